"""The placement of noise in each network, as the sequence of its layers with one letter for each."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from ghostnoise import (
    AdditiveGaussianNoise,
    AnalyticalGhostNoise,
    AnalyticalGhostNoiseBatchNorm,
    BatchNorm2d,
    EvalNorm2d,
    ExclusiveBatchNorm2d,
    GhostBatchNorm2d,
    GhostNoise,
    GhostNoiseBatchNorm,
    NoisyDropout,
)
from ghostnoise.lab import models
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.noisy import Noisy
from ghostnoise.lab.models.norm_free import NormFreeBlock
from ghostnoise.lab.models.slots import Slots
from ghostnoise.methods import registry
from support.families import DRAWING
from support.lab_networks import CASES, WIDTHS, baseline, batch, build, images, norm, trained

NOISES = (*registry.inserted(), AdditiveGaussianNoise, NoisyDropout)
FUSED = (GhostNoiseBatchNorm, AnalyticalGhostNoiseBatchNorm)
PLAIN = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
# A letter is that of the first kind that a layer is.
LETTERS = {NOISES: "~", FUSED: "N", PLAIN: "n", (nn.Conv1d, nn.Conv2d): "c", nn.Linear: "l", nn.ReLU: "r", nn.GELU: "g"}


def passes(model, x):
    """c convolution, l linear, r ReLU, g GELU, ~ noise, n norm, N norm with noise between it and its affine."""
    seen = []

    def enter(module, _):
        if isinstance(module, Noisy) and module.inside:
            seen.append("N")
        else:
            seen.append(next((letter for kind, letter in LETTERS.items() if isinstance(module, kind)), ""))

    for module in model.modules():
        module.register_forward_pre_hook(enter)
    model(x)
    return "".join(seen).replace("N~", "N")  # where that noise is a layer of its own


BODY = {
    "resnet18": "cnr" + 2 * "cnrcnr" + 3 * ("cnrcncnr" + "cnrcnr") + "l",
    "resnet20": "cnr" + 3 * "cnrcnr" + 2 * ("cnrcncnr" + 2 * "cnrcnr") + "l",
    "resnet8": "cnr" + "cnrcnr" + 2 * "cnrcncnr" + "l",
    "resnet50": "cnr" + "".join("cnrcnrcncnr" + count * "cnrcnrcnr" for count in (2, 3, 5, 2)) + "l",
    "nf-resnet26": "c" + 4 * ("rcc" + "rcrc" + "rcrcrc") + "rl",
    "simple-vit": "nln" + 6 * ("nll" + "nlgl") + "nl",
    "convmixer": "cgn" + 8 * ("cgn" + "cgn") + "l",
    "mlp": 3 * "lnr" + "l",
    "digits-net": 3 * "cnr" + "l",
    "conv1d": 3 * "cnr" + "l",
    "nf-resnet1d": "c" + 2 * "rccrcrc" + "rl",
    "vit1d": "ln" + 2 * ("nll" + "nlgl") + "nl",
    "convmixer1d": "cgn" + 4 * ("cgn" + "cgn") + "l",
}
BODY["wsln-resnet18"] = BODY["resnet18"]
BODY["wsln-conv1d"] = BODY["conv1d"]
BODY["preact-resnet18"] = "c" + 2 * "nrcnrc" + 3 * ("nrcnrcnc" + "nrcnrc") + "nrl"
BODY["preact-wsln-resnet18"] = BODY["preact-resnet18"]
IN_BRANCHES = {
    "resnet18": "cnr" + 2 * "cnrcn~r" + 3 * ("cnrcn~cnr" + "cnrcn~r") + "l",
    "resnet20": "cnr" + 3 * "cnrcn~r" + 2 * ("cnrcn~cnr" + 2 * "cnrcn~r") + "l",
    "resnet8": "cnr" + "cnrcn~r" + 2 * "cnrcn~cnr" + "l",
    "resnet50": "cnr" + "".join("cnrcn~rcncnr" + count * "cnrcn~rcnr" for count in (2, 3, 5, 2)) + "l",
}
IN_BRANCHES["digits-net"] = "cnr" + "cn~r" + "cnr" + "l"  # which has none: after its second norm
IN_BRANCHES["conv1d"] = IN_BRANCHES["wsln-conv1d"] = 3 * "cn~r" + "l"  # neither: after every norm
IN_BRANCHES["wsln-resnet18"] = IN_BRANCHES["resnet18"]
IN_BRANCHES["preact-resnet18"] = "c" + 2 * "nrcnr~c" + 3 * ("nrcnr~cnc" + "nrcnr~c") + "nrl"
IN_BRANCHES["preact-wsln-resnet18"] = IN_BRANCHES["preact-resnet18"]


def expected_layers(name, place):
    return {
        None: BODY[name],
        "inside": BODY[name].replace("n", "N"),
        "after": BODY[name].replace("n", "n~"),
        "activation": BODY[name].replace("r", "~r").replace("g", "~g"),
        "branch": IN_BRANCHES.get(name),
    }[place]


@cache
def plain(name, **more):
    """Return the initial state of the network without noise, and the network with changed parameters."""
    model = build(name, **more)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    return initial, trained(model).eval()


@pytest.mark.parametrize(("name", "method", "place"), CASES)
def test_every_network_with_every_method_and_placement(name, method, place):
    """One build of each, since there are more than a hundred."""
    # XBN has no bound, and without a large eps it overflows in the 53 layers of ResNet-50.
    bounded = {"eps": 1.0} if method == "xbn" else {}
    model, x = build(name, method, place, **bounded), batch(name)
    initial, other = plain(name, **bounded)
    # The same parameters, buffers and initial weights as the plain network.
    assert list(model.state_dict()) == list(initial)
    assert all(torch.equal(tensor, initial[key]) for key, tensor in model.state_dict().items())
    # Noise where it belongs, and a gradient for every parameter.
    for block in model.modules():
        if isinstance(block, NormFreeBlock):
            torch.nn.init.constant_(block.skipinit_gain, 0.5)  # at 0, branches have no gradient
    seen = copy.deepcopy(model)
    assert passes(seen, x) == expected_layers(name, place)
    torch.nn.functional.cross_entropy(model(x), torch.arange(8) % 5).backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path
    # In training, noise is drawn anew, from the default generator.
    state = copy.deepcopy(trained(model).state_dict())

    def output():
        model.load_state_dict(state)  # a method may use the running statistics in training
        return model(x)

    torch.manual_seed(3)
    first, second = output(), output()
    assert torch.equal(first, second) == (place is None and method not in DRAWING)
    torch.manual_seed(3)
    assert torch.equal(output(), first)
    # In eval, the output is that of the plain network, unless it depends on the samples.
    model.load_state_dict(other.state_dict(), strict=True)
    evaluated, expected = model.eval()(x), other(x)
    if method != "none" and registry.specs()[method].changes_inference:
        assert not torch.allclose(evaluated, expected, rtol=1e-3)
    else:
        torch.testing.assert_close(evaluated, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 20), ("resnet20", 21), ("resnet8", 9), ("resnet50", 53), ("wsln-resnet18", 20),
     ("preact-resnet18", 20), ("preact-wsln-resnet18", 20), ("nf-resnet26", 25),
     ("simple-vit", 15), ("convmixer", 17), ("mlp", 3), ("digits-net", 3), ("conv1d", 3), ("wsln-conv1d", 3),
     ("nf-resnet1d", 7), ("vit1d", 6), ("convmixer1d", 9)],
)  # fmt: skip
def test_number_of_noise_layers_at_the_default_place(name, count):
    layers = [
        module for module in build(name, "gni").modules() if isinstance(module, (GhostNoise, GhostNoiseBatchNorm))
    ]
    assert len(layers) == count
    assert {layer.ghost_size for layer in layers} == {4}


NORMS = (nn.BatchNorm2d, EvalNorm2d)  # EvalNorm2d is not a subclass of nn.BatchNorm2d


def test_layers_of_the_methods():
    for method, layer in (("gbn", GhostBatchNorm2d), ("xbn", ExclusiveBatchNorm2d), ("en", EvalNorm2d)):
        norms = [module for module in build("resnet8", method).modules() if isinstance(module, NORMS)]
        assert {(type(module), module.ghost_size) for module in norms} == {(layer, 4)}
    assert {type(module) for module in build("resnet8").modules() if isinstance(module, nn.BatchNorm2d)} == {
        nn.BatchNorm2d
    }


def found(model, kind):
    return next(module for module in model.modules() if isinstance(module, kind))


@pytest.mark.parametrize("name", ["resnet8", "mlp"])
def test_settings_reach_batch_norms(name):
    for method in ("bn", "gbn", "gni", "eagn", "dropout" if name == "resnet8" else "agni"):
        layer = found(build(name, method, eps=1e-2, momentum=0.3), nn.modules.batchnorm._BatchNorm)
        assert (layer.eps, layer.momentum) == (1e-2, 0.3)


@pytest.mark.parametrize("place", ["inside", "after", "activation"])
def test_settings_reach_ghost_noise(place):
    kinds = (GhostNoise, GhostNoiseBatchNorm)
    for components in ("both", "shift", "scale"):
        layer = found(build("resnet8", "gni", place, components=components, noise_eps=0.01), kinds)
        assert (layer.components, layer.noise_eps, layer.draw) == (components, 0.01, "replacement")
    assert found(build("resnet8", "gni", place, draw="partition"), kinds).draw == "partition"
    kinds = (AnalyticalGhostNoise, AnalyticalGhostNoiseBatchNorm)
    layer = found(build("resnet8", "agni", place, law="conv", dof="exact", components="scale", noise_eps=0.02), kinds)
    assert (layer.law, layer.dof, layer.components, layer.noise_eps) == ("conv", "exact", "scale", 0.02)


def test_the_normalizer_is_an_option_of_noise_inside_batch_norms():
    layer = found(build("resnet8", "gni", "inside", normalizer="exclusive"), GhostNoiseBatchNorm)
    assert layer.normalizer == "exclusive"
    for name, place in (("resnet8", "after"), ("resnet8", "activation"), ("simple-vit", "inside")):
        with pytest.raises(
            UserError, match=r"norm.normalizer='exclusive' for 'gni' outside batch norms.*placement=ins"
        ):
            build(name, "gni", place, normalizer="exclusive")


def test_settings_reach_element_wise_noise():
    layer = found(build("resnet8", "dropout", distribution="gaussian", per="channel"), NoisyDropout)
    assert (layer.p, layer.distribution, layer.per, layer.channel_dim) == (0.3, "gaussian", "channel", 1)
    assert found(build("wsln-resnet18", "eagn"), AdditiveGaussianNoise).std == 0.2


def test_tokens_have_their_channels_last():
    for name in ("simple-vit", "vit1d"):
        for place in ("inside", "after", "activation"):
            assert found(build(name, "gni", place), GhostNoise).channel_dim == -1


def test_without_a_ghost_size_xbn_takes_the_whole_batch():
    settings = models.building.ModelSettings(name="resnet8", width=WIDTHS["resnet8"])
    model = models.build(settings, models.building.NormSettings(method="xbn"), (3, 8, 8), 5)
    assert found(model, ExclusiveBatchNorm2d).ghost_size is None


@pytest.mark.parametrize("method", ["bn", "gbn", "xbn", "en", "gni", "agni"])
def test_global_scope_is_over_all_ranks(method, one_rank):
    for place in models.CATALOG["resnet8"].offered(method) or [None]:
        model = build("resnet8", method, place, scope="global")
        layers = [module for module in model.modules() if hasattr(module, "process_group")]
        assert {layer.process_group for layer in layers} == {"world"}
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert set(norms) <= set(layers)
        model(images())


def test_global_scope_of_networks_without_batch_norm(one_rank):
    for name in ("wsln-resnet18", "nf-resnet26", "simple-vit", "wsln-conv1d", "nf-resnet1d", "vit1d"):
        assert found(build(name, "gni", scope="global"), GhostNoise).process_group == "world"


@pytest.mark.parametrize("method", ["bn", "gbn", "xbn", "en", "gni", "agni"])
def test_global_scope_of_one_process_is_local(method):
    for place in models.CATALOG["resnet8"].offered(method) or [None]:
        everyone, own = (build("resnet8", method, place, scope=scope) for scope in ("global", "local"))
        assert repr(everyone) == repr(own)
        results = []
        for model in (everyone, own):
            torch.manual_seed(1)
            results.append(model(images()))
        assert torch.equal(*results)


def test_a_plain_norm_of_global_scope_is_one_of_ours(one_rank):
    slots = Slots(norm("bn", scope="global"), "batch", None)
    assert type(slots.norm(3)) is BatchNorm2d


def test_baselines():
    assert [baseline(name) for name in models.names()] == [
        *4 * ["bn"], "none", "bn", *3 * ["none"], *4 * ["bn"], *3 * ["none"], "bn",
    ]  # fmt: skip
