"""χ² numbers as a function of normal ones."""

import numpy as np
import pytest
import torch
from ghostnoise.statistics.chi_square import chi_square_mean
from scipy import stats

Z = np.linspace(-6.66, 6.66, 4001)  # the range of normal numbers from uniform ones of 32 bits


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 31, 32, 64, 255, 512, 1999, 2000, 4096, 32_768, 10**6])
def test_the_function_is_the_quantile(degrees):
    lower = stats.chi2.ppf(stats.norm.cdf(Z), degrees)
    expected = np.where(Z < 0, lower, stats.chi2.isf(stats.norm.sf(Z), degrees)) / degrees
    found = chi_square_mean(torch.from_numpy(Z), degrees).numpy()
    assert np.abs(found - expected).max() < 2e-8 * np.sqrt(2 / degrees)
    assert (np.diff(found) > 0).all()


def test_float32_is_accurate_enough():
    z = torch.from_numpy(Z)
    for degrees in (1, 32, 2048):
        found, expected = chi_square_mean(z.float(), degrees), chi_square_mean(z, degrees)
        torch.testing.assert_close(found.double(), expected, rtol=5e-6, atol=1e-6)
