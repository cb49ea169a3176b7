"""Small jobs, their expected outcome, and a recorder of events."""

import json
from dataclasses import dataclass, field

import torch

from ghostnoise.lab.config import recipe
from ghostnoise.lab.runners import Ended, Job
from ghostnoise.lab.train import Options, train

LONG = ["train.epochs=20", "train.batch_size=64", "train.device=cpu", "optim.warmup_epochs=0"]
SHORT = [*LONG, "train.epochs=2", "data.limit=256"]
TIMINGS = ("seconds", "images_per_second", "ended")


def job(*overrides, settings=SHORT):
    chosen = recipe.load("digits", [*settings, *overrides])
    resolved = recipe.resolve(chosen.settings, device="cpu", processes=1)
    return Job("digits", recipe.identity(resolved), " ".join(overrides) or "digits", resolved)


def outcome(folder):
    """Return the result and the metrics without durations."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    return [{name: value for name, value in each.items() if name not in TIMINGS} for each in (result, *lines)]


def plain(jobs, runs):
    """Run the jobs with `train` and one thread, and return their outcomes."""
    before = torch.get_num_threads()
    for each in jobs:
        chosen = recipe.load("digits").with_settings(each.settings)
        train(chosen, Options(runs=runs, threads=1, quiet=True, thresholds=False))
    torch.set_num_threads(before)
    return [outcome(runs / each.recipe / each.identity) for each in jobs]


@dataclass
class Recorder:
    """Records events, and calls an action for events of a type."""

    on: dict = field(default_factory=dict)
    events: list = field(default_factory=list)

    def __call__(self, event):
        self.events.append(event)
        action = self.on.get(type(event))
        if action is not None:
            action(event)

    def of(self, kind, each=None):
        return [event for event in self.events if isinstance(event, kind) and each in (None, event.job)]

    def endings(self, jobs):
        assert len(self.of(Ended)) == len(jobs)
        return [ended.status for each in jobs for ended in self.of(Ended, each)]
