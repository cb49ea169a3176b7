"""Thousands of finished runs without training: an experiment, and the folders that its runs would leave.

    python -m support.many_runs FOLDER [SEEDS]

writes FOLDER/many.toml and FOLDER/runs/many/, 500 cells with SEEDS seeds each (10, that is, 5,000 runs).
"""

import sys
from dataclasses import replace
from pathlib import Path

from ghostnoise.lab.config import grid, recipe
from ghostnoise.lab.store import record, scan
from ghostnoise.lab.store.folder import RUN
from support.records import ENVIRONMENT, on_cpu

EPOCHS = 10
RECIPE = """\
# Claim: noise helps

[model]
name = "digits-net"
[norm]
method = "bn"
[data]
name = "digits"
evaluate = "test"
[optim]
lr = 0.1
[train]
epochs = {epochs}
batch_size = 64

[grid]
seeds = {seeds}
axes.optim.lr = [0.01, 0.02, 0.04, 0.08, 0.1, 0.16, 0.2, 0.32, 0.4, 0.64]
axes.norm.ghost_size = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
[[grid.methods]]
label = "BN"
without = ["norm.ghost_size"]
[[grid.methods]]
label = "GBN"
set.norm.method = "gbn"
[[grid.methods]]
label = "GNI"
set.norm.method = "gni"
[[grid.methods]]
label = "AGNI"
set.norm.method = "agni"
[[grid.methods]]
label = "XBN"
set.norm.method = "xbn"
axes.norm.ghost_size = [2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 48, 64]

[report]
form = "curves"
x = "norm.ghost_size"
claims = ["GNI > BN", "GNI > GBN"]
"""


def write_experiment(folder, seeds=10):
    path = Path(folder) / "many.toml"
    path.write_text(RECIPE.format(epochs=EPOCHS, seeds=list(range(seeds))))
    return path


def write_runs(path, runs):
    """Write the folder of each run of a recipe, as a CPU leaves it; return how many there are."""
    planned = grid.load(str(path)).runs(on_cpu)
    for at, run in enumerate(planned):
        folder = Path(runs) / run.recipe / run.identity
        (folder / "checkpoints").mkdir(parents=True)
        lines = _metrics(at)
        ended = replace(run, result=_result(run, lines), curve=record.curve_of(lines), environments=[ENVIRONMENT])
        (folder / RUN).write_text(record.line(ended) + "\n")
        (folder / ".lock").touch()
    assert len({run.identity for run in planned}) == len(planned)
    assert recipe.identity(planned[0].settings) == planned[0].identity
    return len(planned)


def _metrics(at):
    """Return metrics that differ from run to run in all of their digits."""
    shift = (at * 0.6180339887498949) % 1
    return [
        {
            "epoch": epoch, "step": 22 * epoch, "lr": 0.1 / epoch, "split": "test", "train_loss": (1 + shift) / epoch,
            "train_accuracy": 90 + 9 * shift / epoch, "loss": (2 + shift) / (epoch + 1),
            "accuracy": 88 + 10 * shift * epoch / (EPOCHS + 1), "images_per_second": 1000 + round(shift, 1),
            "seconds": round(epoch + shift, 3),
        }
        for epoch in range(1, EPOCHS + 1)
    ]  # fmt: skip


def _result(run, lines):
    last = lines[-1]
    return {
        "status": "finished", "split": "test", "epochs": EPOCHS, "steps": last["step"],
        **{name: last[name] for name in ("train_loss", "train_accuracy", "loss", "accuracy")},
        "best_accuracy": last["accuracy"], "best_epoch": EPOCHS, "parameters": 1234,
        "weights_sha256": run.identity * 5 + "abcd", "images_per_second": 1000.5, "seconds": last["seconds"],
        "ended": "2026-01-31T12:00:10+00:00",
    }  # fmt: skip


def indexed(runs):
    """Scan a folder with an index; here, since processes that are started anew cannot import test modules."""
    scan.INDEXED, scan.RACY = 1, 0.0
    return scan.scan(runs, lambda line: None)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    made = write_runs(write_experiment(target, *map(int, sys.argv[2:])), target / "runs")
    print(made, "runs")
