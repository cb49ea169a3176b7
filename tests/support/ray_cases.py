"""Small runs for a Ray cluster, their expected outcome, and a recorder of events."""

from dataclasses import dataclass, field

import torch

from ghostnoise.lab.config import recipe
from ghostnoise.lab.events import Ended
from ghostnoise.lab.run import Run
from ghostnoise.lab.store.folder import history, read
from support.training import trained

LONG = ["train.epochs=20", "train.batch_size=64", "train.device=cpu", "optim.warmup_epochs=0"]
SHORT = [*LONG, "train.epochs=2", "data.limit=256"]
TIMINGS = ("seconds", "images_per_second", "ended")


def job(*overrides, settings=SHORT):
    chosen = recipe.load("digits", [*settings, *overrides])
    return Run.planned("digits", recipe.resolve(chosen.settings, device="cpu", processes=1), " ".join(overrides))


def outcome(folder):
    """Return the result and the metrics without durations."""
    run = read(folder)
    return [
        {name: value for name, value in each.items() if name not in TIMINGS} for each in (run.result, *history(run))
    ]


def plain(runs, folder):
    """Train the runs with one thread, and return their outcomes."""
    before = torch.get_num_threads()
    made = [outcome(trained(each, folder, threads=1).folder) for each in runs]
    torch.set_num_threads(before)
    return made


@dataclass
class Recorder:
    """Records events, and calls an action with the run and the event for events of a type."""

    on: dict = field(default_factory=dict)
    events: list = field(default_factory=list)

    def __call__(self, run, event):
        self.events.append((run, event))
        action = self.on.get(type(event))
        if action is not None:
            action(run, event)

    def of(self, kind, each=None):
        return [event for run, event in self.events if isinstance(event, kind) and each in (None, run)]

    def endings(self, runs):
        assert len(self.of(Ended)) == len(runs)
        return [ended.status for each in runs for ended in self.of(Ended, each)]
