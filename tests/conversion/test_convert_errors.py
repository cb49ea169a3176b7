"""What `convert` refuses; the model is then unchanged."""

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer
from support.models import SIZES, convolutional, images, state, transformer


def refuses(model, message, *arguments, **options):
    """Check that `convert` raises a ValueError with this message, and leaves the model unchanged."""
    before = state(model)
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, *arguments, **options)
    assert state(model) == before


class OwnForward(nn.BatchNorm1d):
    def forward(self, x):
        return x


class Slotted(nn.BatchNorm2d):
    __slots__ = ("extra",)


class EmptySlots(nn.BatchNorm2d):
    __slots__ = ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gin", 4), "method='gin': must be one of 'bn', .*; did you mean 'gni'"),
        (("GBM", 4), "did you mean 'gbn'"),
        (("XBN+GNI-16", 4), r"method='XBN\+GNI-16': must be one of"),
        ((nn.BatchNorm2d, 4), "method=<class '.*BatchNorm2d'>: must be one of"),
        (("GNI-16", 4), "'GNI-16' with ghost_size=4: the name has a ghost size already; give one only"),
        (("bn-4",), "ghost_size=4: 'bn' normalizes the whole batch"),
        (("ghost noise",), "ghost_size is missing: 'gni' needs"),
        ((3, 4), "method=3: must be one of"),
        (("gni",), "ghost_size is missing: 'gni' needs the number of samples in a ghost batch; use ghost_size=32"),
        (("en",), "ghost_size is missing"),
        (("gbn", "4"), "ghost_size='4': must be an integer from 1 to 65536"),
        (("gbn", 65537), "ghost_size=65537: must be an integer from 1 to 65536"),
        (("xbn", 1), "ghost_size=1: must be an integer from 2 to 65536"),
        (("gni", {"1": 4, "*": 0}), "ghost_size=0: must be an integer"),
        (("en", None), "alpha=None with ghost_size=None"),
        (("bn", 4), "ghost_size=4: 'bn' normalizes the whole batch; leave it out, or use 'gbn'"),
        (("bn", None), "ghost_size=None: 'bn'"),
        (("bn", {"*": 4}), "'bn' normalizes the whole batch"),
    ],
)
def test_methods_and_sizes(arguments, message):
    refuses(convolutional(), message, *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"noise": 1},
            "noise=1: neither an argument of convert nor an option of GhostNoiseBatchNorm, .* noise_eps",
        ),
        (
            {"eps": 1},
            "eps=1: neither an argument of convert nor an option of GhostNoiseBatchNorm, which",
        ),
        ({"eps": 1}, "; a converted layer keeps its own eps; set it on the layers"),
        ({"inplace": False}, "; the model is always changed in place; convert copy.deepcopy"),
        ({"verbose": "yes"}, "verbose='yes': must be True or False"),
        ({"noise_eps": "small"}, r"noise_eps='small': must be a number in \[0, inf\)"),
        ({"draw": "shuffle"}, "draw='shuffle': must be one of 'replacement', 'partition'"),
        ({"after": nn.ReLU, "draw": "all"}, "draw='all': must be one of 'replacement', 'partition'"),
        ({"normalizer": "xbn"}, "normalizer='xbn': must be one of 'batch', 'exclusive'"),
        (
            {"after": nn.ReLU, "normalizer": "exclusive"},
            "normalizer='exclusive': neither .* of GhostNoise,",
        ),
        ({"components": "all"}, "components='all': must be one of 'both', 'shift', 'scale'"),
        ({"uneven": "yes"}, "uneven='yes': must be True or False"),
        ({"generator": 3}, "generator=3: must be a torch.Generator or None; use torch.Generator"),
        ({"after": nn.ReLU, "uneven": 1}, "uneven=1: must be True or False"),
        ({"after": nn.ReLU, "generator": 3}, "generator=3: must be a torch.Generator or None"),
        ({"after": nn.ReLU, "noise_eps": -1}, "noise_eps=-1: must be a number"),
        (
            {"after": nn.ReLU, "noise": 1},
            "noise=1: neither an argument of convert nor an option of GhostNoise, which takes noise",
        ),
        ({"after": nn.LayerNorm, "before": nn.ReLU}, "after= and before= are both given: .*; call convert twice"),
        ({"after": "LayerNorm"}, "after='LayerNorm': must be a module type, such as nn.LayerNorm, or a tuple"),
        ({"before": (nn.ReLU, int)}, "before=.*: must be a module type"),
        ({"where": "layer1"}, "where='layer1': must be a function of a module's name and the module"),
        ({"channel_dim": 1}, "channel_dim=1 without after= or before=: batch norms have .*; leave it out"),
        ({"scope": "ranks"}, "scope='ranks': must be one of 'local', 'global'"),
        ({"scope": "global"}, "scope='global' without torch.distributed: call torch.distributed.init_process_group"),
        ({"process_group": object()}, "process_group=<object .*>: must be None for this process alone, 'world'"),
    ],
)
def test_options(options, message):
    refuses(convolutional(), message, "gni", 4, **options)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("nois_eps", "noise_eps"), ("ghostsize", "ghost_size"), ("afer", "after"), ("procces_group", "process_group"),
        ("channels_dim", "channel_dim"), ("generater", "generator"),
    ],
)  # fmt: skip
def test_a_misspelt_keyword_suggests_the_nearest(given, nearest):
    """Before anything else is reported, such as a model without batch norm or a missing ghost size."""
    message = f"{given}=1: neither an argument of convert nor .*, which takes .*; did you mean '{nearest}'"
    refuses(convolutional(), message, "gni", **{given: 1})
    refuses(transformer(), message, "gni", 4, **{given: 1})


@pytest.mark.parametrize("name", [name for spec in registry.specs().values() for name in spec.shorthands])
def test_a_shorthand_does_not_accept_the_option_that_it_stands_for(name):
    for option, value in registry.find(name)[1].items():
        message = f"{option}='both': neither .*; '{name}' stands for {option}='{value}'"
        refuses(convolutional(), message, name, 4, **{option: "both"})


@pytest.mark.parametrize("method", [name for name, (spec, _) in registry.names().items() if spec.noise is None])
def test_only_noise_is_inserted(method):
    message = f"'{method}' with after= or before=: it has no noise to insert; use one of 'gni', 'gni-shift'"
    refuses(transformer(), message, method, **SIZES[method], after=nn.LayerNorm)


def test_values_that_are_not_models():
    for function in (lambda m: ghostnoise.convert(m, "gni", 4), ghostnoise.revert, ghostnoise.summary):
        with pytest.raises(ValueError, match=r"got a dict: model must be an nn.Module; pass the model itself"):
            function({})


def test_an_exported_model():
    exported = torch.export.export(convolutional().eval(), (images(),))
    with pytest.raises(ValueError, match=r"convert got an ExportedProgram, whose layers have become operators: pass"):
        ghostnoise.convert(exported, "gni", 4)
    with pytest.raises(ValueError, match=r"no layers in this GraphModule, .*: convert the model first, then export it"):
        ghostnoise.convert(exported.module(check_guards=False), "gni", 4)


# Layers whose class, parameters or forward cannot be changed in place; all others are unchanged, too.


@pytest.mark.parametrize("method", ["gni", "en"])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (OwnForward(5), r"'5' \(OwnForward\) is a .*OwnForward, which defines its own forward.*where="),
        (Slotted(3), r"'5' \(Slotted\) is a .*, which defines __slots__, so its class cannot be changed .*where="),
        (nn.BatchNorm2d(3, eps=-1e-5), r"has eps=.*: must be a number in \[0, inf\); set its eps"),
        (nn.BatchNorm2d(3, eps=float("nan")), r"has eps=.*: must be a number in \[0, inf\); set its eps"),
        (nn.BatchNorm2d(3, momentum=7), r"has momentum=.*: must be a number in \[0, 1\]; set its momentum"),
        (nn.BatchNorm2d(3, momentum="a"), r"has momentum=.*: must be a number in \[0, 1\]; set its momentum"),
    ],
)
def test_layers_that_cannot_be_converted(layer, message, method):
    model = convolutional().append(layer)
    refuses(model, message, method, 4)
    ghostnoise.convert(model, method, 4, where=lambda name, module: name == "1")
    assert not isinstance(layer, NormLayer)


def test_layers_that_can_be_converted():
    model = nn.Sequential(EmptySlots(3), nn.BatchNorm2d(3, momentum=None))
    ghostnoise.revert(ghostnoise.convert(model, "gni", 4))
    assert type(model[0]) is EmptySlots


def test_a_forward_set_on_the_instance():
    for model, name, place in ((convolutional(), "1", {}), (transformer(), "0", {"after": nn.LayerNorm})):
        model.get_submodule(name).forward = lambda x: x
        refuses(model, rf"'{name}' \(\w+\) has a forward of its own, set on the instance", "gni", 4, **place)


def test_noise_that_cannot_be_inserted_leaves_all_others_unchanged():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    model.append(nn.LayerNorm([5, 2]))
    refuses(model, "channel_dim is not known for '5'", "gni", 16, after=nn.LayerNorm)


def test_a_warning_that_is_an_error_changes_nothing():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    before = state(model)
    with pytest.raises(UserWarning, match="several names"):
        ghostnoise.convert(model, "gni", 4, before=nn.ReLU)
    assert state(model) == before


def test_scripted_models_and_layers():
    with pytest.raises(ValueError, match=r"convert got a ScriptModule, .*: pass the model before torch.jit"):
        ghostnoise.convert(torch.jit.script(convolutional()), "gni", 4)
    model = nn.Sequential(nn.BatchNorm2d(3), torch.jit.script(nn.BatchNorm2d(3)))
    message = r"'1' \(RecursiveScriptModule\) is a ScriptModule, .*: convert before torch.jit"
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is nn.BatchNorm2d


# FSDP, before and after a conversion.


@pytest.mark.usefixtures("one_rank")
def test_fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = fully_shard(convolutional(), mesh=mesh)
    message = "the model itself is managed by FSDP, .*: convert the model first, then call fully_shard"
    refuses(model, message, "gni", 4)
    refuses(model, message, "gni", 4, after=nn.Linear)
    refuses(model[4], r"'1' \(BatchNorm1d\) has DTensor parameters: convert the model before", "gni", 4)
    model = convolutional()
    fully_shard(model[1], mesh=mesh)
    refuses(model, r"'1' \(FSDPBatchNorm2d\) is managed by FSDP", "gni", 4)

    model = fully_shard(ghostnoise.convert(convolutional().append(nn.Linear(5, 2)), "gni", 4), mesh=mesh)
    model(images()).square().sum().backward()
    assert model[1].weight.grad is not None
    assert type(ghostnoise.revert(model)[1]) is nn.BatchNorm2d
    model = ghostnoise.convert(convolutional(), "gni", 4)
    fully_shard(model[1], mesh=mesh)
    before = state(model)
    with pytest.raises(ValueError, match=r"'1' \(FSDPGhostNoise.*\) is managed by FSDP, which revert would undo: load"):
        ghostnoise.revert(model)
    assert state(model) == before


@pytest.mark.usefixtures("one_rank")
def test_fully_sharded_data_parallel():
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrapped(module):
        with pytest.warns(UserWarning, match="the world size is 1"):
            return nn.Sequential(FullyShardedDataParallel(module, device_id=torch.device("cpu")))

    wrapped(ghostnoise.convert(convolutional(), "gni", 4))(images()).square().sum().backward()
    model = wrapped(convolutional())
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"'0' \(FullyShardedDataParallel\) is managed by FSDP"):
        ghostnoise.convert(model, "gni", 4)
    assert [type(module) for module in model.modules()] == before
