"""`ghostnoise train`: train a recipe, or resume its training."""

import argparse
import os
from typing import TYPE_CHECKING

from ghostnoise.cli.console import LAB, warn
from ghostnoise.cli.options import (
    add_checkpoint_seconds,
    add_data_folder,
    add_recipe,
    add_runs_folder,
    device,
    positive,
)

if TYPE_CHECKING:
    from ghostnoise.lab.train import Options

PACKAGES = LAB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser, overrides="settings to change, such as norm.ghost_size=16")
    _add_settings(parser)
    add_runs_folder(parser)
    add_data_folder(parser)
    option = parser.add_argument
    option("--threads", type=positive, help="CPU threads (default: torch's)")
    option("--workers", type=int, help="processes that load the images of an imagefolder")
    add_checkpoint_seconds(parser)
    option("--tensorboard", action="store_true", help="also write metrics for TensorBoard into the run folder")
    option("--keep-malloc", action="store_true", help="do not change malloc's thresholds (Linux; slower on CPUs)")
    option("--quiet", action="store_true", help="print only the last line")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add short forms of overrides: they change the results, and so the identity of the run."""
    option = parser.add_argument
    option("--smoke", action="store_true", help="shrink the run to seconds, to check that it works")
    option("--test", dest="short", action="append_const", const="data.evaluate=test",
           help="train on all training images and evaluate on the test images")  # fmt: skip
    option("--device", type=device, help="auto (the default), cpu, cuda or mps")
    option("--amp", choices=("none", "bf16", "fp16"), help="mixed precision")
    option("--seed", help="seed of the run")
    for name in ("compile", "channels-last", "deterministic"):
        key = f"train.{name.replace('-', '_')}=true"
        option(f"--{name}", dest="short", action="append_const", const=key, help=f"short for {key}")


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code: 0, or 128 + the signal that stopped the run."""
    from ghostnoise.lab.config import recipe
    from ghostnoise.lab.train import train

    given = {"train.device": options.device, "train.amp": options.amp, "seed": options.seed}
    short = [*(options.short or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    chosen = recipe.load(options.recipe, [*options.overrides, *short], smoke=options.smoke, variant=options.variant)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if (warning := recipe.whole_batch_warning(chosen.settings, processes)) and os.environ.get("RANK", "0") == "0":
        warn(warning)
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
