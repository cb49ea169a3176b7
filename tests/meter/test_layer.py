"""Measurements of a layer against naive loops, for arbitrary shapes, layouts and dtypes."""

import numpy as np
import pytest
import torch
from ghostnoise.statistics.samples import ghost_sizes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.meter.layer import sample_ghost_batches
from ghostnoise.meter.theory import COMPONENTS
from support import reference
from support.inputs import cases
from support.metering import Spy, assert_histogram, measure, noise_of, variance_fractions

# Error of moments in float32, in standard deviations, for a mean of half a standard deviation.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
DTYPES = tuple(ROUNDING)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def fold(x, channel_dim):
    return reference.fold(x, channel_dim) if x.ndim > 2 else x.double().unsqueeze(2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(cases(least_batch=2, dtypes=DTYPES), st.integers(1, 30))
def test_arbitrary_batches(case, draws):
    x = case.tensor()
    folded = fold(x, case.channel_dim)
    assume((folded.var((0, 2)) > 0.05).all())
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        found = measure([x], case.ghost_size, case.channel_dim, draws=draws)
    rounding = ROUNDING[case.dtype] / folded.var((0, 2)).min().item()
    assert (found.batches, found.samples, found.skipped, found.spatial) == (1, case.batch_size, 0, case.spatial)
    mean, var = reference.statistics(folded)
    np.testing.assert_allclose(found.mean, mean, atol=rounding)
    np.testing.assert_allclose(found.var, var, atol=3 * rounding)
    within, between = variance_fractions(folded)
    np.testing.assert_allclose(found.within, within, atol=rounding)
    np.testing.assert_allclose(found.between, between.clip(0), atol=rounding)
    for method, tables in spy.noise[0].items():
        for component, values in zip(COMPONENTS, noise_of(folded, tables, method == "gbn"), strict=True):
            distribution = getattr(found.noise[method], component)
            assert_histogram(distribution, values, 10 * rounding)
            np.testing.assert_allclose(distribution.mean, values.mean(0), atol=10 * rounding)
            np.testing.assert_allclose(distribution.var, values.var(0), atol=60 * rounding)


@given(st.integers(2, 20), st.integers(1, 24), st.integers(1, 30), st.integers(0, 1000))
def test_sampled_ghost_batches(samples, size, count, seed):
    tables = sample_ghost_batches(samples, size, count, torch.Generator().manual_seed(seed))
    (with_replacement,) = tables["replacement"]
    assert with_replacement.shape == (count, size)
    assert 0 <= with_replacement.min() <= with_replacement.max() < samples
    sizes = ghost_sizes(samples, size)
    parts = [row for table in tables["partition"] for row in table.tolist()]
    shuffles, left = divmod(len(parts), len(sizes))
    assert left == 0
    assert (shuffles - 1) * len(sizes) < count <= shuffles * len(sizes)
    assert sorted(map(len, parts)) == sorted(sizes * shuffles)
    assert sorted(sample for part in parts for sample in part) == sorted([*range(samples)] * shuffles)
    assert all(len(set(part)) == len(part) for part in parts)


@pytest.mark.parametrize("method", ["gni", "gbn"])
def test_batches_of_different_sizes_and_positions(method, monkeypatch):
    """B and S vary, and B is not a multiple of N or smaller than N; the draws of all batches are combined."""
    shapes = [(9, 2, 5), (3, 2, 2), (16, 2, 4)]
    batches = [random(*shape, seed=seed) + 2 * random(*shape[:2], 1, seed=9) + 1 for seed, shape in enumerate(shapes)]
    spy = Spy(monkeypatch)
    found = measure(batches, 4, draws=60)
    assert (found.batches, found.samples) == (3, 28)
    assert found.spatial == pytest.approx(28 / (9 / 5 + 3 / 2 + 16 / 4))
    both = [noise_of(x, drawn[method], method == "gbn") for x, drawn in zip(batches, spy.noise, strict=True)]
    for component, values in zip(COMPONENTS, map(np.concatenate, zip(*both, strict=True)), strict=True):
        distribution = getattr(found.noise[method], component)
        assert_histogram(distribution, values, 1e-12)
        for name, expected in (
            ("mean", values.mean(0)), ("var", values.var(0)), ("skewness", stats.skew(values)),
            ("kurtosis", stats.kurtosis(values)),
        ):  # fmt: skip
            np.testing.assert_allclose(getattr(distribution, name), expected, rtol=1e-9, atol=1e-9)
    weights = [9, 3, 16]
    shares = [variance_fractions(x) for x in batches]
    np.testing.assert_allclose(found.within, np.average([share[0] for share in shares], axis=0, weights=weights))
    np.testing.assert_allclose(found.between, np.average([share[1] for share in shares], axis=0, weights=weights))
    tables = [reference.statistics(x) for x in batches]
    np.testing.assert_allclose(found.mean, np.average([table[0] for table in tables], axis=0, weights=weights))
    np.testing.assert_allclose(found.var, np.average([table[1] for table in tables], axis=0, weights=weights))


@pytest.mark.parametrize("component", COMPONENTS)
def test_kolmogorov_smirnov_distances_are_those_of_the_raw_draws(component, monkeypatch):
    """Up to the probability of one bin, since distances are evaluated at the edges only."""
    x = random(40, 3, 1)
    spy = Spy(monkeypatch)
    found = measure([x], 6, draws=500)
    values = noise_of(x, spy.noise[0]["gni"], False)[COMPONENTS.index(component)]
    law = stats.norm(scale=6**-0.5) if component == "shift" else stats.chi2(5, scale=1 / 6)
    name = "fc" if component == "shift" else "fc-exact"
    edges = getattr(found.noise["gni"], component).edges
    largest_bin = np.diff(law.cdf([-np.inf, *edges, np.inf])).max()
    assert largest_bin < 0.04
    for channel, distance in enumerate(found.distances(component)[name]):
        exact = stats.kstest(values[:, channel], law.cdf).statistic
        assert distance - 1e-6 <= exact <= distance + largest_bin + 1e-6


@pytest.mark.parametrize("batch_size", [3, 4])
def test_a_partition_into_one_ghost_batch_has_no_noise(batch_size):
    found = measure([random(batch_size, 2, 3)], 4).noise["gbn"]
    np.testing.assert_allclose([found.shift.mean, found.shift.var], 0, atol=1e-14)
    np.testing.assert_allclose(found.scale.mean, 1)
    np.testing.assert_allclose(found.scale.var, 0, atol=1e-14)


def test_ghost_batches_of_one_sample_and_one_value():
    """s² is 0, as in the exact laws, which measure squares around the mean of the ghost batch."""
    found = measure([random(50, 2)], 1)
    assert (found.noise["gni"].scale.mean == 0).all()
    assert (found.distances("scale")["fc-exact"] == 0).all()
    assert (found.distances("scale")["conv-exact"] == 0).all()
    assert set(found.gaps) == {"bn"}
    assert all("ghost_size=1" in why for why in found.refused.values())
    assert set(found.refused) == {"gbn", "xbn", "gni"}


@pytest.mark.parametrize("value", [0.0, 0.1, -7.7, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [1, 49])
def test_constant_channels_are_nan_and_counted(value, dtype, positions):
    x = random(12, 3, positions, dtype=torch.float32).to(dtype)
    x[:, 1] = value
    found = measure([x, x], 4)
    assert found.constant == 1
    for values in (found.within, found.between, found.noise["gni"].shift.var, found.effective_size("shift")):
        assert np.isnan(values).tolist() == [False, True, False]
    assert found.noise["gbn"].scale.n[1] == 0
    assert not np.isnan(found.layer_distances["scale", "conv"])
    assert np.isnan(found.distances("shift")["conv"]).tolist() == [False, True, False]
    assert found.mean[1] == pytest.approx(x[0, 1, 0].item())
    assert found.row()["constant"] == 1


def test_a_channel_that_is_constant_in_some_batches():
    """Its measurements are those of the batches in which it varied."""
    x, still = random(20, 2, 3), random(20, 2, 3, seed=1)
    still[:, 0] = 5.0
    found, alone = measure([x, still], 4, draws=50), measure([x], 4, draws=50)
    assert found.constant == 0
    np.testing.assert_allclose(found.within[0], alone.within[0])
    assert found.noise["gni"].shift.n.tolist() == [50, 100]
    np.testing.assert_array_equal(found.noise["gni"].shift.counts[0], alone.noise["gni"].shift.counts[0])


def test_small_and_non_finite_batches_are_skipped_and_counted():
    valid = random(8, 3, 2)
    with_nan = valid.clone()
    with_nan[0, 0, 0] = float("nan")
    infinite = valid.clone()
    infinite[1, 2, 1] = float("inf")
    found = measure([valid[:0], valid[:1], valid[:, :, :0], with_nan, infinite, valid], 4)
    assert (found.batches, found.samples, found.skipped) == (1, 8, 5)
    assert all(np.isfinite(gap.largest).all() for gap in found.gaps.values())
    alone = measure([valid], 4)
    np.testing.assert_array_equal(found.noise["gni"].scale.counts, alone.noise["gni"].scale.counts)


@pytest.mark.parametrize(("shape", "channel_dim"), [((6, 3, 2, 2, 2, 2), 1), ((6, 2, 2, 2, 2, 3), -1),
                                                    ((6, 2, 2, 2, 2, 3), 5), ((6, 2, 3, 2, 2, 2), 2)])  # fmt: skip
def test_inputs_with_more_than_five_dimensions(shape, channel_dim):
    x = random(*shape)
    flat = x.movedim(channel_dim, 1).flatten(2)
    found, expected = measure([x], 4, channel_dim), measure([flat], 4)
    np.testing.assert_allclose(found.within, expected.within)
    np.testing.assert_array_equal(found.noise["gni"].shift.counts, expected.noise["gni"].shift.counts)
    np.testing.assert_allclose(found.gaps["xbn"].largest, expected.gaps["xbn"].largest)


@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_a_mean_much_larger_than_the_standard_deviation(mean):
    """In float32, the channel is not taken for constant, and its noise is that of the same values in float64."""
    x = (random(32, 2, 9) + mean).float()
    found, expected = measure([x], 8), measure([x.double()], 8)
    assert found.constant == expected.constant == 0
    np.testing.assert_allclose(found.noise["gni"].shift.std, expected.noise["gni"].shift.std, rtol=1e-3)
    np.testing.assert_allclose(found.noise["gni"].scale.mean, expected.noise["gni"].scale.mean, rtol=1e-3)


def test_a_different_number_of_channels_is_refused():
    with pytest.raises(ValueError, match="has 4 channels, and had 3 before"):
        measure([random(8, 3), random(8, 4)], 4)


@pytest.mark.parametrize("x", [torch.zeros(8), torch.zeros(8, 3, dtype=torch.int64)])
def test_inputs_that_are_not_floating_point_batches_are_refused(x):
    with pytest.raises(ValueError, match="Meter needs a floating-point batch"):
        measure([x], 4)
