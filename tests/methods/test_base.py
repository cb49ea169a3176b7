"""All batch norms of the registry, as layers: a new method is tested here without an edit."""

import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise import functional
from ghostnoise.methods.base import update_running
from ghostnoise.tables import Moments
from ghostnoise.torch_private import AnyBatchNorm
from support import families
from support.families import (
    DRAWING,
    FAMILIES,
    LAYERS,
    OPTIONS,
    PLAIN_AT_INFERENCE,
    SHAPES,
    SPECS,
    UNTRACKED,
    build,
    example,
    layer_class,
    plain,
)
from support.levels import LEVELS, running

every_layer = pytest.mark.parametrize(("family", "dimensions"), LAYERS)
SINGLE = pytest.mark.filterwarnings("ignore:.*with a single ghost batch it is plain batch norm")
every_family = pytest.mark.parametrize("family", FAMILIES)
every_level = pytest.mark.parametrize("level", LEVELS)
# Families whose running variance is another one than that of nn.BatchNorm, which is unbiased.
OTHER_VARIANCE = ("gbn", "sgbn", "xbn", "en")


def seeded(layer, x):
    torch.manual_seed(0)
    return layer(x)


@every_layer
def test_subclasses_what_it_replaces(family, dimensions):
    layer = build(family, dimensions)
    assert isinstance(layer, AnyBatchNorm)
    # Code that folds batch norms must leave alone those whose eval output is not a batch norm's.
    assert isinstance(layer, getattr(nn, f"BatchNorm{dimensions}d")) == (family in PLAIN_AT_INFERENCE)
    theirs = list(inspect.signature(type(plain(dimensions))).parameters.values())
    ours = inspect.signature(type(layer)).parameters
    for parameter in theirs:
        assert ours[parameter.name].default == parameter.default
        assert ours[parameter.name].kind == parameter.kind
    order = [name for name, parameter in ours.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert order == [parameter.name for parameter in theirs if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


@every_layer
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"affine": False, "track_running_stats": False},
     {"bias": False}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}],
    ids=str,
)  # fmt: skip
def test_state_dict_and_eval_output_are_those_of_plain_batch_norm(family, dimensions, options):
    """Bit for bit, after training; the state dict loads in both directions."""
    tracks = options.get("track_running_stats", True)
    if not tracks and family not in UNTRACKED:
        with pytest.raises(ValueError, match="track_running_stats"):
            build(family, dimensions, **options)
        return
    layer, other = build(family, dimensions, **options), plain(dimensions, **options)
    x = example(dimensions, options.get("dtype", torch.float32))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for _ in range(3):
        assert layer(x).shape == x.shape
    other.load_state_dict(layer.state_dict(), strict=True)
    layer.eval(), other.eval()
    assert torch.equal(layer(x), other(x)) == (family in PLAIN_AT_INFERENCE or not tracks)
    assert layer(x[:0]).shape == x[:0].shape
    other.train()(x)
    layer.load_state_dict(other.state_dict(), strict=True)
    assert list(layer.state_dict()) == list(other.state_dict())
    for ours, theirs in zip(layer.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@every_family
def test_a_layer_for_any_rank(family):
    free = SPECS[family].norm(3, **OPTIONS[family])
    for dimensions in SHAPES:
        y = seeded(free, example(dimensions))
        assert torch.equal(y, seeded(build(family, dimensions), example(dimensions)))
        free.reset_running_stats()
    assert build(family, 1)(torch.randn(9, 3)).shape == (9, 3)
    with pytest.raises(ValueError, match=r"shape \(3,\): expected 2 or 3 or 4 or 5D input"):
        free(torch.randn(3))


OTHER_VALUES = {
    "noise_eps": 1e-2, "components": "scale", "law": "conv", "dof": "exact", "draw": "partition",
    "normalizer": "exclusive", "min_std": 0.5, "clamp_output": 2.0, "self_weight": 0.1, "alpha": 0.3,
    "running_var_from": "batch", "r_max": 1.5, "d_max": 0.5, "warmup_steps": 0, "transition_steps": 0,
    "transition": "correction", "eps": 1e-3, "momentum": 0.3, "prior_samples": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@every_family
def test_the_function_is_called_with_the_options_of_the_layer(family, training):
    own = {option.name for option in SPECS[family].options} - {"history"}  # a function takes a History
    assert own <= OTHER_VALUES.keys(), "give another value of the new option"
    options = OPTIONS[family] | {name: OTHER_VALUES[name] for name in (*own, "eps", "momentum")}
    layer = build(family, 2, **options).train(training)
    nn.init.normal_(layer.weight), nn.init.uniform_(layer.running_var)
    state = copy.deepcopy(layer.state_dict())
    torch.manual_seed(0)
    given = {name: value for name, value in options.items() if name != "history"}
    expected = SPECS[family].norm.function(
        example(2), state["running_mean"], state["running_var"], state["weight"], state["bias"], training,
        num_batches_tracked=state["num_batches_tracked"], **given,
    )  # fmt: skip
    torch.manual_seed(0)
    assert torch.equal(layer(input=example(2)), expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
    assert state["num_batches_tracked"] == training


@every_family
def test_wrong_inputs(family):
    with pytest.raises(ValueError, match=r"2d got an input of shape \(10, 3, 7\): expected 4D input .*use the 1d"):
        build(family, 2)(example(1))
    with pytest.raises(ValueError, match=r"got 3 channels .*: must be num_features=5; build the layer for 3"):
        build(family, 2, num_features=5)(example(2))
    nested = torch.nested.nested_tensor([torch.randn(3, 4, 5), torch.randn(3, 2, 5)], layout=torch.jagged)
    for layer in (build(family, 2), build(family, 2).eval()):
        for given, message in (
            (example(2).numpy(), r"got a numpy.ndarray: must be a torch.Tensor; convert with torch.as_tensor"),
            (example(2).tolist(), r"got a builtins.list: must be a torch.Tensor; convert with torch.as_tensor"),
            (nested, r"nested tensor: must be a dense tensor; pad with torch.nested.to_padded_t"),
            (example(2).to(torch.float8_e4m3fn), r"dtype torch.float8_e4m3fn: must be .*; convert with x.float\(\)"),
        ):
            with pytest.raises(ValueError, match=message):
                layer(given)


@every_family
@pytest.mark.parametrize("momentum", ["a", 1.5, -0.1, float("nan"), True])
def test_wrong_momentum(family, momentum):
    """Both when a layer is made, and when its attribute was set afterwards."""
    message = r"^momentum=.*: must be a number in \[0, 1\]$"
    with pytest.raises(ValueError, match=message):
        build(family, 2, momentum=momentum)
    layer = build(family, 2)
    layer(example(2))
    before = copy.deepcopy(layer.state_dict())
    layer.momentum = momentum
    with pytest.raises(ValueError, match=message):
        layer(example(2))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@every_family
def test_repr_pickle_and_deepcopy(family):
    layer = build(family, 2, eps=1e-4)
    assert repr(layer).startswith(f"{SPECS[family].norm.__name__}2d(3, eps=0.0001, momentum=0.1, affine=True")
    assert all(f"{name}={value!r}" in repr(layer) for name, value in OPTIONS[family].items())
    assert "generator" not in repr(layer)
    layer(example(2))
    state = copy.deepcopy(layer.state_dict())
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert repr(twin) == repr(layer)
        layer.load_state_dict(state)
        assert torch.equal(seeded(twin, example(2)), seeded(layer, example(2)))
        for first, second in zip(layer.buffers(), twin.buffers(), strict=True):
            assert torch.equal(first, second)


@every_level
@every_family
def test_memory_formats_and_half_inputs_are_kept(family, level):
    """Half inputs beside float32 parameters, as autocast leaves them."""
    formats = ((2, torch.contiguous_format), (2, torch.channels_last), (3, torch.channels_last_3d))
    for dimensions, memory_format in formats:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = example(dimensions, dtype).contiguous(memory_format=memory_format).requires_grad_()
            layer = build(family, dimensions)
            with running(level):
                y = layer(x)
                y.float().square().sum().backward()
            for each in (y, x.grad, layer.eval()(x)):
                assert each.is_contiguous(memory_format=memory_format)
                assert each.dtype == dtype
            assert layer.running_var.dtype == layer.weight.grad.dtype == torch.float32


@every_family
def test_a_generator_replaces_the_default_one(family):
    if family not in DRAWING:
        with pytest.raises(TypeError, match="generator"):
            build(family, 2, generator=torch.Generator())
        return
    layer = build(family, 2, generator=torch.Generator().manual_seed(4))
    first = layer(example(2))
    assert torch.equal(build(family, 2, generator=torch.Generator().manual_seed(4))(example(2)), first)
    assert not torch.equal(layer(example(2)), first)
    copied = copy.deepcopy(layer)
    assert torch.equal(layer(example(2)), copied(example(2)))


@SINGLE
@pytest.mark.parametrize("family", [family for family in FAMILIES if SPECS[family].ghost_size != "none"])
def test_ghost_size_none_disables_ghost_batches(family):
    """The noise is off, or the whole batch is one ghost batch."""
    spec, layer = SPECS[family], layer_class(family, 2)
    if spec.ghost_size == "required":
        for arguments in ((3,), (3, 32)):
            with pytest.raises(TypeError, match=rf"ghost_size is missing: {layer.__name__} needs .* use"):
                layer(*arguments)
    options = {"alpha": 0.25} if family == "en" else {}
    ours, before = layer(3, ghost_size=None, **options), torch.get_rng_state()
    assert "ghost_size=None" in repr(ours)
    same = layer(3, ghost_size=10, **options) if spec.partitions else plain(2)
    torch.testing.assert_close(ours(example(2)), same(example(2)))
    assert torch.equal(torch.get_rng_state(), before)


@SINGLE
@every_family
@pytest.mark.parametrize("training", [True, False])
def test_compiles_as_one_graph_for_any_batch_size(family, training):
    torch._dynamo.reset()  # its limit of recompilations counts those of earlier tests
    layer = build(family, 2).train(training)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=None)
    for batch_size in (10, 7, 9):
        x = torch.randn(batch_size, 3, 4, 5)
        torch.testing.assert_close(seeded(compiled, x), seeded(eager, x))
    torch.testing.assert_close(layer.state_dict(), eager.state_dict())
    assert layer.num_batches_tracked.item() == (3 if training else 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@every_family
def test_torchscript(family):
    """Traces of eval mode work; training cannot be traced, and nothing can be scripted."""
    layer, x = build(family, 2), example(2)
    layer(x)
    with pytest.raises(RuntimeError, match=r"torch.jit.trace in training mode: .*call eval\(\) before tracing"):
        torch.jit.trace(layer, x)
    with pytest.raises(RuntimeError, match=r"torch.jit.script of .*call ghostnoise.revert\(model\) first"):
        torch.jit.script(nn.Sequential(layer))
    layer.eval()
    with warnings.catch_warnings():
        if family not in PLAIN_AT_INFERENCE:  # whose composite form compares sizes
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x[:7] + 1), layer(x[:7] + 1))


# Running statistics. Those of each method are compared with the naive loops in test_every_method.py.


@every_level
@every_family
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_statistics_are_those_of_nn_batch_norm(family, momentum, level):
    """Within 8e-6 in float32, over batches of different sizes; of the variance, where it is the unbiased one."""
    layer, other = build(family, 2, momentum=momentum), plain(2, momentum=momentum)
    for seed, size in enumerate((16, 9, 33, 12, 128)):
        x = torch.randn(size, 3, 5, 7, generator=torch.Generator().manual_seed(seed)) * 3 + 2
        with running(level):
            layer(x), other(x)
    names = ["running_mean"] if family in OTHER_VARIANCE else ["running_mean", "running_var"]
    for name in names:
        torch.testing.assert_close(layer.get_buffer(name), other.get_buffer(name), rtol=8e-6, atol=8e-6)
    assert layer.num_batches_tracked == other.num_batches_tracked == 5
    before = copy.deepcopy(layer.state_dict())
    layer.eval()(example(2))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@every_family
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_that_is_not_finite_leaves_the_buffers_alone(family, bad, momentum):
    layer = build(family, 1, momentum=momentum)
    layer(example(1))
    before, x = copy.deepcopy(layer.state_dict()), example(1)
    x[4, 1, 2] = bad
    for level in LEVELS:
        with running(level):
            assert not layer(x)[4, 1].isfinite().all()
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer(example(1) + 1)
    assert layer.num_batches_tracked == 2
    assert not torch.equal(layer.running_mean, before["running_mean"])


@every_level
def test_statistics_that_are_too_large_for_a_half_type_leave_the_buffers_alone(level):
    overflow = torch.full((4, 2, 4), 6e4, dtype=torch.float16) * 2
    large = torch.randn(8, 2, 4).half() * 3000  # the variance, for buffers in half precision
    for x, dtype in ((overflow, torch.float32), (large, torch.float16)):
        mean, var, count = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), torch.tensor(0)
        with running(level):
            functional.batch_norm(x, mean, var, training=True, num_batches_tracked=count)
        assert (mean.tolist(), var.tolist(), count.item()) == ([0, 0], [1, 1], 0)


@pytest.mark.parametrize("family", UNTRACKED)
def test_training_without_tracking_changes_no_buffer(family):
    assert build(family, 2, track_running_stats=False).running_mean is None
    tracked = build(family, 2)
    tracked.track_running_stats = False  # as users freeze the buffers of nn.BatchNorm2d
    tracked(example(2))
    assert tracked.num_batches_tracked.item() == 0
    assert tracked.running_mean.abs().sum() == 0


@every_level
@every_family
def test_buffers_of_any_dtype_are_updated_in_place(family, level):
    function, options = families.function(family)
    buffers = torch.zeros(3, dtype=torch.float16), torch.ones(3, dtype=torch.float64), torch.tensor(0)
    addresses = [buffer.data_ptr() for buffer in buffers]
    with running(level):
        function(example(1).requires_grad_(), *buffers[:2], training=True, momentum=None,
                 num_batches_tracked=buffers[2], **options)  # fmt: skip
    assert [buffer.data_ptr() for buffer in buffers] == addresses
    torch.testing.assert_close(buffers[0], example(1).mean((0, 2)).half())
    assert buffers[2].item() == 1
    assert not any(buffer.requires_grad for buffer in buffers)


def test_a_missing_buffer_is_left_out_and_a_missing_count_is_an_error():
    mean = torch.zeros(3)
    functional.batch_norm(example(1), mean, None, training=True, momentum=1.0)
    torch.testing.assert_close(mean, example(1).mean((0, 2)))
    with pytest.raises(ValueError, match="momentum=None: needs num_batches_tracked"):
        functional.batch_norm(example(1), mean, None, training=True, momentum=None)


def test_a_full_step_replaces_the_buffer():
    mean = torch.full((2,), 7.0)
    update_running(mean, None, None, 1.0, Moments(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)))
    assert mean.tolist() == [1.0, 2.0]


# Batches with too few samples: warnings of layers that would silently do nothing.

PLAIN_BATCH_NORM = "batch of fewer than 16 samples with ghost_size=8: with a single ghost batch it is plain batch norm"
NO_NOISE = "got a batch of a single sample: its ghost batch is the batch itself, so there is no noise; use larger"
NO_PARTS = "batch of fewer than 16 samples with ghost_size=8: its ghost batch is the batch itself, so there is no noise"
FEW = [
    (lambda: ghostnoise.GhostBatchNorm1d(3, ghost_size=8), 15, 16, PLAIN_BATCH_NORM),
    (lambda: ghostnoise.EvalNorm1d(3, ghost_size=8), 8, 16, PLAIN_BATCH_NORM),
    (lambda: ghostnoise.GhostNoiseBatchNorm1d(3, ghost_size=8), 1, 2, NO_NOISE),
    (lambda: ghostnoise.GhostNoiseBatchNorm1d(3, ghost_size=8, draw="partition"), 15, 16, NO_PARTS),
]
few = pytest.mark.parametrize(("make", "samples", "enough", "message"), FEW)


def warned(layer, x):
    """Return the warnings of a call, none of which Python hides because it has shown it before."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        layer(x)
    return [str(each.message) for each in found]


@few
def test_a_layer_whose_first_batch_has_too_few_samples_warns_once(make, samples, enough, message):
    layer, x = make(), torch.randn(samples, 3, 5)
    assert warned(layer.eval(), x) == []
    (found,) = warned(layer.train(), x)
    assert re.search(message, found)
    assert "of 3 channels" in found
    assert "; use larger batches or " in found
    assert warned(layer, x) == []
    other = make()
    assert warned(other, torch.randn(enough, 3, 5)) == []
    assert warned(other, x) == []  # the last batch of an epoch
    assert len(warned(make(), x)) == 1


@few
def test_functions_without_a_layer_do_not_warn(make, samples, enough, message):
    layer = make()
    options = {name: getattr(layer, name) for name in type(layer).options}
    function = lambda x: type(layer).function(x, None, None, training=True, **options)  # noqa: E731
    assert warned(function, torch.randn(samples, 3, 5)) == []


@few
def test_a_compiled_layer_warns_when_it_is_compiled(make, samples, enough, message):
    torch._dynamo.reset()
    compiled = torch.compile(make(), fullgraph=True, backend="eager", dynamic=False)
    found = warned(compiled, torch.randn(samples, 3, 5))
    assert [each for each in found if re.search(message, each)]
    assert warned(compiled, torch.randn(samples, 3, 5)) == []


def test_noise_among_the_valid_samples_of_a_mask():
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[2] = True
    layer = ghostnoise.GhostNoiseBatchNorm1d(3, ghost_size=8)
    with ghostnoise.masked(mask):
        assert re.search(NO_NOISE, *warned(layer, torch.randn(4, 3, 5)))
        noise = ghostnoise.GhostNoise(8)
        assert re.search(NO_NOISE, *warned(noise, torch.randn(4, 3, 5)))
    mask[3, 0] = True
    with ghostnoise.masked(mask):
        assert warned(ghostnoise.GhostNoiseBatchNorm1d(3, ghost_size=8), torch.randn(4, 3, 5)) == []
        assert warned(noise, torch.randn(4, 3, 5)) == []


def test_noise_on_its_own_names_its_layer():
    model = ghostnoise.convert(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), "gni", 8, after=nn.LayerNorm)
    (found,) = warned(model, torch.randn(1, 3))
    assert found.startswith("GhostNoise '1.ghost_noise' got a batch of a single sample")
    assert warned(model, torch.randn(2, 3)) == warned(model.eval(), torch.randn(1, 3)) == []
    remembers = ghostnoise.convert(model.train(), "gni", 8, after=nn.LayerNorm, history=4)
    assert warned(remembers, torch.randn(1, 3)) == []
    disabled = ghostnoise.convert(model, "gni", None, after=nn.LayerNorm)
    assert warned(disabled, torch.randn(1, 3)) == []
    partition = ghostnoise.GhostNoise(8, draw="partition")
    assert re.search(NO_PARTS, *warned(partition, torch.randn(15, 3)))
    assert warned(partition, torch.randn(16, 3)) == []
