"""What `convert` refuses, and that the model is then as it was."""

import pytest
import torch
from torch import nn

import ghostnoise
from models import SIZES, convolutional, state, transformer


def test_a_failed_conversion_changes_nothing():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return x

    model = nn.Sequential(convolutional(), Own(5))
    for method in ("gni", "en"):
        before = state(model)
        with pytest.raises(ValueError, match=r"'1' \(Own\) is a .*Own, whose forward is its own.*where="):
            ghostnoise.convert(model, method, 4)
        assert state(model) == before
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    model.append(nn.LayerNorm([5, 2]))
    before = state(model)
    with pytest.raises(ValueError, match="channel_dim is not known for '5'"):
        ghostnoise.convert(model, "gni", 16, after=nn.LayerNorm)
    assert state(model) == before


def test_a_warning_that_is_an_error_changes_nothing():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    before = state(model)
    with pytest.raises(UserWarning, match="several names"):
        ghostnoise.convert(model, "gni", 4, before=nn.ReLU)
    assert state(model) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gin", 4), "method='gin': must be one of 'bn', .*; did you mean 'gni'"),
        (("GBN", 4), "did you mean 'gbn'"),
        ((3, 4), "method=3: must be one of"),
        (("gni",), "ghost_size is missing: 'gni' needs the number of samples in a ghost batch; give ghost_size=32"),
        (("en",), "ghost_size is missing"),
        (("gbn", "4"), "ghost_size='4': must be an integer of 1 or more"),
        (("gbn", 0), "ghost_size=0: must be an integer of 1 or more"),
        (("xbn", 1), "ghost_size=1: must be an integer of 2 or more"),
        (("en", None), "alpha=None with ghost_size=None"),
        (("bn", 4), "ghost_size=4: 'bn' normalizes the whole batch; leave it out, or take 'gbn'"),
        (("bn", None), "ghost_size=None: 'bn'"),
    ],
)
def test_methods_and_sizes_that_are_none(arguments, message):
    model = convolutional()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, *arguments)
    assert state(model) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"noise": 1},
            "noise=1: GhostNoiseBatchNorm2d has no such option here; it takes noise_eps, shift, scale, gene",
        ),
        ({"eps": 1}, "eps=1: GhostNoiseBatchNorm2d has no such option"),
        ({"noise_eps": -1}, r"noise_eps=-1: must be a number in \[0, inf\)"),
        ({"after": nn.LayerNorm, "before": nn.ReLU}, "after= and before= are both given: .*; convert twice"),
        ({"after": "LayerNorm"}, "after='LayerNorm': must be a module type, such as nn.LayerNorm, or a tuple"),
        ({"before": (nn.ReLU, int)}, "before=.*: must be a module type"),
        ({"where": "layer1"}, "where='layer1': must be a function of a module's name and the module"),
        ({"channel_dim": 1}, "channel_dim=1 without after= or before=: batch norms have theirs; leave it out"),
        ({"scope": "ranks"}, "scope='ranks': must be one of 'local', 'global'"),
        ({"scope": "global"}, "scope='global' without a process group: call torch.distributed.init_process_group"),
        ({"process_group": object()}, "process_group with scope=None: .*; give scope='global'"),
        ({"after": nn.ReLU, "noise_eps": 1}, "noise_eps=1: GhostNoise has no such option here; it takes eps, shift, "),
    ],
)
def test_options_that_are_none(options, message):
    model = convolutional()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, "gni", 4, **options)
    assert state(model) == before


def test_names_that_fix_an_option_do_not_take_it():
    with pytest.raises(
        ValueError, match=r"scale=True: .* has no such option here; it takes noise_eps, shift, generator"
    ):
        ghostnoise.convert(convolutional(), "gni-shift", 4, scale=True)


@pytest.mark.parametrize("method", ["bn", "gbn", "xbn", "en"])
def test_only_noise_is_inserted(method):
    with pytest.raises(ValueError, match=f"'{method}' with after= or before=: it is no noise; take 'gni' or 'agni'"):
        ghostnoise.convert(transformer(), method, **SIZES[method], after=nn.LayerNorm)


def test_what_is_no_model():
    for function in (lambda m: ghostnoise.convert(m, "gni", 4), ghostnoise.revert, ghostnoise.summary):
        with pytest.raises(ValueError, match=r"got a dict: model must be an nn.Module; give the model itself"):
            function({})


def test_scripted_models_and_layers():
    with pytest.raises(ValueError, match=r"convert got a ScriptModule, .*: give the model before torch.jit"):
        ghostnoise.convert(torch.jit.script(convolutional()), "gni", 4)
    model = nn.Sequential(nn.BatchNorm2d(3), torch.jit.script(nn.BatchNorm2d(3)))
    with pytest.raises(
        ValueError, match=r"'1' \(RecursiveScriptModule\) is a ScriptModule, .*: convert before torch.jit"
    ):
        ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_forward_set_on_the_instance():
    model = convolutional()
    model[1].forward = lambda x: x
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm2d\) has a forward of its own, set on the instance"):
        ghostnoise.convert(model, "gni", 4)
    ghostnoise.convert(model, "gbn", 4, where=lambda name, module: name != "1")
    assert type(model[1]) is nn.BatchNorm2d
    assert type(model[4][1]) is ghostnoise.GhostBatchNorm1d
