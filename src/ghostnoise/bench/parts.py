"""Steps that are divided into parts, and their records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ghostnoise.bench.settings import Record

STEP, PART, FUNCTION = "step", "part", "function"


@dataclass(frozen=True)
class Divided:
    """The milliseconds of a contender's step: the parts, whose last one is the rest, and functions as separate calls.

    `parts` and `functions` are medians, and their names are those of columns in tables.
    """

    contender: str
    kind: str
    backend: str
    total: float
    parts: dict[str, float] = field(default_factory=dict)
    functions: dict[str, float] = field(default_factory=dict)

    def lines(self) -> list[tuple[str, str, float]]:
        """Return the level, the name and the milliseconds of the step, of its parts and of the functions."""
        parts = [(PART, name, taken) for name, taken in self.parts.items()]
        return [(STEP, "step", self.total), *parts, *((FUNCTION, *each) for each in self.functions.items())]


def with_rest(total: float, parts: dict[str, float], rest: str) -> dict[str, float]:
    """Return the parts and what is left of the total."""
    return parts | {rest: total - sum(parts.values())}


def records(row: Any, scope: str, steps: Sequence[Divided], n: int) -> list[Record]:
    """Return a record for each part of each step; ratios are to the first step. `scope` is "layer" or "network"."""
    shared = {"bench": "profile", "row": row.name, "shape": "x".join(map(str, row.shape))}
    shared |= {"memory_format": row.memory_format, "scope": scope}
    return [
        shared
        | {"contender": step.contender, "kind": step.kind, "backend": step.backend, "level": level, "part": part}
        | {"p50_ms": taken, "ratio_p50": taken / steps[0].total, "n": n}
        for step in steps
        for level, part, taken in step.lines()
    ]
