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

from ghostnoise.cli import results
from ghostnoise.lab.report.published import Publisher
from support import plain_signals

ROOT = Path(__file__).parents[1]
EXPERIMENT = "mnist1d-table1"
UNLIKELY = 1e-3  # probability that a test fails although nothing is wrong, for normally distributed accuracies
SEEDS = 6


@pytest.fixture(scope="module")
def published():
    """The published results of each method, by seed."""
    findings = Publisher(ROOT, results.load, {}).findings([EXPERIMENT])
    return {row.method: {run.seed: run.result for run in row.score.runs} for row in findings.rows}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", range(3))
def test_a_run_repeated_from_its_record(chosen, published, tmp_path):
    """With the weights of the record, or else with an accuracy that another seed could have.

    Weights have the same hash on the same kind of machine, as long as nothing changes the rounding.
    """
    method, seed = random.Random(chosen).choice([(name, seed) for name, runs in published.items() for seed in runs])
    words = ["sweep", EXPERIMENT, "--only", method, "--seeds", str(seed), "--workers", "1", "--threads", "1"]
    subprocess.run([sys.executable, "-m", "ghostnoise", *words, "--runs", str(tmp_path)], check=True, timeout=600)
    (path,) = tmp_path.glob(f"{EXPERIMENT}/*/run.json")
    result, record = json.loads(path.read_text())["result"], published[method][seed]
    if result["weights_sha256"] != record["weights_sha256"]:
        seen = [each["accuracy"] for each in published[method].values()]
        n, std = len(seen), statistics.stdev(seen)
        bound = stats.t.isf(UNLIKELY / 2, n - 1) * std * (1 + 1 / n) ** 0.5
        assert abs(result["accuracy"] - statistics.fmean(seen)) < bound


@pytest.mark.slow
@pytest.mark.parametrize(("method", "size"), [("BN", None), ("GBN", 16), ("GNI", 16)])
def test_plain_pytorch_gives_the_published_accuracy(method, size, published):
    """The means differ by less than the bound of Welch's t-test."""
    with torch.random.fork_rng(devices=[]):
        train, test = plain_signals.signals()
        found = [plain_signals.accuracy(method, size, 100 + seed, train, test) for seed in range(SEEDS)]
    seen = [each["accuracy"] for each in published[f"{method}-{size}" if size else method].values()]
    assert stats.ttest_ind(found, seen, equal_var=False).pvalue > UNLIKELY
