import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reference
from comparison import assert_equals_naive
from ghostnoise import functional
from ghostnoise.laws import Law
from inputs import cases

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore:ghost_size=1 on samples")


def noisy(case, **options):
    return lambda x, weight, bias: functional.ghost_noise_batch_norm(
        x, None, None, weight, bias, True, ghost_size=case.ghost_size, channel_dim=case.channel_dim, **options
    )


@given(cases(), st.booleans(), st.booleans(), st.booleans())
def test_ghost_noise_batch_norm_equals_naive_loop(case, affine, shift, scale):
    parts = {"shift": shift, "scale": scale}
    indices = case.indices()
    assert_equals_naive(
        noisy(case, indices=indices, **parts),
        lambda x, w, b: reference.ghost_noise_batch_norm(x, indices, w, b, **parts),
        case,
        affine,
    )


@given(cases(least_batch=8, least_values=16, least_ghost=8, dtypes=ALL_DTYPES))
def test_every_dtype_keeps_its_precision(case):
    indices = case.indices()
    assert_equals_naive(
        noisy(case, indices=indices), lambda x, w, b: reference.ghost_noise_batch_norm(x, indices, w, b), case
    )


@given(
    cases(), st.sampled_from(["fc", "conv"]), st.sampled_from(["paper", "exact"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_analytical_ghost_noise_batch_norm_equals_naive_loop(case, kind, dof, shift, scale):
    law = Law(case.ghost_size, case.spatial, kind, dof)
    draws = law.draw((case.batch_size, case.channels), torch.device("cpu"), None)
    options = {"kind": kind, "dof": dof, "shift": shift, "scale": scale}

    def function(x, weight, bias):
        return functional.analytical_ghost_noise_batch_norm(
            x, None, None, weight, bias, True, ghost_size=case.ghost_size, channel_dim=case.channel_dim, draws=draws,
            **options,
        )  # fmt: skip

    def naive(x, weight, bias):
        return reference.analytical_noise_batch_norm(x, draws, case.ghost_size, weight=weight, bias=bias, **options)

    assert_equals_naive(function, naive, case)


def test_one_op_equals_batch_norm_then_noise_then_affine():
    torch.manual_seed(0)
    x, dy = (torch.randn(12, 3, 4, 4, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    indices = torch.randint(12, (12, 5))
    leaf = x.requires_grad_()
    fused = functional.ghost_noise_batch_norm(leaf, None, None, weight, bias, True, ghost_size=5, indices=indices)
    hat = nn.functional.batch_norm(leaf, None, None, training=True)
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


@pytest.mark.parametrize("kind", ["fc", "conv"])
def test_running_statistics_are_batch_norms(kind):
    x = torch.randn(8, 3, 4, dtype=torch.float64)
    plain = nn.BatchNorm1d(3, dtype=torch.float64)
    plain(x)
    for function, options in (
        (functional.ghost_noise_batch_norm, {}),
        (functional.analytical_ghost_noise_batch_norm, {"kind": kind}),
    ):
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        function(x, mean, var, training=True, ghost_size=4, **options)
        torch.testing.assert_close(mean, plain.running_mean)
        torch.testing.assert_close(var, plain.running_var)


def test_second_derivatives_of_the_composite_form():
    """Against the naive loop, whose noise is constant in the same sense; gradgradcheck would move the noise."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(6, (6, 4))
    dy, ddx = torch.randn(6, 2, 3, dtype=torch.float64), torch.randn(6, 2, 3, dtype=torch.float64)

    def second(y):
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        return torch.autograd.grad(first, x, ddx)[0]

    ours = functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=4, indices=indices)
    naive = reference.ghost_noise_batch_norm(x, indices)
    torch.testing.assert_close(second(ours), second(naive), rtol=1e-10, atol=1e-10)


def test_forward_mode_takes_the_noise_as_constant():
    """The tangent of the output against the naive loop's, by its Jacobian's transpose."""
    torch.manual_seed(0)
    x, tangent, dy = (torch.randn(6, 2, 3, dtype=torch.float64) for _ in range(3))
    indices = torch.randint(6, (6, 4))

    def ours(x):
        return functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=4, indices=indices)

    _, out = torch.func.jvp(ours, (x,), (tangent,))
    leaf = x.clone().requires_grad_()
    (pulled,) = torch.autograd.grad(reference.ghost_noise_batch_norm(leaf, indices), leaf, dy)
    torch.testing.assert_close((out * dy).sum(), (pulled * tangent).sum())


@pytest.mark.parametrize(
    ("function", "drawn"),
    [(functional.ghost_noise_batch_norm, "indices"), (functional.analytical_ghost_noise_batch_norm, "draws")],
)
def test_without_ghosts_it_is_batch_norm(function, drawn):
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
