"""The `ghostnoise` command: the lab's commands, `bench` and `doctor`.

Each command imports what it needs when it runs, so that `doctor` works on a base install, without torch's start-up
time for `--help`.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from ghostnoise.lab import command as lab


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    words = options.command == "runs"  # which takes any, and not key=value alone
    if hasattr(options, "overrides") and all(not each.startswith("-") and (words or "=" in each) for each in rest):
        options.overrides += rest  # those that stand after an option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "doctor":
            from ghostnoise import doctor

            print(doctor.report())
            return 0
        if options.command == "bench":
            from ghostnoise.bench import command

            return command.run(options, arguments)
        return lab.run(options)
    except KeyboardInterrupt:
        print("ghostnoise: interrupted", file=sys.stderr)
        return 130


def _parser() -> Parser:
    parser = Parser(prog="ghostnoise", description="Ghost noise for PyTorch: experiments, measurements, set-up.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    lab.add(commands, _positive, _seconds)
    commands.add_parser("doctor", help="print versions, the CPU, and which backends are usable and why not")
    bench = commands.add_parser("bench", help="measure time and memory against nn.BatchNorm and other libraries")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="layers|net|memory|lab")
    layers = kinds.add_parser("layers", help="time forward + backward of single layers, and the bandwidth limit")
    net = kinds.add_parser("net", help="time training steps of ResNet-20 and ResNet-18 on CIFAR-sized images")
    memory = kinds.add_parser("memory", help="count the bytes held for the backward, and the peak")
    lab_ = kinds.add_parser("lab", help="time the trainer, the bare step and a plain DataLoader loop")
    for kind, formats in ((layers, "both"), (net, "contiguous"), (memory, "both"), (lab_, "contiguous")):
        _shared(kind, formats)
    _timed(layers, seconds=15)
    _timed(net, seconds=60)
    _timed(lab_, seconds=60)
    layers.add_argument(
        "--compile", action="store_true", help="also time layers through torch.compile, which takes minutes"
    )
    lab_.add_argument(
        "--batch", type=_positive, help="samples in a batch (default 256 for ResNet-20, 1024 for the MLP)"
    )
    net.add_argument("--batch", type=_positive, help="samples in a batch (default 128 for ResNet-20, 32 for ResNet-18)")
    return parser


def _shared(parser: Parser, formats: str) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("out"), help="folder of the JSON, CSV and PNG files (default out/)")
    add("--threads", type=_positive, help="CPU threads (default: torch's)")
    add("--device", default="cpu", help="cpu (the default), cuda, ...")
    add(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only rows whose name contains TEXT; may be repeated",
    )
    add("--memory-format", choices=("contiguous", "channels_last", "both"), default=formats, dest="formats",
        help=f"of images (default {formats})")  # fmt: skip
    add("--quick", action="store_true", help="tiny shapes, to see that it runs; the numbers mean nothing")


def _timed(parser: Parser, seconds: float) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=_seconds, default=seconds, help=f"how long to measure a row (default {seconds})"
    )
    length.add_argument("--rounds", type=_positive, help="measure a row this many times instead")
    parser.add_argument(
        "--allocator", choices=("default", "raised", "both"), default="default",
        help="glibc's malloc with its default or with raised mmap and trim thresholds (default: default)",
    )  # fmt: skip
    # Where a process that was started for one allocator mode leaves its records.
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of 1 or more")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return number
