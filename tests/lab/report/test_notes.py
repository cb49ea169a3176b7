"""The wording of verdicts and notes."""

import pytest

from ghostnoise.lab.report.notes import claim_line, claim_reason, notes
from support.run_folders import experiment, fill, findings, points, write

BN, FOUR, SIXTEEN = "BN", "GNI ghost_size=4", "GNI ghost_size=16"
GOOD = {BN: {0: 90.0, 1: 90.4, 2: 90.2}, FOUR: {0: 89.0, 1: 90.0, 2: 89.5}, SIXTEEN: {0: 93.0, 1: 93.6, 2: 93.2}}


def reason(tmp_path, made):
    found = findings(tmp_path, made)
    return claim_reason(found, found.claims[0])


def line(tmp_path, made):
    found = findings(tmp_path, made)
    return claim_line(found, found.claims[0])


def test_a_verdict_is_explained_with_its_numbers(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    text = line(tmp_path, made)
    assert text.startswith("GNI > BN: supported. GNI ghost_size=16 (93.27 ± 0.31, n = 3) against BN (90.20 ± 0.20")
    assert "+3.10 points over 2 common seeds" in text
    assert "Cells chosen by seeds 0, tested on seeds 1, 2." in text
    assert "Only 2 seeds: interpret with caution." in text
    assert "Preliminary" not in text


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({0: 93.0, 1: 93.4, 2: 93.2001}, ", p < 0.001)"),
        ({0: 93.0, 1: 93.9, 2: 93.2}, ", p = 0.0"),
        ({0: 96.0, 1: 90.0, 2: 90.1}, ", p = 0."),
        ({0: 90.0, 1: 90.4, 2: 90.2}, "equal for every seed: no spread to test against"),
        ({0: 80.0, 1: 85.0, 2: 83.2}, ", p = 0."),
        ({0: 95.0}, "no common seed is left for the test: cells chosen by seeds 0, tested on seeds 1, 2."),
        ({0: 95.0, 1: 91.0}, "one seed: no interval and no test"),
        ({0: 91.0, 1: 91.4, 2: 91.2}, "equal for every seed: no spread to test against"),
        ({}, "no finished runs of GNI."),
    ],
)
def test_reasons(tmp_path, ours, words):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN], SIXTEEN: ours})
    assert words in reason(tmp_path, made)


def test_no_finished_runs_are_inconclusive(tmp_path):
    assert line(tmp_path, experiment(tmp_path)) == "GNI > BN: inconclusive: no finished runs of GNI and BN."


def test_no_common_seeds_are_inconclusive(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: {0: 90.0}, SIXTEEN: {1: 92.0}})
    assert line(tmp_path, made) == (
        "GNI > BN: inconclusive: no cell can be chosen: the first half of the seeds has no finished runs of a cell "
        "that was tested."
    )


def test_a_method_that_is_not_included_is_named(tmp_path):
    made = experiment(tmp_path, only=["GNI"])
    fill(tmp_path, made, GOOD)
    assert line(tmp_path, made) == "GNI > BN: inconclusive: BN not included in this report."


def test_verdicts_with_missing_runs_are_preliminary(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {**GOOD, SIXTEEN: {0: 93.0, 1: 93.6}})
    assert "Preliminary: 1 run missing." in reason(tmp_path, made)
    write(tmp_path, next(point for point in points(made, [SIXTEEN]) if point.seed == 2), status="failed")
    assert "Preliminary: 1 run failed." in reason(tmp_path, made)


def test_diverged_runs_are_reported(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN], SIXTEEN: {0: 93.0, 1: 93.6}})
    write(tmp_path, next(point for point in points(made, [SIXTEEN]) if point.seed == 2), status="diverged")
    text = reason(tmp_path, made)
    assert "1 run diverged; the difference excludes diverged runs." in text
    assert "Preliminary: 3 runs missing." in text


def test_notes_on_the_runs(tmp_path):
    made = experiment(tmp_path)
    assert notes(findings(tmp_path, made)) == [
        "0 of 9 runs finished; 9 missing.",
        "No run has finished yet, so there are no results.",
    ]
    fill(tmp_path, made, {BN: {0: 90.0}})
    assert "One seed per cell: no standard deviations, no intervals, no tests." in notes(findings(tmp_path, made))
    fill(tmp_path, made, {BN: {1: 90.5}})
    assert (
        "All seeds share the same training images: intervals cover initialization, order and noise, and not other data."
    ) in notes(findings(tmp_path, made))


def test_notes_on_folders_that_are_ignored(tmp_path):
    made = experiment(tmp_path)
    first, second, *_ = points(made)
    write(tmp_path, first)
    write(tmp_path, first, device="cuda")
    damaged = write(tmp_path, second)
    (damaged / "result.json").write_text("{")
    write(tmp_path, points(experiment(tmp_path, seeds="[7]"))[0])
    shown = notes(findings(tmp_path, made))
    assert f"1 damaged run folder ignored: {damaged.name}." in shown
    assert "1 duplicate run folder ignored: the same run was also made on another device." in shown
    assert f"1 other run in {tmp_path / 'tiny'} not part of this experiment." in shown


def test_different_numerics_are_the_reason_that_nothing_is_compared(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {BN: GOOD[BN]}, environment={"numerics": 1})
    fill(tmp_path, made, {SIXTEEN: GOOD[SIXTEEN]}, environment={"numerics": 2})
    assert line(tmp_path, made) == "GNI > BN: inconclusive: no common seeds with equal numerics."
    notice = notes(findings(tmp_path, made))[0]
    assert "1 (3 runs) and 2 instead of 1 (3 runs)" in notice
    assert "rerun `ghostnoise sweep tiny`" in notice
    assert "trains again the runs that were computed with another number" in notice
