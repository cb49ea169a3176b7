"""Complete run folders, as training leaves them, for tests of records."""

import json
from dataclasses import replace
from pathlib import Path

from ghostnoise.lab.run import Run
from ghostnoise.lab.store import record
from ghostnoise.lab.store.folder import RUN
from support.run_folders import experiment

ENVIRONMENT = {
    "ghostnoise": "0.1.0", "numerics": 1, "commit": "0123456789abcdef0123456789abcdef01234567", "python": "3.11.7",
    "torch": "2.8.0+cpu", "device": "cpu", "device_name": "AMD EPYC", "threads": 1, "processes": 1,
    "started": "2026-01-31T12:00:00+00:00",
}  # fmt: skip


def finished(runs, name, settings, accuracy=90.0, *, environment=None, status="finished", every=1, old=False):
    """Write the folder of a run that ended, evaluated after every `every` epochs and the last; return its path.

    `old` writes it as version 0.1 did.
    """
    planned = Run.planned(name, settings)
    folder = Path(runs) / name / planned.identity
    folder.mkdir(parents=True)
    epochs, lines = settings.train.epochs, []
    for epoch in range(1, epochs + 1):
        shared = {"epoch": epoch, "step": 5 * epoch, "lr": 0.1 / epoch, "split": settings.data.evaluate}
        scored = epoch % every == 0 or epoch == epochs
        line = shared | {"train_loss": 1 / (epoch + 2), "train_accuracy": 95.0, "loss": 1 / 3 if scored else None}
        line |= {"accuracy": accuracy - epochs + epoch if scored else None, "images_per_second": 1.5}
        line |= {"seconds": float(epoch)}
        lines.append(line)
    result = {"status": status, "split": settings.data.evaluate, "epochs": epochs, "steps": 5 * epochs}
    result |= {name: lines[-1][name] for name in ("train_loss", "train_accuracy", "loss", "accuracy")}
    result |= {"best_accuracy": accuracy, "best_epoch": epochs, "parameters": 1234}
    result |= {"weights_sha256": planned.identity * 5 + "abcd", "images_per_second": 100.5, "seconds": 10.25}
    result |= {"ended": "2026-01-31T12:00:10+00:00"}
    if status == "diverged":
        lines[-1] |= {"train_loss": None, "train_accuracy": None, "loss": None, "accuracy": None}
        result |= {"accuracy": None, "loss": None, "epochs": epochs - 1}
    environment = ENVIRONMENT | (environment or {})
    if not old:
        ended = replace(planned, result=result, curve=record.curve_of(lines), environments=[environment])
        (folder / RUN).write_text(record.line(ended) + "\n")
        return folder
    header = {"recipe": name, "identity": planned.identity}
    files = {"settings": header | settings.model_dump(exclude_none=True), "result": result | header}
    for file, content in (files | {"environment": environment}).items():
        (folder / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def change(folder, **values):
    """Change values of the result of a run."""
    tree = json.loads((folder / RUN).read_text())
    tree["result"] |= values
    (folder / RUN).write_text(json.dumps(tree, separators=(",", ":")) + "\n")


def on_cpu(settings):
    return settings.model_copy(update={"train": settings.train.model_copy(update={"device": "cpu"})})


def experiment_with_runs(folder, runs="runs", **options):
    """Write `tiny.toml` and all of its runs; return the experiment."""
    made = experiment(folder)
    for at, run in enumerate(made.runs(on_cpu)):
        finished(Path(folder) / runs, "tiny", run.settings, 90 + at / 7, **options)
    return made
