"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Return "; did you mean ...?" for the name nearest to `word`, or nothing if none is near.

    >>> did_you_mean("gini", ["gni", "gbn"])
    "; did you mean 'gni'?"
    """
    near = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
