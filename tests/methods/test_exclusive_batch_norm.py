import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ghostnoise import ExclusiveBatchNorm1d, ExclusiveBatchNorm2d, functional
from support import reference
from support.comparison import assert_equals_naive
from support.families import example
from support.inputs import cases

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def train(case, **options):
    """Return the function of (x, weight, bias) in training mode, without running buffers."""
    return lambda x, weight, bias: functional.exclusive_batch_norm(
        x, None, None, weight, bias, True, channel_dim=case.channel_dim, **options
    )


@given(cases(least_batch=3, least_values=3, least_ghost=3), st.booleans(), st.booleans())
def test_exclusive_batch_norm_equals_naive_loop(case, affine, whole_batch):
    size = None if whole_batch else case.ghost_size
    function = train(case, ghost_size=size)
    assert_equals_naive(function, lambda x, w, b: reference.exclusive_batch_norm(x, size, w, b), case, affine)


@settings(max_examples=40)
@given(cases(least_batch=3, least_values=16, least_ghost=3, dtypes=ALL_DTYPES), st.floats(0.1, 2), st.floats(0.2, 2))
def test_exclusive_batch_norm_floors_and_clamps(case, min_std, clamp):
    function = train(case, ghost_size=case.ghost_size, min_std=min_std, clamp_output=clamp)

    def naive(x, weight, bias):
        return reference.exclusive_batch_norm(x, case.ghost_size, weight, bias, min_std=min_std, clamp=clamp)

    assert_equals_naive(function, naive, case)


@settings(max_examples=40)
@given(cases(least_batch=8, least_values=16, least_ghost=8, dtypes=ALL_DTYPES))
def test_every_dtype_keeps_its_precision(case):
    function = train(case, ghost_size=case.ghost_size)
    assert_equals_naive(function, lambda x, w, b: reference.exclusive_batch_norm(x, case.ghost_size, w, b), case)


@given(
    cases(least_batch=2, least_ghost=2, dtypes=(torch.float64, torch.float32)),
    st.floats(0.01, 0.9),
    st.booleans(),
    st.booleans(),
)
def test_a_self_weight_equals_naive_loop(case, self_weight, affine, whole_batch):
    size = None if whole_batch else case.ghost_size
    function = train(case, ghost_size=size, self_weight=self_weight)

    def naive(x, weight, bias):
        return reference.self_weighted_batch_norm(x, size, self_weight, weight, bias)

    assert_equals_naive(function, naive, case, affine)


@pytest.mark.parametrize("options", [{"min_std": 1.2}, {"clamp_output": 0.8}], ids=str)
def test_derivatives_with_two_remedies(options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 1, 2, dtype=torch.float64, generator=generator).requires_grad_()

    def run(x):
        return functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=3, self_weight=0.3, **options)

    assert torch.autograd.gradcheck(run, x)


def test_no_self_weight_is_exclusive_batch_norm():
    x = torch.randn(12, 3, 4, requires_grad=True)
    wanted = functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=4)
    y = functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=4, self_weight=0)
    assert torch.equal(y, wanted)
    assert torch.equal(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (y, wanted)))


@given(cases(least_batch=2, least_ghost=2))
def test_the_self_weight_of_a_ghost_batch_is_ghost_batch_norm(case):
    """Identity 7: a sample's own share in its ghost batch of n samples is 1/n."""
    x, dy, size = case.tensor().requires_grad_(), case.tensor(5), case.ghost_size
    n = case.batch_size if case.batch_size < 2 * size else size
    kept = case.batch_size - case.batch_size % n  # ghost batches of the same size
    x, dy = x[:kept], dy[:kept]
    ours = functional.exclusive_batch_norm(
        x, None, None, training=True, ghost_size=n, self_weight=1 / n, channel_dim=case.channel_dim
    )
    theirs = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=n, channel_dim=case.channel_dim)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(y, x, dy)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@given(st.integers(2, 9), st.integers(1, 6), st.floats(0.01, 0.99), st.integers(0, 10**6))
def test_a_self_weight_bounds_the_output(batch_size, spatial, self_weight, seed):
    """By sqrt(S/a - 1): each of the sample's S values has the weight a/S in its own statistics."""
    bound = (spatial / self_weight - 1) ** 0.5
    x = torch.randn(batch_size, 2, spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    options = {"training": True, "self_weight": self_weight}
    for scaled in (x, x.pow(9), x.exp().exp()):
        y = functional.exclusive_batch_norm(scaled, None, None, **options)
        assert y.abs().max().item() <= bound * (1 + 1e-9)
    x = torch.zeros(batch_size, 1, spatial, dtype=torch.float64)
    x[1, 0, 0] = -1.0  # all other values are equal: the bound is attained
    y = functional.exclusive_batch_norm(x, None, None, eps=1e-14, **options)
    assert y[1, 0, 0].item() == pytest.approx(-bound, rel=1e-9)


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


def test_a_floored_constant_channel_has_a_gradient():
    x = torch.ones(6, 2, 3, dtype=torch.float64, requires_grad=True)
    y = functional.exclusive_batch_norm(x, None, None, training=True, eps=0.0, min_std=0.5)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert (gradient == 0).all()


def test_exclusive_statistics_of_fewer_than_two_values():
    with pytest.raises(ValueError, match=r"batch of 1 sample.*use a larger batch"):
        functional.exclusive_batch_norm(torch.randn(1, 3, 4), None, None, training=True)
    with pytest.raises(ValueError, match=r"single value; raise ghost_size"):
        functional.exclusive_batch_norm(torch.randn(8, 3), None, None, training=True, ghost_size=2)
    functional.exclusive_batch_norm(torch.randn(8, 3, 2), None, None, training=True, ghost_size=2)
    functional.exclusive_batch_norm(torch.randn(8, 3), None, None, training=True, ghost_size=3)
    functional.exclusive_batch_norm(torch.randn(3, 3), None, None, training=True, ghost_size=2)  # one ghost batch of 3


def test_a_self_weight_needs_one_other_sample():
    """Two values suffice then: the output of a pair is its sign, sqrt((1 - a)/a) times."""
    x = torch.tensor([[0.0], [2.0], [3.0], [-3.0]], dtype=torch.float64)
    y = functional.exclusive_batch_norm(x, None, None, training=True, eps=1e-14, ghost_size=2, self_weight=0.2)
    torch.testing.assert_close(y[:, 0], torch.tensor([-2.0, 2.0, 2.0, -2.0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"batch of 1 sample.*use a larger batch"):
        functional.exclusive_batch_norm(torch.randn(1, 3, 4), None, None, training=True, self_weight=0.2)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("spatial", [(), (4,)])
def test_a_non_finite_value_in_a_sample(bad, spatial):
    """The other samples of its ghost batch are NaN; the sample's own statistics and other ghost batches are finite."""
    x = torch.randn(12, 3, *spatial, generator=torch.Generator().manual_seed(0))
    wanted = functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=4)
    x[(5, 1, *(2 for _ in spatial))] = bad
    y = functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=4)
    finite = x[5, 1].isfinite()
    assert torch.equal(y[5, 1][finite], wanted[5, 1][finite])
    assert not y[5, 1][~finite].isfinite().any()
    assert y[[4, 6, 7], 1].isnan().all()
    rest = [k for k in range(12) if not 4 <= k < 8]
    assert torch.equal(y[rest], wanted[rest])
    assert torch.equal(y[:, [0, 2]], wanted[:, [0, 2]])


def test_forward_is_the_function():
    options = {"ghost_size": 4, "min_std": 0.5, "clamp_output": 2.0, "self_weight": 0.1}
    layer = ExclusiveBatchNorm2d(3, **options)
    mean, var = torch.zeros(3), torch.ones(3)
    y = functional.exclusive_batch_norm(example(2), mean, var, layer.weight, layer.bias, True, **options)
    assert torch.equal(layer(example(2)), y)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, var)


def test_the_whole_batch_by_default():
    x = torch.randn(6, 2, dtype=torch.float64)
    y = ExclusiveBatchNorm1d(2, dtype=torch.float64)(x)
    others = x[1:]
    expected = (x[0] - others.mean(0)) / (others.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(y[0], expected)


def test_options_are_checked_when_built():
    bad = {"ghost_size": (1, 2.0), "min_std": (-1, None), "clamp_output": (-1,), "self_weight": (1, -0.1, None, "0.1")}
    for name, options in ((name, {name: value}) for name, values in bad.items() for value in values):
        with pytest.raises(ValueError, match=f"{name}="):
            ExclusiveBatchNorm2d(3, **options)


def test_options_outside_their_range():
    x = torch.randn(4, 3, 2)
    with pytest.raises(ValueError, match=r"ghost_size=1: must be an integer from 2 to 65536"):
        functional.exclusive_batch_norm(x, None, None, ghost_size=1)
    with pytest.raises(ValueError, match=r"min_std=-1: must be a number in \[0, inf\)"):
        functional.exclusive_batch_norm(x, None, None, min_std=-1)
    with pytest.raises(ValueError, match=r"self_weight=1: must be a number in \[0, 1\)"):
        functional.exclusive_batch_norm(x, None, None, self_weight=1)
    with pytest.raises(ValueError, match=r"clamp_output=nan"):
        functional.exclusive_batch_norm(x, None, None, clamp_output=float("nan"))
