"""Runs for runners: tiny ones on digits."""

from ghostnoise.lab.config import recipe
from ghostnoise.lab.events import Ended, Started
from ghostnoise.lab.run import Run
from ghostnoise.lab.store.folder import read
from ghostnoise.lab.sweep.execute import execute
from support.training import trained

SHORT = ["train.epochs=1", "train.batch_size=64", "data.limit=256", "optim.warmup_epochs=0"]
LONG = ["train.epochs=10", "train.batch_size=64"]


def job(*overrides, seed=0, recipe_name="digits"):
    settings = recipe.load("digits", [*overrides, f"seed={seed}"]).settings
    return Run.planned(recipe_name, recipe.resolve(settings, device="cpu", processes=1), "run")


def alone(each, runs):
    """Return the weights of the same run, trained in this process with one thread."""
    return trained(each, runs, threads=1).result["weights_sha256"]


def weights(each, runs):
    return read(runs / each.recipe / each.identity).result["weights_sha256"]


class Inline:
    """A runner without worker processes: trains runs one after another in this process."""

    def __init__(self, place):
        self.place, self.closed = place, False

    def run(self, given, emit, stop):
        for each in given:
            if stop():
                emit(each, Ended("stopped"))
                continue
            for event in execute(each, self.place, threads=1):
                emit(each, event)

    def close(self):
        self.closed = True


class Log(list):
    """The events of a runner, with their runs: call `take`."""

    def take(self, run, event):
        self.append((run, event))

    def of(self, kind, run=None):
        return [event for each, event in self if isinstance(event, kind) and run in (None, each)]

    def ended(self):
        return [(run.name, event.status) for run, event in self if isinstance(event, Ended)]

    def started(self):
        return [run.name for run, event in self if isinstance(event, Started)]
