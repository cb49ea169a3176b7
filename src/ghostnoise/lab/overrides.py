"""Settings changed by `key=value` words, as a command line has them."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from ghostnoise.lab.settings import augments
from ghostnoise.lab.validation import KEYS, SECTIONS, unknown

Tree = dict[str, Any]
RESERVED = {"train.smoke": "--smoke", "data.stand_in": "--smoke", "train.processes": "torchrun"}
NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+|\d+\.\d+)([eE][+-]?\d+)?")  # .5 and 1. too, which TOML does not know


class Unset(Enum):
    """What removes a setting."""

    UNSET = "unset"


def overridden(tree: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    """A copy of `tree`, a recipe's sections, with `overrides` of the form `norm.ghost_size=16`; and a line per mistake.

    Later ones win. What a new method, optimizer, data set or augmentation has no use for is removed, unless it is among
    the overrides itself; a new network drops widths, and a new network or method the placement, which is a default of
    both.
    """
    given, lines = _parsed(overrides)
    return applied(tree, given), lines


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """What the overrides set, but for those that `overridden` has a line for."""
    return _parsed(overrides)[0]


def applied(tree: Mapping[str, Any], given: Mapping[str, Any]) -> Tree:
    """A copy of `tree` with the values of `given`, whose keys are those of overrides."""
    made: Tree = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        if section and isinstance(made.setdefault(section, {}), dict):  # else it is validation's to refuse
            _drop_strays(made, section, name, value)
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        target = made[section] if section else made
        if not isinstance(target, dict):
            continue
        if value is Unset.UNSET:
            target.pop(name, None)
        else:
            target[name] = value
    return {name: value for name, value in made.items() if value != {}}  # unset to the last: no section any more


def _parsed(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values by key, and a line for each mistake."""
    given: dict[str, Any] = {}
    lines = []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            lines.append(f"{text!r}: must be key=value, such as norm.ghost_size=16")
        elif key in RESERVED:
            lines.append(f"{key}: set by {RESERVED[key]}, not by hand; leave it out")
        elif key in SECTIONS:
            lines.append(f"{key}: a section; name one of its settings, such as {key}.{_first(key)}=...")
        elif key not in KEYS:
            lines.append(unknown(key))
        else:
            try:
                given[key] = _value(value, text_wanted=_takes_text(key))
            except tomllib.TOMLDecodeError:
                lines.append(f"{text!r}: the value is no TOML; write a number, true, false, a word, 'text' or [1, 2]")
    return given, lines


def _value(text: str, text_wanted: bool) -> Any:
    """A TOML value, or else a bare word as a string."""
    if text in ("", "unset"):
        return Unset.UNSET
    try:
        parsed = tomllib.loads(f"value = {text}")
        if set(parsed) != {"value"}:  # a line break, and more keys behind it
            raise tomllib.TOMLDecodeError("more than one value")
    except tomllib.TOMLDecodeError:
        if NUMBER.fullmatch(text) and not text_wanted:
            return float(text)
        if text[0] in "\"'[{" or "\n" in text:
            raise
        return text
    value = parsed["value"]
    return text if text_wanted and not isinstance(value, str) else value


def _takes_text(key: str) -> bool:
    """Whether a setting is free text, where 2012 is a name too."""
    section, _, name = key.rpartition(".")
    return bool(section) and SECTIONS[section].model_fields[name].annotation in (str, str | None)


def _first(section: str) -> str:
    return next(iter(SECTIONS[section].model_fields))


def _drop_strays(tree: Tree, section: str, choice: str, value: object) -> None:
    """Remove settings that do not belong to the new `value` of `choice`."""
    settings, kind = tree[section], SECTIONS[section]
    if value is Unset.UNSET:
        value = kind.model_fields[choice].default
    strays = [name for name, (by, owners) in kind.OWNERS.items() if by == choice and value not in owners]
    match section, choice:
        case "data", "name" if settings.get("augment", "none") not in augments(str(value)):
            strays += ["augment", "padding"]
        case "model", "name" if settings.get("name") != value:
            strays += ["width", "widths"]
            _without(tree.get("norm"), "placement")
        case "norm", "method" if settings.get("method") != value:
            strays += ["placement"]
    _without(settings, *strays)


def _without(settings: object, *names: str) -> None:
    if isinstance(settings, dict):
        for name in names:
            settings.pop(name, None)
