import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import reference
from closeness import assert_close
from comparison import assert_equals_naive
from ghostnoise import functional
from inputs import cases

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def train(function, case, **options):
    """The function of (x, weight, bias) in training mode, without running buffers."""
    return lambda x, weight, bias: function(x, None, None, weight, bias, True, channel_dim=case.channel_dim, **options)


@given(cases(), st.booleans())
def test_batch_norm_equals_naive_loop(case, affine):
    assert_equals_naive(train(functional.batch_norm, case), reference.batch_norm, case, affine)


@given(cases(), st.booleans())
def test_ghost_batch_norm_equals_naive_loop(case, affine):
    function = train(functional.ghost_batch_norm, case, ghost_size=case.ghost_size)
    assert_equals_naive(function, lambda x, w, b: reference.ghost_batch_norm(x, case.ghost_size, w, b), case, affine)


@given(cases(least_batch=3, least_values=3, least_ghost=3), st.booleans(), st.booleans())
def test_exclusive_batch_norm_equals_naive_loop(case, affine, whole_batch):
    size = None if whole_batch else case.ghost_size
    function = train(functional.exclusive_batch_norm, case, ghost_size=size)
    assert_equals_naive(function, lambda x, w, b: reference.exclusive_batch_norm(x, size, w, b), case, affine)


@given(cases(least_batch=3, least_values=16, least_ghost=3, dtypes=ALL_DTYPES), st.floats(0.1, 2), st.floats(0.2, 2))
def test_exclusive_batch_norm_floors_and_clamps(case, min_std, clamp):
    function = train(
        functional.exclusive_batch_norm, case, ghost_size=case.ghost_size, min_std=min_std, clamp_output=clamp
    )

    def naive(x, weight, bias):
        return reference.exclusive_batch_norm(x, case.ghost_size, weight, bias, min_std=min_std, clamp=clamp)

    assert_equals_naive(function, naive, case)


@given(cases(least_values=1, dtypes=(torch.float64, torch.float32)), st.one_of(st.none(), st.floats(0, 1)))
def test_eval_norm_at_inference_equals_naive_loop(case, alpha):
    running_mean, running_var = case.vector(3).double(), case.vector(4).double().square() + 0.1
    share = 1 / case.ghost_size if alpha is None else alpha

    def function(x, weight, bias):
        return functional.eval_norm(
            x, running_mean, running_var, weight, bias, ghost_size=case.ghost_size, alpha=alpha,
            channel_dim=case.channel_dim,
        )  # fmt: skip

    def naive(x, weight, bias):
        return reference.eval_norm(x, running_mean, running_var, share, weight, bias)

    assert_equals_naive(function, naive, case)


@given(cases())
def test_eval_norm_trains_as_ghost_batch_norm(case):
    def run(function):
        buffers = torch.zeros(case.channels, dtype=case.dtype), torch.ones(case.channels, dtype=case.dtype)
        y = function(case.tensor(), *buffers, training=True, ghost_size=case.ghost_size, channel_dim=case.channel_dim)
        return y, *buffers

    for ours, theirs in zip(run(functional.eval_norm), run(functional.ghost_batch_norm), strict=True):
        assert torch.equal(ours, theirs)


@given(cases(least_batch=8, least_values=16, least_ghost=8, dtypes=ALL_DTYPES))
def test_every_dtype_keeps_its_precision(case):
    size = case.ghost_size
    assert_equals_naive(train(functional.batch_norm, case), reference.batch_norm, case)
    assert_equals_naive(
        train(functional.ghost_batch_norm, case, ghost_size=size),
        lambda x, w, b: reference.ghost_batch_norm(x, size, w, b),
        case,
    )
    assert_equals_naive(
        train(functional.exclusive_batch_norm, case, ghost_size=size),
        lambda x, w, b: reference.exclusive_batch_norm(x, size, w, b),
        case,
    )


@given(cases())
def test_evaluation_is_torchs_own(case):
    x, weight, bias = case.tensor(), case.vector(1), case.vector(2)
    buffers = case.vector(3), case.vector(4).square()
    expected = F.batch_norm(x.movedim(case.channel_dim, 1), *buffers, weight, bias).movedim(1, case.channel_dim)
    for function, options in (
        (functional.batch_norm, {}),
        (functional.ghost_batch_norm, {"ghost_size": 4}),
        (functional.exclusive_batch_norm, {"ghost_size": 4, "clamp_output": 1.0}),
        (functional.ghost_noise_batch_norm, {"ghost_size": 4}),
        (functional.analytical_ghost_noise_batch_norm, {"ghost_size": 4}),
    ):
        y = function(x, *buffers, weight, bias, channel_dim=case.channel_dim, **options)
        assert torch.equal(y, expected)


def test_evaluation_without_buffers_uses_the_batch():
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    expected = F.batch_norm(x, None, None, training=True)
    assert torch.equal(functional.ghost_batch_norm(x, None, None, ghost_size=2), expected)
    assert torch.equal(functional.eval_norm(x, None, None, ghost_size=2), expected)


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


def test_exclusive_batch_norm_output_is_not():
    """Identity 3: the paper's example, all others equal; only eps bounds it."""
    x = torch.zeros(8, 1, dtype=torch.float64)
    x[3] = 1.0
    y = functional.exclusive_batch_norm(x, None, None, training=True, eps=1e-10)
    assert y[3].item() == pytest.approx(1e5)
    bound = functional.exclusive_batch_norm(x, None, None, training=True, eps=1e-10, min_std=0.1)
    assert bound[3].item() == pytest.approx(10)
    clamped = functional.exclusive_batch_norm(x, None, None, training=True, eps=1e-10, clamp_output=5.0)
    assert clamped[3].item() == 5.0


def self_share(function, **options):
    """How much sample 0 counts in its own mean: the derivative of its center, which is 1 - dy/dx · σ for large B."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, dtype=torch.float64, generator=generator)

    def center(value: float) -> float:
        """Where sample 0 sits relative to its center, in units that do not depend on it (eps dominates)."""
        moved = x.clone()
        moved[0] = value
        y = function(moved, None, None, training=True, eps=1e16, **options)
        return float(value - y[0].item() * 1e8)

    return (center(x[0].item() + 1) - center(x[0].item())) / 1


def test_a_samples_share_in_its_own_statistics():
    """Identity 7: BN 1/B, GBN 1/n, XBN 0."""
    assert self_share(functional.batch_norm) == pytest.approx(1 / 12, abs=1e-6)
    assert self_share(functional.ghost_batch_norm, ghost_size=4) == pytest.approx(1 / 4, abs=1e-6)
    assert self_share(functional.exclusive_batch_norm, ghost_size=4) == pytest.approx(0, abs=1e-6)


def test_a_floored_constant_channel_has_a_gradient():
    x = torch.ones(6, 2, 3, dtype=torch.float64, requires_grad=True)
    y = functional.exclusive_batch_norm(x, None, None, training=True, eps=0.0, min_std=0.5)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (functional.batch_norm, {}),
        (functional.ghost_batch_norm, {"ghost_size": 3}),
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


def test_gradients_of_eval_norm_at_inference():
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    buffers = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)

    def run(x, weight, bias):
        return functional.eval_norm(x, *buffers, weight, bias, ghost_size=3)

    assert torch.autograd.gradcheck(run, (x, weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


def test_a_single_value_per_channel_is_torchs_error():
    x = torch.randn(1, 3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as theirs:
        F.batch_norm(x, None, None, training=True)
    for function, options in (
        (functional.batch_norm, {}),
        (functional.ghost_batch_norm, {"ghost_size": 4}),
        (functional.exclusive_batch_norm, {}),
        (functional.ghost_noise_batch_norm, {"ghost_size": 4}),
        (functional.analytical_ghost_noise_batch_norm, {"ghost_size": 4}),
    ):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as ours:
            function(x, None, None, training=True, **options)
        assert str(ours.value) == str(theirs.value)


def test_ghost_batches_of_a_single_value():
    with pytest.raises(ValueError, match=r"ghost_size=1 .*raise ghost_size"):
        functional.ghost_batch_norm(torch.randn(4, 3), None, None, training=True, ghost_size=1)
    functional.ghost_batch_norm(torch.randn(4, 3, 2), None, None, training=True, ghost_size=1)


def test_exclusive_statistics_of_fewer_than_two_values():
    with pytest.raises(ValueError, match=r"batch of 1 sample.*raise the batch size"):
        functional.exclusive_batch_norm(torch.randn(1, 3, 4), None, None, training=True)
    with pytest.raises(ValueError, match=r"single value; raise ghost_size"):
        functional.exclusive_batch_norm(torch.randn(8, 3), None, None, training=True, ghost_size=2)
    functional.exclusive_batch_norm(torch.randn(8, 3, 2), None, None, training=True, ghost_size=2)
    functional.exclusive_batch_norm(torch.randn(8, 3), None, None, training=True, ghost_size=3)
    functional.exclusive_batch_norm(torch.randn(3, 3), None, None, training=True, ghost_size=2)  # one ghost batch of 3


def test_options_outside_their_range():
    x = torch.randn(4, 3, 2)
    with pytest.raises(ValueError, match=r"running_var_from='both': must be one of 'ghost', 'batch'"):
        functional.ghost_batch_norm(x, None, None, ghost_size=2, running_var_from="both")
    with pytest.raises(ValueError, match=r"ghost_size=1: must be an integer from 2 to 65536"):
        functional.exclusive_batch_norm(x, None, None, ghost_size=1)
    with pytest.raises(ValueError, match=r"min_std=-1: must be a number in \[0, inf\)"):
        functional.exclusive_batch_norm(x, None, None, min_std=-1)
    with pytest.raises(ValueError, match=r"clamp_output=nan"):
        functional.exclusive_batch_norm(x, None, None, clamp_output=float("nan"))
    with pytest.raises(ValueError, match=r"alpha=1.5: must be a number in \[0, 1\]"):
        functional.eval_norm(x, None, None, ghost_size=2, alpha=1.5)


def test_non_finite_samples_stay_in_their_ghost_batch():
    x = torch.randn(8, 3, 4)
    x[5, 1, 2] = float("inf")
    y = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=4)
    assert y[:4].isfinite().all()
    assert y[4:, 1].isnan().all()
    assert y[4:, [0, 2]].isfinite().all()
    assert functional.batch_norm(x, None, None, training=True)[:, 1].isnan().all()


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


def test_eval_norm_without_ghosts_needs_its_share():
    x, mean, var = torch.randn(6, 3, 4), torch.zeros(3), torch.ones(3)
    trained = functional.eval_norm(x, None, None, training=True, ghost_size=None, alpha=0.5)
    assert torch.equal(trained, functional.eval_norm(x, None, None, training=True, ghost_size=6))
    evaluated = functional.eval_norm(x, mean, var, ghost_size=None, alpha=0.5)
    assert torch.equal(evaluated, functional.eval_norm(x, mean, var, ghost_size=2))
    with pytest.raises(ValueError, match=r"alpha=None with ghost_size=None: .*give one of the two"):
        functional.eval_norm(x, mean, var, ghost_size=None)
