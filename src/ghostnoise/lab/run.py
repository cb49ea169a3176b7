"""A run: the settings that determine what it computes, and what is known about it.

A recipe expands to runs that are missing; scanning fills in what their folders contain; runners train them; records
hold those that have ended; reports show them. All of these take and return `Run`. Importing this module does not
import torch.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ghostnoise.lab.config import methods, recipe
from ghostnoise.lab.config.schema import Settings

Tree = dict[str, Any]
Pairs = tuple[tuple[str, Any], ...]
Stage = Literal["tune", "test"]
Status = Literal["finished", "diverged", "failed", "running", "interrupted", "missing", "damaged"]
STATUSES: tuple[Status, ...] = ("finished", "diverged", "failed", "running", "interrupted", "missing")
"""From the furthest advanced to none; of two folders of the same run, reports use the further advanced one."""
ENDED = ("finished", "diverged")
IMPORTED = "imported.json"  # in a run folder: the file that the run was imported from


class Numerics(NamedTuple):
    """Numerics number of a run, which is raised when results change by more than rounding, and its method's `current`.

    Runs are comparable if their methods have changed equally often since: if both numbers are current, for example.
    """

    number: int
    current: int

    @property
    def behind(self) -> int:
        """How often the number of the method was raised since the run."""
        return self.current - self.number

    def __str__(self) -> str:
        return f"{self.number} instead of {self.current}" if self.behind else str(self.number)


@dataclass(frozen=True, eq=False)
class Run:
    """A run: planned, running, finished on disk or read from a record."""

    recipe: str
    """Name of the recipe: the folder that contains the run's folder."""
    identity: str
    """12 hexadecimal digits that are equal for equal settings: the name of the run's folder."""
    given: Settings | Mapping[str, Any] = field(repr=False)
    """The settings, as they are planned or as they are stored; see `settings` and `tree`."""
    label: str = ""
    """Label of its method in the grid; empty for a run without a grid."""
    at: Pairs = ()
    """Its values on the axes of the grid."""
    paper: str | None = None
    """The paper's result."""
    stage: Stage = "test"
    status: Status = "missing"
    environments: Sequence[Mapping[str, Any]] = ()
    """Metadata of the environment of each segment of the training, which resuming begins."""
    result: Mapping[str, Any] | None = None
    """The result; None unless the run has finished or diverged."""
    failure: Mapping[str, Any] | None = None
    reason: str = ""
    """Why its folder is damaged."""
    folder: Path | None = None
    """Its folder; None for a run that is planned or was read from a record."""
    curve: Mapping[str, Any] | None = None
    """Measures after each epoch of a run that was read from a record; `store.scan.history` reads those of a folder."""
    noise: Sequence[Mapping[str, Any]] = ()
    """Noise measured during training, of a run that was read from a record."""

    @classmethod
    def planned(
        cls, name: str, settings: Settings, label: str = "", at: Pairs = (), paper: str | None = None,
        stage: Stage = "test",
    ) -> "Run":  # fmt: skip
        """Return a run of the recipe `name` that is not known to exist."""
        return cls(name, recipe.identity(settings), settings, label, at, paper, stage)

    def filled(self, found: "Run | None") -> "Run":
        """Return this planned run with what is known from its folder or record."""
        if found is None:
            return self
        return replace(
            self, identity=found.identity, status=found.status, environments=found.environments, result=found.result,
            failure=found.failure, reason=found.reason, folder=found.folder, curve=found.curve, noise=found.noise,
        )  # fmt: skip

    @cached_property
    def settings(self) -> Settings:
        """The settings; raises a ValueError if they are stored and are not valid in this version."""
        return self.given if isinstance(self.given, Settings) else recipe.stored(self.given)

    @cached_property
    def tree(self) -> Mapping[str, Any]:
        """The settings as a dictionary."""
        return self.given.model_dump(exclude_none=True) if isinstance(self.given, Settings) else self.given

    @property
    def seed(self) -> int:
        """The seed."""
        return self.given.seed if isinstance(self.given, Settings) else self.given.get("seed", 0)

    @cached_property
    def key(self) -> str | None:
        """An identity that does not depend on the machine; None if the settings are not valid in this version."""
        try:
            return recipe.key(self.settings)
        except ValueError:
            return None

    @property
    def cell(self) -> str:
        """Label of the method and values on the axes, which the runs of a cell share; they differ in their seed."""
        return named(self.label, self.at)

    @property
    def name(self) -> str:
        """Name in tables."""
        text = f"{self.cell or self.recipe} seed {self.seed}"
        return f"{text} (tuning)" if self.stage == "tune" else text

    @property
    def accuracy(self) -> float | None:
        """Accuracy after the last epoch; None unless the run finished."""
        return number((self.result or {}).get("accuracy")) if self.status == "finished" else None

    @property
    def ended(self) -> bool:
        """Whether it finished or diverged, and this version would compute the same result."""
        return self.status in ENDED and not self.numerics.behind

    @property
    def environment(self) -> Mapping[str, Any]:
        """Metadata of the environment in which it was last trained; empty if there is none."""
        return self.environments[-1] if self.environments else {}

    @cached_property
    def numerics(self) -> Numerics:
        """Numerics number that it was computed with, and that of its method now."""
        found = self.environment.get("numerics", 1)  # runs from before it was recorded have none
        norm = self.tree.get("norm")
        method = norm.get("method") if isinstance(norm, Mapping) else None
        return Numerics(found if type(found) is int else 1, methods.numerics(method))

    @property
    def imported(self) -> bool:
        """Whether its folder was imported from a file of records."""
        return self.folder is not None and (self.folder / IMPORTED).exists()

    @property
    def failed_for(self) -> str:
        """First line of the reason for a failure; empty if the run did not fail."""
        if self.status != "failed":
            return ""
        texts = [text for text in (self.failure or {}).values() if isinstance(text, str)]
        given = (self.failure or {}).get("message")
        lines = [line.strip() for text in ([given] if isinstance(given, str) else texts) for line in text.splitlines()]
        return next(filter(None, lines), "no reason was recorded")

    @property
    def damage(self) -> str:
        """A line about a damaged folder, with the command that removes it."""
        return (
            f"{self.folder} is damaged ({self.reason}); `ghostnoise runs remove {shlex.quote(str(self.folder))}` "
            "removes it"
        )


def named(label: str, at: Pairs) -> str:
    """Return the name of a cell, or of a group of cells."""
    return " ".join([label, *(f"{key.rpartition('.')[2]}={value}" for key, value in at)])


def number(value: object) -> float | None:
    """Return a finite number as float, and None for anything else that a file may contain."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if numeric and math.isfinite(value) else None  # type: ignore[arg-type]
    except OverflowError:  # an integer of more than 308 digits
        return None
