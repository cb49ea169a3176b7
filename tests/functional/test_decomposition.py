import pytest
import torch
from hypothesis import given

import reference
from ghostnoise import functional
from inputs import cases


@given(cases())
def test_eq_6_holds(case):
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


def test_a_constant_channel_has_no_noise():
    x = torch.randn(8, 2, 3)
    x[:, 1] = 5.0
    parts = functional.decompose(x, 4)
    assert parts.ghost_mean[:, 1].tolist() == [0, 0]
    assert parts.ghost_std[:, 1].tolist() == [1, 1]
    assert parts.std[1] == 0


def test_dtypes_and_gradients():
    x = torch.randn(8, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    parts = functional.decompose(x, 4)
    assert parts.mean.dtype == torch.float32
    assert not parts.shift.requires_grad
    assert functional.decompose(torch.randn(8, 2), 4).mean.dtype == torch.float32


def test_bad_input():
    with pytest.raises(ValueError, match="ghost_size=0: must be an integer from 1 to 65536"):
        functional.decompose(torch.randn(8, 2), 0)
    with pytest.raises(ValueError, match="got an empty input"):
        functional.decompose(torch.randn(0, 2), 4)
