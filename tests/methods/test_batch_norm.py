import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise import functional
from support import families, reference
from support.comparison import assert_equals_naive
from support.inputs import cases

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def train(function, case, **options):
    """Return the function of (x, weight, bias) in training mode, without running buffers."""
    return lambda x, weight, bias: function(x, None, None, weight, bias, True, channel_dim=case.channel_dim, **options)


@given(cases(), st.booleans())
def test_batch_norm_equals_naive_loop(case, affine):
    assert_equals_naive(train(functional.batch_norm, case), reference.batch_norm, case, affine)


@given(cases(least_batch=8, least_values=16, least_ghost=8, dtypes=ALL_DTYPES))
def test_every_dtype_keeps_its_precision(case):
    assert_equals_naive(train(functional.batch_norm, case), reference.batch_norm, case)


def self_share(function, **options):
    """Return the share of sample 0 in its own mean: the derivative of its center with respect to its value."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, dtype=torch.float64, generator=generator)

    def center(value: float) -> float:
        moved = x.clone()
        moved[0] = value
        y = function(moved, None, None, training=True, eps=1e16, **options)  # eps dominates: y = (x - center) / 1e8
        return float(value - y[0].item() * 1e8)

    return center(x[0].item() + 1) - center(x[0].item())


def test_a_samples_share_in_its_own_statistics():
    """Identity 7: BN 1/B, GBN 1/n, XBN 0."""
    assert self_share(functional.batch_norm) == pytest.approx(1 / 12, abs=1e-6)
    assert self_share(functional.ghost_batch_norm, ghost_size=4) == pytest.approx(1 / 4, abs=1e-6)
    assert self_share(functional.exclusive_batch_norm, ghost_size=4) == pytest.approx(0, abs=1e-6)


@given(cases())
def test_evaluation_is_torchs_own(case):
    x, weight, bias = case.tensor(), case.vector(1), case.vector(2)
    buffers = case.vector(3), case.vector(4).square()
    expected = F.batch_norm(x.movedim(case.channel_dim, 1), *buffers, weight, bias).movedim(1, case.channel_dim)
    for family in families.PLAIN_AT_INFERENCE:
        function, options = families.function(family)
        y = function(x, *buffers, weight, bias, channel_dim=case.channel_dim, **options)
        assert torch.equal(y, expected)


def test_evaluation_without_buffers_uses_the_batch():
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    expected = F.batch_norm(x, None, None, training=True)
    assert torch.equal(functional.ghost_batch_norm(x, None, None, ghost_size=2), expected)
    assert torch.equal(functional.eval_norm(x, None, None, ghost_size=2), expected)


def test_a_single_value_per_channel_is_torchs_error():
    x = torch.randn(1, 3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as theirs:
        F.batch_norm(x, None, None, training=True)
    for family in families.FAMILIES:
        function, options = families.function(family)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as ours:
            function(x, None, None, training=True, **options)
        assert str(ours.value) == str(theirs.value)
