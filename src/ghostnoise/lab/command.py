"""The lab's part of the `ghostnoise` command: all but `bench` and `doctor`.

The parsers need no package at all; what a command needs is imported when it runs.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.lab import runs_command, sweep_command
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.measuring import command as measuring
from ghostnoise.lab.report import command as reports

if TYPE_CHECKING:
    from ghostnoise.lab.train import Options

NEEDED = ("pydantic", "rich", "filelock", "sklearn")


def add(commands: Any, positive: Any, seconds: Any) -> None:
    """Add the parsers; `positive` and `seconds` read numbers."""
    train = commands.add_parser("train", help="train a recipe, or go on with it")
    train.add_argument("recipe", help="a name that `ghostnoise recipes` lists, or a TOML file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="other settings, such as norm.ghost_size=16")
    _switches(train)
    option = train.add_argument
    _runs_folder(train)
    _data_folder(train)
    option("--threads", type=positive, help="CPU threads (default: torch's)")
    option("--workers", type=int, help="processes that load images of an imagefolder")
    option("--checkpoint-seconds", type=seconds, default=60.0, metavar="S", help="save at least so often (default 60)")
    option("--tensorboard", action="store_true", help="also write metrics for TensorBoard, into the run folder")
    option("--keep-malloc", action="store_true", help="leave malloc's thresholds alone (Linux; slower on CPUs)")
    option("--quiet", action="store_true", help="print the last line only")
    sweep = sweep_command.add(commands, positive, seconds)
    _runs_folder(sweep)
    _data_folder(sweep)
    runs = runs_command.add(commands)
    _runs_folder(runs)
    recipes = commands.add_parser("recipes", help="list the recipes, or show one")
    recipes.add_argument("recipe", nargs="?", help="the one to show")
    data = commands.add_parser("data", help="list, download or verify data sets")
    data.add_argument("action", choices=("list", "get", "verify"))
    data.add_argument("name", nargs="?", help="the data set")
    _data_folder(data)
    reports.add(commands)
    measured = measuring.add(commands, positive)
    for parser in measured:
        _runs_folder(parser)
        _data_folder(parser)
    for parser in (train, sweep, runs, recipes, data, *measured):
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _switches(train: argparse.ArgumentParser) -> None:
    """What changes the numbers, and so makes another run: short for overrides."""
    option = train.add_argument
    option("--smoke", action="store_true", help="shrink the run to seconds, to see that it works")
    option("--test", dest="short", action="append_const", const="data.evaluate=test",
           help="train on all training images and score the test images")  # fmt: skip
    option("--device", help="auto (the default), cpu, cuda or mps")
    option("--amp", choices=("none", "bf16", "fp16"), help="mixed precision")
    option("--seed", help="seed of the run")
    for name in ("compile", "channels-last", "deterministic"):
        key = f"train.{name.replace('-', '_')}=true"
        option(f"--{name}", dest="short", action="append_const", const=key, help=f"short for {key}")


def _runs_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path(os.environ.get("GHOSTNOISE_RUNS", "runs")),
        metavar="DIR",
        help="folder of the run folders (default runs/, or GHOSTNOISE_RUNS)",
    )


def _data_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder of the data sets (default GHOSTNOISE_DATA or ~/.cache/ghostnoise-data)",
    )


def run(options: argparse.Namespace) -> int:
    """Run a command; returns the exit code."""
    try:
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(f"{' and '.join(missing)} missing; pip install 'ghostnoise[lab]'")
        runners = {
            "train": _train, "sweep": sweep_command.run, "runs": runs_command.run, "recipes": _recipes, "data": _data,
            **reports.COMMANDS, **measuring.COMMANDS,
        }  # fmt: skip
        return runners[options.command](options)
    except UserError as error:
        if options.debug:
            raise
        print(f"ghostnoise {options.command}: {error}", file=sys.stderr)
        return 2


def _train(options: argparse.Namespace) -> int:
    from ghostnoise.lab.config import recipe
    from ghostnoise.lab.train import train

    given = {"train.device": options.device, "train.amp": options.amp, "seed": options.seed}
    short = [*(options.short or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    chosen = recipe.load(options.recipe, [*options.overrides, *short], smoke=options.smoke)
    outcome = train(chosen, _options(options))
    return 128 + outcome.signal if outcome.signal else 0


def _options(options: argparse.Namespace) -> "Options":
    from ghostnoise.lab.train import Options

    return Options(
        runs=options.runs,
        data=options.data_dir,
        threads=options.threads,
        workers=options.workers,
        checkpoint_seconds=options.checkpoint_seconds,
        quiet=options.quiet,
        tensorboard=options.tensorboard,
        thresholds=not options.keep_malloc,
    )


def _recipes(options: argparse.Namespace) -> int:
    from rich.console import Console

    from ghostnoise.lab import recipes_command

    return recipes_command.run(options.recipe, Console())


def _data(options: argparse.Namespace) -> int:
    from rich.console import Console

    from ghostnoise.lab.data import command

    if options.action != "list" and options.name is None:
        raise UserError(f"{options.action} without a name; give one that `ghostnoise data list` shows")
    return command.run(options.action, options.name, options.data_dir, Console())
