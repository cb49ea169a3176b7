"""All batch norms of the registry, as layers: a new method is tested here without an edit."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn

from ghostnoise import functional
from ghostnoise.torch_private import AnyBatchNorm
from support import families
from support.families import (
    FAMILIES,
    LAYERS,
    NOISY,
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

every_layer = pytest.mark.parametrize(("family", "dimensions"), LAYERS)
every_family = pytest.mark.parametrize("family", FAMILIES)


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
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_state_dict_is_that_of_plain_batch_norm(family, dimensions, affine, tracks):
    options = {"affine": affine, "track_running_stats": tracks}
    if not tracks and family not in UNTRACKED:
        with pytest.raises(ValueError, match="track_running_stats"):
            build(family, dimensions, **options)
        return
    layer, other = build(family, dimensions, **options), plain(dimensions, **options)
    layer(example(dimensions))
    other.load_state_dict(layer.state_dict(), strict=True)
    other(example(dimensions))
    layer.load_state_dict(other.state_dict(), strict=True)
    assert list(layer.state_dict()) == list(other.state_dict())
    for ours, theirs in zip(layer.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tracks", [True, False])
def test_eval_is_bit_equal_to_plain_batch_norm(family, dimensions, dtype, tracks):
    options = {"dtype": dtype, "track_running_stats": tracks}
    if not tracks and family not in UNTRACKED:
        return
    layer, other = build(family, dimensions, **options), plain(dimensions, **options)
    x = example(dimensions, dtype)
    nn.init.normal_(layer.weight)
    for _ in range(3):
        layer(x)
    other.load_state_dict(layer.state_dict())
    layer.eval(), other.eval()
    same = torch.equal(layer(x), other(x))
    assert same == (family in PLAIN_AT_INFERENCE or not tracks)


@pytest.mark.parametrize("family", UNTRACKED)
def test_training_without_tracking_changes_no_buffer(family):
    layer = build(family, 2, track_running_stats=False)
    assert layer.running_mean is None
    y = layer(example(2))
    assert y.isfinite().all()
    tracked = build(family, 2)
    tracked.track_running_stats = False  # as users freeze the buffers of nn.BatchNorm2d
    tracked(example(2))
    assert tracked.num_batches_tracked.item() == 0
    assert tracked.running_mean.abs().sum() == 0


@every_family
def test_buffers_are_updated_in_training(family):
    layer = build(family, 2)
    for _ in range(3):
        layer(example(2))
    assert layer.num_batches_tracked.item() == 3
    expected = (1 - 0.9**3) * example(2).mean((0, 2, 3))
    torch.testing.assert_close(layer.running_mean, expected)
    layer.eval()
    layer(example(2))
    assert layer.num_batches_tracked.item() == 3


@every_family
def test_cumulative_average(family):
    layer = build(family, 1, momentum=None)
    batches = [example(1) + k for k in range(4)]
    for batch in batches:
        layer(batch)
    torch.testing.assert_close(layer.running_mean, torch.stack(batches).mean((0, 1, 3)))


@every_family
def test_without_bias(family):
    layer = build(family, 2, bias=False)
    assert layer.bias is None
    assert layer.weight is not None
    plain(2, bias=False).load_state_dict(layer.state_dict(), strict=True)
    assert layer(example(2)).shape == SHAPES[2]


@every_family
def test_two_dimensions_in_1d(family):
    layer = build(family, 1)
    assert layer(torch.randn(9, 3)).shape == (9, 3)


@every_family
def test_wrong_rank_and_channel_count(family):
    with pytest.raises(ValueError, match=r"2d got an input of shape \(10, 3, 7\): expected 4D input .*use the 1d"):
        build(family, 2)(example(1))
    with pytest.raises(ValueError, match=r"got 3 channels .*: must be num_features=5; build the layer for 3"):
        build(family, 2, num_features=5)(example(2))
    with pytest.raises(ValueError, match="must be float16, bfloat16, float32 or float64"):
        build(family, 2)(example(2).long())
    with pytest.raises(ValueError, match="empty input"):
        build(family, 2)(torch.randn(0, 3, 4, 5))


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
def test_an_empty_batch_in_eval(family):
    assert build(family, 2).eval()(torch.randn(0, 3, 4, 5)).shape == (0, 3, 4, 5)


@every_family
def test_repr_shows_the_options(family):
    text = repr(build(family, 2, eps=1e-4))
    assert text.startswith(f"{SPECS[family].norm.__name__}2d(3, eps=0.0001, momentum=0.1, affine=True")
    for name, value in OPTIONS[family].items():
        assert f"{name}={value!r}" in text
    assert "generator" not in text


@every_family
def test_pickle_and_deepcopy(family):
    layer = build(family, 2)
    layer(example(2))
    state = copy.deepcopy(layer.state_dict())
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert repr(twin) == repr(layer)
        layer.load_state_dict(state)
        torch.manual_seed(0)
        ours = layer(example(2))
        torch.manual_seed(0)
        assert torch.equal(twin(example(2)), ours)
        for first, second in zip(layer.buffers(), twin.buffers(), strict=True):
            assert torch.equal(first, second)


@every_family
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_is_kept(family, memory_format):
    x = example(2).contiguous(memory_format=memory_format).requires_grad_()
    layer = build(family, 2)
    y = layer(x)
    assert y.is_contiguous(memory_format=memory_format)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.is_contiguous(memory_format=memory_format)
    assert layer.eval()(x).is_contiguous(memory_format=memory_format)
    volume = example(3).contiguous(memory_format=torch.channels_last_3d)
    assert build(family, 3)(volume).is_contiguous(memory_format=torch.channels_last_3d)


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_beside_float32_parameters(family, dtype):
    """As autocast leaves them: activations in half, parameters and buffers in float32."""
    layer = build(family, 2)
    y = layer(example(2, dtype))
    assert y.dtype == dtype
    assert layer.running_var.dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@every_family
def test_a_generator_replaces_the_default_one(family):
    if family not in NOISY:
        with pytest.raises(TypeError, match="generator"):
            build(family, 2, generator=torch.Generator())
        return
    runs = [build(family, 2, generator=torch.Generator().manual_seed(4))(example(2)) for _ in range(2)]
    assert torch.equal(*runs)
    layer = build(family, 2, generator=torch.Generator().manual_seed(4))
    assert not torch.equal(layer(example(2)), layer(example(2)))
    copied = copy.deepcopy(layer)
    assert torch.equal(layer(example(2)), copied(example(2)))


@every_family
def test_training_goes_on_under_a_seed(family):
    """Ten steps of a small network, twice: the same weights to the bit."""

    def weights():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 3, 3), build(family, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
        x = example(2)
        model(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for first, second in zip(weights(), weights(), strict=True):
        assert torch.equal(first, second)
        assert first.isfinite().all()


@every_family
@pytest.mark.parametrize("training", [True, False])
def test_compiles_as_one_graph_for_any_batch_size(family, training):
    torch._dynamo.reset()  # its limit of recompilations counts those of earlier tests
    layer = build(family, 2).train(training)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=None)
    for batch_size in (10, 7, 9):
        x = torch.randn(batch_size, 3, 4, 5)
        torch.manual_seed(0)
        y = compiled(x)
        torch.manual_seed(0)
        torch.testing.assert_close(eager(x), y)
    torch.testing.assert_close(layer.state_dict(), eager.state_dict())
    assert layer.num_batches_tracked.item() == (3 if training else 0)


@pytest.mark.parametrize("family", [family for family in FAMILIES if SPECS[family].ghost_size != "none"])
def test_ghost_size_none_disables_ghost_batches(family):
    """The noise is off, or the whole batch is one ghost batch."""
    spec, layer = SPECS[family], layer_class(family, 2)
    if spec.ghost_size == "required":
        with pytest.raises(TypeError, match="ghost_size"):
            layer(3)
    options = {"alpha": 0.25} if family == "en" else {}
    ours = layer(3, ghost_size=None, **options)
    assert "ghost_size=None" in repr(ours)
    same = layer(3, ghost_size=10, **options) if spec.partitions else plain(2)
    torch.testing.assert_close(ours(example(2)), same(example(2)))


@pytest.mark.parametrize("family", [family for family in FAMILIES if SPECS[family].ghost_size != "none"])
def test_ghost_sizes_are_bounded(family):
    """65,537 samples are refused before anything is allocated, by the layer and by the function."""
    spec, (function, options) = SPECS[family], families.function(family)
    for size in (65_537, spec.least_ghost_size - 1):
        with pytest.raises(
            ValueError, match=rf"ghost_size={size}: must be an integer from {spec.least_ghost_size} to 65"
        ):
            build(family, 2, ghost_size=size)
        with pytest.raises(ValueError, match=f"ghost_size={size}: must be an integer from"):
            function(example(2), None, None, training=True, **(options | {"ghost_size": size}))


@every_family
def test_a_layer_for_any_rank(family):
    free = SPECS[family].norm(3, **OPTIONS[family])
    for dimensions in SHAPES:
        torch.manual_seed(0)
        y = free(example(dimensions))
        torch.manual_seed(0)
        assert torch.equal(y, build(family, dimensions)(example(dimensions)))
        free.reset_running_stats()
    with pytest.raises(ValueError, match=r"shape \(3,\): expected 2 or 3 or 4 or 5D input"):
        free(torch.randn(3))
    with pytest.raises(ValueError, match=r"got 4 channels .*: must be num_features=3"):
        free(torch.randn(5, 4))


@every_family
def test_input_is_a_keyword(family):
    layer, x = build(family, 2), example(2)
    torch.manual_seed(0)
    y = layer(input=x)
    layer.reset_running_stats()
    torch.manual_seed(0)
    assert torch.equal(y, layer(x))
    assert torch.equal(layer.eval()(input=x), layer(x))


@every_family
@pytest.mark.parametrize("training", [True, False])
def test_inputs_that_are_not_dense_tensors(family, training):
    layer, x = build(family, 2).train(training), example(2)
    for given, name in ((x.numpy(), "numpy.ndarray"), (x.tolist(), "builtins.list")):
        with pytest.raises(ValueError, match=rf"got a {name}: must be a torch.Tensor; convert with torch.as_tensor"):
            layer(given)
    nested = torch.nested.nested_tensor([torch.randn(3, 4, 5), torch.randn(3, 2, 5)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"nested tensor: must be a dense tensor; pad with torch.nested.to_padded_t"):
        layer(nested)
    with pytest.raises(ValueError, match=r"dtype torch.float8_e4m3fn: must be float16, .*; convert with x.float\(\)"):
        layer(x.to(torch.float8_e4m3fn))


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


DETERMINISTIC = [(*families.function(family),) for family in UNTRACKED if family not in NOISY]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        *DETERMINISTIC,
        (functional.ghost_batch_norm, {"ghost_size": 2}),
        (functional.exclusive_batch_norm, {"ghost_size": 3}),
        (functional.exclusive_batch_norm, {"min_std": 0.9}),
        (functional.exclusive_batch_norm, {"clamp_output": 1.0}),
    ],
)
def test_gradients_of_training(function, options):
    torch.manual_seed(0)
    x = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run(x, weight, bias):
        return function(x, None, None, weight, bias, True, **options)

    assert torch.autograd.gradcheck(run, (x, weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))
