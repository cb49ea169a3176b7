"""Noise that is inserted at modules that are not batch norms."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.methods import registry
from support.models import convolutional, images, state, tokens, transformer

METHODS = {name: method for name, method in registry.names().items() if method[0].noise in registry.noises()}


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


def by_hand(method, places, make=transformer, channel_dim=-1, **options):
    """Return a network with noise layers at these places of the Sequential."""
    model, (spec, fixed) = make(), METHODS[method]
    for at in places:
        model.insert(at, spec.noise(4, channel_dim=channel_dim, **fixed, **options))
    return model


@pytest.mark.parametrize("method", METHODS)
def test_after_layer_norm(method):
    model = ghostnoise.convert(transformer(), method, 4, after=nn.LayerNorm)
    assert torch.equal(output_of(model, tokens()), output_of(by_hand(method, (1, 5)), tokens()))
    assert type(model[0].ghost_noise) is METHODS[method][0].noise


def test_before_an_activation():
    model = ghostnoise.convert(convolutional(), "gni", 4, before=nn.ReLU)
    other = by_hand("gni", (2,), convolutional, 1)
    assert torch.equal(output_of(model, images()), output_of(other, images()))


def test_options_of_the_noise():
    options = {"noise_eps": 1e-2, "dof": "exact", "generator": torch.Generator()}
    noise = ghostnoise.convert(transformer(), "agni", 4, after=nn.LayerNorm, **options)[0].ghost_noise
    assert {name: getattr(noise, name) for name in options} == options
    noise = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, draw="partition")[0].ghost_noise
    assert noise.draw == "partition"


def test_several_types_and_their_subclasses():
    class Own(nn.GELU):
        pass

    model = transformer().append(Own())
    ghostnoise.convert(model, "gni", 4, after=(nn.LayerNorm, nn.GELU), channel_dim=-1)
    assert [row.name for row in ghostnoise.summary(model)] == ["0", "2", "3", "5"]


def test_where_restricts_types_and_alone_selects_anything():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, where=lambda name, module: name == "3")
    assert [row.name for row in ghostnoise.summary(model)] == ["3"]
    model = ghostnoise.convert(convolutional(), "gni", 4, where=lambda name, module: name in ("1", "4.0"))
    assert type(model[1]) is ghostnoise.GhostNoiseBatchNorm2d
    assert not hasattr(model[1], "ghost_noise")
    assert model[4][0].ghost_noise.channel_dim == -1
    assert type(model[4][1]) is nn.BatchNorm1d
    model(images())


def test_keys_eval_output_and_optimizers_stay():
    model, plain = transformer(), transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model.eval()(tokens())
    ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model(tokens()), expected)
    assert not model[0].ghost_noise.training
    y, before = model.train()(tokens()), model[0].weight.detach().clone()
    assert not torch.equal(y, expected)
    y.square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_converting_again_replaces_the_noise():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    ghostnoise.convert(model, "agni", 8, before=nn.LayerNorm)
    assert type(model[0].ghost_noise) is ghostnoise.AnalyticalGhostNoise
    assert (len(model[0]._forward_hooks), len(model[0]._forward_pre_hooks), len(model._forward_pre_hooks)) == (0, 1, 1)
    assert len(ghostnoise.summary(model)) == 2


@pytest.mark.parametrize("place", ["after", "before"])
def test_revert_removes_the_noise_and_copies_have_their_own(place):
    model, calls = transformer(), []
    model[0].register_forward_hook(lambda *args: calls.append(1))
    before = state(model)
    ghostnoise.revert(ghostnoise.convert(model, "gni", 4, **{place: nn.LayerNorm}))
    assert state(model) == before
    model(tokens())
    assert calls == [1]
    model = ghostnoise.convert(transformer(), "gni", 4, **{place: nn.LayerNorm})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].ghost_noise is not model[0].ghost_noise
        assert torch.equal(output_of(twin, tokens()), output_of(model, tokens()))
        ghostnoise.revert(twin)
        assert not hasattr(twin[0], "ghost_noise")
    assert hasattr(model[0], "ghost_noise")


# Calls: each draws new noise, and a second one in a forward pass is reported once.


def test_a_second_call_in_a_forward_pass_is_reported_once():
    model = nn.Sequential(Residual(), nn.Linear(6, 6))
    ghostnoise.convert(model, "gni", 4, before=nn.ReLU, channel_dim=-1)
    twin = copy.deepcopy(model)
    for each in (model, twin):  # a copy counts its own calls
        message = r"noise before '0.relu' \(ReLU\) is called more than once in a forward pass"
        with pytest.warns(UserWarning, match=message):
            each(tokens())
        each(tokens())  # no second warning, which would be an error here


def test_calls_that_are_not_reported():
    """In several forward passes, outside of one, before a later conversion, and in eval mode."""
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    for _ in range(3):
        model(tokens())
    assert not torch.equal(model[0](tokens()), model[0](tokens()))
    ghostnoise.convert(model, "gni", 4, after=nn.Linear)
    model(tokens())
    ghostnoise.convert(Residual(), "gni", 4, before=nn.ReLU, channel_dim=-1).eval()(tokens())


def test_calls_count_for_the_model_that_was_converted_last():
    model = nn.Sequential(Residual())
    ghostnoise.convert(model[0], "gni", 4, before=nn.ReLU, channel_dim=-1)
    ghostnoise.convert(model, "gni", 4, after=nn.Linear)
    with pytest.warns(UserWarning, match="noise before 'relu'"):
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


@pytest.mark.parametrize("host", [nn.Sequential(nn.ReLU()), nn.ParameterList([nn.Parameter(torch.ones(3))])])
def test_containers(host):
    model, name = nn.Sequential(host), type(host).__name__
    with pytest.raises(ValueError, match=rf"'0' \({name}\) is a container, .*: select a layer inside it \(where= is"):
        ghostnoise.convert(model, "gni", 4, where=lambda name, module: name == "0", channel_dim=1)


def test_an_attribute_with_the_name_of_the_noise():
    model = transformer()
    model[3].ghost_noise = 3
    before = state(model)
    with pytest.raises(ValueError, match=r"'3' \(LayerNorm\) has an attribute 'ghost_noise' of its own"):
        ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)
    assert state(model) == before


def test_outputs_and_inputs_that_are_not_a_single_tensor():
    model = ghostnoise.convert(nn.Sequential(nn.GRU(6, 4)), "gni", 4, after=nn.GRU, channel_dim=-1)
    with pytest.raises(ValueError, match=r"noise after '0' \(GRU\) got a tuple: must be a single tensor"):
        model(tokens())
    model.eval()(tokens())
    model = ghostnoise.convert(nn.Sequential(nn.ReLU()), "gni", 4, before=nn.ReLU)
    with pytest.raises(ValueError, match=r"noise before .* got no positional input"):
        model[0](input=images())
    model.eval()[0](input=images())


class Calling(nn.MultiheadAttention):
    """An attention that calls its projection."""

    def forward(self, x):
        return self.out_proj(x)


def test_modules_that_are_never_called():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    before = state(model)
    for place in ({"after": nn.Linear}, {"before": nn.Linear}, {"where": lambda name, module: name[-8:] == "out_proj"}):
        with pytest.raises(
            ValueError,
            match=r"'self_attn.out_proj' \(NonDynamicallyQuantizableLinear\) is never called: 'self_attn' "
            r"\(MultiheadAttention\) uses its weight and bias alone, .*; exclude it with where=",
        ):
            ghostnoise.convert(model, "gni", 4, channel_dim=-1, **place)
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


# In eval mode, with stored moments.


@pytest.mark.parametrize("place", ["after", "before"])
@pytest.mark.parametrize("method", METHODS)
def test_sampling_equals_that_of_layers_placed_by_hand(method, place):
    model = ghostnoise.convert(transformer(), method, 4, **{place: nn.LayerNorm})
    other, plain = by_hand(method, (0, 4) if place == "before" else (1, 5)), transformer().eval()
    for each in (model, other):
        assert ghostnoise.calibrate(each, [tokens(), tokens()], keep=7).layers == ()
        each.eval()
    expected = plain(tokens())
    assert torch.equal(model(tokens()), expected)
    with ghostnoise.sampling(model), ghostnoise.sampling(other):
        assert torch.equal(output_of(model, tokens()), output_of(other, tokens()))
        assert not torch.equal(model(tokens()), expected)
    assert torch.equal(model(tokens()), expected)
    generators = (torch.Generator().manual_seed(2) for _ in range(2))
    ours, theirs = (ghostnoise.predict(each, tokens(), 16, generator=next(generators)) for each in (model, other))
    assert torch.equal(ours.outputs, theirs.outputs)
    assert (ours.variance > 0).all()


def test_sampling_of_a_compiled_model_and_from_a_history():
    torch._dynamo.reset()
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, history=16)
    model(tokens())
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    plain = model(tokens())
    assert torch.equal(compiled(tokens()), plain)
    with ghostnoise.sampling(model):
        torch.testing.assert_close(output_of(compiled, tokens()), output_of(model, tokens()))
        assert not torch.equal(compiled(tokens()), plain)
    assert torch.equal(compiled(tokens()), plain)
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
    model = ghostnoise.convert(convolutional(), "gni", 4, before=nn.ReLU)
    assert ghostnoise.calibrate(model, [images()], keep=5).layers == ("1", "4.1")
    assert len(model[2].ghost_noise.kept.mean) == 5
    assert (ghostnoise.predict(model, images(), 8).variance > 0).all()
