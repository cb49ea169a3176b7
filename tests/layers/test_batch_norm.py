"""What holds for every layer with batch-norm state."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import ghostnoise
from families import LAYERS, NOISY, OPTIONS, SHAPES, build, example, plain

every_layer = pytest.mark.parametrize(("family", "dimensions"), LAYERS)
every_family = pytest.mark.parametrize("family", list(OPTIONS))


@every_layer
def test_subclasses_what_it_replaces(family, dimensions):
    layer = build(family, dimensions)
    assert isinstance(layer, getattr(nn, f"BatchNorm{dimensions}d"))
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
def test_state_dict_goes_both_ways(family, dimensions, affine, tracks):
    options = {"affine": affine, "track_running_stats": tracks}
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
    layer, other = build(family, dimensions, **options), plain(dimensions, **options)
    x = example(dimensions, dtype)
    nn.init.normal_(layer.weight)
    for _ in range(3):
        layer(x)
    other.load_state_dict(layer.state_dict())
    layer.eval(), other.eval()
    same = torch.equal(layer(x), other(x))
    assert same if family != "EvalNorm" or not tracks else not same


@every_family
def test_training_without_tracking_leaves_no_trace(family):
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
def test_buffers_follow_training(family):
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
        build(family, 2, num_features=5, affine=False, track_running_stats=False)(example(2))
    with pytest.raises(ValueError, match="must be a real floating dtype"):
        build(family, 2)(example(2).long())
    with pytest.raises(ValueError, match="empty input"):
        build(family, 2)(torch.randn(0, 3, 4, 5))


@every_family
def test_an_empty_batch_in_eval(family):
    assert build(family, 2).eval()(torch.randn(0, 3, 4, 5)).shape == (0, 3, 4, 5)


@every_family
def test_repr_says_what_was_asked_for(family):
    text = repr(build(family, 2, eps=1e-4))
    assert text.startswith(f"{family}2d(3, eps=0.0001, momentum=0.1, affine=True")
    for name, value in OPTIONS[family].items():
        assert f"{name}={value!r}" in text
    assert "generator" not in text


@every_family
def test_pickle_and_deepcopy(family):
    layer = build(family, 2)
    layer(example(2))
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert repr(twin) == repr(layer)
        torch.manual_seed(0)
        ours = layer(example(2))
        torch.manual_seed(0)
        assert torch.equal(twin(example(2)), ours)
        layer.load_state_dict(twin.state_dict())


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
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=None)
    for batch_size in (10, 7, 9):
        x = torch.randn(batch_size, 3, 4, 5)
        torch.manual_seed(0)
        y = compiled(x)
        torch.manual_seed(0)
        torch.testing.assert_close(layer(x), y)
    assert layer.num_batches_tracked.item() == (6 if training else 0)


@every_family
def test_ghost_size_none_is_given_on_purpose(family):
    """None is no ghosts: the noise is gone, and the whole batch is one ghost batch."""
    if family == "BatchNorm":
        return
    layer = getattr(ghostnoise, f"{family}2d")
    if family != "ExclusiveBatchNorm":
        with pytest.raises(TypeError, match="ghost_size"):
            layer(3)
    options = {"alpha": 0.25} if family == "EvalNorm" else {}
    ours = layer(3, ghost_size=None, **options)
    assert "ghost_size=None" in repr(ours)
    same = layer(3, ghost_size=10, **options) if family == "ExclusiveBatchNorm" else plain(2)
    torch.testing.assert_close(ours(example(2)), same(example(2)))


@every_family
def test_a_family_without_rank_takes_every_rank(family):
    free = type(build(family, 2)).__bases__[0](3, **OPTIONS[family])
    for dimensions in SHAPES:
        torch.manual_seed(0)
        y = free(example(dimensions))
        torch.manual_seed(0)
        assert torch.equal(y, build(family, dimensions)(example(dimensions)))
    with pytest.raises(ValueError, match=r"shape \(3,\): must have 2 to 5 dimensions"):
        free(torch.randn(3))
    with pytest.raises(ValueError, match=r"got 4 channels .*: must be num_features=3"):
        free(torch.randn(5, 4))
