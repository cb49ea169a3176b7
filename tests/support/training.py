"""Train a run in this process, and collect what it yields."""

import io
from dataclasses import dataclass, field

from rich.console import Console

from ghostnoise.lab.events import Ended, Saved
from ghostnoise.lab.run import Run
from ghostnoise.lab.store.folder import history
from ghostnoise.lab.train import Options, train
from ghostnoise.lab.train.sinks import Terminal


@dataclass
class Outcome:
    """The run as it ended, all events, and what was printed."""

    run: Run
    signal: int
    events: list = field(repr=False)
    printed: str = ""
    warned: list[str] = field(default_factory=list)

    @property
    def result(self):
        return self.run.result

    @property
    def folder(self):
        return self.run.folder

    @property
    def lines(self):
        """The metrics after each epoch."""
        return history(self.run)


def planned(chosen):
    """Return a recipe, settings or a run as a run."""
    return chosen if isinstance(chosen, Run) else Run.planned(chosen.name, chosen.settings)


def trained(chosen, runs, *, saved=lambda path: None, quiet=False, **options):
    """Train to the end; `saved` is called with the folder after each checkpoint."""
    warned, events, console = [], [], Console(file=io.StringIO(), width=200)
    terminal = Terminal(console, quiet)
    for event in train(planned(chosen), Options(runs=runs, **{"thresholds": False, "warn": warned.append} | options)):
        events.append(event)
        terminal.take(event)
        if isinstance(event, Saved):
            saved(event.path.parent.parent)
    terminal.close()
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert [isinstance(event, Ended) for event in events].count(True) == 1
    return Outcome(ended.run, ended.signal, events, console.file.getvalue(), warned)
