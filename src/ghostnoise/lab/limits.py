"""Limits on what others have written: files, names, and values of TOML and JSON. This module does not import torch."""

import errno
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 2**26  # of a file of a run, other than checkpoints
MOST_RECIPE_BYTES = 2**18
MOST_OVERRIDE = 10_000  # characters
MOST_DIGITS = 20  # of an integer
MOST_DEPTH = 8  # of objects and lists in JSON
MOST_TOML_DEPTH = 16  # of tables and lists, of which a recipe with variants has more
MOST_CHARACTERS = 1_000  # of a text in a recipe
MOST_NAME_BYTES = 200


def read_bytes(path: Path, most: int = MOST_BYTES, *, follow: bool = False) -> bytes:
    """Read a regular file of at most `most` bytes; raises an OSError or a ValueError for anything else.

    Opening a pipe or a device never waits. Symbolic links are refused unless `follow`.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("a symbolic link instead of a file") from None
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("a folder instead of a file" if stat.S_ISDIR(found.st_mode) else "not a regular file")
        if found.st_size > most:
            raise ValueError(f"{found.st_size:,} bytes: must have at most {most:,}")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def checked_name(name: Any) -> str:
    """Return the name of a recipe if it can be that of a folder; raises a ValueError otherwise."""
    valid = isinstance(name, str) and 0 < len(name.encode(errors="replace")) <= MOST_NAME_BYTES and name.isprintable()
    if not valid or name.startswith(".") or any(separator in name for separator in "/\\:"):
        raise ValueError(f"recipe {ascii(name)[:80]}: must be the name of a recipe")
    return str(name)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML, with limits on nesting, digits and texts; raises a ValueError, of which TOMLDecodeError is one."""
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise
        raise ValueError(f"a number or a date that is out of range ({error})") from None
    for mistake in mistakes(tree):
        raise ValueError(mistake)
    return tree


def mistakes(tree: Any) -> Iterator[str]:
    """Yield the rules that values in tables and lists break."""
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > MOST_TOML_DEPTH:
            yield "nested too deeply"
            return
        below = []
        for found in level:
            if isinstance(found, dict):
                below += [*found, *found.values()]
            elif isinstance(found, list):
                below += found
            elif isinstance(found, str) and (len(found) > MOST_CHARACTERS or not _plain(found)):
                yield f"a text must have at most {MOST_CHARACTERS:,} characters, and no control characters"
            elif isinstance(found, int) and abs(found) >= 10**MOST_DIGITS:
                yield f"an integer must have at most {MOST_DIGITS} digits"
        level = below


def _plain(text: str) -> bool:
    return text.replace("\n", "").replace("\t", "").isprintable()
