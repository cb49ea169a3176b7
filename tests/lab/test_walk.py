"""The direction of imports inside the lab: an experiment walks up this list, and a room imports from rooms below it."""

import ast
from pathlib import Path

import pytest

from ghostnoise import lab

SOURCE = Path(lab.__file__).parent
# From the top down. Rooms of one line do not import each other.
WALK = [
    ["report", "measure"],
    ["sweep"],
    ["runners"],
    ["train"],
    ["plan"],
    ["grid"],
    ["store"],
    ["recipe"],
    ["smoke", "sections"],
    ["overrides"],
    ["validation"],
    ["models", "data"],
    ["settings"],
    ["errors"],
]
HEIGHT = {room: len(WALK) - line for line, rooms in enumerate(WALK) for room in rooms}


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ghostnoise.lab"):
            parts = node.module.split(".")
            yield from [parts[2]] if len(parts) > 2 else [alias.name for alias in node.names]


MODULES = [path for path in SOURCE.rglob("*.py") if room(path) != "__init__"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    here = room(path)
    assert here in HEIGHT, f"{here} has no place on the walk"
    for there in set(imported(path)) - {here}:
        assert HEIGHT[there] < HEIGHT[here], f"{here} imports {there}, which is not below it"
