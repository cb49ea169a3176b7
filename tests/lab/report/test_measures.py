"""Measures of cells: intervals, the gap between training and test, and the cost relative to the baseline."""

import json

import pytest
from scipy import stats

from ghostnoise.lab.report import measures
from support.run_folders import experiment, findings, points, write


def filled(tmp_path, speeds, environment=None, **more):
    """Write runs of all cells; `speeds` has the images per second of each seed, by the cell's name."""
    made = experiment(tmp_path)
    for point in points(made):
        if point.cell in speeds:
            folder = write(tmp_path, point, 90.0 + point.seed, environment=environment and environment(point))
            path = folder / "result.json"
            result = json.loads(path.read_text()) | {"images_per_second": speeds[point.cell][point.seed]} | more
            path.write_text(json.dumps(result))
    return findings(tmp_path, made)


def test_intervals_are_those_of_the_t_distribution():
    values = [90.0, 90.4, 90.2, 91.0]
    found = measures.summarized(values)
    expected = stats.t.interval(0.95, 3, loc=90.4, scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert (found.mean, found.n, found.band) == (pytest.approx(90.4), 4, (found.low, found.high))


def test_one_run_has_no_interval_and_two_have_none_that_is_drawn():
    assert measures.summarized([]) is None
    one, two = measures.summarized([90.0]), measures.summarized([90.0, 91.0])
    assert (one.low, one.high, one.band) == (None, None, None)
    assert two.high - two.low == pytest.approx(2 * 12.7062 * 0.5, rel=1e-4)
    assert two.band is None


def test_the_gap_is_training_minus_test_accuracy_of_finished_runs(tmp_path):
    found = filled(tmp_path, {"BN": [100.0, 100.0, 100.0]}, train_accuracy=99.0)
    scores = {row.name: row.score for row in found.rows}
    assert measures.gap(scores["BN"]).values == (9.0, 8.0, 7.0)
    assert measures.gap(scores["GNI ghost_size=4"]) is None


def test_costs_are_relative_to_the_median_run_of_the_baseline(tmp_path):
    found = filled(tmp_path, {"BN": [90.0, 100.0, 110.0], "GNI ghost_size=4": [50.0, 40.0, 80.0]})
    bn, gni = [cost for _, cost in measures.costs(found)]
    assert bn.median == pytest.approx(1)
    assert (gni.median, gni.fastest, gni.slowest) == pytest.approx((2, 1.25, 2.5))
    assert (bn.rough, gni.rough) == (False, True)
    (note,) = measures.cost_notes(found)
    assert "factor of up to 2.0" in note


def test_without_a_baseline_there_are_no_costs(tmp_path):
    found = filled(tmp_path, {"GNI ghost_size=4": [50.0, 40.0, 80.0]})
    assert measures.costs(found) == []
    assert measures.cost_notes(found) == []


def test_times_of_different_machines_and_resumed_runs_are_noted(tmp_path):
    def environment(point):
        started = "2030-01-01T10:00:05+00:00" if point.seed else "2030-01-01T10:00:58+00:00"
        return {"started": started, "device_name": "fast" if point.seed else "slow"}

    speeds = {"BN": [100.0] * 3, "GNI ghost_size=4": [100.0] * 3}
    found = filled(tmp_path, speeds, environment, seconds=50.0, ended="2030-01-01T10:01:00+00:00")
    machines, resumed = measures.cost_notes(found)
    assert "different machines (fast, slow)" in machines
    assert resumed.startswith("2 of 6 runs were interrupted and resumed")
