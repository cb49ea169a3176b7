"""Noise that is inserted at modules that are not batch norms."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.methods import registry
from support.models import convolutional, images, state, tokens, transformer

METHODS = {name: method for name, method in registry.names().items() if method[0].noise is not None}


class Residual(nn.Module):
    """A block that calls its activation twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU()

    def forward(self, x):
        return self.relu(x + self.second(self.relu(self.first(x))))


def output_of(model, x):
    torch.manual_seed(3)
    return model(x)


@pytest.mark.parametrize("method", METHODS)
def test_after_layer_norm(method):
    model = ghostnoise.convert(transformer(), method, 4, after=nn.LayerNorm)
    spec, options = METHODS[method]
    noise = spec.noise
    by_hand = transformer()
    by_hand.insert(1, noise(4, channel_dim=-1, **options))
    by_hand.insert(5, noise(4, channel_dim=-1, **options))
    assert torch.equal(output_of(model, tokens()), output_of(by_hand, tokens()))
    assert type(model[0].ghost_noise) is noise


def test_before_an_activation():
    model = ghostnoise.convert(convolutional(), "gni", 4, before=nn.ReLU)
    by_hand = convolutional()
    by_hand.insert(2, ghostnoise.GhostNoise(4))
    assert torch.equal(output_of(model, images()), output_of(by_hand, images()))


def test_several_types_and_their_subclasses():
    class Own(nn.GELU):
        pass

    model = transformer().append(Own())
    ghostnoise.convert(model, "gni", 4, after=(nn.LayerNorm, nn.GELU), channel_dim=-1)
    assert [row.name for row in ghostnoise.summary(model)] == ["0", "2", "3", "5"]


def test_where_restricts_types():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, where=lambda name, module: name == "3")
    assert [row.name for row in ghostnoise.summary(model)] == ["3"]


def test_where_alone_selects_anything():
    def where(name, module):
        return name in ("1", "4.0")

    model = ghostnoise.convert(convolutional(), "gni", 4, where=where)
    assert type(model[1]) is ghostnoise.GhostNoiseBatchNorm2d
    assert not hasattr(model[1], "ghost_noise")
    assert model[4][0].ghost_noise.channel_dim == -1
    assert type(model[4][1]) is nn.BatchNorm1d
    model(images())


def test_options_of_the_noise():
    generator = torch.Generator()
    model = ghostnoise.convert(
        transformer(), "agni", 4, after=nn.LayerNorm, noise_eps=1e-2, dof="exact", generator=generator
    )
    noise = model[0].ghost_noise
    assert (noise.noise_eps, noise.dof, noise.generator) == (1e-2, "exact", generator)


def test_keys_and_eval_output_do_not_change():
    model, plain = transformer(), transformer()
    expected = model.eval()(tokens())
    ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model(tokens()), expected)
    assert not model[0].ghost_noise.training
    assert not torch.equal(model.train()(tokens()), expected)


def test_an_optimizer_created_before_stays_valid():
    model = transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)
    before = model[0].weight.detach().clone()
    model(tokens()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_converting_again_replaces_the_noise():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    ghostnoise.convert(model, "agni", 8, before=nn.LayerNorm)
    assert type(model[0].ghost_noise) is ghostnoise.AnalyticalGhostNoise
    assert len(model[0]._forward_hooks) == 0
    assert len(model[0]._forward_pre_hooks) == 1
    assert len(model._forward_pre_hooks) == 1
    assert len(ghostnoise.summary(model)) == 2


def test_revert_removes_the_noise():
    model = transformer()
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append(1))
    before = state(model)
    for place in ({"after": nn.LayerNorm}, {"before": nn.LayerNorm}):
        ghostnoise.convert(model, "gni", 4, **place)
        ghostnoise.revert(model)
        assert state(model) == before
    model(tokens())
    assert calls == [1]


@pytest.mark.parametrize("place", ["after", "before"])
def test_copies_have_their_own_noise(place):
    model = ghostnoise.convert(transformer(), "gni", 4, **{place: nn.LayerNorm})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].ghost_noise is not model[0].ghost_noise
        assert torch.equal(output_of(twin, tokens()), output_of(model, tokens()))
        ghostnoise.revert(twin)
        assert not hasattr(twin[0], "ghost_noise")
    assert hasattr(model[0], "ghost_noise")


# Calls.


def test_a_second_call_in_a_forward_pass_is_reported_once():
    model = nn.Sequential(Residual(), nn.Linear(6, 6))
    ghostnoise.convert(model, "gni", 4, before=nn.ReLU, channel_dim=-1)
    with pytest.warns(UserWarning, match=r"noise before '0.relu' \(ReLU\) is called more than once in a forward pass"):
        model(tokens())
    model(tokens())  # no second warning, which would be an error here


def test_each_call_draws_new_noise():
    model = ghostnoise.convert(nn.Sequential(nn.ReLU()), "gni", 4, before=nn.ReLU)
    x = images()
    assert not torch.equal(model[0](x), model[0](x))


def test_calls_in_several_forward_passes_are_not_reported():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    for _ in range(3):
        model(tokens())


def test_calls_outside_a_forward_pass_are_not_reported():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    model(tokens())
    for _ in range(3):
        model[0](tokens())


def test_calls_in_eval_are_not_reported():
    model = ghostnoise.convert(Residual(), "gni", 4, before=nn.ReLU, channel_dim=-1)
    model.eval()(tokens())


def test_a_copy_counts_its_own_calls():
    model = ghostnoise.convert(Residual(), "gni", 4, before=nn.ReLU, channel_dim=-1)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        with pytest.warns(UserWarning, match="called more than once"):
            each(tokens())


def test_calls_count_for_the_model_that_was_converted_last():
    model = nn.Sequential(Residual())
    ghostnoise.convert(model[0], "gni", 4, before=nn.ReLU, channel_dim=-1)
    ghostnoise.convert(model, "gni", 4, after=nn.Linear)
    with pytest.warns(UserWarning, match="noise before 'relu'"):
        model(tokens())


def test_passes_before_a_later_conversion_do_not_count():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    model(tokens())
    ghostnoise.convert(model, "gni", 4, after=nn.Linear)
    model(tokens())


def test_a_compiled_model_does_not_count():
    torch._dynamo.reset()
    model = ghostnoise.convert(Residual(), "gni", 4, before=nn.ReLU, channel_dim=-1)
    torch.compile(model, fullgraph=True, backend="eager")(tokens())
    model = nn.Sequential(Residual())
    ghostnoise.convert(model, "gni", 4, before=nn.ReLU, channel_dim=-1)
    model[0].compile(fullgraph=True, backend="eager")  # a part alone
    model(tokens())


def test_a_module_with_several_names_is_reported_when_it_is_converted():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 6), relu, nn.Linear(6, 6), relu)
    with pytest.warns(UserWarning, match="before '1' .* is at a module with several names, '1', '3'") as caught:
        ghostnoise.convert(model, "gni", 4, before=nn.ReLU, channel_dim=-1)
    assert len(caught) == 1
    model(tokens())


# Errors.


def test_the_channel_dimension_of_an_activation_on_tokens_must_be_given():
    model = ghostnoise.convert(nn.Sequential(nn.ReLU()), "gni", 4, before=nn.ReLU)
    model(torch.randn(8, 6))
    model(images())
    with pytest.raises(ValueError, match=r"noise before '0' \(ReLU\) got an input of shape \(8, 5, 6\): tokens .*-1"):
        model(tokens())
    model.eval()(tokens())
    for dim in (1, -1):
        ghostnoise.convert(model, "gni", 4, before=nn.ReLU, channel_dim=dim).train()(tokens())


def test_containers():
    with pytest.raises(
        ValueError, match=r"'4' \(Sequential\) is a container, .*: select a layer inside it \(where= is"
    ):
        ghostnoise.convert(convolutional(), "gni", 4, where=lambda name, module: name == "4", channel_dim=1)


def test_an_attribute_with_the_name_of_the_noise():
    model = transformer()
    model[3].ghost_noise = 3
    before = state(model)
    with pytest.raises(ValueError, match=r"'3' \(LayerNorm\) has an attribute 'ghost_noise' of its own"):
        ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)
    assert state(model) == before


def test_modules_that_do_not_return_one_tensor():
    model = ghostnoise.convert(nn.Sequential(nn.GRU(6, 4)), "gni", 4, after=nn.GRU, channel_dim=-1)
    with pytest.raises(ValueError, match=r"noise after '0' \(GRU\) got a tuple: must be a single tensor"):
        model(tokens())
    model.eval()(tokens())


def test_inputs_given_by_name():
    model = ghostnoise.convert(nn.Sequential(nn.ReLU()), "gni", 4, before=nn.ReLU)
    with pytest.raises(ValueError, match=r"noise before .* got no positional input"):
        model[0](input=images())
    model.eval()[0](input=images())


def test_a_forward_set_on_the_instance():
    model = transformer()
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match=r"'0' \(LayerNorm\) has a forward of its own"):
        ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)


def attention():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


class Calling(nn.MultiheadAttention):
    """An attention that calls its projection."""

    def forward(self, x):
        return self.out_proj(x)


def test_modules_that_are_never_called():
    model = attention()
    before = state(model)
    for options in (
        {"after": nn.Linear},
        {"before": nn.Linear},
        {"where": lambda name, module: name[-8:] == "out_proj"},
    ):
        with pytest.raises(
            ValueError,
            match=r"'self_attn.out_proj' \(NonDynamicallyQuantizableLinear\) is never called: 'self_attn' "
            r"\(MultiheadAttention\) uses its weight and bias alone, .*; exclude it with where=",
        ):
            ghostnoise.convert(model, "gni", 4, channel_dim=-1, **options)
    assert state(model) == before
    ghostnoise.convert(model, "gni", 4, after=nn.Linear, where=lambda name, module: not name.endswith("out_proj"))
    called = []
    for row in ghostnoise.summary(model):
        noise = model.get_submodule(row.name).ghost_noise
        noise.register_forward_hook(lambda *args, name=row.name: called.append(name))
    model(tokens())
    assert called == [row.name for row in ghostnoise.summary(model)] == ["linear1", "linear2"]
    other = nn.Sequential(Calling(6, 2))
    ghostnoise.convert(other, "gni", 4, after=nn.Linear, channel_dim=-1)
    assert not torch.equal(other(tokens()), other(tokens()))


def test_lists_of_parameters_are_containers():
    model = nn.Sequential(nn.ParameterList([nn.Parameter(torch.ones(3))]))
    with pytest.raises(ValueError, match=r"'0' \(ParameterList\) is a container"):
        ghostnoise.convert(model, "gni", 4, where=lambda name, module: name == "0", channel_dim=1)


# In eval mode, with stored moments.


def calibrated(method, before=False, **options):
    place = {"before" if before else "after": nn.LayerNorm}
    model = ghostnoise.convert(transformer(), method, 4, **place, **options)
    found = ghostnoise.calibrate(model, [tokens(), tokens()], keep=7)
    assert found.layers == ()
    return model.eval()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_sampling_equals_that_of_layers_placed_by_hand(method, before):
    model = calibrated(method, before)
    spec, options = METHODS[method]
    by_hand = transformer()
    for at in (0, 4) if before else (1, 5):
        by_hand.insert(at, spec.noise(4, channel_dim=-1, **options))
    ghostnoise.calibrate(by_hand, [tokens(), tokens()], keep=7)
    by_hand.eval()
    plain = transformer().eval()
    expected = plain(tokens())
    assert torch.equal(model(tokens()), expected)
    with ghostnoise.sampling(model), ghostnoise.sampling(by_hand):
        assert torch.equal(output_of(model, tokens()), output_of(by_hand, tokens()))
        assert not torch.equal(model(tokens()), expected)
    assert torch.equal(model(tokens()), expected)
    generators = (torch.Generator().manual_seed(2) for _ in range(2))
    ours, theirs = (ghostnoise.predict(each, tokens(), 16, generator=next(generators)) for each in (model, by_hand))
    assert torch.equal(ours.outputs, theirs.outputs)
    assert (ours.variance > 0).all()


def test_sampling_of_a_compiled_model():
    torch._dynamo.reset()
    model = calibrated("gni")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = model(tokens())
    assert torch.equal(compiled(tokens()), plain)
    with ghostnoise.sampling(model):
        torch.testing.assert_close(output_of(compiled, tokens()), output_of(model, tokens()))
        assert not torch.equal(compiled(tokens()), plain)
    assert torch.equal(compiled(tokens()), plain)


def test_sampling_of_inserted_noise_from_a_history():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, history=16)
    model(tokens())
    assert (ghostnoise.predict(model, tokens(), 16).variance > 0).all()


def test_sampling_checks_the_input_of_inserted_noise_as_training_does():
    model = ghostnoise.convert(nn.Sequential(nn.ReLU()), "gni", 4, before=nn.ReLU)
    fails = pytest.raises(ValueError, match=r"noise before '0' \(ReLU\) got an input of shape \(8, 5, 6\): tokens")
    with fails:
        ghostnoise.calibrate(model, [tokens()], keep=4)
    ghostnoise.calibrate(model, [images()], keep=4)
    with ghostnoise.sampling(model.eval()):
        model(images())
        with fails:
            model(tokens())
        with pytest.raises(ValueError, match="got no positional input"):
            model[0](input=images())
    model(tokens())


def test_noise_inserted_beside_batch_norms_is_calibrated_with_them():
    model = convolutional()
    ghostnoise.convert(model, "gni", 4, before=nn.ReLU)
    found = ghostnoise.calibrate(model, [images()], keep=5)
    assert found.layers == ("1", "4.1")
    assert len(model[2].ghost_noise.kept.mean) == 5
    assert (ghostnoise.predict(model, images(), 8).variance > 0).all()
