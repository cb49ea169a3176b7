"""Converted networks in training: accumulation, mixed precision, averages, checkpointing, formats and devices."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ghostnoise
from support.closeness import assert_close
from support.converted import DRAWING, METHODS, NOISY, PLAIN_AT_INFERENCE, assert_same, converted, step, twins
from support.families import FAMILIES, build, example
from support.levels import LEVELS, running
from support.models import SIZES, convolutional, images, tokens, trained, transformer

every_method = pytest.mark.parametrize("method", METHODS)
every_level = pytest.mark.parametrize("level", LEVELS)


# State dicts.


def train(model):
    """Train for three steps, and return the state dict as a file has it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for seed in range(3):
        optimizer.zero_grad()
        step(model, model, seed=seed)
        optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_method
def test_trained_with_a_method_and_deployed_plain_and_the_other_way_round(method):
    model, plain = converted(method), convolutional()
    plain.load_state_dict(train(model), strict=True)
    assert torch.equal(model.eval()(images()), plain.eval()(images())) == (method in PLAIN_AT_INFERENCE)
    model.load_state_dict(train(plain.train()), strict=True)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    train(model.train())
    assert model[1].num_batches_tracked.item() == 12


@every_method
def test_a_copy_trains_on_its_own_under_the_seed(method):
    model = converted(method)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    ours = step(twin, twin, seed=1)
    assert_same(model.state_dict(), before)
    assert_same(step(model, model, seed=1), ours)
    other = converted(method)
    assert torch.equal(ours["y"], step(other, other, seed=2)["y"]) != (method in DRAWING)


# Gradient accumulation: a micro-batch is a batch of its own.


@every_method
def test_each_micro_batch_has_its_own_statistics_and_noise(method):
    """The gradients are the sum of those of the micro-batches alone, and each of them counts."""
    parts = images(16).split(8)
    model, alone = converted(method), converted(method)
    torch.manual_seed(0)
    for part in parts:
        (model(part).square().sum() / len(parts)).backward()
    torch.manual_seed(0)
    sums = [torch.zeros_like(parameter) for parameter in alone.parameters()]
    for part in parts:
        loss = alone(part).square().sum() / len(parts)
        for total, gradient in zip(sums, torch.autograd.grad(loss, list(alone.parameters())), strict=True):
            total.add_(gradient)
    for parameter, total in zip(model.parameters(), sums, strict=True):
        assert torch.equal(parameter.grad, total)
    assert model[1].num_batches_tracked.item() == 3 + 2


@pytest.mark.parametrize(
    ("method", "same"), [("bn", False), ("gni", False), ("agni", False), ("gbn", True), ("xbn", True)]
)
def test_whole_ghost_batches_alone_are_the_same_in_micro_batches(method, same):
    """As the guide warns: statistics of the whole batch do not extend over micro-batches."""
    whole, parted = converted(method, torch.float64), converted(method, torch.float64)
    x, outputs = images(16).double(), []
    for run in (whole, lambda x: torch.cat([parted(part) for part in x.split(8)])):
        torch.manual_seed(0)
        outputs.append(run(x))
    assert torch.allclose(*outputs, rtol=1e-9 if same else 1e-2) == same


# Mixed precision.


@every_method
def test_autocast_in_bfloat16(method):
    model, seen = converted(method), []
    for norm in (model[1], model[4][1]):
        norm.momentum = 1.0  # running statistics are those of the batch
        norm.register_forward_hook(lambda norm, args, y: seen.append((norm, args[0].detach(), y.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(images()).square().mean()
    loss.backward()
    assert len(seen) == 2
    for norm, x, dtype in seen:
        assert x.dtype == dtype == torch.bfloat16
        assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
        exact = x.double().mean([dim for dim in range(x.ndim) if dim != 1])
        torch.testing.assert_close(norm.running_mean.double(), exact, rtol=1e-6, atol=1e-8)
        assert norm.running_var.isfinite().all()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@every_level
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_not_computed_in_float16(family, level):
    """Squares and sums of these values overflow in float16, and their variance has no digits in it."""
    half = (example(2) + 600).half()
    layer, exact = build(family, 2, momentum=1.0), build(family, 2, momentum=1.0, dtype=torch.float64)
    inputs, outputs = [half.clone().requires_grad_(), half.double().requires_grad_()], []
    for each, x in zip((layer, exact), inputs, strict=True):
        torch.manual_seed(0)
        with running(level):
            outputs.append(each(x))
            outputs[-1].backward(example(2, outputs[-1].dtype))
    assert_close(outputs[0], outputs[1])
    assert_close(layer.running_mean, exact.running_mean)
    assert_close(layer.running_var, exact.running_var)
    assert inputs[0].grad.isfinite().all()


@every_method
def test_a_step_that_overflows_changes_nothing(method):
    model = converted(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train(x):
        optimizer.zero_grad()
        scaler.scale(nn.functional.softplus(model(x)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    overflowing = images()
    overflowing[2, 1, 3, 3] = float("inf")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    train(overflowing)
    assert scaler.get_scale() == 2.0
    assert_same(model.state_dict(), before)
    train(images())
    assert scaler.get_scale() == 2.0
    assert model[1].num_batches_tracked.item() == before["1.num_batches_tracked"].item() + 1
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert not torch.equal(model[0].weight, before["0.weight"])


# Averages of weights: EMA, and SWA with its statistics taken again.


@every_method
@pytest.mark.parametrize("use_buffers", [True, False])
def test_exponential_averages(method, use_buffers):
    model = converted(method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=use_buffers)
    average.update_parameters(model)  # the first time, it copies
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step(model, model)
    optimizer.step()
    average.update_parameters(model)
    after = average.module.state_dict()
    assert list(after) == list(before)
    for key, new in model.state_dict().items():
        if new.is_floating_point():
            mixed = use_buffers or "running" not in key
            torch.testing.assert_close(after[key], 0.75 * before[key] + 0.25 * new if mixed else new)
    trained().load_state_dict(after, strict=True)
    assert torch.isfinite(average.eval()(images())).all()


@pytest.mark.parametrize("method", ["bn", *NOISY])
def test_statistics_are_taken_again_as_by_plain_batch_norm(method):
    """What a noisy layer sees is measured as plain batch norm would; layers after it see its noise."""
    batches = [images() + shift for shift in range(3)]
    model, plain = AveragedModel(converted(method)), AveragedModel(trained())
    update_bn(batches, model), update_bn(batches, plain)
    ours, theirs = model.module.state_dict(), plain.module.state_dict()
    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "4.1.num_batches_tracked"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours["4.1.running_mean"], theirs["4.1.running_mean"], rtol=1e-3) == (method == "bn")
    assert model.module[1].momentum == 0.1
    reverted = ghostnoise.revert(model.module)  # without noise: the guide's remedy
    update_bn(batches, reverted)
    assert_same(reverted.state_dict(), theirs)


@pytest.mark.parametrize("method", ["gbn", "en"])
def test_ghost_variances_are_taken_again(method):
    model = nn.Sequential(converted(method)[1])
    shape = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    update_bn([shape, shape + 1], model)
    ghosts = shape.unflatten(0, (2, 4)).var((1, 3, 4), correction=0).mean(0)
    torch.testing.assert_close(model[0].running_var, ghosts)
    torch.testing.assert_close(model[0].running_mean, shape.mean((0, 2, 3)) + 0.5)


# Activation checkpointing: the same noise when the forward pass runs again, and every batch counts once.

both_modes = pytest.mark.parametrize("use_reentrant", [True, False])


@both_modes
@every_method
def test_a_step_is_that_without_checkpointing(method, use_reentrant):
    model, plain = twins(method)
    ours = step(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), model)
    assert_same(ours, step(plain, plain))
    assert model[1].num_batches_tracked.item() == 4


@both_modes
def test_segments_of_segments_and_inserted_noise(use_reentrant):
    model, plain = twins("gni")

    def run(x):
        inner = checkpoint_sequential(model[:3], 2, x, use_reentrant=use_reentrant)
        return checkpoint(lambda x: checkpoint(model[3:], x, use_reentrant=use_reentrant), inner, use_reentrant=False)

    assert_same(step(run, model), step(plain, plain))
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    plain = copy.deepcopy(model)
    ours = step(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), model, tokens())
    assert_same(ours, step(plain, plain, tokens()))


def test_second_backward_passes_leave_the_next_batch_to_count():
    model = converted("gni")
    x = images().requires_grad_()
    (gradient,) = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert model[1].num_batches_tracked.item() == 4
    model(x)
    assert model[1].num_batches_tracked.item() == 5


def test_the_draws_of_an_explicit_generator_are_those_of_the_first_pass():
    steps = []
    for run in (lambda model: model, lambda model: lambda x: checkpoint(model, x, use_reentrant=False)):
        model = converted("gni", generator=torch.Generator().manual_seed(0))
        steps.append(step(run(model), model))
    assert_same(*steps)


# Memory formats, buffers and devices.


@every_method
@every_level
def test_networks_in_channels_last(method, level):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
    model = ghostnoise.convert(nn.Sequential(*layers).double(), method, **SIZES[method])
    last, x = copy.deepcopy(model).to(memory_format=torch.channels_last), images().double()
    buffers = {name: (buffer, buffer.data_ptr()) for name, buffer in last.named_buffers()}
    with running(level):
        ours, theirs = step(last, last, x.to(memory_format=torch.channels_last)), step(model, model, x)
    assert_same(ours, theirs, rtol=1e-9, atol=1e-9)
    for key in ("y", "x", "0.weight", "3.weight"):
        assert ours[key].is_contiguous(memory_format=torch.channels_last), key
    y = last.eval()(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, model.eval()(x))
    assert {name: (buffer, buffer.data_ptr()) for name, buffer in last.named_buffers()}.keys() == buffers.keys()
    assert all(buffer is buffers[name][0] and buffer.data_ptr() == buffers[name][1]
               for name, buffer in last.named_buffers())  # fmt: skip


WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2")


class NoWaiting(TorchDispatchMode):
    """Fails on an operator whose result the host would wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in WAITING
        return func(*args, **(kwargs or {}))


@every_method
@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_does_not_wait_for_the_device(method, momentum):
    with NoWaiting(), pytest.raises(AssertionError):
        bool(torch.ones(()) > 0)
    model, x = converted(method), images()
    model[1].momentum = model[4][1].momentum = momentum
    with running("general"), NoWaiting():
        model(x).square().sum().backward()
    model = ghostnoise.convert(convolutional(), method, **SIZES[method]).to("meta")  # tensors without values
    model(images().to("meta")).square().sum().backward()
    assert model[0].weight.grad.device.type == "meta"
    if method in NOISY:
        model, x = ghostnoise.convert(transformer(), method, **SIZES[method], after=nn.LayerNorm), tokens()
        with running("general"), NoWaiting():
            model(x).square().sum().backward()
