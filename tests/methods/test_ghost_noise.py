import copy
import functools
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from ghostnoise import AnalyticalGhostNoise, GhostNoise, GhostNoiseBatchNorm2d, functional
from ghostnoise.tables import COMPONENTS
from support import reference
from support.comparison import assert_equals_naive
from support.families import example
from support.inputs import cases
from support.levels import LEVELS, running

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore:ghost_size=1 on samples")
both = pytest.mark.parametrize("layer", [GhostNoise, AnalyticalGhostNoise])
normalizers = pytest.mark.parametrize("normalizer", ["batch", "exclusive"])
levels = pytest.mark.parametrize("level", LEVELS)


@given(cases(least_values=1, dtypes=ALL_DTYPES), st.sampled_from(COMPONENTS))
def test_ghost_noise_equals_naive_loop(case, components):
    indices = case.indices()

    def function(x, weight, bias):
        return functional.ghost_noise(
            x, case.ghost_size, components=components, channel_dim=case.channel_dim, indices=indices
        )

    def naive(x, weight, bias):
        return reference.ghost_noise(x, indices, components=components)

    assert_equals_naive(function, naive, case, affine=False)


@given(cases(least_values=1))
def test_ghost_noise_of_everyone_is_the_identity(case):
    """Identity 1: each sample draws the whole batch, once each."""
    x = case.tensor()
    everyone = torch.arange(case.batch_size).expand(case.batch_size, -1)
    y = functional.ghost_noise(x, case.batch_size, channel_dim=case.channel_dim, indices=everyone)
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


def test_a_single_sample_gets_no_noise():
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(functional.ghost_noise(x, 16), x, rtol=1e-6, atol=1e-6)


def test_gradient_is_that_of_the_transformation_alone():
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(5, (5, 4))
    (gradient,) = torch.autograd.grad(functional.ghost_noise(x, 4, indices=indices).sum(), x)
    still = x.detach()
    step = torch.zeros_like(still).fill_(1.0)
    apart = functional.ghost_noise(still + step, 4, indices=indices) - functional.ghost_noise(still, 4, indices=indices)
    torch.testing.assert_close(gradient, apart)  # moving all of x together leaves the noise as it is


@pytest.mark.parametrize("function", [functional.ghost_noise, functional.analytical_ghost_noise])
def test_second_derivatives(function):
    """The noise is a constant of x, so gradcheck in x would differ; in the upstream gradient the op is linear."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    y = function(x, 4, generator=torch.Generator().manual_seed(1))
    dy = torch.randn_like(y).requires_grad_()
    (gradient,) = torch.autograd.grad(y, x, dy, create_graph=True)
    (back,) = torch.autograd.grad(gradient, dy, torch.ones_like(gradient), retain_graph=True)
    torch.testing.assert_close(back * dy, gradient)
    assert torch.autograd.grad(gradient.sum(), x, allow_unused=True)[0] is None


def test_law_of_the_drawn_moments():
    """Identity 4: given a batch, E[m] = μ, Var[m] = Var_b(mean_b)/N, E[s²] = σ² - Var_b(mean_b)/N."""
    torch.manual_seed(0)
    repeats, size, batch_size = 500, 6, 16
    x = torch.randn(batch_size, 3, 5, dtype=torch.float64) + torch.randn(batch_size, 3, 1, dtype=torch.float64)
    _, var = reference.statistics(x)
    expected = x.mean(2).var(0, correction=0) / size
    shifts, squares = [], []
    for _ in range(repeats):
        indices = torch.randint(batch_size, (batch_size, size))
        shifts.append((x - functional.ghost_noise(x, size, components="shift", indices=indices))[:, :, 0])
        scaled = functional.ghost_noise(x, size, noise_eps=0, components="scale", indices=indices)
        squares.append(var * (x / scaled)[:, :, 0] ** 2)
    shift, square = torch.cat(shifts), torch.cat(squares)  # (n, C) independent draws
    deviations = 5 / (repeats * batch_size) ** 0.5  # five standard errors, in standard deviations of a draw
    assert (shift.mean(0).abs() <= deviations * shift.std(0)).all()
    assert ((shift.square().mean(0) - expected).abs() <= deviations * shift.square().std(0)).all()
    assert ((square.mean(0) - (var - expected)).abs() <= deviations * square.std(0)).all()


def test_law_in_fully_connected_layers():
    """Identity 5: shift ~ N(0, 1/N), and scale² ~ χ²(N-1)/N; with 80,000 draws KS rejects χ²(N)/N."""
    torch.manual_seed(0)
    size, batch_size = 32, 80_000
    x = torch.randn(batch_size, 1, dtype=torch.float64)
    x = (x - x.mean()) / x.std(correction=0)
    indices = torch.randint(batch_size, (batch_size, size))
    shift = (x - functional.ghost_noise(x, size, components="shift", indices=indices)).flatten()
    square = (x / functional.ghost_noise(x, size, noise_eps=0, components="scale", indices=indices)).flatten() ** 2
    # The probability that a right implementation fails here is 1e-4 a line; the seed is fixed.
    assert stats.kstest(shift, stats.norm(scale=size**-0.5).cdf).pvalue > 1e-4
    assert stats.kstest(square * size, stats.chi2(size - 1).cdf).pvalue > 1e-4
    assert stats.kstest(square * size, stats.chi2(size).cdf).pvalue < 1e-9


def test_share_of_oneself_in_expectation():
    """Identity 7: under GNI each of the N draws is the sample itself with probability 1/B."""
    torch.manual_seed(0)
    batch_size, size, repeats = 8, 4, 2000
    hits = sum(
        (torch.randint(batch_size, (batch_size, size)) == torch.arange(batch_size)[:, None]).double().mean().item()
        for _ in range(repeats)
    )
    n = repeats * batch_size * size
    assert abs(hits / repeats - 1 / batch_size) <= 5 * (1 / batch_size / n) ** 0.5
    # One sample is far from the others: only those who drew it are shifted, by its share in their draws.
    x = torch.zeros(batch_size, 1, dtype=torch.float64)
    x[0] = 1.0
    indices = torch.randint(batch_size, (batch_size, size))
    shift = (x - functional.ghost_noise(x, size, components="shift", indices=indices)).flatten()
    torch.testing.assert_close(shift, (indices == 0).double().mean(1) - 1 / batch_size)


def test_precision_with_an_outlier_that_was_not_drawn():
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 8)
    x[0] += 1e8
    indices = torch.randint(1, 16, (16, 5))
    y = functional.ghost_noise(x, 5, indices=indices)
    expected = reference.unfold(reference.ghost_noise(reference.fold(x), indices), x)
    assert (y[1:] - expected[1:]).abs().max() <= 1e-5 * expected[1:].abs().max()


@pytest.mark.parametrize(
    "function",
    [
        functional.ghost_noise,
        functools.partial(functional.ghost_noise, draw="partition"),
        functional.analytical_ghost_noise,
    ],
)
def test_reproducible_by_seed_and_by_generator(function):
    x = torch.randn(8, 3, 4)
    torch.manual_seed(3)
    first, second = function(x, 4), function(x, 4)
    torch.manual_seed(3)
    assert torch.equal(function(x, 4), first)
    assert not torch.equal(first, second)
    with_generator = [function(x, 4, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*with_generator)
    state = torch.get_rng_state()
    function(x, 4, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), state)


def test_ghost_batches_of_a_single_value_warn_once():
    x = torch.randn(6, 19)
    with pytest.warns(UserWarning, match=r"ghost_size=1 on samples of shape \(19,\).*raise ghost_size"):
        functional.ghost_noise(x, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.ghost_noise(x, 1)
        functional.ghost_noise(torch.randn(6, 19, 2), 1)
        functional.ghost_noise(torch.randn(6, 23), 1, components="shift")
        functional.analytical_ghost_noise(torch.randn(6, 23), 1)
        functional.ghost_noise(torch.randn(1, 23), 1)  # one sample: no noise at all
    with pytest.warns(UserWarning, match="no variance"):
        functional.analytical_ghost_noise(torch.randn(6, 23), 1, dof="exact")


def test_indices_that_do_not_fit():
    x = torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"indices of shape \(6, 3\): must be \(B, N\) = \(6, 4\)"):
        functional.ghost_noise(x, 4, indices=torch.zeros(6, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"indices from 0 to 6: must lie in \[0, B\) = \[0, 6\)"):
        functional.ghost_noise(x, 4, indices=torch.tensor([[0, 1, 2, 6]]).expand(6, 4))
    with pytest.raises(ValueError, match=r"dtype torch.float32: must be int64 or int32"):
        functional.ghost_noise(x, 4, indices=torch.zeros(6, 4))
    int32 = torch.randint(6, (6, 4), dtype=torch.int32)
    expected = functional.ghost_noise(x, 4, indices=int32.long())
    assert torch.equal(functional.ghost_noise(x, 4, indices=int32), expected)


def test_indices_may_be_used_again_before_backward():
    x = torch.randn(6, 3, requires_grad=True)
    indices = torch.randint(6, (6, 4))
    y = functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=4, indices=indices)
    (wanted,) = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)
    indices.zero_()
    (gradient,) = torch.autograd.grad(y.cos().sum(), x)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize(
    ("function", "drawn"), [(functional.ghost_noise, "indices"), (functional.analytical_ghost_noise, "draws")]
)
def test_without_ghost_batches_the_input_is_returned(function, drawn):
    x = torch.randn(6, 3)
    before = torch.get_rng_state()
    assert function(x, None) is x
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=f"{drawn} with ghost_size=None: .*give a ghost_size"):
        function(x, None, **{drawn: torch.zeros(6, 4, dtype=torch.int64)})


def test_options_outside_their_range():
    x = torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"noise_eps=-1: must be a number in \[0, inf\)"):
        functional.ghost_noise(x, 4, noise_eps=-1)
    with pytest.raises(ValueError, match="components='mean': must be one of 'both', 'shift', 'scale'"):
        functional.ghost_noise(x, 4, components="mean")
    with pytest.raises(ValueError, match="got an empty input"):
        functional.ghost_noise(torch.randn(0, 3), 4)


@both
def test_forward_is_the_function(layer):
    x = torch.randn(6, 5, 3)
    options = {"components": "scale", "channel_dim": -1}
    function = functional.ghost_noise if layer is GhostNoise else functional.analytical_ghost_noise
    expected = function(x, 4, 1e-2, **options, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(4, 1e-2, **options, generator=torch.Generator().manual_seed(1))(x), expected)


@both
def test_eval_returns_the_input_itself(layer):
    x = torch.randn(6, 3)
    assert layer(4).eval()(x) is x


@both
def test_no_state(layer):
    assert list(layer(4).state_dict()) == []


@both
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 2), (6, 3, 4, 2, 2)])
def test_any_rank(layer, shape):
    x = torch.randn(shape)
    assert layer(4)(x).shape == shape
    assert layer(4, channel_dim=-1)(x).shape == shape


@both
def test_repr_pickle_and_deepcopy(layer):
    original = layer(4, components="scale", channel_dim=-1)
    assert "ghost_size=4, noise_eps=0.001" in repr(original)
    assert "components='scale', channel_dim=-1" in repr(original)
    x = torch.randn(6, 3)
    for twin in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
        assert repr(twin) == repr(original)
        torch.manual_seed(0)
        y = original(x)
        torch.manual_seed(0)
        assert torch.equal(twin(x), y)


@both
def test_options_are_checked_when_built(layer):
    with pytest.raises(ValueError, match="ghost_size=0"):
        layer(0)
    with pytest.raises(ValueError, match="noise_eps=-1"):
        layer(4, -1)
    with pytest.raises(ValueError, match="channel_dim=0"):
        layer(4, channel_dim=0)


@both
def test_without_ghost_batches_the_input_itself_is_returned(layer):
    x = torch.randn(6, 3)
    assert layer(None)(x) is x


# A partition of the shuffled batch instead of independent draws.


@levels
@given(cases(least_values=1, dtypes=ALL_DTYPES), st.sampled_from(COMPONENTS))
def test_noise_of_a_partition_equals_naive_loop(level, case, components):
    order = case.permutation()

    def function(x, weight, bias):
        return functional.ghost_noise(
            x, case.ghost_size, components=components, draw="partition", channel_dim=case.channel_dim, indices=order
        )

    def naive(x, weight, bias):
        return reference.ghost_noise(x, reference.partition(order, case.ghost_size), components=components)

    with running(level):
        assert_equals_naive(function, naive, case, affine=False)


@levels
@normalizers
@given(cases(least_batch=3), st.booleans(), st.sampled_from(COMPONENTS))
def test_batch_norm_with_noise_of_a_partition_equals_naive_loop(level, normalizer, case, affine, components):
    order, options = case.permutation(), {"components": components, "normalizer": normalizer}
    drawn = reference.partition(order, case.ghost_size)
    with running(level):
        assert_equals_naive(
            noisy(case, indices=order, draw="partition", **options),
            lambda x, w, b: reference.ghost_noise_batch_norm(x, drawn, w, b, **options),
            case,
            affine,
        )


def ghost_batches(batch_size, ghost_size, **options):
    """Return how often each sample (column) is in the ghost batch of each position (row), in shares of the ghost batch.

    With the unit vectors as samples, the mean of a ghost batch is the share that each sample has in it.
    """
    x = torch.eye(batch_size, dtype=torch.float64)
    return x - functional.ghost_noise(x, ghost_size, components="shift", **options) + 1 / batch_size


@pytest.mark.parametrize(("batch_size", "ghost_size", "sizes"), [(8, 4, [4, 4]), (11, 3, [3, 3, 5]), (5, 1, [1] * 5)])
def test_a_partition_draws_every_sample_once(batch_size, ghost_size, sizes):
    torch.manual_seed(0)
    shares = [ghost_batches(batch_size, ghost_size, draw="partition") for _ in range(20)]
    for share in shares:
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
        rows = share[starts] * torch.tensor(sizes)[:, None]  # a row for each ghost batch
        torch.testing.assert_close(rows.sum(0), torch.ones(batch_size, dtype=torch.float64))
        torch.testing.assert_close(rows, rows.round(), rtol=0, atol=1e-12)
        torch.testing.assert_close(rows.sum(1), torch.tensor(sizes, dtype=torch.float64))
        torch.testing.assert_close(share, share[starts].repeat_interleave(torch.tensor(sizes), 0))
    assert len({tuple(share.flatten().tolist()) for share in shares}) > 1  # a new permutation for every batch


def test_a_partition_is_uniform():
    """Each sample is in the ghost batch of a position with probability N/B."""
    torch.manual_seed(0)
    repeats, batch_size, ghost_size = 2000, 6, 2
    shares = sum(ghost_batches(batch_size, ghost_size, draw="partition") for _ in range(repeats)) / repeats
    p = ghost_size / batch_size
    assert (shares * ghost_size - p).abs().max() <= 5 * (p * (1 - p) / repeats) ** 0.5


@pytest.mark.parametrize("ghost_size", [6, 7, 200])
def test_a_partition_into_one_ghost_batch_adds_no_noise(ghost_size):
    x = torch.randn(6, 3, 4, dtype=torch.float64) + 1
    torch.testing.assert_close(functional.ghost_noise(x, ghost_size, draw="partition"), x, rtol=1e-12, atol=1e-12)


@normalizers
def test_gradcheck_of_a_partition_into_one_ghost_batch(normalizer):
    """The noise is then constant in x, so that gradcheck applies."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(x):
        options = {"ghost_size": 9, "draw": "partition", "normalizer": normalizer}
        return functional.ghost_noise_batch_norm(x, None, None, training=True, **options)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


def test_a_partition_without_shuffling_is_ghost_batch_norm():
    """With the identity as permutation, batch norm with noise is ghost batch norm, as eps goes to 0 (identity 1)."""
    x = torch.randn(11, 3, 4, dtype=torch.float64)
    options = {"training": True, "eps": 0.0, "ghost_size": 4}
    y = functional.ghost_noise_batch_norm(
        x, None, None, noise_eps=0.0, draw="partition", indices=torch.arange(11), **options
    )
    torch.testing.assert_close(y, functional.ghost_batch_norm(x, None, None, **options), rtol=1e-10, atol=1e-10)


def test_precision_of_a_partition_next_to_an_outlier():
    """An outlier in another ghost batch, and S = 1 in float32."""
    for shape in ((16, 4, 8, 8), (16, 4)):
        torch.manual_seed(0)
        x = torch.randn(shape)
        x[0] += 1e8
        order = torch.randperm(16)
        y = functional.ghost_noise(x, 4, draw="partition", indices=order)
        expected = reference.unfold(reference.ghost_noise(reference.fold(x), reference.partition(order, 4)), x)
        group = order.tolist().index(0) // 4
        others = [k for k in range(1, 16) if k // 4 != group]
        assert (y[others] - expected[others]).abs().max() <= 1e-5 * expected[others].abs().max()


def test_compiled_noise_of_a_partition():
    """The permutation is drawn inside the graph."""
    layers = nn.Sequential(GhostNoise(4, draw="partition"), GhostNoiseBatchNorm2d(3, ghost_size=4, draw="partition"))
    x = torch.randn(11, 3, 4, 4, requires_grad=True)
    y = torch.compile(layers, fullgraph=True, level="aot_eager")(x)
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()
    assert not torch.allclose(y, torch.compile(layers, fullgraph=True, level="aot_eager")(x))


def test_permutations_that_do_not_fit():
    x = torch.randn(6, 3)

    def run(indices):
        return functional.ghost_noise(x, 4, draw="partition", indices=indices)

    with pytest.raises(ValueError, match=r"indices of shape \(6, 4\): must be \(B,\) = \(6,\).*use torch.randperm"):
        run(torch.zeros(6, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="indices without sample 5: must contain each of the 6 samples once"):
        run(torch.tensor([0, 1, 2, 3, 4, 4]))
    with pytest.raises(ValueError, match=r"dtype torch.float32: must be int64 or int32"):
        run(torch.zeros(6))
    with pytest.raises(ValueError, match=r"indices of type list: must be a torch.Tensor \(B,\)"):
        run([0, 1, 2, 3, 4, 5])
    order = torch.randperm(6)
    assert torch.equal(run(order.int()), run(order))


@pytest.mark.parametrize("group", ["world", "other"])
def test_a_partition_is_of_one_process(group):
    with pytest.raises(
        ValueError, match=f"draw='partition' with process_group='{group}': must be None.*use draw='repl"
    ):
        GhostNoise(4, draw="partition", process_group=group)
    with pytest.raises(ValueError, match="draw='partition' with process_group="):
        GhostNoiseBatchNorm2d(3, ghost_size=4, draw="partition", process_group=group)
    with pytest.raises(ValueError, match="draw='partition' with process_group="):
        functional.ghost_noise(torch.randn(6, 3), 4, draw="partition", process_group=group)


def test_draws_outside_their_values():
    for build in (GhostNoise, lambda size, **options: GhostNoiseBatchNorm2d(3, ghost_size=size, **options)):
        with pytest.raises(ValueError, match="draw='shuffle': must be one of 'replacement', 'partition'"):
            build(4, draw="shuffle")
    with pytest.raises(ValueError, match="draw=None: must be one of"):
        functional.ghost_noise(torch.randn(6, 3), 4, draw=None)


# Inside batch norm.


def noisy(case, **options):
    return lambda x, weight, bias: functional.ghost_noise_batch_norm(
        x, None, None, weight, bias, True, ghost_size=case.ghost_size, channel_dim=case.channel_dim, **options
    )


@levels
@normalizers
@given(cases(least_batch=3), st.booleans(), st.sampled_from(COMPONENTS))
def test_ghost_noise_batch_norm_equals_naive_loop(level, normalizer, case, affine, components):
    indices, options = case.indices(), {"components": components, "normalizer": normalizer}
    with running(level):
        assert_equals_naive(
            noisy(case, indices=indices, **options),
            lambda x, w, b: reference.ghost_noise_batch_norm(x, indices, w, b, **options),
            case,
            affine,
        )


@given(cases())
def test_ghost_noise_in_batches_of_any_size(case):
    indices = case.indices()
    assert_equals_naive(
        noisy(case, indices=indices), lambda x, w, b: reference.ghost_noise_batch_norm(x, indices, w, b), case
    )


@normalizers
@given(cases(least_batch=8, least_values=16, least_ghost=8, dtypes=ALL_DTYPES))
def test_every_dtype_keeps_its_precision(normalizer, case):
    indices = case.indices()
    assert_equals_naive(
        noisy(case, indices=indices, normalizer=normalizer),
        lambda x, w, b: reference.ghost_noise_batch_norm(x, indices, w, b, normalizer=normalizer),
        case,
    )


@normalizers
def test_one_op_equals_normalization_then_noise_then_affine(normalizer):
    torch.manual_seed(0)
    x, dy = (torch.randn(12, 3, 4, 4, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    indices = torch.randint(12, (12, 5))
    leaf = x.requires_grad_()
    fused = functional.ghost_noise_batch_norm(
        leaf, None, None, weight, bias, True, ghost_size=5, indices=indices, normalizer=normalizer
    )
    norm = functional.exclusive_batch_norm if normalizer == "exclusive" else nn.functional.batch_norm
    hat = norm(leaf, None, None, training=True)
    noisy = functional.ghost_noise(hat, 5, indices=indices)
    chained = noisy * weight[:, None, None] + bias[:, None, None]
    torch.testing.assert_close(fused, chained, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(fused, (leaf, weight, bias), dy),
        torch.autograd.grad(chained, (leaf, weight, bias), dy),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_noise_is_constant_in_the_normalized_input_not_in_the_raw_one():
    """Detaching the drawn moments of raw x instead gives the same output and another gradient."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(6, (6, 4))
    y = functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=4, indices=indices)
    raw = functional.batch_norm(functional.ghost_noise(x, 4, indices=indices), None, None, training=True)
    (ours,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    hat = nn.functional.batch_norm(x, None, None, training=True)
    (wanted,) = torch.autograd.grad(functional.ghost_noise(hat, 4, indices=indices).square().sum(), x)
    (other,) = torch.autograd.grad(raw.square().sum(), x)
    torch.testing.assert_close(ours, wanted)
    assert not torch.allclose(ours, other)


@normalizers
def test_second_derivatives_of_the_composite_form(normalizer):
    """Against the naive loop, whose noise is constant in the same sense; gradgradcheck would move the noise."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(6, (6, 4))
    dy, ddx = torch.randn(6, 2, 3, dtype=torch.float64), torch.randn(6, 2, 3, dtype=torch.float64)

    def second(y):
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        return torch.autograd.grad(first, x, ddx)[0]

    ours = functional.ghost_noise_batch_norm(
        x, None, None, training=True, ghost_size=4, indices=indices, normalizer=normalizer
    )
    naive = reference.ghost_noise_batch_norm(x, indices, normalizer=normalizer)
    torch.testing.assert_close(second(ours), second(naive), rtol=1e-10, atol=1e-10)


@normalizers
def test_forward_mode_takes_the_noise_as_constant(normalizer):
    """The tangent of the output against the naive loop's, by its Jacobian's transpose."""
    torch.manual_seed(0)
    x, tangent, dy = (torch.randn(6, 2, 3, dtype=torch.float64) for _ in range(3))
    indices = torch.randint(6, (6, 4))

    def ours(x):
        return functional.ghost_noise_batch_norm(
            x, None, None, training=True, ghost_size=4, indices=indices, normalizer=normalizer
        )

    _, out = torch.func.jvp(ours, (x,), (tangent,))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reference.ghost_noise_batch_norm(leaf, indices, normalizer=normalizer), leaf, dy)
    torch.testing.assert_close((out * dy).sum(), (gradient * tangent).sum())


def test_exclusive_normalization_of_the_whole_batch():
    """Without noise, and in its running statistics, it is exclusive batch norm; in eval mode batch norm."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(6, 3, 4), torch.randn(3), torch.randn(3)
    noisy, plain = (
        (functional.ghost_noise_batch_norm, {"normalizer": "exclusive"}),
        (functional.exclusive_batch_norm, {}),
    )
    for noisy_size in (None, 4):
        runs = []
        for (norm, options), size in ((noisy, noisy_size), (plain, None)):
            mean, var = torch.zeros(3), torch.ones(3)
            y = norm(x, mean, var, weight, bias, True, ghost_size=size, **options)
            runs.append((mean, var, norm(x, mean, var, weight, bias, ghost_size=size, **options), y))
        for ours, theirs in zip(*runs, strict=True):
            assert torch.equal(ours, theirs) or (noisy_size and ours is runs[0][3])
    assert torch.equal(runs[0][2], nn.functional.batch_norm(x, *runs[0][:2], weight, bias))


def test_exclusive_normalization_needs_two_other_values():
    options = {"training": True, "ghost_size": 4, "normalizer": "exclusive"}
    with pytest.raises(
        ValueError, match=r"batch of 1 sample.*normalizer='exclusive' needs 2 samples.*normalizer='batc"
    ):
        functional.ghost_noise_batch_norm(torch.randn(1, 3, 4), None, None, **options)
    with pytest.raises(ValueError, match=r"^batch of 2 samples.*single value; use a batch of 3 samples or more"):
        functional.ghost_noise_batch_norm(torch.randn(2, 3), None, None, **options)
    assert functional.ghost_noise_batch_norm(torch.randn(2, 3, 2), None, None, **options).isfinite().all()


def test_precision_of_exclusive_normalization_next_to_an_outlier():
    """The outlier's normalized value is far from the others, which the noise of other samples must not feel."""
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 8)
    x[0] *= 1e4
    indices = torch.randint(1, 16, (16, 5))
    y = functional.ghost_noise_batch_norm(
        x, None, None, training=True, ghost_size=5, indices=indices, normalizer="exclusive"
    )
    expected = reference.unfold(reference.ghost_noise_batch_norm(reference.fold(x), indices, normalizer="exclusive"), x)
    for rows in (slice(0, 1), slice(1, None)):
        assert (y[rows] - expected[rows]).abs().max() <= 1e-5 * expected[rows].abs().max()


def test_normalizer_outside_its_values():
    with pytest.raises(ValueError, match="normalizer='xbn': must be one of 'batch', 'exclusive'"):
        GhostNoiseBatchNorm2d(3, ghost_size=4, normalizer="xbn")
    with pytest.raises(ValueError, match="normalizer=None: must be one of"):
        functional.ghost_noise_batch_norm(torch.randn(6, 3), None, None, ghost_size=4, normalizer=None)


@pytest.mark.parametrize(
    ("function", "drawn"),
    [(functional.ghost_noise_batch_norm, "indices"), (functional.analytical_ghost_noise_batch_norm, "draws")],
)
def test_without_ghost_batches_it_is_batch_norm(function, drawn):
    x, weight, bias = torch.randn(6, 3, 4), torch.randn(3), torch.randn(3)
    runs = []
    before = torch.get_rng_state()
    for norm, options in ((function, {"ghost_size": None}), (functional.batch_norm, {})):
        mean, var = torch.zeros(3), torch.ones(3)
        runs.append((norm(x, mean, var, weight, bias, True, **options), mean, var))
    assert torch.equal(torch.get_rng_state(), before)
    for ours, plain in zip(*runs, strict=True):
        assert torch.equal(ours, plain)
    with pytest.raises(ValueError, match=f"{drawn} with ghost_size=None: .*give a ghost_size"):
        function(x, None, None, training=True, ghost_size=None, **{drawn: torch.zeros(6, 4, dtype=torch.int64)})


def test_batch_norm_forward_is_the_function():
    layer = GhostNoiseBatchNorm2d(
        3, ghost_size=7, noise_eps=1e-2, components="shift", generator=torch.Generator().manual_seed(1)
    )
    mean, var = torch.zeros(3), torch.ones(3)
    y = functional.ghost_noise_batch_norm(
        example(2), mean, var, layer.weight, layer.bias, True, ghost_size=7, noise_eps=1e-2, components="shift",
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert torch.equal(layer(example(2)), y)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, var)


@pytest.mark.parametrize("ghost_size", [1, 3, 100])
def test_any_ghost_size_will_do(ghost_size):
    layer = GhostNoiseBatchNorm2d(3, ghost_size=ghost_size)
    assert layer(example(2)).isfinite().all()


def test_less_noise_with_larger_ghost_batches():
    """The shift noise's variance goes down as 1/N (identity 4), measured as the output's distance from plain BN."""
    torch.manual_seed(0)
    x = torch.randn(256, 8, 1, 1)
    clean = torch.nn.functional.batch_norm(x, None, None, training=True)
    variances = {
        size: (GhostNoiseBatchNorm2d(8, ghost_size=size, components="shift")(x) - clean).square().mean().item()
        for size in (4, 16, 64)
    }
    n = 256 * 8
    for size, variance in variances.items():
        assert abs(variance * size - 1) <= 5 * (2 / n) ** 0.5 * 1.5
