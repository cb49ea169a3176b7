"""Experiments and run folders made by hand, for tests of reports."""

import json
from pathlib import Path

from ghostnoise.lab.config import grid
from ghostnoise.lab.report.claims import judge
from ghostnoise.lab.report.collect import collect
from ghostnoise.lab.report.statistics import aggregate

RECIPE = """\
# Claim: {claim}

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
epochs = 3
batch_size = 64

[grid]
seeds = {seeds}
[[grid.methods]]
label = {base}
set = {{ norm.method = "bn" }}
paper = "90.1 ± 0.2"
[[grid.methods]]
label = "GNI"
set = {{ norm.method = "gni" }}
axes = {{ norm.ghost_size = [4, 16] }}

{more}
[report]
form = "{form}"
{x}
claims = {claims}
"""


def experiment(
    folder, *, name="tiny", seeds="[0, 1, 2]", base="BN", claim="noise helps", form="bars", claims=None, more="", **load
):
    x = 'x = "norm.ghost_size"' if form == "curves" else ""
    claims = [f"GNI > {base}"] if claims is None else claims
    text = RECIPE.format(
        claim=claim, seeds=seeds, base=json.dumps(base), form=form, x=x, claims=json.dumps(claims), more=more
    )
    path = Path(folder) / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return grid.load(str(path), **load)


def points(made, cells=None):
    """Return the runs of the first stage, or those of some cells."""
    return [run for run in made.runs() if cells is None or run.cell in cells]


def write(runs, point, accuracy=90.0, *, status="finished", device="cpu", name=None, failure=None, environment=None):
    """Write a run folder as a machine with `device` leaves it."""
    train = point.settings.train.model_copy(update={"device": device})
    settings = point.settings.model_copy(update={"train": train}).model_dump(exclude_none=True)
    folder = Path(runs) / "tiny" / (name or f"{point.key}-{device}")
    folder.mkdir(parents=True)
    header = {"recipe": "tiny", "identity": folder.name}
    (folder / "settings.json").write_text(json.dumps(header | settings))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.8", "device": device} | (environment or {})))
    lines = [
        {"epoch": k + 1, "loss": 1 / (k + 1), "accuracy": accuracy - 2 + k, "train_loss": 0.5, "train_accuracy": 95.0}
        for k in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status in ("finished", "diverged"):
        finished = status == "finished"
        result = {
            "status": status,
            "accuracy": accuracy if finished else None,
            "loss": 0.3 if finished else None,
            "best_accuracy": min(accuracy + 1, 100.0),
            "seconds": 10.0 + point.seed,
            "images_per_second": 100.0,
        }
        (folder / "result.json").write_text(json.dumps(result))
    if status == "failed":
        (folder / "failure.json").write_text(json.dumps({"message": failure or "RuntimeError: no luck\nmore"}))
    return folder


def evaluate_only(folder, epochs):
    """Remove the evaluations after other epochs from the metrics of a run, as `train.evaluate_every` does."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["epoch"] not in epochs:
            line |= {"loss": None, "accuracy": None}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def fill(runs, made, scores, **options):
    """Write finished runs: `scores` has, by the cell's name, an accuracy for each seed."""
    for point in points(made):
        accuracy = scores.get(point.cell, {}).get(point.seed)
        if accuracy is not None:
            write(runs, point, accuracy, **options)


def findings(runs, made, warn=lambda line: None, further=None):
    return judge(aggregate(collect(made, Path(runs) / "tiny", warn)), further)
