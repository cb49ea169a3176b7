"""Imports in the lab: a module imports only from parts that are listed below its own."""

import ast
import subprocess
import sys
from pathlib import Path

from ghostnoise import lab

SOURCE = Path(lab.__file__).parent
# From top to bottom. Parts in one line do not import each other.
LAYERS = [
    ["uncertainty"],
    ["report", "measure"],
    ["sweep"],
    ["train"],
    ["store"],
    ["config.grid", "events"],
    ["run"],
    ["config.recipe"],
    ["config.inheritance"],
    ["config.overrides"],
    ["models", "data"],
    ["config.schema"],
    ["config.methods"],
    ["config.section"],
    ["config.own", "store.atomic"],
    ["errors", "garbage", "limits"],
]
HEIGHT = {part: len(LAYERS) - line for line, parts in enumerate(LAYERS) for part in parts}


def part_of(names):
    """Return the part of the lab that contains the module at the path `names`."""
    return ".".join(names[:2] if names[0] == "config" or tuple(names[:2]) == ("store", "atomic") else names[:1])


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ghostnoise.lab"):
            below = node.module.split(".")[2:]
            yield from (part_of([*below, alias.name]) for alias in node.names)


def test_imports_point_down():
    for path in SOURCE.rglob("*.py"):
        names = path.relative_to(SOURCE).with_suffix("").parts
        if names[-1] == "__init__" and names[0] in ("__init__", "config"):
            continue
        here = part_of(names)
        assert here in HEIGHT, f"{here} is not in the list"
        for there in set(imported(path)) - {here}:
            assert HEIGHT[there] < HEIGHT[here], f"{path}: {here} imports {there}, which is not below it"


def test_config_is_imported_without_torch():
    modules = ", ".join(f"ghostnoise.lab.{part}" for parts in LAYERS for part in parts if part.startswith("config."))
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
