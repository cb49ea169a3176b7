"""Means, differences to the baseline, and verdicts."""

import statistics

import pytest
from scipy import stats

from ghostnoise.lab.errors import UserError
from lab.report.folders import experiment, fill, findings, points, write

BN, FOUR, SIXTEEN = "BN", "GNI ghost_size=4", "GNI ghost_size=16"
GOOD = {BN: {0: 90.0, 1: 90.4, 2: 90.2}, FOUR: {0: 89.0, 1: 90.0, 2: 89.5}, SIXTEEN: {0: 93.0, 1: 93.6, 2: 93.2}}


def rows_of(found):
    return {row.name: row for row in found.rows}


def test_means_and_differences_of_a_complete_experiment(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    found, (judged,) = findings(tmp_path, made)
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
    # The claim's comparison is the second row's, and so counts once.
    assert len(found.differences) == 2
    assert rows[SIXTEEN].difference.corrected.p == pytest.approx(2 * tests[1].pvalue)
    assert judged.verdict == "supported"
    assert "+3.07 points over 3 common seeds" in judged.why
    assert "Only 3 seeds" in judged.why


@pytest.mark.parametrize(
    ("ours", "verdict", "word"),
    [
        ({0: 93.0, 1: 93.6, 2: 93.2}, "supported", "p ="),
        ({0: 96.0, 1: 90.0, 2: 90.1}, "points that way", "p ="),
        ({0: 90.0, 1: 90.4, 2: 90.2}, "not supported", "same for every seed"),
        ({0: 80.0, 1: 85.0, 2: 83.2}, "not supported", "p ="),
        ({0: 95.0}, "points that way", "one seed: no interval"),
        ({0: 91.0, 1: 91.4, 2: 91.2}, "points that way", "same for every seed"),
        ({}, "cannot be told", "without a finished run"),
    ],
)
def test_verdicts(tmp_path, ours, verdict, word):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN], SIXTEEN: ours})
    _, (judged,) = findings(tmp_path, made)
    assert judged.verdict == verdict
    assert word in judged.why


def test_no_common_seed_cannot_be_told(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: {0: 90.0}, SIXTEEN: {1: 92.0}})
    assert findings(tmp_path, made)[1][0].verdict == "cannot be told"


def test_runs_to_go_are_said(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN], SIXTEEN: {0: 93.0, 1: 93.6}})
    found, (judged,) = findings(tmp_path, made)
    assert "So far: 4 runs of the two to go" in judged.why
    assert rows_of(found)[SIXTEEN].note == "1 missing"


def test_diverged_runs_are_not_averaged_and_their_cell_is_not_the_best(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN], FOUR: GOOD[FOUR], SIXTEEN: {0: 99.0, 1: 99.5}})
    write(tmp_path, next(point for point in points(made, [SIXTEEN]) if point.seed == 2), status="diverged")
    found, (judged,) = findings(tmp_path, made)
    assert rows_of(found)[SIXTEEN].score.mean == pytest.approx(99.25)
    assert rows_of(found)[SIXTEEN].note == "1 diverged"
    assert "ghost_size=4" in judged.why
    assert judged.verdict == "not supported"


def test_a_cell_is_compared_with_the_baseline_at_the_same_place(tmp_path):
    more = '[grid.axes]\ndata.augment = ["none", "flip-crop"]\n'
    made = experiment(tmp_path, more=more, claims=[])
    fill(tmp_path, made, {point.cell.name: {0: 90.0} for point in points(made)})
    found, _ = findings(tmp_path, made)
    compared = [row.difference for row in found.rows if row.method == "GNI"]
    assert len(compared) == 4
    for difference in compared:
        assert dict(difference.ours.cell.at)["data.augment"] == dict(difference.theirs.cell.at)["data.augment"]


def test_a_baseline_with_an_axis_of_its_own_is_compared_with_nothing(tmp_path):
    made = experiment(tmp_path, claims=[])
    made = made.__class__(
        made.recipe, made.grid, made.select, made.report.model_copy(update={"baseline": "GNI"}), made.tree
    )
    fill(tmp_path, made, GOOD)
    assert [row.difference for row in findings(tmp_path, made)[0].rows] == [None] * 3


TUNED = '[select]\naxes = ["norm.ghost_size"]\n'


def test_tuned_methods_are_judged_by_their_tests(tmp_path):
    made = experiment(tmp_path, more=TUNED)
    fill(tmp_path, made, GOOD)
    found, (judged,) = findings(tmp_path, made)
    assert judged.verdict == "cannot be told"
    assert [(score.cell.name, score.chosen) for score in found.tuning] == [(FOUR, False), (SIXTEEN, True)]
    tests = [run.point for run in found.gathered.runs if run.point.stage == "test" and run.status == "missing"]
    for point in tests:
        write(tmp_path, point, 95.0 + 0.3 * point.seed**2)
    found, (judged,) = findings(tmp_path, made)
    assert [row.name for row in found.rows] == [BN, SIXTEEN]
    assert judged.verdict == "supported"
    assert len(found.differences) == 1


def test_a_method_whose_tuning_goes_on_has_a_row_that_says_so(tmp_path):
    made = experiment(tmp_path, more=TUNED)
    fill(tmp_path, made, {BN: GOOD[BN], FOUR: GOOD[FOUR]})
    found, _ = findings(tmp_path, made)
    assert [(row.method, row.note) for row in found.rows] == [
        ("BN", ""),
        ("GNI", "not tested yet: 3 tuning runs to go"),
    ]


def test_each_place_on_an_axis_that_is_not_tuned_has_its_winner(tmp_path):
    axis = '[grid.axes]\ndata.augment = ["none", "flip-crop"]\n'
    made = experiment(tmp_path, more=axis + TUNED, claims=[])
    tuned = [point for point in points(made) if point.stage == "tune"]
    for point in tuned:
        if point.settings.data.augment == "none":
            write(tmp_path, point, 90.0 + (point.settings.norm.ghost_size == 4))
    found, _ = findings(tmp_path, made)
    ours = [(dict(row.at), row.note) for row in found.rows if row.method == "GNI"]
    assert sorted(ours, key=str) == [
        ({"data.augment": "flip-crop"}, "not tested yet: 6 tuning runs to go"),
        ({"data.augment": "none", "norm.ghost_size": 4}, "3 missing"),
    ]


def test_a_chain_is_several_claims_and_a_single_label_none(tmp_path):
    made = experiment(tmp_path, claims=["GNI > BN > GNI"])
    fill(tmp_path, made, GOOD)
    assert [each.verdict for each in findings(tmp_path, made)[1]] == ["supported", "not supported"]
    with pytest.raises(UserError, match="A > B"):
        findings(tmp_path, experiment(tmp_path, claims=["GNI"]))


def test_a_claim_about_a_method_that_is_left_out_cannot_be_told(tmp_path):
    made = experiment(tmp_path, only=["GNI"])
    fill(tmp_path, made, GOOD)
    (judged,) = findings(tmp_path, made)[1]
    assert judged.verdict == "cannot be told"
    assert "BN left out" in judged.why
