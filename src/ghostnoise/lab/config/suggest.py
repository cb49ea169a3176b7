"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def nearest(given: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `count` names of `known` that resemble `given`, the most similar first."""
    return difflib.get_close_matches(str(given), list(known), n=count, cutoff=cutoff)
