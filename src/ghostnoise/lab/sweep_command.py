"""The parser of `ghostnoise sweep`, and what it runs."""

import argparse
from pathlib import Path
from typing import Any

from ghostnoise.lab.errors import UserError

CLUSTER = ("address", "cpus", "gpus", "storage")


def add(commands: Any, positive: Any, seconds: Any) -> argparse.ArgumentParser:
    """Add the parser but for the folders, which `train` has too."""
    parser: argparse.ArgumentParser = commands.add_parser("sweep", help="run all of a recipe's grid that is missing")
    parser.add_argument("recipe", help="a name that `ghostnoise recipes` lists, or a TOML file, with a [grid]")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="other settings; of an axis: its one value")
    option = parser.add_argument
    option("--only", action="append", default=[], metavar="LABEL", help="only this method; may be repeated")
    option("--seeds", metavar="SEEDS", help="other seeds than the recipe's: 3, 0..4 or 0,2,5")
    option("--dry-run", action="store_true", help="show what is done and what is missing, and run nothing")
    option("--smoke", action="store_true", help="shrink each run to seconds, and the grid to the ends of its axes")
    option("--device", help="auto (the default), cpu, cuda or mps")
    option("--engine", default="local", help="local (the default): processes on this machine; ray: a cluster")
    option("--workers", type=positive, help="runs at once (default: one for each GPU, or for each core)")
    option("--threads", type=positive, help="CPU threads of each (default: a fair share of the cores)")
    option("--address", metavar="HOST:PORT", help="of the Ray cluster (default: one on this machine)")
    option("--cpus-per-run", dest="cpus", type=float, help="what a run gets of a Ray cluster (default: its threads)")
    option("--gpus-per-run", dest="gpus", type=float, help="also a part of one (default: 1 on CUDA)")
    option("--storage", metavar="DIR", help="folder that all nodes of a Ray cluster can write")
    option("--checkpoint-seconds", type=seconds, default=60.0, metavar="S", help="save at least so often (default 60)")
    option("--quiet", action="store_true", help="print the last line only")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the sweep, or show what it would run; returns the exit code."""
    from ghostnoise.lab.config import grid
    from ghostnoise.lab.sweep import Options, listing, seeds, sweep
    from ghostnoise.lab.sweep.machine import ENGINES

    if options.engine not in ENGINES:
        raise UserError(f"--engine {options.engine}: must be {' or '.join(ENGINES)}")
    cluster = {name: value for name in CLUSTER if (value := getattr(options, name)) is not None}
    if cluster and options.engine == "local":
        raise UserError("--address, --cpus-per-run, --gpus-per-run and --storage: of --engine ray; leave them out")
    if options.workers and options.engine == "ray":
        raise UserError("--workers: a Ray cluster runs as many as fit; give --cpus-per-run and --gpus-per-run")
    overrides = options.overrides + ([f"train.device={options.device}"] if options.device else [])
    chosen = None if options.seeds is None else seeds.read(options.seeds)
    experiment = grid.load(options.recipe, overrides, smoke=options.smoke, seeds=chosen, only=options.only)
    stored = Path(options.storage.removeprefix("file://")) if options.storage else options.runs
    given = Options(
        runs=stored, data=options.data_dir, engine=options.engine, workers=options.workers,
        threads=options.threads, checkpoint_seconds=options.checkpoint_seconds, quiet=options.quiet,
        cluster=cluster,
    )  # fmt: skip
    if options.dry_run:
        listing.show(experiment, given)
        return 0
    return sweep(experiment, given).code
