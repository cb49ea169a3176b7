"""Match the run folders of an experiment with the runs that it defines; the folders are only read."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.run import ENDED, STATUSES, Numerics, Run, Status
from ghostnoise.lab.store.scan import scan


@dataclass(frozen=True)
class Collected:
    """The runs of an experiment."""

    experiment: Experiment
    folder: Path
    runs: tuple[Run, ...]
    winners: Mapping[str, Run]
    """A run of the selected cell of each group of cells whose tuning has finished."""
    damaged: tuple[Path, ...] = ()
    reasons: Mapping[Path, str] = field(default_factory=dict)
    """Why each damaged folder is damaged, and the command that removes it."""
    others: int = 0
    """Number of folders of runs that are not part of this experiment."""
    duplicates: int = 0
    """Number of folders of runs that have another folder too."""

    def count(self, status: Status) -> int:
        """Count the runs with this status."""
        return sum(run.status == status for run in self.runs)

    @cached_property
    def numerics(self) -> Mapping[Numerics, int]:
        """Numerics numbers of the runs that have a result, and how many runs have each."""
        return numerics_of(self.runs)

    @property
    def mixed(self) -> bool:
        """Whether the runs that have a result are not all comparable."""
        return len({each.behind for each in self.numerics}) > 1


def collect(
    experiment: Experiment, folder: Path, warn: Callable[[str], object], found: Mapping[str, Run] | None = None
) -> Collected:
    """Match the runs in `folder` (`runs/<recipe>`), or those in `found`, with the experiment's by what they compute."""
    found = scan(folder, warn) if found is None else found
    damaged = {each.folder: each.damage for each in found.values() if each.status == "damaged" and each.folder}
    by_key: dict[str, list[Run]] = {}
    unreadable = 0
    for each in found.values():
        if each.status == "damaged":
            continue
        if each.status == "finished" and each.accuracy is None and each.folder is not None:
            line = replace(each, status="damaged", reason="result.json: accuracy: missing").damage
            warn(line)
            damaged[each.folder] = line
        elif each.key is None:
            unreadable += 1
        else:
            by_key.setdefault(each.key, []).append(each)
    best = {key: _preferred(candidates) for key, candidates in by_key.items()}

    def filled(runs: Iterable[Run]) -> list[Run]:
        return [run.filled(next((best[key] for key in _keys(run) if key in best), None)) for run in runs]

    first = filled(experiment.runs())
    winners = experiment.winners(first)
    runs = (*first, *filled(experiment.tests(winners)))
    used = {key for run in runs for key in _keys(run)} & set(by_key)
    others = unreadable + sum(len(candidates) for key, candidates in by_key.items() if key not in used)
    duplicates = sum(len(by_key[key]) - 1 for key in used)
    return Collected(experiment, folder, runs, winners, tuple(sorted(damaged)), damaged, others, duplicates)


def numerics_of(runs: Iterable[Run]) -> dict[Numerics, int]:
    """Count the runs that have a result by their numerics number, in ascending order."""
    counts = Counter(run.numerics for run in runs if run.status in ENDED)
    return dict(sorted(counts.items()))


def _keys(run: Run) -> Iterable[str]:
    """Yield the run's key, and for fp16 smoke runs the key of the same run on a CPU, which uses bf16 instead."""
    yield str(run.key)
    if run.settings.train.smoke and run.settings.train.amp == "fp16":
        yield recipe.key(recipe.resolve(run.settings, device="cpu", processes=1))


def _preferred(candidates: Sequence[Run]) -> Run:
    """Choose one of the folders of the same run: the furthest advanced one, then the one with the newest numerics.

    Device and name make the choice deterministic.
    """

    def order(run: Run) -> tuple[int, int, str, str]:
        return STATUSES.index(run.status), -run.numerics.number, str(run.tree.get("train")), run.identity

    return candidates[0] if len(candidates) == 1 else min(candidates, key=order)
