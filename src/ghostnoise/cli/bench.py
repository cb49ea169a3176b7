"""`ghostnoise bench`: measure time and memory against nn.BatchNorm and other libraries."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.cli.console import require
from ghostnoise.cli.options import positive, seconds, usable_device
from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from ghostnoise.bench.settings import Settings

PACKAGES = ("rich", "matplotlib", "filelock")
KINDS = {
    "layers": "time forward + backward of single layers, and the bandwidth limit",
    "flex": "time normalizations written with flex_norm, as ratios to what PyTorch has for them",
    "net": "time training steps of ResNet-20 and ResNet-18 on CIFAR-sized images",
    "recipe": "time a training step of each method of a recipe, as a ratio to its baseline",
    "memory": "count the bytes saved for the backward, and the peak",
    "profile": "time the operators of layers alone, beside the layers",
    "lab": "time the trainer, the bare training step and a plain DataLoader loop",
}
QUICK_ROUNDS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each kind of measurement."""
    kinds: Any = parser.add_subparsers(dest="bench", required=True, metavar="|".join(KINDS))
    added = {name: kinds.add_parser(name, help=text) for name, text in KINDS.items()}
    for name, formats in (("layers", "both"), ("flex", "both"), ("net", "contiguous"), ("memory", "both"),
                          ("lab", "contiguous"), ("recipe", "contiguous"), ("profile", "both")):  # fmt: skip
        _add_shared(added[name], formats)
    for name, length in (("layers", 15), ("flex", 15), ("net", 60), ("lab", 60), ("recipe", 60), ("profile", 15)):
        _add_timing(added[name], length)
    added["recipe"].add_argument("recipe", metavar="RECIPE", help="the name of a recipe with a [grid], or its file")
    added["recipe"].add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    added["recipe"].add_argument(
        "--cpu-time", action="store_true",
        help="time the processor instead of the clock, with --threads 1: for a machine that also does other work",
    )  # fmt: skip
    for name in ("layers", "net"):
        added[name].add_argument(
            "--compile", action="store_true", help="also time everything through torch.compile, which takes minutes"
        )
    added["layers"].add_argument(
        "--released", type=Path, metavar="DIR", help="also time the paper's code, in a checkout of its repository"
    )
    for name, chosen in (("layers", "all"), ("profile", "BN, GBN-32, XBN-32 and BN+GNI-32")):
        added[name].add_argument(
            "--contender", action="append", default=[], metavar="NAME", dest="contenders",
            help=f"measure only this layer besides that of torch.nn, such as BN+GNI-32; may be repeated "
            f"(default: {chosen})",
        )  # fmt: skip
    for name, default in (
        ("lab", "256 for ResNet-20, 1024 for the MLP"),
        ("net", "128 for ResNet-20, 32 for ResNet-18"),
    ):
        added[name].add_argument("--batch", type=positive, help=f"samples per batch (default: {default})")


def _add_shared(parser: argparse.ArgumentParser, formats: str) -> None:
    option = parser.add_argument
    option("--out", type=Path, default=Path("out"), help="folder of the JSON, CSV and PNG files (default: out/)")
    option("--json", type=Path, metavar="FILE", help="write this JSON file instead, such as results/bench/layers.json")
    option("--threads", type=positive, help="CPU threads (default: torch's)")
    option("--device", default="cpu", help="cpu (the default), cuda, ...")
    option("--only", action="append", default=[], metavar="TEXT",
           help="measure only rows whose name contains TEXT; may be repeated")  # fmt: skip
    option("--memory-format", choices=("contiguous", "channels_last", "both"), default=formats, dest="formats",
           help=f"memory format of images (default: {formats})")  # fmt: skip
    option("--quick", action="store_true", help="use tiny shapes, to check that it works; the numbers are meaningless")


def _add_timing(parser: argparse.ArgumentParser, length: float) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--seconds", type=seconds, default=length, help=f"time to measure a row (default: {length})")
    group.add_argument("--rounds", type=positive, help="measure a row this many times instead")
    parser.add_argument(
        "--allocator", choices=("default", "raised", "both"), default="default",
        help="glibc's malloc with its default or with raised mmap and trim thresholds (default: default)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure in one or both allocator modes and return the exit code."""
    if options.bench in ("net", "lab", "recipe"):
        require(("pydantic",))
    from ghostnoise.bench import run as bench

    if getattr(options, "cpu_time", False) and (options.threads != 1 or options.device != "cpu"):
        raise UserError("--cpu-time: adds up the time of all threads; give --threads 1, and no other device than cpu")
    modes = _modes(options)
    folder, option = (options.json.parent, "--json") if options.json else (options.out, "--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {folder}: cannot be created ({error.strerror}); give another folder") from None
    settings = _settings(options)
    with _threads(options.threads):
        records, left_out = bench.measure(settings, modes, options.arguments)
        if options.json:
            bench.write_json(options.json, options.bench, records, left_out)
        else:
            print("saved:", *bench.save(options.out, options.bench, records, left_out))
    return 0


def _modes(options: argparse.Namespace) -> list[str]:
    """Return the allocator modes to measure in; raise if this system does not have one of them."""
    from ghostnoise.bench import allocator

    wanted = getattr(options, "allocator", allocator.active())  # byte counts do not depend on it
    modes = ["default", "raised"] if wanted == "both" else [wanted]
    for mode in modes:
        if mode != allocator.active() and (why := allocator.missing(mode)):
            raise UserError(why)
    return modes


def _settings(options: argparse.Namespace) -> "Settings":
    from ghostnoise.bench.settings import Settings

    rounds = getattr(options, "rounds", None)
    return Settings(
        bench=options.bench,
        device=usable_device(options.device),
        formats=("contiguous", "channels_last") if options.formats == "both" else (options.formats,),
        only=tuple(options.only),
        quick=options.quick,
        seconds=getattr(options, "seconds", 0.0),
        rounds=QUICK_ROUNDS if options.quick and rounds is None else rounds,
        batch=getattr(options, "batch", None),
        compiled=getattr(options, "compile", False),
        recipe=getattr(options, "recipe", ""),
        overrides=tuple(getattr(options, "overrides", ())),
        cpu_time=getattr(options, "cpu_time", False),
        released=getattr(options, "released", None),
        contenders=tuple(getattr(options, "contenders", ())),
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of CPU threads, and restore it afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
