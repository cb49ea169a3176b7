"""The scripts in the folder `tools`, as modules."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "tools"


def load(name):
    found = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made
