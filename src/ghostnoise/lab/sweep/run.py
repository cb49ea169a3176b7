"""A sweep, from an experiment to run folders; the same call again does what is missing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ghostnoise.lab.config import plan
from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.config.plan import Point
from ghostnoise.lab.engines import Ended, Engine, Event, Job, Place, aside
from ghostnoise.lab.store import scan
from ghostnoise.lab.store.scan import Found
from ghostnoise.lab.sweep import machine
from ghostnoise.lab.sweep.board import Board
from ghostnoise.lab.sweep.tally import Failure, Tally
from ghostnoise.lab.train.stop import Stop, listening
from ghostnoise.version import NUMERICS

OVER = ("finished", "diverged")


@dataclass(frozen=True)
class Options:
    """What does not change what runs compute."""

    runs: Path = Path("runs")
    data: Path | None = None
    engine: str = "local"
    workers: int | None = None
    threads: int | None = None
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """Options of the Ray engine: address, cpus, gpus, storage."""
    checkpoint_seconds: float = 60.0
    quiet: bool = False
    """Print the last line only."""
    console: Console = field(default_factory=Console)
    errors: Console = field(default_factory=lambda: Console(stderr=True))

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.errors.print(f"warning: {text}", highlight=False, soft_wrap=True, markup=False)


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended."""

    tally: Tally
    signal: int = 0

    @property
    def code(self) -> int:
        """The exit code: 0 if every run is finished or diverged, 1 if one failed, 128 + signal if one stopped it."""
        return 128 + self.signal if self.signal else int(bool(self.tally.failures))


def sweep(experiment: Experiment, options: Options) -> Outcome:
    """Run what is missing of an experiment: what is tuned first, then the tests of what won."""
    return Sweep(experiment, options).run()


class Sweep:
    """A sweep at work."""

    def __init__(self, experiment: Experiment, options: Options) -> None:
        self.experiment, self.options = experiment, options
        self.name = experiment.recipe.name
        self.place = Place(options.runs, options.data, options.checkpoint_seconds)
        self.resolve = machine.resolver(options.data, options.engine)
        self.tally = Tally()
        self.board = Board(self.tally, options.console, options.quiet)
        self.found: dict[str, Found] = {}
        self.elsewhere: list[Job] = []
        self.stop = Stop()
        self.engine: Engine | None = None

    def run(self) -> Outcome:
        """Both stages, and the last lines."""
        points = plan.first_points(self.experiment, self.resolve)
        self.found = scan.scan(self.options.runs / self.name, self.options.warn, NUMERICS)
        waiting = self._waiting(points)
        if waiting and self.options.engine == "local":
            machine.need_data(waiting, self.options.data)
        with ExitStack() as stack:
            self.stop = stack.enter_context(listening())
            stack.callback(self._close)
            stack.enter_context(self.board)
            self._stage(points)
            if not self.stop.signal:
                self._stage(self._tests(points))
        self._last_lines()
        return Outcome(self.tally, self.stop.signal)

    def _waiting(self, points: Sequence[Point]) -> list[Point]:
        """Those that are not over, and whose folders are not damaged."""
        return [point for point in points if self._status(point) not in (*OVER, "damaged")]

    def _status(self, point: Point) -> str:
        found = self.found.get(point.identity)
        return "missing" if found is None else found.status

    def _stage(self, points: Sequence[Point]) -> None:
        """Count what is over, and run the rest."""
        for point in points:
            status = self._status(point)
            if status in OVER:
                self.tally.earlier += 1
                self.tally.over(status)
            elif status == "damaged":
                self._fail(point.name, self.found[point.identity].reason, point.identity)
        waiting = self._waiting(points)
        self.tally.waiting += len(waiting)
        jobs = [Job(self.name, point.identity, point.name, point.settings) for point in waiting]
        if jobs and self.engine is None:
            options = self.options
            self.engine = machine.engine(
                options.engine, self.place, waiting, options.workers, options.threads, options.cluster
            )
        while jobs and self.engine is not None:
            self.elsewhere = []
            self.engine.run(jobs, self._tell, lambda: bool(self.stop.signal))
            jobs = self._wait_for_others()

    def _wait_for_others(self) -> list[Job]:
        """Wait until runs that an engine left to another sweep are over, or free: those to run here."""
        others = aside.Aside(self.place)
        for job in self.elsewhere:
            others.put(job)
        while others.jobs and not self.stop.signal:
            ended, free = others.look()
            for event in ended:
                self._tell(event)
            if free:
                self.elsewhere = []
                return [*free, *others.clear()]
            aside.pause()
        return []

    def _tell(self, event: Event) -> None:
        """Take an event of the engine."""
        if isinstance(event, Ended) and event.status == "elsewhere":
            self.elsewhere.append(event.job)
            self.tally.put_back(event.job)
            return
        self.tally.take(event)
        if not isinstance(event, Ended):
            return
        job, result = event.job, None
        if event.status == "stopped":
            self.tally.waiting += 1
            return
        if event.status == "failed":
            self._fail(job.name, event.message, job.identity)
        else:
            found = self.found[job.identity] = scan.look(self.place.folder(job), self.options.warn)
            result = found.result
            self.tally.over(event.status)
        self.board.over(job.name, event.status, result, event.message)

    def _fail(self, name: str, reason: str, identity: str) -> None:
        first = next(iter(reason.splitlines()), "no reason given")
        self.tally.failures.append(Failure(name, first, self.options.runs / self.name / identity))

    def _tests(self, points: Sequence[Point]) -> list[Point]:
        """The tests of the cells that won; says which methods have none, and why."""
        results: dict[str, dict[str, Any]] = {}
        missing: Counter[str] = Counter()
        tuned = [point for point in points if point.stage == "tune"]
        for point in tuned:
            found = self.found.get(point.identity)
            if found is not None and found.result is not None:
                results[point.key] = found.result
            else:
                missing[self.experiment.group(point.cell)] += 1
        winners = plan.winners(self.experiment, tuned, results)
        for group in dict.fromkeys(self.experiment.group(point.cell) for point in tuned):
            if group in winners:
                self.board.say(f"{group}: {winners[group].name} is best, and is tested")
            elif missing[group]:
                self.board.say(f"{group}: not tested, as {missing[group]} of its tuning runs failed")
            else:
                self.board.say(f"{group}: not tested, as all of its tuning diverged")
        return plan.test_points(self.experiment, winners, self.resolve)

    def _close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _last_lines(self) -> None:
        for failure in self.tally.failures:
            self.board.say(f"failed {failure.name}: {failure.reason} ({failure.folder})")
        text = self.tally.line(stopped=bool(self.stop.signal))
        if self.stop.signal:
            text = f"stopped; the same command goes on from here: {text}"
        text += f"; {self.options.runs / self.name}"
        self.options.console.print(text, highlight=False, soft_wrap=True, markup=False)
