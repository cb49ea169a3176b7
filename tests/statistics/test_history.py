"""Histories in inference mode, under fake tensors and in exports: what stays in them can be trained with afterwards."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import ghostnoise
from ghostnoise import History

LAYERS = {
    "noise": partial(ghostnoise.GhostNoise, 4, history=6),
    "inside": partial(ghostnoise.GhostNoiseBatchNorm1d, 3, ghost_size=4, history=6),
    "exclusive": partial(ghostnoise.GhostNoiseBatchNorm1d, 3, ghost_size=4, history=6, normalizer="exclusive"),
}
every_layer = pytest.mark.parametrize("layer", [make() for make in LAYERS.values()], ids=LAYERS)


def batch(seed, size=4):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def step(layer, seed):
    """Return output and input gradient of a training step."""
    torch.manual_seed(seed)
    x = batch(seed).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def assert_same_steps(layer, other, seeds=(5, 6, 7)):
    for seed in seeds:
        for ours, theirs in zip(step(layer, seed), step(other, seed), strict=True):
            assert torch.equal(ours, theirs)


@every_layer
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("sizes", [(4,), (4, 11)])
def test_batches_in_inference_mode_are_kept_as_others_are(layer, before, sizes):
    """Before the first batch, and when the ring grows: what the block has created can be updated after it."""
    ours, other = copy.deepcopy(layer), copy.deepcopy(layer)
    assert_same_steps(ours, other, range(before))
    for size in sizes:
        for each, mode in ((ours, torch.inference_mode()), (other, torch.no_grad())):
            torch.manual_seed(size)
            with mode:
                each(batch(size, size))
    assert_same_steps(ours, other)
    assert all(torch.equal(*pair) for pair in zip(*(h.history.state().values() for h in (ours, other)), strict=True))


@every_layer
def test_loading_and_calibration_in_inference_mode(layer):
    trained, loaded = copy.deepcopy(layer), copy.deepcopy(layer)
    for each in (trained, loaded):
        each.history.persistent = True
    for seed in range(3):
        step(trained, seed)
    with torch.inference_mode():
        loaded.load_state_dict(trained.state_dict())
    assert_same_steps(loaded, trained)
    calibrated = torch.nn.Sequential(copy.deepcopy(trained), torch.nn.BatchNorm1d(3))
    with torch.inference_mode():
        ghostnoise.calibrate(calibrated, [batch(1), batch(2)], noise=True, keep=4)
    calibrated[0].load_state_dict(trained.state_dict())  # the running statistics have changed
    assert_same_steps(calibrated[0], trained)
    x = batch(3).requires_grad_()
    with ghostnoise.sampling(calibrated[0].eval()):
        calibrated[0](x).sum().backward()
    assert x.grad.isfinite().all()


@every_layer
def test_copies_and_pickles_made_in_inference_mode(layer):
    trained = copy.deepcopy(layer)
    step(trained, 0)
    with torch.inference_mode():
        copies = copy.deepcopy(trained.history), pickle.loads(pickle.dumps(trained.history))
    for each in copies:
        twin = copy.deepcopy(trained)
        twin.history = each
        other = copy.deepcopy(trained)
        assert_same_steps(twin, other)


def fake_input(layer):
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(torch.randn(4, 3))


def traced(layer, **options):
    make_fx(layer, **options)(batch(0))


def exported(layer, **options):
    torch.export.export(layer, (batch(0),), **options)


WITHOUT_VALUES = {
    "fake input": fake_input, "make_fx": traced, "fake make_fx": partial(traced, tracing_mode="fake"),
    "symbolic make_fx": partial(traced, tracing_mode="symbolic"), "export": partial(exported, strict=False),
    "strict export": partial(exported, strict=True),
}  # fmt: skip


@every_layer
@pytest.mark.parametrize("run", WITHOUT_VALUES.values(), ids=WITHOUT_VALUES)
@pytest.mark.parametrize("before", [0, 1])
def test_tensors_without_values_are_refused_and_not_kept(layer, run, before):
    ours, other = copy.deepcopy(layer), copy.deepcopy(layer)
    assert_same_steps(ours, other, range(before))
    with pytest.raises(
        Exception, match=r"a history in training under torch\.export, make_fx or FakeTensorMode: .*history=0"
    ):
        run(ours)
    pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    other.load_state_dict(ours.state_dict())  # a trace may have run the update of the running statistics
    assert_same_steps(ours, other)


@every_layer
def test_a_layer_of_tensors_without_values(layer):
    with FakeTensorMode():
        kind = type(layer)
        built = kind(4, history=6) if kind is ghostnoise.GhostNoise else kind(3, ghost_size=4, history=6)
        with pytest.raises(ValueError, match="a history in training under"):
            built(torch.randn(4, 3))


@every_layer
def test_eval_mode_reads_no_history(layer):
    trained = copy.deepcopy(layer)
    step(trained, 0)
    twin, x = copy.deepcopy(trained), batch(1)
    trained.eval()
    y = trained(x)
    for run in (fake_input, traced, exported):
        run(trained)
    assert torch.equal(torch.export.export(trained, (x,)).module()(x), y)
    assert_same_steps(trained.train(), twin)


@every_layer
def test_other_dispatch_modes_are_not_refused(layer):
    ours, other = copy.deepcopy(layer), copy.deepcopy(layer)
    for seed in range(2):
        with FlopCounterMode(display=False):
            counted = step(ours, seed)
        for one, another in zip(counted, step(other, seed), strict=True):
            torch.testing.assert_close(one, another)
    torch.testing.assert_close(ours.history.state(), other.history.state())


def test_a_history_of_ones_own():
    history = History(5)
    with torch.inference_mode():
        ghostnoise.functional.ghost_noise(batch(0), 4, history=history)
    x = batch(1).requires_grad_()
    ghostnoise.functional.ghost_noise(x, 4, history=history).sum().backward()
    expected = torch.cat([batch(0), batch(1)])[-5:]
    assert torch.equal(history.state()["mean"], expected)
