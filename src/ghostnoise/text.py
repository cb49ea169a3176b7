"""Text for people: suggestions for misspelt names, durations, counts, commands, and names that are shown literally.

This module does not import torch.
"""

import difflib
import json
import os
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

DEVICE_SYNONYMS = {"gpu": "cuda", "cuda": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps"}
"""Other names of devices, and torch's names for them."""


def nearest(word: str, candidates: Iterable[str], *, count: int = 1, cutoff: float = 0.5) -> list[str]:
    """Return up to `count` candidates that resemble `word`, ignoring case, the most similar one first.

    `cutoff` is the least similarity, as in `difflib.get_close_matches`; 0 always finds a candidate.
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    return [by_lower[found] for found in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=cutoff)]


def did_you_mean(
    word: str, candidates: Iterable[str], *, count: int = 1, cutoff: float = 0.5, show: Callable[[str], str] = str
) -> str:
    """Return "did you mean X?" for the nearest candidates, or "" if none is near. `show=repr` quotes them.

    >>> did_you_mean("gnj", ["bn", "gbn", "gni"], show=repr)
    "did you mean 'gni'?"
    """
    found = nearest(word, candidates, count=count, cutoff=cutoff)
    return f"did you mean {' or '.join(map(show, found))}?" if found else ""


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes, hours or days, with one decimal below 10.

    >>> [duration(seconds) for seconds in (0.04, 75, 600, 9000, 86400 * 3)]
    ['0.0 s', '75 s', '10 min', '2.5 h', '3.0 d']
    """
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next((each for each in units if seconds >= 2 * each[1]), units[-1])
    value = seconds / size
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "run"), counted(3, "run")
    ('1 run', '3 runs')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where this library is: its sources, or what pip installed."""
    sources = Path(__file__).parents[2]
    if (sources / "pyproject.toml").is_file():
        return f"pip install -e '{sources}[{extra}]'"
    from importlib import metadata  # both take a while to import
    from urllib.request import url2pathname

    try:
        origin = metadata.distribution("ghostnoise").read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        origin = "{}"
    url = json.loads(origin).get("url", "")
    path = url2pathname(url.removeprefix("file://"))
    return f"pip install '{path if os.path.exists(path) else 'ghostnoise'}[{extra}]'"


def printable(text: str) -> str:
    """Escape control characters and other characters that are not printable, so that a terminal shows them literally.

    >>> print(printable("red" + chr(27) + "[31m"))
    red\\x1b[31m
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def wrapped(text: str, width: int) -> str:
    """Break lines between words so that they fit, and indent what follows; longer words, such as paths, stay whole.

    >>> print(wrapped("finished after 3 epochs; runs/digits/0123456789ab", 24))
    finished after 3 epochs;
      runs/digits/0123456789ab
    """
    return "\n".join(
        textwrap.fill(line, max(width, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False,
                      replace_whitespace=False)
        for line in text.split("\n")
    )  # fmt: skip


def for_stream(text: str, stream: IO[str]) -> str:
    """Return text with its lines broken between words if the stream is a terminal, and unchanged otherwise."""
    try:
        return wrapped(text, os.get_terminal_size(stream.fileno()).columns) if stream.isatty() else text
    except (OSError, ValueError):  # a stream without a file, or a terminal without a size
        return text
