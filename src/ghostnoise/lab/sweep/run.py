"""Run the missing runs of an experiment, or list them."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ghostnoise.lab.config import plan, recipe
from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.config.plan import Point
from ghostnoise.lab.runners import Ended, Event, Job, Place, Runner, execution
from ghostnoise.lab.store import scan
from ghostnoise.lab.store.scan import Found
from ghostnoise.lab.sweep import machine
from ghostnoise.lab.sweep.progress import Board, Failure, Tally
from ghostnoise.lab.train.stop import Stop, handle_signals
from ghostnoise.terminal import LiteralConsole, print_table
from ghostnoise.text import counted

OVER = ("finished", "diverged")
ATTEMPTS = 3  # at a run whose folder is deleted again and again


@dataclass(frozen=True)
class Options:
    """Options that do not change the results of runs.

    `cluster` has the options of the Ray runner: address, cpus, gpus, storage. `quiet` prints only the last line.
    """

    runs: Path = Path("runs")
    data: Path | None = None
    runner: str = "local"
    workers: int | None = None
    threads: int | None = None
    cluster: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_seconds: float = 60.0
    quiet: bool = False
    console: Console = field(default_factory=LiteralConsole)
    errors: Console = field(default_factory=lambda: LiteralConsole(stderr=True))

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
        """Return the exit code: 0 if all runs finished or diverged, 1 if one failed, or 128 + the signal."""
        return 128 + self.signal if self.signal else int(bool(self.tally.failures))


def sweep(experiment: Experiment, options: Options) -> Outcome:
    """Run the missing runs of an experiment: first the tuning, then the tests of the best cells."""
    return Sweep(experiment, options).run()


class Sweep:
    """A sweep in progress."""

    def __init__(self, experiment: Experiment, options: Options) -> None:
        self.experiment, self.options = experiment, options
        self.name = experiment.recipe.name
        self.place = Place(options.runs, options.data, options.checkpoint_seconds)
        self.resolve = machine.resolver(options.data, options.runner)
        self.tally = Tally()
        self.board = Board(self.tally, options.console, options.quiet)
        self.found: dict[str, Found] = {}
        self.elsewhere: list[Job] = []
        self.ended: dict[str, str] = {}
        self.earlier: set[str] = set()
        self.attempts: Counter[str] = Counter()
        self.stop = Stop()
        self.runner: Runner | None = None

    def run(self) -> Outcome:
        """Run both stages, and print the last lines."""
        points = plan.first_points(self.experiment, self.resolve)
        self.found = scan.scan(self.options.runs / self.name, self.options.warn, current=True)
        waiting = self._waiting(points)
        for warning in dict.fromkeys(recipe.whole_batch_warning(point.settings) for point in waiting):
            if warning:
                self.options.warn(warning)
        if waiting and self.options.runner == "local":
            machine.need_data(waiting, self.options.data)
        with ExitStack() as stack:
            self.stop = stack.enter_context(handle_signals())
            stack.callback(self._close)
            stack.enter_context(self.board)
            self._stage(points)
            if not self.stop.signal:
                self._stage(self._tests(points))
        self._last_lines()
        return Outcome(self.tally, self.stop.signal)

    def _waiting(self, points: Sequence[Point]) -> list[Point]:
        """Return the points whose runs have not ended, and whose folders are not damaged."""
        return [point for point in points if self._status(point) not in (*OVER, "damaged")]

    def _status(self, point: Point) -> str:
        found = self.found.get(point.identity)
        return "missing" if found is None else found.status

    def _stage(self, points: Sequence[Point]) -> None:
        """Count the runs that have ended, and run the others."""
        for point in points:
            status = self._status(point)
            if status in OVER:
                self.tally.earlier += 1
                self.earlier.add(point.identity)
                self._over(point.identity, status)
            elif status == "damaged":
                self._fail(point.name, self.found[point.identity].damage, point.identity)
        waiting = self._waiting(points)
        self.tally.waiting += len(waiting)
        jobs = [Job(self.name, point.identity, point.name, point.settings) for point in waiting]
        if jobs and self.runner is None:
            options = self.options
            self.runner = machine.make_runner(
                options.runner, self.place, waiting, options.workers, options.threads, options.cluster
            )
        if jobs and self.board.live is None:  # a live table shows the same
            self.board.print(f"{counted(len(jobs), 'run')} of {self.name} to train, {self.tally.earlier} ended earlier")
        while jobs and self.runner is not None:
            self.elsewhere = []
            self.runner.run(jobs, self._take, lambda: bool(self.stop.signal))
            jobs = self._wait_for_others() or self._deleted(points)

    def _deleted(self, points: Sequence[Point]) -> list[Job]:
        """Return the runs that have ended, but whose folders were deleted since then, to run them again."""
        jobs = []
        for point in () if self.stop.signal else points:
            job = Job(self.name, point.identity, point.name, point.settings)
            gone = point.identity in self.ended and not os.path.lexists(self.place.folder(job) / "result.json")
            if gone and self.attempts[point.identity] < ATTEMPTS - 1:
                self.attempts[point.identity] += 1
                self.tally.again(self.ended.pop(point.identity), point.identity in self.earlier)
                self.earlier.discard(point.identity)
                self.board.print(f"{point.name}: its folder was deleted during the sweep; it is trained again")
                jobs.append(job)
        return jobs

    def _over(self, identity: str, status: str) -> None:
        self.ended[identity] = status
        self.tally.over(status)

    def _wait_for_others(self) -> list[Job]:
        """Wait for runs that another process owns; return those that it left, to run them here."""
        others = execution.Deferred(self.place)
        for job in self.elsewhere:
            others.add(job)
        while others.jobs and not self.stop.signal:
            ended, free = others.check()
            for event in ended:
                self._take(event)
            if free:
                self.elsewhere = []
                return [*free, *others.clear()]
            execution.pause()
        return []

    def _take(self, event: Event) -> None:
        """Handle an event of the runner."""
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
            self._over(job.identity, event.status)
        self.board.over(job.name, event.status, result, event.message)

    def _fail(self, name: str, reason: str, identity: str) -> None:
        first = next(iter(reason.splitlines()), "no reason given")
        self.tally.failures.append(Failure(name, first, self.options.runs / self.name / identity))

    def _tests(self, points: Sequence[Point]) -> list[Point]:
        """Return the tests of the best cells; print which methods are not tested, and why."""
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
                self.board.print(f"{group}: {winners[group].name} is the best cell and is tested now")
            elif missing[group]:
                self.board.print(f"{group}: not tested, because {counted(missing[group], 'tuning run')} failed")
            else:
                self.board.print(f"{group}: not tested, because all of its tuning runs diverged")
        return plan.test_points(self.experiment, winners, self.resolve)

    def _close(self) -> None:
        if self.runner is not None:
            self.runner.close()

    def _last_lines(self) -> None:
        for failure in self.tally.failures:
            self.board.print(f"failed {failure.name}: {failure.reason} ({failure.folder})")
        text = self.tally.line(stopped=bool(self.stop.signal))
        if self.stop.signal:
            text = f"stopped; run the same command to resume: {text}"
        text += f"; {self.options.runs / self.name}"
        self.options.console.print(text, highlight=False, soft_wrap=True, markup=False)


def list_runs(experiment: Experiment, options: Options) -> None:
    """Print a table of cells with their finished and missing seeds, and the counts; run nothing."""
    resolve = machine.resolver(options.data, options.runner)
    folder = options.runs / experiment.recipe.name
    found = scan.scan(folder, options.warn, current=True)
    points = plan.first_points(experiment, resolve)
    results = {
        point.key: result
        for point in points
        if point.identity in found and (result := found[point.identity].result) is not None
    }
    winners = plan.winners(experiment, points, results)
    tests = plan.test_points(experiment, winners, resolve)
    if not options.quiet:
        print_table(options.console, _table([*points, *tests], found), titles=2)
    done = sum(_over(point, found) for point in (*points, *tests))
    text = f"{len(points) + len(tests) - done} to run, {done} finished; {folder}"
    tuned = {experiment.group(point.cell): point.cell for point in points if point.stage == "tune"}
    if later := sum(len(experiment.seeds_of(cell)) for group, cell in tuned.items() if group not in winners):
        text += f"; then up to {later} tests of the best tuned cells"
    options.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _over(point: Point, found: dict[str, Found]) -> bool:
    return point.identity in found and found[point.identity].status in OVER


def _table(points: Iterable[Point], found: dict[str, Found]) -> Table:
    rows: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for point in points:
        done, missing = rows.setdefault((point.stage, point.cell.name), ([], []))
        status = found[point.identity].status if point.identity in found else "missing"
        note = f" ({status})" if status not in ("finished", "missing") else ""
        (done if status in OVER else missing).append(f"{point.seed}{note}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "cell", "seeds finished", "seeds missing"):
        table.add_column(name)
    for (stage, cell), (done, missing) in rows.items():
        table.add_row(stage, cell, " ".join(done), " ".join(missing))
    return table
