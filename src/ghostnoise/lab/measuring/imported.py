"""What a function of the user's makes, named as `module:function`."""

import importlib
import os
import sys
from typing import Any

from ghostnoise.lab.errors import UserError


def imported(name: str) -> Any:
    """Import the module, from the current folder too, and call the function without arguments."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the module does
        raise UserError(
            f"{name}: {module!r} cannot be imported ({type(error).__name__}: {_line(error)}); start where it lies, or "
            "set PYTHONPATH"
        ) from error
    made: Any = found
    for part in function.split("."):
        if not hasattr(made, part):
            raise UserError(f"{name}: {module!r} has no {function!r}; give the name of a function in it")
        made = getattr(made, part)
    if not callable(made):
        raise UserError(f"{name} is a {type(made).__name__}: must be a function; give one that returns it")
    try:
        return made()
    except Exception as error:
        raise UserError(
            f"{name}() failed ({type(error).__name__}: {_line(error)}); it must run without arguments"
        ) from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
