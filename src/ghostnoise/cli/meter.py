"""`ghostnoise meter`: measure the noise in each layer of a network."""

import argparse
import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ghostnoise.cli import console
from ghostnoise.cli.options import add_data_folder, add_runs_folder, add_variant, device, positive
from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ghostnoise.lab.measure import Request, Target
    from ghostnoise.meter import Reading

PACKAGES = console.LAB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_target(parser)
    option = parser.add_argument
    option("--epoch", type=positive, action="append", metavar="E",
           help="for a run: the noise after this epoch; may be repeated, to compare epochs")  # fmt: skip
    option("--law-size", type=positive, metavar="N", help="also draw the fully connected law for this ghost size")
    option("--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the written files (default: out/)")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select what is measured, and how."""
    option = parser.add_argument
    option("target", help="a run folder, a recipe, or module:function that returns a network")
    option("overrides", nargs="*", metavar="key=value", help="settings of a recipe to change")
    add_variant(parser, "for a recipe: use this variant of it")
    option("--data", metavar="SET", help="for module:function: a name that `ghostnoise data list` shows, or "
           "module:function that returns batches, such as a DataLoader")  # fmt: skip
    option("--ghost-size", type=positive, metavar="N", help="samples per ghost batch (default: the run's, or 32)")
    option("--batches", type=positive, metavar="K", help="training batches to measure (default: 8)")
    option("--batch-size", type=positive, metavar="B", help="samples per batch (default: the run's, or 256)")
    option("--draws", type=positive, default=256, metavar="D", help="ghost batches drawn per batch (default: 256)")
    option("--modules", action="append", metavar="PATTERN",
           help="measure the modules with these names, such as 'layer1.*', instead of the normalization layers; may be "
           "repeated")  # fmt: skip
    option("--channel-dim", type=int, metavar="DIM",
           help="channel dimension of modules for which it is not known")  # fmt: skip
    option("--eval", action="store_true", help="run the network in eval mode instead of training mode")
    option("--device", type=device, default="auto", help="auto (the default), cpu, cuda or mps")
    option("--smoke", action="store_true", help="shrink a recipe to seconds, to check that it works")
    add_runs_folder(parser)
    add_data_folder(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, write figures, CSV and .npz files, and return the exit code."""
    from ghostnoise.lab import measure
    from ghostnoise.lab.report import noise_figures, noise_tables
    from ghostnoise.lab.store import atomic

    terminal = console.output()
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: is a file; give another folder")
    wanted = request(options)
    folder = measure.run_folder(wanted) if options.epoch else None
    if options.epoch and folder is None:
        raise UserError(f"--epoch for {options.target}: only a run has epochs; leave it out, or give a run folder")
    if folder is not None:
        readings = {f"epoch {epoch}": _at_epoch(folder, epoch, wanted, options, terminal) for epoch in options.epoch}
    else:
        found = measure.find(wanted)
        readings = {found.when: measured(found, options, terminal)}
    noise_tables.print_table(readings, terminal)
    atomic.make_folder(options.out, "--out")
    paths = noise_figures.write(readings, options.law_size, options.out / "noise")
    for key, reading in readings.items():
        path = options.out / ("noise.npz" if len(readings) == 1 else f"noise-{key.replace(' ', '-')}.npz")
        with atomic.writing(path, "--out"):
            reading.save(path)
        paths.append(path)
    atomic.write(options.out / "noise.csv", _csv(readings), "--out")
    console.print_line(terminal, ", ".join(map(str, [*paths, options.out / "noise.csv"])))
    return 0


def request(options: argparse.Namespace) -> "Request":
    """Return what the options ask for."""
    from ghostnoise.lab.measure import Request

    return Request(
        options.target, tuple(options.overrides), options.data, options.runs, options.data_dir, options.device,
        options.ghost_size, options.batches, options.batch_size, options.smoke, options.variant,
    )  # fmt: skip


def measured(found: "Target", options: argparse.Namespace, terminal: "Console") -> "Reading":
    """Run the network on its batches and return what the meter measured."""
    import torch

    from ghostnoise.meter import Meter

    mode = "eval mode" if options.eval else "training mode"
    console.print_line(terminal, f"{found.about}; {mode}, ghost batches of {found.ghost_size} samples")
    found.model.train(not options.eval)
    try:
        meter = Meter(
            found.model, found.ghost_size, modules=options.modules, channel_dim=options.channel_dim, draws=options.draws
        )
        with torch.no_grad(), meter:
            for _ in found.feed():
                pass
        return meter.result()
    except ValueError as error:
        raise UserError(
            str(error)
            .replace("modules= ", "--modules ")
            .replace("modules=", "--modules ")
            .replace("channel_dim=", "--channel-dim ")
        ) from None


def _at_epoch(
    folder: Path, epoch: int, wanted: "Request", options: argparse.Namespace, terminal: "Console"
) -> "Reading":
    """Return what training recorded after an epoch, or else a measurement at its checkpoint."""
    from ghostnoise.lab import measure
    from ghostnoise.lab.report import noise

    changed = any((options.ghost_size, options.batches, options.batch_size, options.modules, options.eval))
    recorded = {} if changed else noise.recorded(folder, lambda line: console.print_line(terminal, f"warning: {line}"))
    if epoch in recorded:
        return recorded[epoch]
    return measured(measure.from_folder(folder, replace(wanted, overrides=()), epoch), options, terminal)


def _csv(readings: dict[str, "Reading"]) -> bytes:
    """Return a CSV table with a line for each layer."""
    rows = [{"when": key} | row for key, reading in readings.items() for row in reading.rows()]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()
