import pytest

from ghostnoise.lab.config import grid, plan, recipe
from ghostnoise.lab.store.scan import Found
from ghostnoise.lab.sweep.machine import resolver
from support import experiment

SELECT = experiment.THREE + '[select]\naxes = ["norm.ghost_size"]\n'


def on_cpu(settings):
    return recipe.resolve(settings, device="cpu", processes=1)


def loaded(tmp_path, text=SELECT, **options):
    return grid.load(experiment.write(tmp_path, text), **options)


def scored(points, scores, metric="accuracy"):
    """Results for tuning runs: {cell name: one score for each seed}."""
    return {
        point.key: {"status": "finished" if score is not None else "diverged", metric: score}
        for point in points
        if point.cell.name in scores
        for score in [scores[point.cell.name][point.seed]]
    }


def test_without_select_all_points_are_tests(tmp_path):
    points = plan.first_points(loaded(tmp_path, experiment.THREE), on_cpu)
    assert len(points) == 10
    assert {point.stage for point in points} == {"test"}
    assert all(point.identity == recipe.identity(point.settings) for point in points)
    assert len({point.identity for point in points}) == 10
    assert points[1].name == "BN seed 1"


def test_with_select_what_has_one_cell_is_tested_at_once_on_test_images(tmp_path):
    points = plan.first_points(loaded(tmp_path), on_cpu)
    stages = {(point.cell.method, point.stage, point.settings.data.evaluate) for point in points}
    assert stages == {("BN", "test", "test"), ("GBN", "tune", "validation"), ("GNI", "tune", "validation")}


def test_the_mean_over_seeds_wins_and_the_first_of_equals(tmp_path):
    made = loaded(tmp_path)
    points = plan.first_points(made, on_cpu)
    scores = {
        "GBN ghost_size=4": [90.0, 10.0], "GBN ghost_size=16": [51.0, 51.0],
        "GNI ghost_size=4": [60.0, 40.0], "GNI ghost_size=16": [50.0, 50.0],
    }  # fmt: skip
    chosen = plan.winners(made, points, scored(points, scores))
    assert {group: cell.name for group, cell in chosen.items()} == {
        "GBN": "GBN ghost_size=16", "GNI": "GNI ghost_size=4",
    }  # fmt: skip
    tests = plan.test_points(made, chosen, on_cpu)
    assert [(point.cell.name, point.seed, point.stage) for point in tests] == [
        ("GBN ghost_size=16", 0, "test"), ("GBN ghost_size=16", 1, "test"),
        ("GNI ghost_size=4", 0, "test"), ("GNI ghost_size=4", 1, "test"),
    ]  # fmt: skip
    assert {point.settings.data.evaluate for point in tests} == {"test"}


def test_a_cell_that_diverged_does_not_win_and_none_does_if_all_did(tmp_path):
    made = loaded(tmp_path)
    points = plan.first_points(made, on_cpu)
    scores = {
        "GBN ghost_size=4": [99.0, None], "GBN ghost_size=16": [20.0, 20.0],
        "GNI ghost_size=4": [None, None], "GNI ghost_size=16": [None, 50.0],
    }  # fmt: skip
    assert {k: cell.name for k, cell in plan.winners(made, points, scored(points, scores)).items()} == {
        "GBN": "GBN ghost_size=16"
    }


def test_nothing_is_chosen_while_a_run_is_missing(tmp_path):
    made = loaded(tmp_path)
    points = plan.first_points(made, on_cpu)
    results = scored(points, {"GBN ghost_size=4": [1.0, 1.0], "GBN ghost_size=16": [2.0, 2.0]})
    assert set(plan.winners(made, points, results)) == {"GBN"}
    results.popitem()
    assert plan.winners(made, points, results) == {}


def test_the_lowest_loss_wins(tmp_path):
    made = loaded(tmp_path, SELECT + 'metric = "loss"\n', only=["GNI"])
    points = plan.first_points(made, on_cpu)
    scores = {"GNI ghost_size=4": [0.5, 0.5], "GNI ghost_size=16": [0.4, 0.4]}
    chosen = plan.winners(made, points, scored(points, scores, "loss"))
    assert chosen["GNI"].name == "GNI ghost_size=16"


def test_each_place_on_an_axis_that_is_not_tuned_has_a_winner(tmp_path):
    text = SELECT.replace("seeds = [0, 1]", "seeds = [0]\naxes.optim.lr = [0.1, 0.2]")
    made = loaded(tmp_path, text, only=["GNI"])
    points = plan.first_points(made, on_cpu)
    scores = {
        "GNI lr=0.1 ghost_size=4": [1.0], "GNI lr=0.1 ghost_size=16": [2.0],
        "GNI lr=0.2 ghost_size=4": [4.0], "GNI lr=0.2 ghost_size=16": [3.0],
    }  # fmt: skip
    chosen = plan.winners(made, points, scored(points, scores))
    assert {group: cell.name for group, cell in chosen.items()} == {
        "GNI lr=0.1": "GNI lr=0.1 ghost_size=16", "GNI lr=0.2": "GNI lr=0.2 ghost_size=4",
    }  # fmt: skip


def test_the_key_is_the_same_on_every_device_and_the_identity_is_not(tmp_path):
    made = loaded(tmp_path)
    here = plan.first_points(made, on_cpu)
    there = plan.first_points(made, lambda settings: recipe.resolve(settings, device="cuda", processes=1))
    assert [point.key for point in here] == [point.key for point in there]
    assert not {point.identity for point in here} & {point.identity for point in there}


def test_a_run_folder_has_its_points_key(tmp_path):
    point = plan.first_points(loaded(tmp_path), on_cpu)[0]
    written = {"recipe": "small", "identity": point.identity} | point.settings.model_dump(exclude_none=True)
    assert plan.key_of(Found(tmp_path, "finished", written)) == point.key
    assert plan.key_of(Found(tmp_path, "finished", {"model": 3})) is None


@pytest.mark.parametrize("smoke", [False, True])
def test_the_sweep_resolves_settings_as_a_single_run_does(tmp_path, smoke):
    made = loaded(tmp_path, smoke=smoke)
    resolve = resolver(None)
    for cell in made.cells():
        kind = resolve(cell.settings).train.device
        assert resolve(cell.settings) == recipe.resolve(cell.settings, device=kind, processes=1)
