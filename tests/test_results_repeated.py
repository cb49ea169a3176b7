"""Published results can be obtained again: runs repeated from their records, and an experiment in plain PyTorch."""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scipy import stats

from ghostnoise.lab import records
from ghostnoise.lab.config import grid, recipe
from support import plain_signals

RECORDS = Path(__file__).parents[1] / "results" / "mnist1d-table1" / "records.jsonl"
UNLIKELY = 1e-3  # probability that a test fails although nothing is wrong, for normally distributed accuracies
SEEDS = 6


@pytest.fixture(scope="module")
def accuracies():
    """The published accuracies of each method, by seed."""
    found = {each.identity: each.result for each in records.read(RECORDS).runs}
    made = grid.load("mnist1d-table1")
    return {
        cell.method: {seed: found[recipe.identity(cell.run(seed))] for seed in made.seeds_of(cell)}
        for cell in made.cells()
    }


@pytest.mark.slow
@pytest.mark.parametrize("chosen", range(3))
def test_a_run_repeated_from_its_record(chosen, accuracies, tmp_path):
    """With the weights of the record, or else with an accuracy that another seed could have.

    Weights have the same hash on the same kind of machine, as long as nothing changes the rounding.
    """
    method, seed = random.Random(chosen).choice([(name, seed) for name, runs in accuracies.items() for seed in runs])
    words = ["sweep", "mnist1d-table1", "--only", method, "--seeds", str(seed), "--workers", "1", "--threads", "1"]
    subprocess.run([sys.executable, "-m", "ghostnoise", *words, "--runs", str(tmp_path)], check=True, timeout=600)
    (path,) = tmp_path.glob("mnist1d-table1/*/result.json")
    result, record = json.loads(path.read_text()), accuracies[method][seed]
    if result["weights_sha256"] != record.weights_sha256:
        published = [each.accuracy for each in accuracies[method].values()]
        n, std = len(published), statistics.stdev(published)
        bound = stats.t.isf(UNLIKELY / 2, n - 1) * std * (1 + 1 / n) ** 0.5
        assert abs(result["accuracy"] - statistics.fmean(published)) < bound


@pytest.mark.slow
@pytest.mark.parametrize(("method", "size"), [("BN", None), ("GBN", 16), ("GNI", 16)])
def test_plain_pytorch_gives_the_published_accuracy(method, size, accuracies):
    """The means differ by less than the bound of Welch's t-test."""
    state = torch.get_rng_state()
    train, test = plain_signals.signals()
    found = [plain_signals.accuracy(method, size, 100 + seed, train, test) for seed in range(SEEDS)]
    torch.set_rng_state(state)
    published = [each.accuracy for each in accuracies[f"{method}-{size}" if size else method].values()]
    assert stats.ttest_ind(found, published, equal_var=False).pvalue > UNLIKELY
