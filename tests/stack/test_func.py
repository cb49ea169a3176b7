"""torch.func: functional calls, gradients, and many models at once."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

import ghostnoise
from ghostnoise.methods import registry
from support.converted import DRAWING, METHODS, assert_same, converted, step
from support.families import UNTRACKED
from support.models import images

every_method = pytest.mark.parametrize("method", METHODS)
# torch has no rule for embedding bags, and takes the models one by one.
slow = pytest.mark.filterwarnings("ignore:There is a performance drop .*embedding_bag:UserWarning")


def ensemble(method, **options):
    models = [converted(method, torch.float64, **options) for _ in range(3)]
    for scale, model in enumerate(models):
        model[0].weight.data.mul_(1 + scale)
    return models


def stacked(models):
    base = copy.deepcopy(models[0]).to("meta")
    return *stack_module_state(models), lambda parameters, buffers, x: functional_call(
        base, (parameters, buffers), (x,)
    )


def many(models, **options):
    parameters, buffers, run = stacked(models)
    torch.manual_seed(0)
    return vmap(run, (0, 0, None), **options)(parameters, buffers, images().double()), buffers


def seeded(model):
    torch.manual_seed(0)
    return model(images().double())


@every_method
def test_a_functional_call_updates_the_buffers_that_it_is_given(method):
    model, plain = converted(method), converted(method)
    before = copy.deepcopy(model.state_dict())
    given = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    torch.manual_seed(0)
    y = functional_call(model, given, (images(),))
    assert torch.equal(y, step(plain, plain)["y"])
    assert_same(model.state_dict(), before)
    assert_same(given, plain.state_dict())


@every_method
def test_gradients_of_a_functional_call(method):
    model, plain = converted(method, torch.float64), converted(method, torch.float64)

    def loss(parameters, buffers):
        return functional_call(model, (parameters, buffers), (images().double(),)).square().sum()

    torch.manual_seed(0)
    parameters = {key: parameter.detach() for key, parameter in model.named_parameters()}
    ours = grad(loss)(parameters, dict(model.named_buffers()))
    theirs = step(plain, plain, images().double())
    assert_same(ours, {key: theirs[key] for key in ours}, rtol=1e-9, atol=1e-9)
    assert_same(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def test_buffers_that_a_transformation_cannot_move_stay_as_they_are():
    """torch refuses to write to what was not passed in; nothing is half written."""
    model = converted("bn")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
        grad(lambda weight: functional_call(model, {"1.weight": weight}, (images(),)).sum())(model[1].weight.detach())
    assert_same(model.state_dict(), before)


@every_method
def test_many_models_in_eval(method):
    models = [model.eval() for model in ensemble(method)]
    y, _ = many(models)
    torch.testing.assert_close(y, torch.stack([model(images().double()) for model in models]))


@slow
@every_method
def test_many_models_in_training(method):
    """With randomness="same", each model draws what it would have drawn alone under the seed."""
    models = ensemble(method)
    y, buffers = many(models, randomness="same")
    torch.testing.assert_close(y, torch.stack([seeded(model) for model in models]))
    for key, buffer in buffers.items():
        torch.testing.assert_close(buffer, torch.stack([model.get_buffer(key) for model in models]))


@slow
@pytest.mark.parametrize("method", DRAWING)
def test_randomness_is_for_vmap_to_say(method):
    models = [converted(method, torch.float64) for _ in range(2)]
    y, _ = many(models, randomness="same")
    assert torch.allclose(y[0], y[1])
    y, _ = many(models, randomness="different")
    assert not torch.allclose(y[0], y[1])
    with pytest.raises(RuntimeError, match="either use the 'same' or 'different' randomness flags"):
        many(models)


@slow
def test_gradients_of_many_models():
    models = ensemble("gni")
    parameters, buffers, run = stacked(models)

    def loss(parameters, buffers):
        return run(parameters, buffers, images().double()).square().sum()

    torch.manual_seed(0)
    parameters = {key: parameter.detach() for key, parameter in parameters.items()}
    ours = vmap(grad(loss), randomness="same")(parameters, buffers)
    theirs = [step(model, model, images().double()) for model in models]
    assert_same(ours, {key: torch.stack([each[key] for each in theirs]) for key in ours}, rtol=1e-9, atol=1e-9)


@slow
@every_method
@pytest.mark.parametrize("inside_grad", [True, False])
def test_buffers_that_are_not_mapped_over(method, inside_grad):
    model = converted(method)
    before = copy.deepcopy(model.state_dict())
    state = {key: parameter.detach() for key, parameter in model.named_parameters()}, dict(model.named_buffers())
    batches = torch.stack([images(), images() + 1])

    def loss(parameters, buffers, x):
        return functional_call(model, (parameters, buffers), (x,)).square().sum()

    mapped = vmap(grad(loss) if inside_grad else loss, (None, None, 0), randomness="different")
    with pytest.raises(ValueError, match=r"buffers that vmap does not map over, .*; map over them too .*eval\(\)"):
        mapped(*state, batches)
    assert_same(model.state_dict(), before)
    if registry.find(method)[0].name not in UNTRACKED:  # it needs running statistics, which then must be mapped over
        return
    for norm in (model[1], model[4][1]):  # the remedy
        norm.track_running_stats = False
    mapped(*state, batches)
    assert_same(model.state_dict(), before)


def test_gradients_per_sample_in_eval():
    model = converted("gni").eval()
    parameters = {key: parameter.detach() for key, parameter in model.named_parameters()}

    def loss(parameters, x):
        return functional_call(model, parameters, (x.unsqueeze(0),)).square().sum()

    ours = vmap(grad(loss), (None, 0))(parameters, images())
    theirs = step(ghostnoise.revert(model), model, images()[3:4])
    assert_same({key: each[3] for key, each in ours.items()}, {key: theirs[key] for key in ours}, rtol=1e-4, atol=1e-5)
