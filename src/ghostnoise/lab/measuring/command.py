"""`ghostnoise meter` and `ghostnoise advise`.

The parsers need no package at all; what a command needs is imported when it runs.
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from ghostnoise.lab.measuring.target import Target, Wanted
    from ghostnoise.meter import Reading


def add(commands: Any, positive: Any) -> list[argparse.ArgumentParser]:
    """Add the two parsers; `positive` reads numbers."""
    meter = commands.add_parser("meter", help="measure the noise in each layer of a network")
    advise = commands.add_parser("advise", help="say how strong noise is in a network, and a ghost size to try first")
    for parser in (meter, advise):
        option = parser.add_argument
        option("target", help="a run folder, a recipe, or module:function that returns a network")
        option("overrides", nargs="*", metavar="key=value", help="other settings of a recipe")
        option("--data", metavar="SET", help="for module:function: a set of `ghostnoise data list`, or module:function "
               "that returns batches, such as a DataLoader")  # fmt: skip
        option("--ghost-size", type=positive, metavar="N", help="samples in a ghost batch (default: the run's, or 32)")
        option("--batches", type=positive, metavar="K", help="training batches to measure (default 8)")
        option("--batch-size", type=positive, metavar="B", help="samples in a batch (default: the run's, or 256)")
        option("--draws", type=positive, default=256, metavar="D", help="ghost batches drawn of each (default 256)")
        option("--modules", action="append", metavar="PATTERN",
               help="measure modules of this name, such as 'layer1.*', not the norms; may be repeated")  # fmt: skip
        option("--channel-dim", type=int, metavar="DIM", help="where channels are, if a module does not tell")
        option("--eval", action="store_true", help="run the network as at inference, not as in training")
        option("--device", default="auto", help="auto (the default), cpu, cuda or mps")
        option("--smoke", action="store_true", help="shrink a recipe to seconds, to see that it works")
    meter.add_argument("--epoch", type=positive, action="append", metavar="E",
                       help="of a run folder: after this epoch; may be repeated, to compare")  # fmt: skip
    meter.add_argument("--law-size", type=positive, metavar="N", help="draw the fully connected law of this size")
    meter.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the files (default out/)"
    )
    return [meter, advise]


def meter(options: argparse.Namespace) -> int:
    """Measure, print a table, write figures, CSV and .npz; returns the exit code."""
    from rich.console import Console

    from ghostnoise.lab.measuring import target
    from ghostnoise.lab.report import noise_figures, noise_tables
    from ghostnoise.lab.store import atomic

    console = Console()
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: is a file; give another folder")
    wanted = _wanted(options)
    folder = target.run_folder(wanted) if options.epoch else None
    if options.epoch and folder is None:
        raise UserError(f"--epoch for {options.target}: only a run has epochs, and this is none; leave it out")
    if folder is not None:
        readings = {f"epoch {epoch}": _at_epoch(folder, epoch, wanted, options, console) for epoch in options.epoch}
    else:
        readings = {"now": _measured(target.find(wanted), options, console)}
    noise_tables.print_table(readings, console)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot be made ({error.strerror}); give another folder") from None
    paths = noise_figures.write(readings, options.law_size, options.out / "noise")
    for key, reading in readings.items():
        path = options.out / ("noise.npz" if len(readings) == 1 else f"noise-{key.replace(' ', '-')}.npz")
        with atomic.writing(path):
            reading.save(path)
        paths.append(path)
    paths.append(_table(readings, options.out / "noise.csv"))
    console.print(", ".join(map(str, paths)), highlight=False, soft_wrap=True, markup=False)
    return 0


def advise(options: argparse.Namespace) -> int:
    """Measure once, and say what the figures mean; returns the exit code."""
    from rich.console import Console

    from ghostnoise.lab.measuring import target
    from ghostnoise.meter import advise

    console = Console()
    reading = _measured(target.find(_wanted(options)), options, console)
    try:
        console.print(str(advise(reading)), highlight=False, soft_wrap=True, markup=False)
    except ValueError as error:
        raise UserError(str(error)) from None
    return 0


COMMANDS = {"meter": meter, "advise": advise}


def _wanted(options: argparse.Namespace) -> "Wanted":
    from ghostnoise.lab.measuring.target import Wanted

    return Wanted(
        options.target, tuple(options.overrides), options.data, options.runs, options.data_dir, options.device,
        options.ghost_size, options.batches, options.batch_size, options.smoke,
    )  # fmt: skip


def _at_epoch(
    folder: Path, epoch: int, wanted: "Wanted", options: argparse.Namespace, console: Any
) -> "Reading":  # fmt: skip
    """What training recorded after an epoch, or else what its checkpoint gives."""
    from ghostnoise.lab.measuring import target
    from ghostnoise.lab.report import noise

    asked = any((options.ghost_size, options.batches, options.batch_size, options.modules, options.eval))

    def warn(line: str) -> None:
        console.print(f"warning: {line}", highlight=False, soft_wrap=True, markup=False)

    recorded = {} if asked else noise.recorded(folder, warn)
    if epoch in recorded:
        return recorded[epoch]
    return _measured(target.of_folder(folder, replace(wanted, overrides=()), epoch), options, console)


def _measured(found: "Target", options: argparse.Namespace, console: Any) -> "Reading":
    import torch

    from ghostnoise.meter import Meter

    how = "in eval" if options.eval else "as in training"
    line = f"{found.about}; {how}, ghost batches of {found.ghost_size}"
    console.print(line, highlight=False, soft_wrap=True, markup=False)
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


def _table(readings: dict[str, "Reading"], path: Path) -> Path:
    """A CSV file with a line for each layer."""
    from ghostnoise.lab.store import atomic

    rows = [{"when": key} | row for key, reading in readings.items() for row in reading.rows()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with atomic.writing(path), open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path
