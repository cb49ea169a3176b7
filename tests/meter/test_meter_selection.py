"""Which modules a meter selects, which tensors and channels it measures, and the errors if it cannot."""

import numpy as np
import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.meter import Meter
from support.metering import measure_model
from support.models import convolutional, images, tokens, transformer


class Weighted(nn.Module):
    """Identity with a weight vector."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x


class OddNorm(Weighted):
    pass


class Returning(nn.Module):
    """Apply a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def sides(model):
    return {layer.metered.name: layer.metered.side for layer in Meter(model).layers}


def test_batch_norms_are_measured_at_their_input_and_other_norms_at_their_output():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.ReLU())
    assert sides(model) == {"0": "input", "1": "output", "2": "output", "3": "output"}
    for side in ("input", "output"):
        assert {layer.metered.side for layer in Meter(model, side=side).layers} == {side}


@pytest.mark.parametrize("method", ["gbn", "xbn", "en", "gni", "agni"])
def test_converted_batch_norms(method):
    model = ghostnoise.convert(convolutional(), method, ghost_size=4)
    assert sides(model) == {"1": "input", "4.1": "input"}


def test_noise_after_layer_norms_is_measured_instead_of_them():
    """At its input, which does not contain the noise; the output of the layer norm does."""
    plain = measure_model(transformer(), [tokens(16)])
    model = ghostnoise.convert(transformer(), "gni", ghost_size=8, after=nn.LayerNorm)
    noisy = measure_model(model, [tokens(16)])
    assert list(noisy) == ["0.ghost_noise", "3.ghost_noise"]
    assert [(layer.side, layer.own_ghost_size, layer.kind) for layer in noisy.layers] == [
        ("input", 8, "GhostNoise")
    ] * 2
    np.testing.assert_array_equal(noisy["0.ghost_noise"].mean, plain["0"].mean)
    np.testing.assert_array_equal(
        noisy["0.ghost_noise"].noise["gni"].scale.counts, plain["0"].noise["gni"].scale.counts
    )


@pytest.mark.parametrize("place", ["after", "before"])
def test_noise_at_batch_norms_is_measured_once(place):
    """At the input of the batch norm, without the noise, whose ghost size is reported as the layer's own."""
    model = ghostnoise.convert(convolutional(), "gni", ghost_size=4, **{place: nn.BatchNorm2d})
    assert sides(model) == {"1": "input", "4.1": "input"}
    noisy, plain = measure_model(model, [images()]), measure_model(convolutional(), [images()])
    assert (noisy["1"].own_ghost_size, noisy["4.1"].own_ghost_size, plain["1"].own_ghost_size) == (4, None, None)
    np.testing.assert_array_equal(noisy["1"].mean, plain["1"].mean)
    np.testing.assert_array_equal(noisy["1"].noise["gni"].scale.counts, plain["1"].noise["gni"].scale.counts)


def test_standalone_noise_on_tokens():
    model = nn.Sequential(nn.Linear(6, 6), ghostnoise.GhostNoise(4, channel_dim=-1), nn.Tanh())
    found = measure_model(model, [tokens()])["1"]
    assert (found.side, found.channels, found.spatial) == ("input", 6, 5)


def test_the_model_itself():
    found = measure_model(nn.BatchNorm1d(3), [torch.randn(8, 3)])
    assert list(found) == ["BatchNorm1d"]
    assert found["BatchNorm1d"].names == ("BatchNorm1d",)


@pytest.mark.parametrize(
    ("modules", "names"), [("2", ["2"]), ("4.*", ["4.0", "4.1"]), (["0", "[12]"], ["0", "1", "2"])]
)
def test_names_and_patterns(modules, names):
    assert [layer.metered.name for layer in Meter(convolutional(), modules=modules).layers] == names


def test_a_model_without_norms_lists_its_modules():
    with pytest.raises(ValueError, match=r"no normalization layer in this Sequential: give modules= .*'0' \(Linear\)"):
        Meter(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(ValueError, match="available: none"):
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
def test_objects_that_are_not_modules_are_refused(model):
    with pytest.raises(ValueError, match="Meter got a"):
        Meter(model)


@pytest.mark.parametrize(("shape", "channels"), [((6, 5, 7), 5), ((6, 7, 5), 5), ((6, 2, 3, 5), 5), ((6, 5), 5)])
def test_the_channel_dim_is_the_one_that_fits_the_weight(shape, channels):
    assert measure_model(nn.Sequential(OddNorm(channels)), [torch.randn(shape)])["0"].channels == channels


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (OddNorm(5), (6, 5, 5)),  # fits both
        (OddNorm(4), (6, 5, 7)),  # fits neither
        (nn.Identity(), (6, 5)),
        (nn.GELU(), (6, 5, 7)),  # tokens or a sequence
        (nn.LayerNorm((5, 7)), (6, 5, 7)),
    ],
)
def test_unknown_channel_dims_are_refused(module, shape):
    with pytest.raises(ValueError, match=r"channel_dim is not known for '0' .* give channel_dim=1, or -1"):
        measure_model(nn.Sequential(module), [torch.randn(shape)], modules="0")
    found = measure_model(nn.Sequential(module), [torch.randn(shape)], modules="0", channel_dim=-1)["0"]
    assert found.channels == shape[-1]


def test_activations_of_images_have_channel_dim_1():
    assert measure_model(nn.Sequential(nn.ReLU()), [images()], modules="0")["0"].channels == 3


@pytest.mark.parametrize("dim", [2, -2, 5])
def test_a_channel_dim_that_does_not_exist_is_refused(dim):
    with pytest.raises(ValueError, match=f"channel_dim={dim}: must be a dimension of the input of '0'"):
        measure_model(nn.Sequential(nn.BatchNorm1d(3)), [torch.randn(8, 3)], channel_dim=dim)


@pytest.mark.parametrize(
    "function",
    [lambda x: (None, x, 2 * x), lambda x: [x], lambda x: {"mask": None, "x": x}],
    ids=["tuple", "list", "dict"],
)
def test_the_first_tensor_of_several_is_measured(function):
    x = torch.randn(8, 3)
    found = measure_model(nn.Sequential(Returning(function)), [x], modules="0", channel_dim=1)["0"]
    np.testing.assert_allclose(found.mean, x.mean(0), atol=1e-6)


def test_a_module_without_a_tensor_is_refused():
    with pytest.raises(ValueError, match=r"'0' \(Returning\) has no tensor as its output: .* leave the module out"):
        measure_model(nn.Sequential(Returning(lambda x: None)), [torch.randn(8, 3)], modules="0")


def test_keyword_inputs():
    class Naming(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(input=x)

    assert measure_model(Naming(), [torch.randn(8, 3)])["norm"].samples == 8
