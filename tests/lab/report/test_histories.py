"""Training curves of a page: means with intervals and seeds, thinned and rounded so that a page stays small."""

import itertools
import json
import re

import pytest
from scipy import stats

from ghostnoise.lab.report import histories
from support.run_folders import evaluate_only, experiment, fill, findings, points, write

GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 91.1}, "GNI ghost_size=16": {0: 93.0}}


def test_a_cell_has_the_mean_the_interval_and_its_seeds(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    data = histories.page_data(findings(tmp_path, made))
    bn, gni = data["groups"]
    curve = bn["curves"]["accuracy"]
    assert curve["x"] == [1, 2, 3]
    low, high = stats.t.interval(0.95, 2, loc=90.5, scale=stats.sem([90.0, 90.4, 91.1]))
    assert (curve["mean"][2], curve["low"][2], curve["high"][2]) == pytest.approx((90.5, low, high), abs=0.01)
    assert [run[2] for run in curve["runs"]] == [90, 90.4, 91.1]
    single = gni["curves"]["accuracy"]
    assert (single["low"], "runs" in single) == ([None] * 3, False)  # the mean is the only run
    assert data["first"] == "accuracy"


def test_a_page_first_shows_a_measure_that_has_a_curve(tmp_path):
    made = experiment(tmp_path)
    for point in points(made):
        evaluate_only(write(tmp_path, point), (3,))
    data = histories.page_data(findings(tmp_path, made))
    assert data["groups"][0]["curves"]["accuracy"]["x"] == [3]
    assert data["first"] == "train_loss"


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path):
    assert histories.thinned(range(1, 6), 5) == [1, 2, 3, 4, 5]
    kept = histories.thinned(range(1, 1001), 50)
    assert (kept[0], kept[-1], len(kept)) == (1, 1000, 50)
    gaps = {second - first for first, second in itertools.pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("counts", "points", "seeds"),
    [([5] * 7, 120, True), ([10] * 49, 43, True), ([10] * 500, 15, False), ([1] * 5000, 15, False)],
)
def test_the_numbers_on_a_page_are_limited(counts, points, seeds):
    assert histories.allowed(counts) == (points, seeds)


def test_numbers_are_as_short_as_a_screen_needs(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {"BN": {0: 90.123456789, 1: 91.0, 2: 92.0}})
    text = json.dumps(histories.page_data(findings(tmp_path, made)))
    assert "90.12" in text
    assert "90.123" not in text
    assert not re.search(r"\b91\.0\b", text)
