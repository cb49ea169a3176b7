"""Training steps of the methods of a recipe."""

import math
import random

import pytest
import torch

from ghostnoise import cli
from ghostnoise.bench import recipe
from ghostnoise.bench.run import read
from ghostnoise.bench.settings import Settings
from ghostnoise.lab.errors import UserError


def test_the_baseline_is_first(tmp_path):
    (row,), left_out = recipe.plan(Settings("recipe", torch.device("cpu"), recipe="mnist1d-table1"))
    assert row.name == "mnist1d-table1 batch 256"
    assert [cell.cell for cell in row.cells][:3] == ["BN", "GBN-16", "XBN-32"]
    assert len(row.cells) == 9
    assert left_out == []


def test_records(tmp_path, capsys):
    arguments = ["bench", "recipe", "demo", "--threads", "1", "--rounds", "7", "--cpu-time", "--quick"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    records = read(tmp_path / "recipe.json")
    assert records[0]["contender"] == "BN"
    assert {record["n"] for record in records} == {7}
    assert {record["clock"] for record in records} == {"CPU time"}
    assert [records[0][key] for key in ("ratio_paired", "ratio_low", "ratio_high")] == [1, 1, 1]
    for record in records:
        assert 0 < record["ratio_low"] <= record["ratio_paired"] <= record["ratio_high"]


def test_settings_and_precision_are_those_of_the_recipe_and_its_overrides(tmp_path, capsys):
    dtypes = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, made: dtypes.append(made.dtype) if isinstance(module, torch.nn.Linear) else None
    )
    words = ["bench", "recipe", "table4", "train.amp=bf16", "optim.lr=0.1", "--rounds", "1", "--quick"]
    with hook:
        assert cli.main([*words, "--out", str(tmp_path)]) == 0
    records = read(tmp_path / "recipe.json")
    assert [record["contender"] for record in records] == ["baseline lr=0.1", "GNI-16 lr=0.1", "GNI-32 lr=0.1"]
    assert {record["dtype"] for record in records} == {"bfloat16"}
    assert set(dtypes) == {torch.bfloat16}
    with pytest.raises(UserError, match=r"'baseline', must be one cell, and has 3; give one value .* optim\.lr=0\.1"):
        recipe.plan(Settings("recipe", torch.device("cpu"), recipe="table4"))


@pytest.mark.parametrize("words", [["--cpu-time"], ["--cpu-time", "--threads", "2"]])
def test_cpu_time_of_several_threads_is_refused(tmp_path, capsys, words):
    assert cli.main(["bench", "recipe", "demo", "--out", str(tmp_path), *words]) == 2
    assert "give --threads 1" in capsys.readouterr().err


def test_recipes_that_cannot_be_measured():
    for name, line in (("mnist1d-fig3", None), ("table2-i1k", "no fixed shape"), ("digits", "has no [grid]")):
        settings = Settings("recipe", torch.device("cpu"), recipe=name)
        if line is None:
            assert recipe.plan(settings)[0]
            continue
        with pytest.raises(UserError, match=line.replace("[", r"\[")):
            recipe.plan(settings)


def test_the_interval_of_a_median_contains_it_in_95_of_100_cases():
    """Coverage is at least 95 %, and not much more: within 5 standard errors of the exact coverage at n = 20."""
    generator = random.Random(0)
    hits, trials = 0, 4000
    for _ in range(trials):
        low, high = recipe.median_interval(sorted(generator.random() for _ in range(20)))
        hits += low <= 0.5 <= high
    exact = 1 - 2 * sum(math.comb(20, k) for k in range(6)) / 2**20
    assert exact == pytest.approx(0.9586, abs=1e-4)
    assert abs(hits / trials - exact) < 5 * math.sqrt(exact * (1 - exact) / trials)


def test_too_few_values_have_no_interval():
    assert all(math.isnan(end) for end in recipe.median_interval([1.0] * 5))
    assert recipe.median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
