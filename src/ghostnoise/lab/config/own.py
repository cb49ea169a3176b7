"""A user's own networks, data sets and optimizers: functions that settings name as "package.module:function"."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ghostnoise.lab.errors import UserError
from ghostnoise.text import did_you_mean

NAME = "package.module:function"
PATTERN = re.compile(r"(?!timm:)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
FOREIGN = ("width", "widths", "zero_init_last")
"""Settings of the library's networks, which a function of the user need not know."""


def named(name: object) -> bool:
    """Return whether a setting names a function: "package.module:function"."""
    return isinstance(name, str) and PATTERN.fullmatch(name) is not None


@cache
def load(name: str, key: str) -> Callable[..., Any]:
    """Import the function that the setting `key` names; modules of the current folder are found, too.

    Raises a UserError if there is no such module or function, or if the module fails.
    """
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # the module can raise anything
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name))
        why = f"there is no module {error.name!r}" if missing else f"{type(error).__name__}: {error}"  # type: ignore[attr-defined]
        remedy = "install its package, or run this from the folder that contains it" if missing else "correct it"
        raise UserError(f"{key}={name!r}: {module} cannot be imported ({' '.join(why.split())}); {remedy}") from error
    for part in function.split("."):
        if not hasattr(found, part):
            meant = did_you_mean(part, [each for each in vars(found) if callable(getattr(found, each))])
            raise UserError(f"{key}={name!r}: {module} has no {part!r}; {meant or 'name one of its functions'}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{key}={name!r}: is not a function but {type(found).__name__}; name a function or class")
    return found  # type: ignore[no-any-return]


def call(name: str, section: str, args: Mapping[str, Any] | None, *given: object, **named: object) -> Any:
    """Call the function of a section with what the library gives and the arguments of the settings, after checking."""
    function, args = load(name, f"{section}.name"), args or {}
    try:
        inspect.signature(function).bind(*given, **named, **args)
    except TypeError as error:
        raise UserError(
            f"{section}.name={name!r} with {section}.args={dict(args)}: cannot be called with them ({error}); "
            f"correct {section}.args or the function"
        ) from None
    except ValueError:  # it has no signature
        pass
    return function(*given, **named, **args)
