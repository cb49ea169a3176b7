"""Intervals, tests and Holm's correction, against scipy, hand-computed values and a naive implementation."""

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.lab.report.inference import ALPHA, holm, paired

numbers = st.floats(0, 100).map(lambda value: round(value, 3))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_paired_is_scipys_paired_t_test(pairs):
    ours, theirs = ({seed: pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    made = paired(ours, theirs)
    differences = numpy.array([a - b for a, b in pairs])
    assert made.n == len(pairs)
    assert made.mean == pytest.approx(differences.mean(), abs=1e-9)
    assert made.std == pytest.approx(differences.std(ddof=1), abs=1e-9)
    if made.p is None:
        assert numpy.ptp(differences) < 1e-9
        assert made.interval() is None
        return
    theirs_too = stats.ttest_rel(list(ours.values()), list(theirs.values()))
    assert made.p == pytest.approx(theirs_too.pvalue, rel=1e-6, abs=1e-12)
    low, high = theirs_too.confidence_interval(0.95)
    assert made.interval() == pytest.approx((low, high), rel=1e-6, abs=1e-9)


def test_paired_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, t = 2√3; with 2 degrees of freedom, p = 1 - t/√(t² + 2)."""
    made = paired({0: 91.0, 1: 92.0, 2: 93.0}, {2: 90.0, 1: 90.0, 0: 90.0})
    t = 2 * math.sqrt(3)
    assert (made.n, made.mean, made.std) == (3, 2.0, 1.0)
    assert made.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    half = 4.302652729749464 / math.sqrt(3)  # of a table of t
    assert made.interval() == pytest.approx((2 - half, 2 + half))


def test_only_common_seeds_count():
    made = paired({0: 91.0, 1: 92.0, 5: 10.0}, {0: 90.0, 1: 90.0, 7: 99.0})
    assert (made.n, made.mean) == (2, 1.5)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_no_interval_and_equal_differences_no_test():
    assert paired({0: 91.0}, {0: 90.0}).interval() is None
    same = paired({0: 91.1, 1: 92.1, 2: 0.4}, {0: 90.0, 1: 91.0, 2: -0.7})
    assert same.p is None
    assert same.interval() is None


def naive(values):
    """By the definition: the largest of (m - j) p_j over all that are not above this one."""
    ordered = sorted(values)
    return [
        min(1.0, max((len(values) - j) * q for j, q in enumerate(ordered) if q <= p))
        for p in values
    ]  # fmt: skip


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=10, unique=True))
def test_holm_is_the_definition(values):
    assert [made.p for made in holm(values)] == pytest.approx(naive(values))


def test_holm_by_hand():
    assert [made.p for made in holm([0.01, 0.04, 0.03, 0.005])] == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_none_counts_for_nothing():
    made = holm([None, 0.02, None, 0.03])
    assert made[0] is made[2] is None
    assert [made[1].p, made[3].p] == pytest.approx([0.04, 0.04])


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=5))
def test_corrected_interval_excludes_zero_exactly_if_the_corrected_test_rejects(many):
    pairs = [paired(dict(enumerate(values)), dict.fromkeys(range(3), 50.0)) for values in many]
    for made, corrected in zip(pairs, holm([each.p for each in pairs]), strict=True):
        if corrected is None or abs(corrected.p - ALPHA) < 1e-6:
            continue
        low, high = made.interval(corrected.alpha)
        assert (low > 0 or high < 0) == (corrected.p < ALPHA)
