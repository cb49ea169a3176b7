"""Experiments. The lab imports the library, and the library never imports the lab."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this package is imported without the packages of the [lab] extra
    from ghostnoise.lab.store.load import Runs


def load_runs(path: str | Path) -> "Runs":
    """Read runs as data.

    Args:
        path: The folder that contains the folders of recipes (`runs`), the folder of a recipe, the folder of a run, or
            a file of records. Nothing is changed.

    Returns:
        A sequence of `ghostnoise.lab.run.Run`, with `table()`, rows of plain dictionaries, and `to_pandas()`. Damaged
        runs are among them, with the reason in `Run.reason`.

    Examples:
        >>> from ghostnoise.lab import load_runs
        >>> runs = load_runs("results/mnist1d-table1/records.jsonl")
        >>> accuracies = [run.accuracy for run in runs if run.settings.norm.method == "gni"]
        >>> rows = runs.table(["norm.method", "norm.ghost_size", "seed", "accuracy"])
    """
    from ghostnoise.lab.store.load import load

    return load(Path(path))
