import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ghostnoise import GhostBatchNorm1d, GhostBatchNorm2d, functional
from support import reference
from support.closeness import assert_close
from support.comparison import assert_equals_naive
from support.families import example
from support.inputs import cases

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def train(case, **options):
    """Return the function of (x, weight, bias) in training mode, without running buffers."""
    return lambda x, weight, bias: functional.ghost_batch_norm(
        x, None, None, weight, bias, True, channel_dim=case.channel_dim, **options
    )


@given(cases(), st.booleans())
def test_equals_naive_loop(case, affine):
    function = train(case, ghost_size=case.ghost_size)
    assert_equals_naive(function, lambda x, w, b: reference.ghost_batch_norm(x, case.ghost_size, w, b), case, affine)


@settings(max_examples=40)
@given(cases(least_batch=8, least_values=16, least_ghost=8, dtypes=ALL_DTYPES))
def test_every_dtype_keeps_its_precision(case):
    function = train(case, ghost_size=case.ghost_size)
    assert_equals_naive(function, lambda x, w, b: reference.ghost_batch_norm(x, case.ghost_size, w, b), case)


def test_a_whole_batch_as_ghost_batch_is_batch_norm():
    """Identity 1: GBN-B = BN in output and gradients, and with running_var_from="batch" in the buffers too."""
    torch.manual_seed(0)
    x, dy = (torch.randn(6, 3, 4, 4, dtype=torch.float64) for _ in range(2))

    def run(function, **options):
        leaf, buffers = x.clone().requires_grad_(), (torch.zeros(3), torch.ones(3))
        y = function(leaf, *buffers, training=True, **options)
        return y, torch.autograd.grad(y, leaf, dy)[0], *buffers

    whole = run(functional.ghost_batch_norm, ghost_size=6, running_var_from="batch")
    for ours, theirs in zip(whole, run(functional.batch_norm), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    default = run(functional.ghost_batch_norm, ghost_size=6)
    count = 6 * 16
    torch.testing.assert_close(default[3] - 0.9, (whole[3] - 0.9) * (count - 1) / count)


def test_ghost_batch_norm_ignores_batch_norm_before_it():
    """Identity 1: GBN(BN(x)) = GBN(x) as eps goes to 0."""
    x = torch.randn(10, 3, 4, dtype=torch.float64)
    hat = functional.batch_norm(x, None, None, training=True, eps=0)
    once = functional.ghost_batch_norm(x, None, None, training=True, eps=0, ghost_size=4)
    twice = functional.ghost_batch_norm(hat, None, None, training=True, eps=0, ghost_size=4)
    assert_close(twice, once)


@given(cases())
def test_ghost_batch_norm_output_is_bounded(case):
    """Identity 3: |y| ≤ sqrt(n·S - 1) before the affine, n being the samples really in the ghost batch."""
    x = case.tensor()
    x.view(-1)[0:1].mul_(1e6) if x.is_contiguous() else None
    y = functional.ghost_batch_norm(
        x, None, None, training=True, ghost_size=case.ghost_size, channel_dim=case.channel_dim
    )
    for k in range(case.batch_size):
        members = reference.ghost_batch_of(k, case.batch_size, case.ghost_size)
        assert y[k].abs().max() <= (len(members) * case.spatial - 1) ** 0.5 * (1 + 1e-12)


def test_ghost_batches_of_a_single_value():
    with pytest.raises(ValueError, match=r"ghost_size=1 .*raise ghost_size"):
        functional.ghost_batch_norm(torch.randn(4, 3), None, None, training=True, ghost_size=1)
    functional.ghost_batch_norm(torch.randn(4, 3, 2), None, None, training=True, ghost_size=1)


@pytest.mark.parametrize("running_var_from", ["ghost", "batch"])
def test_without_ghosts_the_whole_batch_is_one_ghost_batch(running_var_from):
    x = torch.randn(6, 3, 4)
    runs = []
    for size in (None, 6):
        mean, var = torch.zeros(3), torch.ones(3)
        options = {"ghost_size": size, "running_var_from": running_var_from}
        runs.append((functional.ghost_batch_norm(x, mean, var, training=True, **options), mean, var))
    for nothing, whole in zip(*runs, strict=True):
        assert torch.equal(nothing, whole)


def test_non_finite_samples_stay_in_their_ghost_batch():
    x = torch.randn(8, 3, 4)
    x[5, 1, 2] = float("inf")
    y = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=4)
    assert y[:4].isfinite().all()
    assert y[4:, 1].isnan().all()
    assert y[4:, [0, 2]].isfinite().all()
    assert functional.batch_norm(x, None, None, training=True)[:, 1].isnan().all()


def test_forward_is_the_function():
    layer = GhostBatchNorm2d(3, ghost_size=3, running_var_from="batch", eps=1e-3, momentum=0.3)
    mean, var = torch.zeros(3), torch.ones(3)
    y = functional.ghost_batch_norm(
        example(2), mean, var, layer.weight, layer.bias, True, 0.3, 1e-3, ghost_size=3, running_var_from="batch"
    )
    assert torch.equal(layer(example(2)), y)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, var)


def test_a_ragged_batch_loses_no_sample():
    """17 samples in ghost batches of 8: 8 and 9."""
    x = torch.randn(17, 3, 4)
    y = GhostBatchNorm1d(3, ghost_size=8)(x)
    for rows in (slice(0, 8), slice(8, 17)):
        torch.testing.assert_close(y[rows].mean((0, 2)), torch.zeros(3), rtol=0, atol=1e-6)
        torch.testing.assert_close(y[rows].var((0, 2), correction=0), torch.ones(3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("ghost_size", [0, -1, 1.5, "4"])
def test_ghost_sizes_are_checked_when_built(ghost_size):
    with pytest.raises(ValueError, match="ghost_size="):
        GhostBatchNorm2d(3, ghost_size=ghost_size)
    with pytest.raises(TypeError, match="ghost_size"):
        GhostBatchNorm2d(3)


def test_options_are_checked_when_built():
    with pytest.raises(ValueError, match="running_var_from='x'"):
        GhostBatchNorm2d(3, ghost_size=2, running_var_from="x")


def test_options_outside_their_range():
    x = torch.randn(4, 3, 2)
    with pytest.raises(
        ValueError, match=r"running_var_from='both': must be one of 'ghost', 'batch', 'each', 'each-scaled'"
    ):
        functional.ghost_batch_norm(x, None, None, ghost_size=2, running_var_from="both")


@given(cases())
def test_decompose_eq_6_holds(case):
    """Identity 2: μ_g = μ + σ·μ̂_g and σ_g = σ·σ̂_g, with the hatted statistics taken from the normalized batch."""
    x = reference.fold(case.tensor(), case.channel_dim)
    parts = functional.decompose(case.tensor(), case.ghost_size, channel_dim=case.channel_dim)
    hat = reference.batch_norm(x, eps=0)
    mean, var = reference.statistics(x)
    torch.testing.assert_close(parts.mean, mean)
    torch.testing.assert_close(parts.std, var.sqrt())
    start = 0
    for g, size in enumerate(parts.sizes):
        members = reference.ghost_batch_of(start, case.batch_size, case.ghost_size)
        assert members == list(range(start, start + size))
        ghost_mean, ghost_var = reference.statistics(x[members])
        hat_mean, hat_var = reference.statistics(hat[members])
        torch.testing.assert_close(parts.ghost_mean[g], hat_mean)
        torch.testing.assert_close(parts.ghost_std[g], hat_var.sqrt())
        torch.testing.assert_close(parts.mean + parts.std * parts.ghost_mean[g], ghost_mean)
        torch.testing.assert_close(parts.std * parts.ghost_std[g], ghost_var.sqrt())
        torch.testing.assert_close(parts.shift[g], ghost_mean - mean)
        torch.testing.assert_close(parts.scale[g], (ghost_var / var).sqrt())
        start += size
    assert start == case.batch_size
    assert len(parts.shift) == len(parts.sizes)


def test_decompose_a_constant_channel_has_no_noise():
    x = torch.randn(8, 2, 3)
    x[:, 1] = 5.0
    parts = functional.decompose(x, 4)
    assert parts.ghost_mean[:, 1].tolist() == [0, 0]
    assert parts.ghost_std[:, 1].tolist() == [1, 1]
    assert parts.std[1] == 0


def test_decompose_dtypes_and_gradients():
    x = torch.randn(8, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    parts = functional.decompose(x, 4)
    assert parts.mean.dtype == torch.float32
    assert not parts.shift.requires_grad
    assert functional.decompose(torch.randn(8, 2), 4).mean.dtype == torch.float32


def test_decompose_bad_input():
    with pytest.raises(ValueError, match="ghost_size=0: must be an integer from 1 to 65536"):
        functional.decompose(torch.randn(8, 2), 0)
    with pytest.raises(ValueError, match="got an empty input"):
        functional.decompose(torch.randn(0, 2), 4)


@pytest.mark.parametrize(("ghost_size", "shape"), [(4, (12, 3, 5)), (4, (14, 3)), (None, (6, 3, 2))])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("scaled", [False, True])
def test_running_statistics_of_each_ghost_batch_are_those_of_batch_norm_called_for_each(
    ghost_size, shape, momentum, scaled
):
    torch.manual_seed(0)
    source = "each-scaled" if scaled else "each"
    layer = GhostBatchNorm1d(3, ghost_size=ghost_size, running_var_from=source, momentum=momentum, dtype=torch.float64)
    plain = torch.nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    for _ in range(2):
        x = torch.randn(shape, dtype=torch.float64) * 3 + 1
        starts = range(0, shape[0] - (ghost_size or shape[0]) + 1, ghost_size or shape[0])
        parts = [x[start:end] for start, end in zip(starts, [*starts[1:], shape[0]], strict=True)]
        plain.momentum = momentum / len(parts) if scaled and momentum else momentum
        expected = torch.cat([plain(part) for part in parts])
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


def test_without_running_statistics_there_is_none_to_update_for_each_ghost_batch():
    x = example(2)
    layer = GhostBatchNorm2d(3, ghost_size=3, running_var_from="each", track_running_stats=False)
    assert torch.equal(layer(x), GhostBatchNorm2d(3, ghost_size=3)(x))
    assert not dict(layer.named_buffers())
