"""`ghostnoise train`: train a recipe, or resume its training."""

import argparse
import math
import os
from pathlib import Path

from ghostnoise.cli.console import LAB, warn
from ghostnoise.cli.options import add_data_folder, add_recipe, add_runs_folder, add_training, count, device, positive

PACKAGES = LAB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command. Some are short forms of overrides, and change the identity of the run."""
    add_recipe(parser, overrides="settings to change, such as norm.ghost_size=16")
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
    option("--init-from", type=Path, metavar="FILE", help="start from these weights, a state_dict of the same network")
    option("--threads", type=positive, help="CPU threads (default: torch's)")
    option("--workers", type=count, help="processes that load the images of an imagefolder; 0 for none")
    option("--keep-malloc", action="store_true", help="do not change malloc's thresholds (Linux; slower on CPUs)")
    option("--quiet", action="store_true", help="print only the last line")
    add_training(parser)
    add_runs_folder(parser)
    add_data_folder(parser)


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code: 0, or 128 + the signal that stopped the run."""
    from ghostnoise.lab.config import recipe
    from ghostnoise.lab.events import Ended
    from ghostnoise.lab.run import Run
    from ghostnoise.lab.store import checkpoints
    from ghostnoise.lab.train import Options, train
    from ghostnoise.lab.train.sinks import Logs, Terminal
    from ghostnoise.terminal import LiteralConsole

    given = {"train.device": options.device, "train.amp": options.amp, "seed": options.seed}
    short = [*(options.short or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    chosen = recipe.load(options.recipe, [*options.overrides, *short], smoke=options.smoke, variant=options.variant)
    processes, first = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("RANK", "0") == "0"
    if first and (warning := recipe.whole_batch_warning(chosen.settings, processes)):
        warn(warning)
    settings = chosen.settings
    if options.init_from is not None:
        weights = checkpoints.weights_sha256(checkpoints.read_weights(options.init_from))
        settings = settings.model_copy(update={"model": recipe.with_value(settings.model, "init", weights)})
    terminal = Terminal(LiteralConsole(), options.quiet)
    logs = Logs(options.log, options.log_steps, warn) if options.log and first else None
    planned, signal = Run.planned(chosen.name, settings), 0
    try:
        for event in train(
            planned,
            Options(
                options.runs, options.data_dir, options.threads, options.workers, options.checkpoint_seconds,
                options.keep, 0.25 if terminal.live else math.inf, options.log_steps if options.log else 0,
                options.init_from, not options.keep_malloc, warn,
            ),
        ):  # fmt: skip
            if first:
                terminal.take(event)
            if logs is not None:
                logs.take(planned, event)
            signal = event.signal if isinstance(event, Ended) else 0
    finally:
        terminal.close()
        if logs is not None:
            logs.close()
    return 128 + signal if signal else 0
