"""Jobs for runners: tiny runs on digits."""

import json
from functools import partial

from ghostnoise.lab.config import recipe
from ghostnoise.lab.runners import Ended, Job, Started
from ghostnoise.lab.runners.execution import execute
from ghostnoise.lab.train import Options, train

SHORT = ["train.epochs=1", "train.batch_size=64", "data.limit=256", "optim.warmup_epochs=0"]
LONG = ["train.epochs=10", "train.batch_size=64"]


def job(*overrides, seed=0, recipe_name="digits"):
    settings = recipe.load("digits", [*overrides, f"seed={seed}"]).settings
    settings = recipe.resolve(settings, device="cpu", processes=1)
    return Job(recipe_name, recipe.identity(settings), f"run {seed}", settings)


def alone(each, runs):
    """Return the weights of the same run, trained in this process with one thread."""
    chosen = recipe.load("digits").with_settings(each.settings)
    return train(chosen, Options(runs=runs, threads=1, quiet=True)).result["weights_sha256"]


def weights(each, runs):
    return json.loads((runs / each.recipe / each.identity / "result.json").read_text())["weights_sha256"]


class Inline:
    """A runner without worker processes: runs jobs one after another in this process."""

    def __init__(self, place):
        self.place, self.closed = place, False

    def run(self, given, emit, stop):
        for each in given:
            if stop():
                emit(Ended(each, "stopped"))
                continue
            on_start = partial(emit, Started(each, "here"))
            emit(execute(each, self.place, lambda *numbers: None, threads=1, on_start=on_start))

    def close(self):
        self.closed = True


class Log(list):
    """The events of a runner."""

    def ended(self):
        return [(event.job.name, event.status) for event in self if isinstance(event, Ended)]

    def started(self):
        return [event.job.name for event in self if isinstance(event, Started)]
