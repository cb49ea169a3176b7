from dataclasses import replace

import pytest

from ghostnoise.lab.config import grid, recipe
from ghostnoise.lab.run import Run
from ghostnoise.lab.sweep.run import resolver
from support import experiment

SELECT = experiment.THREE + '[select]\naxes = ["norm.ghost_size"]\n'


def on_cpu(settings):
    return recipe.resolve(settings, device="cpu", processes=1)


def loaded(tmp_path, text=SELECT, **options):
    return grid.load(experiment.write(tmp_path, text), **options)


def scored(runs, scores, metric="accuracy"):
    """Fill in the results of tuning runs: {cell: one score for each seed}."""

    def fill(run):
        if run.stage != "tune" or run.cell not in scores:
            return run
        score = scores[run.cell][run.seed]
        return replace(run, status="diverged" if score is None else "finished", result={metric: score})

    return [fill(run) for run in runs]


def test_without_select_all_points_are_tests(tmp_path):
    points = loaded(tmp_path, experiment.THREE).runs(on_cpu)
    assert len(points) == 10
    assert {point.stage for point in points} == {"test"}
    assert all(point.identity == recipe.identity(point.settings) for point in points)
    assert len({point.identity for point in points}) == 10
    assert points[1].name == "BN seed 1"


def test_with_select_what_has_one_cell_is_tested_at_once_on_test_images(tmp_path):
    points = loaded(tmp_path).runs(on_cpu)
    stages = {(point.label, point.stage, point.settings.data.evaluate) for point in points}
    assert stages == {("BN", "test", "test"), ("GBN", "tune", "validation"), ("GNI", "tune", "validation")}


def test_the_mean_over_seeds_wins_and_the_first_of_equals(tmp_path):
    made = loaded(tmp_path)
    points = made.runs(on_cpu)
    scores = {
        "GBN ghost_size=4": [90.0, 10.0], "GBN ghost_size=16": [51.0, 51.0],
        "GNI ghost_size=4": [60.0, 40.0], "GNI ghost_size=16": [50.0, 50.0],
    }  # fmt: skip
    chosen = made.winners(scored(points, scores))
    assert {group: run.cell for group, run in chosen.items()} == {
        "GBN": "GBN ghost_size=16", "GNI": "GNI ghost_size=4",
    }  # fmt: skip
    tests = made.tests(chosen, on_cpu)
    assert [(point.cell, point.seed, point.stage) for point in tests] == [
        ("GBN ghost_size=16", 0, "test"), ("GBN ghost_size=16", 1, "test"),
        ("GNI ghost_size=4", 0, "test"), ("GNI ghost_size=4", 1, "test"),
    ]  # fmt: skip
    assert {point.settings.data.evaluate for point in tests} == {"test"}


def test_a_cell_that_diverged_does_not_win_and_none_does_if_all_did(tmp_path):
    made = loaded(tmp_path)
    points = made.runs(on_cpu)
    scores = {
        "GBN ghost_size=4": [99.0, None], "GBN ghost_size=16": [20.0, 20.0],
        "GNI ghost_size=4": [None, None], "GNI ghost_size=16": [None, 50.0],
    }  # fmt: skip
    assert {group: run.cell for group, run in made.winners(scored(points, scores)).items()} == {
        "GBN": "GBN ghost_size=16"
    }


def test_nothing_is_chosen_while_a_run_is_missing(tmp_path):
    made = loaded(tmp_path)
    points = made.runs(on_cpu)
    runs = scored(points, {"GBN ghost_size=4": [1.0, 1.0], "GBN ghost_size=16": [2.0, 2.0]})
    assert set(made.winners(runs)) == {"GBN"}
    at = next(at for at, run in enumerate(runs) if run.cell == "GBN ghost_size=16")
    assert made.winners([*runs[:at], points[at], *runs[at + 1 :]]) == {}


def test_results_of_methods_that_have_changed_since_are_not_compared_with_new_ones(tmp_path):
    """A sweep trains the old ones again, and a report must not choose a cell that the sweep may not test."""
    made = loaded(tmp_path, only=["GBN"])
    scores = {"GBN ghost_size=4": [1.0, 1.0], "GBN ghost_size=16": [2.0, 2.0]}
    new, newer = ([replace(run, environments=[{"numerics": number}]) for run in scored(made.runs(on_cpu), scores)]
                  for number in (1, 2))  # fmt: skip
    assert made.winners(new)["GBN"].cell == made.winners(newer)["GBN"].cell == "GBN ghost_size=16"
    assert made.winners([*new[:2], *newer[2:]]) == {}


def test_the_lowest_loss_wins(tmp_path):
    made = loaded(tmp_path, SELECT + 'metric = "loss"\n', only=["GNI"])
    points = made.runs(on_cpu)
    scores = {"GNI ghost_size=4": [0.5, 0.5], "GNI ghost_size=16": [0.4, 0.4]}
    chosen = made.winners(scored(points, scores, "loss"))
    assert chosen["GNI"].cell == "GNI ghost_size=16"


def test_each_place_on_an_axis_that_is_not_tuned_has_a_winner(tmp_path):
    text = SELECT.replace("seeds = [0, 1]", "seeds = [0]\naxes.optim.lr = [0.1, 0.2]")
    made = loaded(tmp_path, text, only=["GNI"])
    points = made.runs(on_cpu)
    scores = {
        "GNI lr=0.1 ghost_size=4": [1.0], "GNI lr=0.1 ghost_size=16": [2.0],
        "GNI lr=0.2 ghost_size=4": [4.0], "GNI lr=0.2 ghost_size=16": [3.0],
    }  # fmt: skip
    chosen = made.winners(scored(points, scores))
    assert {group: run.cell for group, run in chosen.items()} == {
        "GNI lr=0.1": "GNI lr=0.1 ghost_size=16", "GNI lr=0.2": "GNI lr=0.2 ghost_size=4",
    }  # fmt: skip


def test_the_key_is_the_same_on_every_device_and_the_identity_is_not(tmp_path):
    made = loaded(tmp_path)
    here = made.runs(on_cpu)
    there = made.runs(lambda settings: recipe.resolve(settings, device="cuda", processes=1))
    assert [point.key for point in here] == [point.key for point in there]
    assert not {point.identity for point in here} & {point.identity for point in there}


def test_a_run_on_disk_has_the_key_of_its_plan(tmp_path):
    run = loaded(tmp_path).runs(on_cpu)[0]
    assert Run("small", run.identity, dict(run.tree)).key == run.key
    assert Run("small", run.identity, {"model": 3}).key is None


@pytest.mark.parametrize("smoke", [False, True])
def test_the_sweep_resolves_settings_as_a_single_run_does(tmp_path, smoke):
    made = loaded(tmp_path, smoke=smoke)
    resolve = resolver(None)
    for run in made.runs():
        kind = resolve(run.settings).train.device
        assert resolve(run.settings) == recipe.resolve(run.settings, device=kind, processes=1)
