"""Train the missing runs of an experiment, or list them."""

import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ghostnoise import doctor
from ghostnoise.lab import data
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.grid import Experiment, Resolve
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.events import Ended, Event
from ghostnoise.lab.run import ENDED, Run, number
from ghostnoise.lab.store import scan
from ghostnoise.lab.sweep import local, ray
from ghostnoise.lab.sweep.board import Board, Tally
from ghostnoise.lab.sweep.execute import Place, Runner
from ghostnoise.lab.train import machine
from ghostnoise.lab.train.machine import Stop, handle_signals
from ghostnoise.lab.train.run import Keep
from ghostnoise.lab.train.sinks import Logs
from ghostnoise.terminal import LiteralConsole, print_table
from ghostnoise.text import counted, duration

RUNNERS = ("local", "ray")


@dataclass(frozen=True)
class Options:
    """Options that do not change the results of runs.

    `cluster` has the options of the Ray runner: address, cpus, gpus, storage. `logs` names the sinks of the runs.
    `quiet` prints only the last lines.
    """

    runs: Path = Path("runs")
    data: Path | None = None
    runner: str = "local"
    workers: int | None = None
    threads: int | None = None
    cluster: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_seconds: float = 60.0
    keep: Keep = "weights"
    logs: Sequence[str] = ()
    log_steps: int = 10
    words: Sequence[str] = ()
    """Words of the command line that select the experiment, for the command to type next."""
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
    """Train the missing runs of an experiment: first the tuning, then the tests of the best cells."""
    return Sweep(experiment, options).run()


class Sweep:
    """A sweep in progress."""

    def __init__(self, experiment: Experiment, options: Options) -> None:
        self.experiment, self.options = experiment, options
        self.name = experiment.recipe.name
        log_steps = options.log_steps if options.logs else 0
        self.place = Place(options.runs, options.data, options.checkpoint_seconds, options.keep, log_steps)
        self.resolve = resolver(options.data, options.runner)
        self.logs = Logs(options.logs, options.log_steps, options.warn)
        self.tally = Tally()
        self.board = Board(self.tally, options.console, options.quiet)
        self.ended: dict[str, Run] = {}
        self.stop = Stop()
        self.runner: Runner | None = None

    def run(self) -> Outcome:
        """Run both stages, and print the last lines."""
        found = scan.scan(self.options.runs / self.name, self.options.warn)
        runs = _filled(self.experiment.runs(self.resolve), found)
        waiting = [run for run in runs if not _over(run)]
        for warning in dict.fromkeys(recipe.whole_batch_warning(run.settings) for run in waiting):
            if warning:
                self.options.warn(warning)
        if waiting and self.options.runner == "local":
            need_data(waiting, self.options.data)
            need_data(self._any_tests(waiting), self.options.data)
        with ExitStack() as stack:
            self.stop = stack.enter_context(handle_signals())
            stack.callback(self._close)
            stack.enter_context(self.board)
            runs = self._stage(runs)
            if not self.stop.signal:
                tests = _filled(self.experiment.tests(self.experiment.winners(runs), self.resolve), found)
                self._print_winners(runs, tests)
                self._stage(tests)
        self._print_last()
        return Outcome(self.tally, self.stop.signal)

    def _any_tests(self, runs: Sequence[Run]) -> list[Run]:
        """Return the tests of some cell of each group, whose data must be there before hours of tuning."""
        some = {self.experiment.group(run): run for run in runs if run.stage == "tune"}
        return self.experiment.tests(some, self.resolve)

    def _stage(self, runs: Sequence[Run]) -> list[Run]:
        """Count the runs that have ended, train the others, and return all as they are now."""
        waiting = [run for run in runs if not _over(run)]
        for run in runs:
            if _over(run):
                self.tally.earlier += run.status in ENDED
                self.tally.over(run)
        self.tally.waiting += len(waiting)
        if waiting and self.runner is None:
            self.runner = make_runner(self.options, self.place, waiting)
        if waiting and self.board.live is None:  # a live table shows the same
            count = counted(len(waiting), "run")
            self.board.print(f"{count} of {self.name} to train, {self.tally.earlier} ended earlier")
        if waiting and self.runner is not None:
            self.runner.run(waiting, self._take, lambda: bool(self.stop.signal))
        return _filled(runs, self.ended)

    def _take(self, run: Run, event: Event) -> None:
        """Handle an event of the runner."""
        self.logs.take(run, event)
        self.tally.take(run, event)
        if isinstance(event, Ended) and event.status not in ("stopped", "elsewhere"):
            if event.run is not None:
                self.ended[run.identity] = run.filled(event.run)
                if event.run.status not in ENDED:
                    self.tally.failures[-1] = run.filled(event.run)
            self.board.over(run, event)

    def _print_winners(self, runs: Sequence[Run], tests: Sequence[Run]) -> None:
        """Print which cell of each group is tested, or why none is."""
        winners = self.experiment.winners(runs)
        groups: dict[str, list[Run]] = {}
        for run in runs:
            if run.stage == "tune":
                groups.setdefault(self.experiment.group(run), []).append(run)
        for group, tuned in groups.items():
            if group in winners:
                left = [run for run in tests if self.experiment.group(run) == group and not _over(run)]
                done = "is tested now" if left else "has been tested"
                self.board.print(f"{group}: {winners[group].cell} is the best cell and {done}")
            elif missing := sum(not run.ended for run in tuned):
                self.board.print(f"{group}: not tested, because {counted(missing, 'tuning run')} failed")
            else:
                self.board.print(f"{group}: not tested, because all of its tuning runs diverged")

    def _close(self) -> None:
        if self.runner is not None:
            self.runner.close()
        self.logs.close()

    def _print_last(self) -> None:
        for run in self.tally.failures:
            why = run.damage if run.status == "damaged" else run.failed_for
            self.board.print(f"failed {run.name}: {why} ({run.folder})")
        text = self.tally.line(stopped=bool(self.stop.signal))
        if self.stop.signal:
            text = f"stopped; run the same command to resume: {text}"
        _print(self.options, f"{text}; {self.options.runs / self.name}")
        if not self.stop.signal and not self.options.quiet:
            _print(self.options, f"next: {next_command(self.options)}")


def next_command(options: Options) -> str:
    """Return the command that reports the runs."""
    runs = [] if options.runs == Path("runs") else ["--runs", str(options.runs)]
    return shlex.join(["ghostnoise", "report", *options.words, *runs])


def list_runs(experiment: Experiment, options: Options) -> None:
    """Print a table of cells with their finished and missing seeds, and the counts; train nothing."""
    resolve = resolver(options.data, options.runner)
    folder = options.runs / experiment.recipe.name
    found = scan.scan(folder, options.warn)
    runs = _filled(experiment.runs(resolve), found)
    winners = experiment.winners(runs)
    every = [*runs, *_filled(experiment.tests(winners, resolve), found)]
    if not options.quiet:
        print_table(options.console, _table(every), titles=2)
    counts = Counter("to run" if not _over(run) else run.status for run in every)
    shown = {"to run": counts["to run"], "finished": counts["finished"]}
    shown |= {name: counts[name] for name in ("diverged", "damaged") if counts[name]}
    text = ", ".join(f"{count} {name}" for name, count in shown.items()) + f"; {folder}"
    tuned = {experiment.group(run): run for run in runs if run.stage == "tune"}
    if later := sum(len(experiment.seeds_of(run.label)) for group, run in tuned.items() if group not in winners):
        text += f"; then up to {later} tests of the best tuned cells"
    _print(options, text + _estimate(every, later, options))


def resolver(folder: Path | None, runner: str = "local") -> Resolve:
    """Return a function that resolves settings for this machine, as `train` does.

    A device of a cluster is not checked here: this machine may not have it.
    """
    place = data.data_folder(folder)

    @cache
    def device(name: str) -> str:
        return name if runner != "local" and name != "auto" else machine.select_device(name).type

    def resolve(settings: Settings) -> Settings:
        kind = device(settings.train.device)
        if settings.train.smoke:
            missing = not data.present(settings.data, place)
            resolved = recipe.resolve(settings, device=kind, processes=1, stand_in=missing)
        else:  # the same, without validating every cell of a grid again
            resolved = settings.model_copy(update={"train": recipe.with_value(settings.train, "device", kind)})
        recipe.check(resolved)
        return resolved

    return resolve


def need_data(runs: Iterable[Run], folder: Path | None) -> None:
    """Raise if the data of no run are found; if some are found, the other runs fail one by one."""
    place = data.data_folder(folder)
    seen = {run.settings.data.model_dump_json(): run.settings.data for run in runs}
    present = [data.present(each, place) for each in seen.values()]
    if seen and not any(present):
        missing = next(iter(seen.values()))
        own = getattr(missing, "folder", None)
        remedy = "copy them to that folder" if own else f"run `ghostnoise data get {missing.name}`"
        raise UserError(
            f"{own or missing.name}: its images were not found in {place}; {remedy}, or use --smoke, which "
            "does not need them"
        )


def make_runner(options: Options, place: Place, runs: Iterable[Run]) -> Runner:
    """Create the runner that the options name."""
    devices = {run.settings.train.device for run in runs}
    workers, threads = options.workers, options.threads
    if options.runner == "local":
        if "mps" in devices:
            workers = workers or 1
        return local.LocalRunner(place, workers, threads, local.gpus() if "cuda" in devices else ())
    own = {"cpus": threads or 1, "gpus": int("cuda" in devices)} | dict(options.cluster)
    return ray.RayRunner(place, threads=threads, **own)


def _filled(runs: Iterable[Run], found: Mapping[str, Run]) -> list[Run]:
    return [run.filled(found.get(run.identity)) for run in runs]


def _over(run: Run) -> bool:
    """Return whether there is nothing to do: the run has ended, or its folder is damaged."""
    return run.ended or run.status == "damaged"


def _print(options: Options, text: str) -> None:
    options.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _estimate(runs: Sequence[Run], later: int, options: Options) -> str:
    """Estimate the time of the missing runs from the finished ones of the same cell, or else of all."""
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if run.ended and (time := number((run.result or {}).get("seconds"))) is not None:
            for name in (run.cell, ""):
                seconds.setdefault(name, []).append(time)
    left = [run for run in runs if not _over(run)]
    if not left or not seconds:
        return ""
    total = sum(statistics.median(seconds.get(run.cell, seconds[""])) for run in left)
    total += later * statistics.median(seconds[""])
    workers = options.workers or doctor.cores()
    return f"; about {duration(total / min(workers, len(left) + later))} with {counted(workers, 'worker')}"


def _table(runs: Iterable[Run]) -> Table:
    rows: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for run in runs:
        done, missing = rows.setdefault((run.stage, run.cell), ([], []))
        outdated = run.status in ENDED and not run.ended
        noted = outdated or run.status not in ("finished", "missing")
        note = f" ({'outdated' if outdated else run.status})" if noted else ""
        (done if run.ended else missing).append(f"{run.seed}{note}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "cell", "seeds finished", "seeds missing"):
        table.add_column(name)
    for (stage, cell), (done, missing) in rows.items():
        table.add_row(stage, cell, " ".join(done), " ".join(missing))
    return table
