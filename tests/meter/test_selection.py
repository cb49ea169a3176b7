"""Which modules a meter chooses, and what it says if it cannot."""

import numpy as np
import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.meter import Meter
from metering import through
from models import convolutional, images, tokens, transformer


class Passing(nn.Module):
    """Gives what it gets, by way of a vector of its own."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x


class OddNorm(Passing):
    pass


class Giving(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x):
        return self.give(x)


def sides(model):
    return {layer.place.name: layer.place.side for layer in Meter(model).layers}


def test_batch_norms_at_their_input_and_other_norms_at_their_output():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.ReLU())
    assert sides(model) == {"0": "input", "1": "output", "2": "output", "3": "output"}
    for side in ("input", "output"):
        assert {layer.place.side for layer in Meter(model, side=side).layers} == {side}


@pytest.mark.parametrize("method", ["gbn", "xbn", "en", "gni", "agni"])
def test_converted_batch_norms(method):
    model = ghostnoise.convert(convolutional(), method, ghost_size=4)
    assert sides(model) == {"1": "input", "4.1": "input"}


def test_noise_after_layer_norms_is_measured_in_their_stead():
    """At its input, which has no noise; the layer norm's output has it."""
    plain = through(transformer(), [tokens(16)])
    model = ghostnoise.convert(transformer(), "gni", ghost_size=8, after=nn.LayerNorm)
    noisy = through(model, [tokens(16)])
    assert list(noisy) == ["0.ghost_noise", "3.ghost_noise"]
    assert [(layer.side, layer.own, layer.kind) for layer in noisy.layers] == [("input", 8, "GhostNoise")] * 2
    np.testing.assert_array_equal(noisy["0.ghost_noise"].mean, plain["0"].mean)
    np.testing.assert_array_equal(
        noisy["0.ghost_noise"].noise["gni"].scale.counts, plain["0"].noise["gni"].scale.counts
    )


@pytest.mark.parametrize("place", ["after", "before"])
def test_noise_at_batch_norms_is_measured_once(place):
    """At the batch norm's input, without the noise, whose ghost size the layer then has."""
    model = ghostnoise.convert(convolutional(), "gni", ghost_size=4, **{place: nn.BatchNorm2d})
    assert sides(model) == {"1": "input", "4.1": "input"}
    noisy, plain = through(model, [images()]), through(convolutional(), [images()])
    assert (noisy["1"].own, noisy["4.1"].own, plain["1"].own) == (4, None, None)
    np.testing.assert_array_equal(noisy["1"].mean, plain["1"].mean)
    np.testing.assert_array_equal(noisy["1"].noise["gni"].scale.counts, plain["1"].noise["gni"].scale.counts)


def test_noise_that_stands_alone_and_tokens():
    model = nn.Sequential(nn.Linear(6, 6), ghostnoise.GhostNoise(4, channel_dim=-1), nn.Tanh())
    found = through(model, [tokens()])["1"]
    assert (found.side, found.channels, found.spatial) == ("input", 6, 5)


def test_the_model_itself():
    found = through(nn.BatchNorm1d(3), [torch.randn(8, 3)])
    assert list(found) == ["BatchNorm1d"]
    assert found["BatchNorm1d"].names == ("BatchNorm1d",)


@pytest.mark.parametrize(
    ("modules", "names"), [("2", ["2"]), ("4.*", ["4.0", "4.1"]), (["0", "[12]"], ["0", "1", "2"])]
)
def test_names_and_patterns(modules, names):
    assert [layer.place.name for layer in Meter(convolutional(), modules=modules).layers] == names


def test_a_model_without_norms_lists_what_can_be_named():
    with pytest.raises(ValueError, match=r"no normalization layer in this Sequential: give modules= .*'0' \(Linear\)"):
        Meter(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(ValueError, match="none to name"):
        Meter(nn.ReLU())
    with pytest.raises(ValueError, match="and 4 more"):
        Meter(nn.Sequential(*(nn.ReLU() for _ in range(12))))


def test_an_unknown_name_gets_a_suggestion():
    model = nn.Sequential()
    model.add_module("encoder_norm", nn.LayerNorm(3))
    with pytest.raises(ValueError, match=r"modules has 'encoder_nrom', .* did you mean 'encoder_norm'"):
        Meter(model, modules="encoder_nrom")
    with pytest.raises(ValueError, match=r"modules has 'layer9\.\*', which nothing in this Sequential matches"):
        Meter(model, modules=["encoder_norm", "layer9.*"])
    with pytest.raises(ValueError, match="modules is empty"):
        Meter(model, modules=[])


@pytest.mark.parametrize("model", [None, [nn.ReLU()], torch.jit.ScriptModule()])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match="Meter got a"):
        Meter(model)


@pytest.mark.parametrize(("shape", "channels"), [((6, 5, 7), 5), ((6, 7, 5), 5), ((6, 2, 3, 5), 5), ((6, 5), 5)])
def test_channels_are_where_the_weight_fits(shape, channels):
    assert through(nn.Sequential(OddNorm(channels)), [torch.randn(shape)])["0"].channels == channels


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (OddNorm(5), (6, 5, 5)),  # fits both
        (OddNorm(4), (6, 5, 7)),  # fits neither
        (nn.Identity(), (6, 5)),
        (nn.GELU(), (6, 5, 7)),  # tokens, or a sequence
        (nn.LayerNorm((5, 7)), (6, 5, 7)),
    ],
)
def test_channels_that_are_not_known(module, shape):
    with pytest.raises(ValueError, match=r"channel_dim is not known for '0' .* give channel_dim=1, or -1"):
        through(nn.Sequential(module), [torch.randn(shape)], modules="0")
    found = through(nn.Sequential(module), [torch.randn(shape)], modules="0", channel_dim=-1)["0"]
    assert found.channels == shape[-1]


def test_activations_of_images_have_channels_first():
    assert through(nn.Sequential(nn.ReLU()), [images()], modules="0")["0"].channels == 3


@pytest.mark.parametrize("dim", [2, -2, 5])
def test_a_channel_dim_that_the_tensor_has_not(dim):
    with pytest.raises(ValueError, match=f"channel_dim={dim}: must be a dimension of the input of '0'"):
        through(nn.Sequential(nn.BatchNorm1d(3)), [torch.randn(8, 3)], channel_dim=dim)


@pytest.mark.parametrize(
    "give", [lambda x: (None, x, 2 * x), lambda x: [x], lambda x: {"mask": None, "x": x}], ids=["tuple", "list", "dict"]
)
def test_the_first_tensor_of_several_is_measured(give):
    x = torch.randn(8, 3)
    found = through(nn.Sequential(Giving(give)), [x], modules="0", channel_dim=1)["0"]
    np.testing.assert_allclose(found.mean, x.mean(0), atol=1e-6)


def test_a_module_without_a_tensor_is_refused():
    with pytest.raises(ValueError, match=r"'0' \(Giving\) has no tensor as its output: .* leave the module out"):
        through(nn.Sequential(Giving(lambda x: None)), [torch.randn(8, 3)], modules="0")


def test_inputs_by_name():
    class Naming(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(input=x)

    assert through(Naming(), [torch.randn(8, 3)])["norm"].samples == 8
