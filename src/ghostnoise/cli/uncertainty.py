"""`ghostnoise uncertainty`: calibration and detection of shifted inputs of trained networks, with and without noise."""

import argparse
import csv
import io
from pathlib import Path
from typing import Any

from ghostnoise.cli import console
from ghostnoise.cli.options import add_data_folder, add_recipe, add_runs_folder, add_selection, device, positive
from ghostnoise.lab.errors import UserError

PACKAGES = console.LAB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser, " with a [grid] of mnist1d or cifar10, whose runs have finished", "settings to change")
    add_selection(parser)
    option = parser.add_argument
    option("--samples", type=positive, default=32, metavar="S", help="outputs per input with noise (default: 32)")
    option("--test", type=positive, default=4000, metavar="N", help="test inputs (default: 4000)")
    option("--shifted", type=positive, default=2000, metavar="N", help="inputs of each shift (default: 2000)")
    option("--smoke", action="store_true", help="use the runs of `ghostnoise sweep --smoke`")
    option("--device", type=device, default="auto", help="auto (the default), cpu, cuda or mps")
    option("--out", type=Path, default=Path("uncertainty.csv"), metavar="FILE",
           help="file of the figures; runs that it has are not measured again (default: uncertainty.csv)")  # fmt: skip
    add_runs_folder(parser)
    add_data_folder(parser)


def run(options: argparse.Namespace) -> int:
    """Measure all runs of the experiment that have a checkpoint, print the table, and return the exit code."""
    from ghostnoise.lab import uncertainty
    from ghostnoise.lab.config import grid
    from ghostnoise.lab.measure import Request
    from ghostnoise.lab.report import uncertainty as report
    from ghostnoise.lab.report.collect import collect
    from ghostnoise.lab.store import atomic

    terminal = console.output()
    experiment = grid.load(
        options.recipe, options.overrides, smoke=options.smoke, seeds=options.seeds, only=tuple(options.only),
        variant=options.variant,
    )  # fmt: skip
    name = experiment.recipe.name

    def warn(text: str) -> None:
        console.print_line(terminal, f"warning: {text}")

    runs = collect(experiment, options.runs / name, warn).runs
    found = [(run, run.folder) for run in runs if run.accuracy is not None and run.folder is not None]
    if not found:
        raise UserError(f"{options.runs / name} has no finished run; run `ghostnoise sweep {name}` first")
    rows = _rows(options.out, {"test": options.test, "shifted": options.shifted, "samples": options.samples})
    for run, folder in found:
        weights = str((run.result or {}).get("weights_sha256", ""))
        if any((row["identity"], row["weights"]) == (run.identity, weights) for row in rows):
            continue
        rows = [row for row in rows if row["identity"] != run.identity]  # those of other weights
        header = {"recipe": name, "method": run.label, "seed": run.seed, "identity": run.identity, "weights": weights}
        request = Request(str(folder), data_folder=options.data_dir, device=options.device)
        for row in uncertainty.evaluate(folder, request, options.samples, options.test, options.shifted):
            rows.append(header | row)
            figures = ", ".join(f"{key} {row[key]:.2f}" for key in ("accuracy", "ece"))
            console.print_line(terminal, f"{run.name}, {row['inference']}: {figures}, {row['seconds']} s")
        atomic.write(options.out, _csv(rows), "--out")
    console.print_line(terminal, report.render(options.out))
    return 0


def _rows(path: Path, settings: dict[str, int]) -> list[dict[str, Any]]:
    """Return the rows of a file that this command has written with the same settings; none if there is no file."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    for row in rows:
        for name, value in settings.items():
            if row.get(name) != str(value) and (name, row.get(name)) != ("samples", "1"):  # "1" is without noise
                raise UserError(
                    f"--{name} {value}: {path} has figures with {row.get(name)}; give another file with --out"
                )
    return rows


def _csv(rows: list[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()
