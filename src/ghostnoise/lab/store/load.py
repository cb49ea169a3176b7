"""Runs as data: a sequence of runs from folders or records, and a table of their settings and results."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ghostnoise.lab.config.overrides import flat
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.run import Run
from ghostnoise.lab.store import records, scan
from ghostnoise.lab.store.folder import PARTS, RUN, history, read
from ghostnoise.text import did_you_mean

if TYPE_CHECKING:
    import pandas

FIRST = ("recipe", "identity", "seed", "status")


class Runs(Sequence[Run]):
    """Runs in the order in which they were read."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = tuple(runs)

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> "Runs": ...
    def __getitem__(self, index: int | slice) -> "Run | Runs":
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return f"<{len(self)} runs>"

    def table(self, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return a row for each run: recipe, identity, seed, status, settings, results and environment.

        Settings have their keys ("norm.method"), results their names ("accuracy"), and those of the last environment
        begin with "environment.". A value that a run does not have is None. `columns` selects columns, in this order.
        """
        rows = [row(run) for run in self]
        known = list(dict.fromkeys([*FIRST, *(name for each in rows for name in each)]))
        for name in columns or ():
            if name not in known:
                meant = did_you_mean(name, known) or f"there are {', '.join(known)}"
                raise UserError(f"{name}: no run has this column; {meant}")
        return [{name: each.get(name) for name in columns or known} for each in rows]

    def curves(self) -> list[dict[str, Any]]:
        """Return a row for each epoch of each run: identity, epoch, and the measures after it."""
        return [{"identity": run.identity} | line for run in self for line in history(run)]

    def to_pandas(self, columns: Sequence[str] | None = None) -> "pandas.DataFrame":
        """Return the table as a DataFrame, which needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas(): needs pandas, which is not installed; pip install pandas") from error
        return pandas.DataFrame(self.table(columns))


def load(path: Path) -> Runs:
    """Read the runs in a folder or a file; see `ghostnoise.lab.load_runs`."""
    if path.is_file():
        return Runs(records.load(path).runs.values())
    if not path.is_dir():
        raise UserError(f"{path}: not found; give a folder of runs, or a file that `ghostnoise runs export` wrote")
    if any((path / name).exists() for name in (RUN, *PARTS)):
        return Runs([read(path)])
    below = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    of_recipe = any((each / name).exists() for each in below for name in (RUN, *PARTS))
    return Runs(run for each in ([path] if of_recipe else below) for run in scan.scan(each, _ignore).values())


def row(run: Run) -> dict[str, Any]:
    """Return a run as a row of a table."""
    made = {name: getattr(run, name) for name in FIRST} | flat(run.tree)
    made |= {"seed": run.seed} | dict(run.result or {}) | {"status": run.status, "segments": len(run.environments)}
    return made | {f"environment.{name}": value for name, value in run.environment.items()}


def write_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return rows with the same names as CSV."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def _ignore(text: str) -> None:
    pass
