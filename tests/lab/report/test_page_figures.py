"""Data of the page's figures: the views, the gap, and the accuracy against the cost."""

import json

from ghostnoise.lab.report import page_figures
from support.run_folders import experiment, fill, findings

GOOD = {
    "BN": {0: 90.0, 1: 90.4, 2: 90.2},
    "GNI ghost_size=4": {0: 91.0},
    "GNI ghost_size=16": {0: 93.0, 1: 93.6, 2: 93},
}


def test_points_have_what_a_reader_can_ask_for(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    data = page_figures.plots(findings(tmp_path, made), ())
    json.dumps(data, allow_nan=False)
    (rows,) = data["views"]
    bn, single, gni = [series["points"][0] for series in rows["series"]]
    assert (bn["n"], bn["mean"], bn["paper"], bn["seeds"]) == (3, 90.2, 90.1, [90, 90.4, 90.2])
    assert bn["band"] == [bn["low"], bn["high"]]
    assert (single["low"], "band" in single, "paper" in gni) == (None, False, False)
    assert "hollow: fewer than 3 seeds" in rows["note"]
    assert data["gap"] is None  # these runs have no training accuracy
    low, high = rows["range"]
    assert 88 < low < 90
    assert 93.6 < high < 96


def test_the_cost_names_the_best_cell_of_each_method(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    data = page_figures.cost(findings(tmp_path, made))
    assert [(point["label"], point["best"], point["cost"]) for point in data["points"]] == [
        ("BN", True, 1), ("GNI 4", False, 1), ("GNI 16", True, 1),
    ]  # fmt: skip
    assert data["x"] == "training time relative to BN"


def test_one_cell_has_no_comparison_of_costs(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {"BN": {0: 90.0}})
    assert page_figures.cost(findings(tmp_path, made)) is None


def test_a_cell_without_a_result_says_why(tmp_path):
    data = page_figures.plots(findings(tmp_path, experiment(tmp_path)), ())
    (rows,) = data["views"]
    assert rows["range"] is None
    assert [series["points"][0]["lacking"] for series in rows["series"]] == ["3 missing"] * 3
