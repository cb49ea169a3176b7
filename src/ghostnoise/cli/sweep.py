"""`ghostnoise sweep`: run all missing runs of a recipe's grid."""

import argparse
import os
import sys
from pathlib import Path

from ghostnoise.cli.console import LAB
from ghostnoise.cli.options import (
    add_data_folder,
    add_recipe,
    add_runs_folder,
    add_selection,
    add_training,
    device,
    positive,
    selecting_words,
)
from ghostnoise.lab.errors import UserError

PACKAGES = LAB
CLUSTER = ("address", "cpus", "gpus", "storage")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser, " with a [grid]", "settings to change; a key that is an axis of the grid gets this single value")
    add_selection(parser)
    option = parser.add_argument
    option("--dry-run", action="store_true", help="list finished and missing runs, and run nothing")
    option("--smoke", action="store_true", help="shrink each run to seconds, and the grid to the ends of its axes")
    option("--device", type=device, help="auto (the default), cpu, cuda or mps")
    option("--runner", default="local",
           help="local (the default): processes on this machine; ray: a Ray cluster")  # fmt: skip
    option("--workers", type=positive, help="runs at the same time (default: one per GPU, or one per core)")
    option("--threads", type=positive, help="CPU threads of each run (default: an equal share of the cores)")
    option("--address", metavar="HOST:PORT", help="address of the Ray cluster (default: start one on this machine)")
    option("--cpus-per-run", dest="cpus", type=float, help="CPUs that Ray reserves for a run (default: its threads)")
    option("--gpus-per-run", dest="gpus", type=float,
           help="GPUs that Ray reserves for a run, such as 0.25 (default: 1 on CUDA)")  # fmt: skip
    option("--storage", metavar="DIR", help="folder that all nodes of the Ray cluster can write")
    option("--quiet", action="store_true", help="print only the last line")
    add_training(parser)
    add_runs_folder(parser)
    add_data_folder(parser)


def run(options: argparse.Namespace) -> int:
    """Run the sweep, or list what it would run, and return the exit code."""
    from ghostnoise.lab.config import grid
    from ghostnoise.lab.sweep.ray import HeadLost
    from ghostnoise.lab.sweep.run import Options, list_runs, sweep

    cluster = _cluster(options)
    overrides = options.overrides + ([f"train.device={options.device}"] if options.device else [])
    experiment = grid.load(
        options.recipe, overrides, smoke=options.smoke, seeds=options.seeds, only=tuple(options.only),
        variant=options.variant,
    )  # fmt: skip
    given = Options(
        runs=Path(options.storage.removeprefix("file://")) if options.storage else options.runs,
        data=options.data_dir, runner=options.runner, workers=options.workers, threads=options.threads,
        checkpoint_seconds=options.checkpoint_seconds, quiet=options.quiet, cluster=cluster, keep=options.keep,
        logs=options.log, log_steps=options.log_steps, words=selecting_words(options),
    )  # fmt: skip
    if options.dry_run:
        list_runs(experiment, given)
        return 0
    try:
        return sweep(experiment, given).code
    except HeadLost as error:
        print(f"ghostnoise sweep: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)  # as any `UserError` does: without its head, Ray does not disconnect, and exits with another code


def _cluster(options: argparse.Namespace) -> dict[str, object]:
    """Return the options of the Ray runner that were given, after checking that they fit the chosen runner."""
    from ghostnoise.lab.sweep.run import RUNNERS

    if options.runner not in RUNNERS:
        raise UserError(f"--runner {options.runner}: must be {' or '.join(RUNNERS)}; choose one of them")
    cluster = {name: value for name in CLUSTER if (value := getattr(options, name)) is not None}
    if cluster and options.runner == "local":
        raise UserError(
            "--address, --cpus-per-run, --gpus-per-run and --storage: only for a Ray cluster; add --runner ray, or "
            "leave them out"
        )
    if options.workers and options.runner == "ray":
        raise UserError(
            f"--workers {options.workers}: a Ray cluster runs as many runs as fit; give --cpus-per-run and "
            "--gpus-per-run instead"
        )
    return cluster
