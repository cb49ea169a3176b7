"""Argument types, and options that several commands have."""

import argparse
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ghostnoise.lab.errors import UserError
from ghostnoise.text import DEVICE_SYNONYMS, nearest

if TYPE_CHECKING:
    import torch

MOST_SEEDS = 100_000
KEEP, LOGS = ("weights", "best", "checkpoints"), ("tensorboard", "wandb")
DEVICES = ("auto", "cpu", "cuda", "mps")
SEEDS = re.compile(r"(\d{1,18})(?:(?:\.\.|-)(\d{1,18}))?")


def positive(text: str) -> int:
    """Parse an integer of 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of 1 or more")
    return number


def count(text: str) -> int:
    """Parse an integer of 0 or more."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of 0 or more")
    return int(text)


def seconds(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return number


def device(text: str) -> str:
    """Parse the name of a device."""
    if text not in DEVICES:
        meant = DEVICE_SYNONYMS.get(text.lower().partition(":")[0]) or next(iter(nearest(text, DEVICES)), None)
        remedy = f"did you mean {meant}?" if meant else "leave it out for auto"
        if meant == "cuda" and ":" in text:
            remedy += " The environment variable CUDA_VISIBLE_DEVICES selects a GPU"
        raise argparse.ArgumentTypeError(f"{text}: must be auto, cpu, cuda or mps; {remedy}")
    return text


def usable_device(name: str) -> "torch.device":
    """Return the device with this name, which torch must be able to use; "auto" is a GPU if there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(name)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError):  # by device and build, torch raises each of these
        meant = DEVICE_SYNONYMS.get(name)
        remedy = f"did you mean {meant}?" if meant and meant != name else "try cpu"
        raise UserError(f"--device {name}: torch cannot use it on this machine; {remedy}") from None
    return found


def port(text: str) -> int:
    """Parse the number of a TCP port; 0 lets the system choose a free one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer from 0 to 65535")
    return int(text)


def seeds(text: str) -> list[int]:
    """Parse seeds and inclusive ranges of seeds, separated by commas; each seed is returned once, in the given order.

    >>> seeds("0..4"), seeds("0-4"), seeds("7,0..2")
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [7, 0, 1, 2])
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = SEEDS.fullmatch(part.strip())
        if match is None or not part.isascii():
            raise argparse.ArgumentTypeError(
                f"{text!r}: must be integers of 0 or more and ranges, separated by commas; "
                "give for example 0..4, 0-4 or 0,3,7"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise argparse.ArgumentTypeError(
                f"{text!r}: the range {part.strip()} must not end before it begins; give {last}..{first}"
            )
        if last - first >= MOST_SEEDS:
            raise argparse.ArgumentTypeError(
                f"{text!r}: the range {part.strip()} must have at most {MOST_SEEDS:,} seeds; give a shorter one"
            )
        found |= dict.fromkeys(range(first, last + 1))
    return list(found)


def add_recipe(parser: argparse.ArgumentParser, note: str = "", overrides: str = "settings to change") -> None:
    """Add a recipe and its overrides."""
    parser.add_argument("recipe", help=f"a name that `ghostnoise recipes` lists, or a TOML file{note}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)
    add_variant(parser, "use this variant of the recipe: released follows the authors' released code")


def add_variant(parser: argparse.ArgumentParser, help: str) -> None:
    """Add `--variant`."""
    parser.add_argument("--variant", metavar="NAME", help=help)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select runs of an experiment."""
    parser.add_argument(
        "--seeds", type=seeds, metavar="SEEDS", help="use these seeds instead of the recipe's: 0..4, 0-4 or 0,3,7"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="LABEL", help="use only this method; may be repeated"
    )


def selecting_words(options: argparse.Namespace) -> list[str]:
    """Return the words of a command line that select the runs of an experiment."""
    words = [options.recipe, *options.overrides]
    words += ["--variant", options.variant] if options.variant else []
    words += ["--seeds", ",".join(map(str, options.seeds))] if options.seeds else []
    words += [word for label in options.only for word in ("--only", label)]
    return words + (["--smoke"] if options.smoke else [])


def add_runs_folder(parser: argparse.ArgumentParser) -> None:
    """Add `--runs`."""
    parser.add_argument(
        "--runs", type=Path, default=Path(os.environ.get("GHOSTNOISE_RUNS", "runs")), metavar="DIR",
        help="folder that contains the run folders (default: GHOSTNOISE_RUNS, or runs/)",
    )  # fmt: skip


def add_data_folder(parser: argparse.ArgumentParser) -> None:
    """Add `--data-dir`."""
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR",
        help="folder that contains the data sets (default: GHOSTNOISE_DATA, or ~/.cache/ghostnoise-data)",
    )  # fmt: skip


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training of a run that change no result."""
    option = parser.add_argument
    option("--checkpoint-seconds", type=seconds, default=60.0, metavar="S",
           help="save a checkpoint at least this often (default: 60)")  # fmt: skip
    option("--keep", choices=KEEP, default="weights",
           help="what stays of a run that has ended: the final weights (default), also the best ones, or also the last "
           "two checkpoints")  # fmt: skip
    option("--log", action="append", choices=LOGS, default=[],
           help="also write curves for TensorBoard, or to Weights & Biases; may be repeated")  # fmt: skip
    option("--log-steps", type=positive, default=10, metavar="N", help="steps between two logged steps (default: 10)")
