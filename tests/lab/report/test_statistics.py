"""Means, intervals, tests and Holm correction against scipy, hand-computed values and naive code."""

import math
import statistics

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.lab.report.statistics import ALPHA, holm, paired
from support.run_folders import experiment, fill, findings, points, write

BN, FOUR, SIXTEEN = "BN", "GNI ghost_size=4", "GNI ghost_size=16"
GOOD = {BN: {0: 90.0, 1: 90.4, 2: 90.2}, FOUR: {0: 89.0, 1: 90.0, 2: 89.5}, SIXTEEN: {0: 93.0, 1: 93.6, 2: 93.2}}
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
    half = 4.302652729749464 / math.sqrt(3)  # from a table of the t distribution
    assert made.interval() == pytest.approx((2 - half, 2 + half))


def test_only_common_seeds_are_compared():
    made = paired({0: 91.0, 1: 92.0, 5: 10.0}, {0: 90.0, 1: 90.0, 7: 99.0})
    assert (made.n, made.mean) == (2, 1.5)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_no_interval_and_equal_differences_no_test():
    assert paired({0: 91.0}, {0: 90.0}).interval() is None
    same = paired({0: 91.1, 1: 92.1, 2: 0.4}, {0: 90.0, 1: 91.0, 2: -0.7})
    assert same.p is None
    assert same.interval() is None


def naive(values):
    """Compute by definition: the largest of (m - j) p_j over all p-values that are not larger."""
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


def test_none_is_not_a_comparison():
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


def rows_of(found):
    return {row.name: row for row in found.rows}


def test_means_and_differences_of_a_complete_experiment(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    found = findings(tmp_path, made)
    rows = rows_of(found)
    assert list(rows) == [BN, FOUR, SIXTEEN]
    for name, values in GOOD.items():
        score = rows[name].score
        assert score.n == 3
        assert score.mean == pytest.approx(statistics.fmean(values.values()))
        assert score.std == pytest.approx(statistics.stdev(values.values()))
        assert score.best == pytest.approx(max(values.values()) + 1)
        assert (score.seconds, score.speed) == (11.0, 100.0)
    assert rows[BN].difference is None
    tests = [stats.ttest_rel(list(GOOD[name].values()), list(GOOD[BN].values())) for name in (FOUR, SIXTEEN)]
    for name, test in zip((FOUR, SIXTEEN), tests, strict=True):
        assert rows[name].difference.paired.p == pytest.approx(test.pvalue)


def test_diverged_runs_are_not_averaged_and_their_cell_is_not_the_best(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN], FOUR: GOOD[FOUR], SIXTEEN: {0: 99.0, 1: 99.5}})
    write(tmp_path, next(point for point in points(made, [SIXTEEN]) if point.seed == 2), status="diverged")
    found = findings(tmp_path, made)
    assert rows_of(found)[SIXTEEN].score.mean == pytest.approx(99.25)
    assert rows_of(found)[SIXTEEN].note == "1 diverged"
    assert found.best("GNI").cell == FOUR


def test_a_cell_is_compared_with_the_baseline_at_the_same_place(tmp_path):
    more = '[grid.axes]\ndata.augment = ["none", "flip-crop"]\n'
    made = experiment(tmp_path, more=more, claims=[])
    fill(tmp_path, made, {point.cell: {0: 90.0} for point in points(made)})
    found = findings(tmp_path, made)
    compared = [row.difference for row in found.rows if row.method == "GNI"]
    assert len(compared) == 4
    for difference in compared:
        assert dict(difference.ours.at)["data.augment"] == dict(difference.theirs.at)["data.augment"]


def test_a_baseline_with_an_axis_of_its_own_is_compared_with_nothing(tmp_path):
    made = experiment(tmp_path, claims=[])
    made = made.__class__(
        made.recipe, made.grid, made.select, made.report.model_copy(update={"baseline": "GNI"}), made.tree
    )
    fill(tmp_path, made, GOOD)
    assert [row.difference for row in findings(tmp_path, made).rows] == [None] * 3


TUNED = '[select]\naxes = ["norm.ghost_size"]\n'


def test_tuned_methods_are_judged_by_their_tests(tmp_path):
    made = experiment(tmp_path, more=TUNED)
    fill(tmp_path, made, GOOD)
    found = findings(tmp_path, made)
    assert found.claims[0].verdict == "inconclusive"
    assert [(score.cell, score.chosen) for score in found.tuning] == [(FOUR, False), (SIXTEEN, True)]
    tests = [run for run in found.collected.runs if run.stage == "test" and run.status == "missing"]
    for point in tests:
        write(tmp_path, point, 95.0 + 0.3 * point.seed**2)
    found = findings(tmp_path, made)
    assert [row.name for row in found.rows] == [BN, SIXTEEN]


def test_a_method_whose_tuning_has_not_finished_has_a_row_with_a_note(tmp_path):
    made = experiment(tmp_path, more=TUNED)
    fill(tmp_path, made, {BN: GOOD[BN], FOUR: GOOD[FOUR]})
    found = findings(tmp_path, made)
    assert [(row.method, row.note) for row in found.rows] == [
        ("BN", ""),
        ("GNI", "not tested yet: 3 tuning runs not finished"),
    ]


def test_each_place_on_an_axis_that_is_not_tuned_has_its_winner(tmp_path):
    axis = '[grid.axes]\ndata.augment = ["none", "flip-crop"]\n'
    made = experiment(tmp_path, more=axis + TUNED, claims=[])
    tuned = [point for point in points(made) if point.stage == "tune"]
    for point in tuned:
        if point.settings.data.augment == "none":
            write(tmp_path, point, 90.0 + (point.settings.norm.ghost_size == 4))
    found = findings(tmp_path, made)
    ours = [(dict(row.at), row.note) for row in found.rows if row.method == "GNI"]
    assert sorted(ours, key=str) == [
        ({"data.augment": "flip-crop"}, "not tested yet: 6 tuning runs not finished"),
        ({"data.augment": "none", "norm.ghost_size": 4}, "3 missing"),
    ]


def test_seeds_are_not_paired_across_numerics(tmp_path):
    """Seed 2 of GNI has another number than seed 2 of BN: seeds 0 and 1 are compared, and every run is averaged."""
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN]}, environment={"numerics": 1})
    for point in points(made, [SIXTEEN]):
        number = 2 if point.seed == 2 else 1
        write(tmp_path, point, GOOD[SIXTEEN][point.seed], environment={"numerics": number})
    row = rows_of(findings(tmp_path, made))[SIXTEEN]
    assert row.score.n == 3
    assert row.score.mean == pytest.approx(statistics.fmean(GOOD[SIXTEEN].values()))
    assert row.score.numerics == {(1, 1): 2, (2, 1): 1}
    expected = stats.ttest_rel([93.0, 93.6], [90.0, 90.4])
    assert (row.difference.paired.n, row.difference.paired.mean) == (2, pytest.approx(3.1))
    assert row.difference.paired.p == pytest.approx(expected.pvalue)


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (None, 2)])
def test_methods_with_different_numerics_are_not_compared(tmp_path, numbers):
    made = experiment(tmp_path)
    for name, number in zip((BN, SIXTEEN), numbers, strict=True):
        fill(tmp_path, made, {name: GOOD[name]}, environment={} if number is None else {"numerics": number})
    found = findings(tmp_path, made)
    assert rows_of(found)[SIXTEEN].difference.paired is None
    assert found.claims[0].verdict == "inconclusive"


@pytest.mark.parametrize(("number", "compared"), [(1, False), (2, True), (3, False)])
def test_methods_are_compared_if_each_has_its_current_number(tmp_path, number, compared, raised):
    raised("gni", 2)
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN]}, environment={"numerics": 1})
    fill(tmp_path, made, {SIXTEEN: GOOD[SIXTEEN]}, environment={"numerics": number})
    found = findings(tmp_path, made)
    assert (rows_of(found)[SIXTEEN].difference.paired is not None) == compared
    assert found.collected.mixed != compared


@pytest.mark.parametrize("numbers", [(3, 3), (None, 1)])
def test_equal_numerics_are_compared(tmp_path, numbers):
    made = experiment(tmp_path)
    for name, number in zip((BN, SIXTEEN), numbers, strict=True):
        fill(tmp_path, made, {name: GOOD[name]}, environment={} if number is None else {"numerics": number})
    assert rows_of(findings(tmp_path, made))[SIXTEEN].difference.paired.n == 3
