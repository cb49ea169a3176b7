"""Repeated calls of a layer: the results of its function to the last bit, and no effect that a first call lacks."""

import copy
import gc
import pickle
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
from ghostnoise.engine.repeat import Repeats
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ghostnoise
from ghostnoise.methods.base import NormLayer

LAYERS = {
    "bn": lambda **options: ghostnoise.BatchNorm(6, **options),
    "gbn": lambda **options: ghostnoise.GhostBatchNorm(6, ghost_size=5, **options),
    "gbn batch": lambda **options: ghostnoise.GhostBatchNorm(6, ghost_size=4, running_var_from="batch", **options),
    "xbn": lambda **options: ghostnoise.ExclusiveBatchNorm(6, ghost_size=5, **options),
    "en": lambda **options: ghostnoise.EvalNorm(6, ghost_size=5, **options),
    "gni": lambda **options: ghostnoise.GhostNoiseBatchNorm(6, ghost_size=3, **options),
    "gni shift": lambda **options: ghostnoise.GhostNoiseBatchNorm(6, ghost_size=3, components="shift", **options),
    "agni": lambda **options: ghostnoise.AnalyticalGhostNoiseBatchNorm(6, ghost_size=3, law="conv", **options),
    "brn": lambda **options: ghostnoise.BatchRenorm(6, warmup_steps=2, transition_steps=3, **options),
}
TRACKED = [name for name in LAYERS if name != "brn"]
SHAPES = {"features": (12, 6), "signals": (12, 6, 5), "images": (12, 6, 3, 2)}


def batches(count, shape=SHAPES["images"], dtype=torch.float32, form=torch.contiguous_format):
    generator = torch.Generator().manual_seed(4)
    made = (torch.randn(2, *shape, generator=generator).to(dtype) for _ in range(count))
    return [[each.contiguous(memory_format=form).requires_grad_() for each in pair] for pair in made]


def first_calls():
    """Count the calls that are not repeated."""
    return patch.object(NormLayer, "_run", autospec=True, side_effect=NormLayer._run)


def run(layer, batch):
    torch.manual_seed(7)
    x, dy = batch
    y = layer(x)
    gradients = torch.autograd.grad(y, (x, *layer.parameters()), dy.detach())
    return [y, *gradients, *(buffer.clone() for buffer in layer.buffers())]


def unrepeated(layer):
    """A copy of a layer that never repeats a call."""
    copied = copy.deepcopy(layer)
    copied._repeats = Repeats(())
    copied._repeats.patience = 0
    return copied


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_repeated_calls_equal_first_calls(make, shape, dtype):
    layer = make(dtype=torch.float64 if dtype == torch.float64 else None)
    plain = unrepeated(layer)
    with first_calls() as called:
        found = [run(layer, batch) for batch in batches(5, shape, dtype)]
        assert called.call_count == 1
        expected = [run(plain, batch) for batch in batches(5, shape, dtype)]
        assert called.call_count == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_channels_last(make):
    layer = make()
    plain = unrepeated(layer)
    for batch in batches(3, form=torch.channels_last):
        assert_same(run(layer, batch), run(plain, batch))
    assert layer._repeats.found


@pytest.mark.parametrize("name", TRACKED)
@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"bias": False}], ids=str
)
def test_absent_tensors_and_the_cumulative_average(name, options):
    layer = LAYERS[name](**options)
    plain = unrepeated(layer)
    with first_calls() as called:
        found = [run(layer, batch) for batch in batches(3)]
        assert called.call_count == 1
    for ours, batch in zip(found, batches(3), strict=True):
        assert_same(ours, run(plain, batch))


def test_shapes_alternate():
    layer = LAYERS["gni"]()
    plain = unrepeated(layer)
    with first_calls() as called:
        found = [run(layer, batch) for _ in range(3) for shape in SHAPES.values() for batch in batches(1, shape)]
        assert called.call_count == 3
    expected = [run(plain, batch) for _ in range(3) for shape in SHAPES.values() for batch in batches(1, shape)]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


def change(**values):
    def apply(layer):
        for name, value in values.items():
            setattr(layer, name, value)

    return apply


def replace_weight(layer):
    layer.weight = nn.Parameter(torch.full((6,), 0.5))


def move_weight(layer):
    layer.weight.data = torch.full((12,), 0.5)[::2]  # with a stride


CHANGES = {
    "ghost_size": change(ghost_size=2),
    "noise_eps": change(noise_eps=0.5),
    "components": change(components="scale"),
    "draw": change(draw="partition"),
    "normalizer": change(normalizer="exclusive"),
    "generator": change(generator=torch.Generator().manual_seed(3)),
    "eps": change(eps=0.3),
    "momentum": change(momentum=0.7),
    "cumulative average": change(momentum=None),
    "track_running_stats": change(track_running_stats=False),
    "weight": replace_weight,
    "strides": move_weight,
    "double": nn.Module.double,
    "frozen": lambda layer: layer.bias.requires_grad_(False),
}


@pytest.mark.parametrize("modify", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_changes_between_calls(modify):
    layer = LAYERS["gni"]()
    first, second, third = batches(3)
    run(layer, first)
    run(layer, second)
    modify(layer)
    plain = unrepeated(layer)
    if layer.generator is not None:  # a copied generator has a state of its own
        plain.generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x, dy = third
        results = []
        for each in (layer, plain):
            torch.manual_seed(7)
            x.grad = None
            y = each(x.to(each.running_mean.dtype))
            y.backward(dy.detach().to(y.dtype))
            results.append([y, x.grad, *(buffer.clone() for buffer in each.buffers())])
        assert_same(*results)


def test_equal_settings():
    """Integers above 256 are new objects when a schedule sets them; equal settings of another type are checked."""
    layer = ghostnoise.GhostNoiseBatchNorm(6, ghost_size=300)
    x, _ = batches(1)[0]
    with first_calls() as called:
        for _ in range(3):
            layer.ghost_size = int("300")
            layer(x)
        assert called.call_count == 1
        with torch.no_grad():
            layer(x)
        layer(x)
        with torch.no_grad():
            layer(x)
        assert called.call_count == 2


def test_settings_are_checked_again_after_a_change():
    layer = LAYERS["gni"]()
    x, _ = batches(1)[0]
    for _ in range(3):
        layer(x)
    layer.ghost_size = 0
    with pytest.raises(ValueError, match="ghost_size=0"):
        layer(x)
    layer.ghost_size = 3.0  # equal to an allowed one
    with pytest.raises(ValueError, match=r"ghost_size=3\.0"):
        layer(x)
    layer.ghost_size = 3
    with pytest.raises(ValueError, match="7 channels"):
        layer(torch.randn(12, 7, 3, 2))
    with pytest.raises(ValueError, match="dtype"):
        layer(x.long())
    with pytest.raises(ValueError, match="list"):
        layer([1.0])
    assert layer(x).shape == x.shape


def test_eval_mode_and_back():
    layer = LAYERS["gni"]()
    x, _ = batches(1)[0]
    for _ in range(3):
        layer(x)
    layer.eval()
    plain = nn.BatchNorm2d(6).eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), plain(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))  # noise


def test_masks_are_applied():
    layer = LAYERS["bn"]()
    x, _ = batches(1)[0]
    for _ in range(2):
        layer(x)
    mask = torch.ones(12, 3, 2, dtype=torch.bool)
    mask[:, 2] = False
    for y in (layer(x, mask), _in_block(layer, x, mask)):
        assert not y[:, :, 2].any()
    assert layer(x)[:, :, 2].any()


def _in_block(layer, x, mask):
    with ghostnoise.masked(mask):
        return layer(x)


def test_the_chosen_backend_runs():
    layer = LAYERS["gni"]()
    x, _ = batches(1)[0]
    for _ in range(2):
        layer(x)
    with first_calls() as called:
        with ghostnoise.backend("aten"):
            layer(x)
            assert called.call_count == 1
        with ghostnoise.backend("native"):
            layer(x)
            assert called.call_count == 1
        layer(x)
        assert called.call_count == 1


def test_the_number_of_threads():
    layer = LAYERS["gni"]()
    x, _ = batches(1)[0]
    layer(x)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with first_calls() as called:
            layer(x)
            layer(x)
        assert called.call_count == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_second_derivatives(make):
    layer = make(dtype=torch.float64)
    plain = unrepeated(layer)
    results = []
    for each in (layer, plain):
        for batch in batches(3, dtype=torch.float64):
            torch.manual_seed(7)
            x, dy = batch
            (first,) = torch.autograd.grad(each(x), x, dy, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert_same(results[:3], results[3:])


def test_forward_mode_and_function_transforms():
    layer = LAYERS["bn"](dtype=torch.float64, track_running_stats=False)  # torch.func does not update buffers
    plain = unrepeated(layer)
    x, tangent = (each.detach() for each in batches(1, dtype=torch.float64)[0])
    for _ in range(2):
        layer(x)
    results = []
    for each in (layer, plain):
        with forward_ad.dual_level():
            results.append([forward_ad.unpack_dual(each(forward_ad.make_dual(x, tangent))).tangent])
        results[-1].append(torch.func.grad(lambda x, each=each: each(x).cos().sum())(x))
    assert_same(*results)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(make, use_reentrant):
    """The first pass may be repeated, and the recomputed one is not; both save the same tensors."""
    layer = make()
    plain = unrepeated(layer)
    for batch in batches(3):
        x, dy = batch
        results = []
        for each, call in ((layer, partial(checkpoint, layer, use_reentrant=use_reentrant)), (plain, plain)):
            torch.manual_seed(7)
            x.grad = None
            each.zero_grad()
            y = call(x)
            y.backward(dy)
            results.append([y, x.grad, each.weight.grad, *(buffer.clone() for buffer in each.buffers())])
        assert_same(*results)


def test_compiled_calls_are_not_recorded():
    layer = LAYERS["gni"]()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x, _ = batches(1)[0]
    compiled(x)
    assert layer._repeats is None
    layer(x)
    layer(x)
    assert torch.compile(layer, backend="eager", fullgraph=True)(x).shape == x.shape


def test_modes_see_operators():
    layer = LAYERS["gni"]()
    x, _ = batches(1)[0]
    layer(x)
    with first_calls() as called, FlopCounterMode(display=False):
        layer(x)
    assert called.call_count == 1


def test_inference_mode():
    layer = LAYERS["gni"]()
    x = batches(1)[0][0].detach()
    for _ in range(2):
        layer(x)
    with torch.inference_mode():
        for _ in range(2):
            assert layer(x).is_inference()
    assert not layer(x).is_inference()


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "load"]
)
def test_copies_start_without_recorded_calls(clone):
    layer = LAYERS["brn"]()
    first, second = batches(2)
    run(layer, first)
    copied = clone(layer)
    assert layer._repeats.found
    assert not copied._repeats.found
    assert_same(run(layer, second), run(copied, second))


def test_nothing_keeps_the_input_alive():
    layer = LAYERS["gni"]()
    for _ in range(2):
        x = torch.randn(12, 6, 3, 2)
        watched = weakref.ref(x), weakref.ref(layer(x))
        del x
        gc.collect()
        assert [each() for each in watched] == [None, None]


def test_a_freed_storage_is_not_read():
    layer = LAYERS["gni"]()
    x, _ = batches(1)[0]
    layer(x)
    freed = x.detach().clone().requires_grad_()
    freed.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError)):
        layer(freed)


def test_layers_whose_shapes_never_repeat_stop_recording():
    layer = LAYERS["bn"]()
    with patch.object(Repeats, "PATIENCE", 4):
        layer(torch.randn(3, 6))
        layer._repeats.patience = 3
        for size in range(4, 12):
            layer(torch.randn(size, 6))
    assert len(layer._repeats.found) == 4


def test_a_function_that_does_more_is_not_repeated():
    """The result of `Call.train` must be the result of the layer."""

    class Doubled(ghostnoise.BatchNorm):
        function = staticmethod(lambda *args, **kwargs: 2 * ghostnoise.functional.batch_norm(*args, **kwargs))

    class Undeclared(ghostnoise.BatchNorm):
        repeatable = False

    x, _ = batches(1)[0]
    for layer in (Doubled(6), Undeclared(6)):
        outputs = [layer(x) for _ in range(3)]
        assert torch.equal(outputs[0], outputs[2])
        assert layer._repeats is None or not layer._repeats.found


@pytest.mark.parametrize(
    "options",
    [{"running_var_from": "each"}, {"running_var_from": "each-scaled"}],
    ids=str,
)
def test_buffers_that_are_updated_several_times_per_batch(options):
    layer = ghostnoise.GhostBatchNorm(6, ghost_size=4, **options)
    plain = unrepeated(layer)
    for batch in batches(3):
        assert_same(run(layer, batch), run(plain, batch))


def test_clamped_output_and_history():
    x, _ = batches(1)[0]
    clamped = ghostnoise.ExclusiveBatchNorm(6, ghost_size=3, clamp_output=0.5)
    remembering = ghostnoise.GhostNoiseBatchNorm(6, ghost_size=3, history=24)
    for _ in range(3):
        assert clamped(x).abs().max() <= 0.5
        remembering(x)
    assert len(remembering.history.stored(6, x.device).mean) == 24
