"""Variants of a recipe: `[variants.NAME]` changes its settings and its grid, and `--variant NAME` selects it.

A variant has `set`, changes of settings that work like overrides; `grid`, whose keys replace those of `[grid]`; and
`report`, whose keys replace those of `[report]`. A method of `grid.methods` that has the label of a method of the
recipe keeps everything that it does not change.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ghostnoise.lab.config.overrides import Tree, applied, flat
from ghostnoise.lab.errors import UserError

SECTION = "variants"
KEYS = ("set", "grid", "report")


def named(parsed: Mapping[str, Any]) -> list[str]:
    """Return the names of the variants of a recipe."""
    found = parsed.get(SECTION, {})
    return list(found) if isinstance(found, Mapping) else []


def apply(parsed: Mapping[str, Any], name: str, source: str, having: Iterable[str]) -> Tree:
    """Return the sections of the recipe `source` with the changes of its variant `name`, without `[variants]`.

    `having` lists the recipes that have this variant, for the error if the recipe has none.
    """
    if name not in named(parsed):
        raise UserError(_missing(named(parsed), name, source, list(having)))
    variant, place = parsed[SECTION][name], f"{SECTION}.{name}"
    _check(variant, place)
    sections = {key: value for key, value in parsed.items() if key != SECTION}
    plan = {key: sections.pop(key) for key in ("grid", "select", "report") if key in sections}
    tree = applied(sections, flat(variant.get("set", {})))
    for key in ("grid", "report"):
        if key in variant:
            plan[key] = {**plan.get(key, {}), **variant[key]}
    if "methods" in variant.get("grid", {}):
        plan["grid"]["methods"] = _methods(parsed.get("grid", {}).get("methods", []), variant["grid"]["methods"])
    return tree | plan


def _missing(names: list[str], name: str, source: str, having: list[str]) -> str:
    if names:
        return f"--variant {name}: {source} has no such variant; it has {', '.join(names)}"
    if having:
        return f"--variant {name}: {source} has no variants; the recipes that have this one are {', '.join(having)}"
    return f"--variant {name}: {source} has no variants; leave --variant out"


def _check(variant: object, place: str) -> None:
    """Raise a UserError for a variant that is not a table of tables with known names."""
    if not isinstance(variant, Mapping):
        raise UserError(f"{place}: must be a section, [{place}]")
    for key, value in variant.items():
        if key not in KEYS:
            raise UserError(f"{place}.{key}: unknown; a variant has {', '.join(KEYS)}")
        if not isinstance(value, Mapping):
            raise UserError(f"{place}.{key}: must be a table, such as {place}.set.seed = 1")


def _methods(own: object, given: object) -> object:
    """Return the methods of the variant, completed with those of the recipe; `grid.load` reports what is invalid."""
    if not isinstance(own, list) or not isinstance(given, list):
        return given
    known = {method.get("label"): method for method in own if isinstance(method, Mapping)}
    return [_completed(known.get(method.get("label"), {}), method) if isinstance(method, Mapping) else method
            for method in given]  # fmt: skip


def _completed(own: Mapping[str, Any], given: Mapping[str, Any]) -> Tree:
    """Return a method with the entries of `own` that `given` does not have; settings are completed one by one."""
    made = {**own, **given}
    settings = [each.get("set", {}) for each in (own, given)]
    if all(isinstance(each, Mapping) for each in settings):
        made["set"] = flat(settings[0]) | flat(settings[1])
    return made
