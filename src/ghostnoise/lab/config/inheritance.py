"""Recipes that build on others: `extends = "table1"`, and the variants of a recipe, which `--variant NAME` selects.

Both change settings as overrides do, and replace keys of `[grid]`. A method of `grid.methods` that has the label of a
method below keeps everything that it does not change. A variant has `set`, the settings; `grid`; and `report`, whose
keys replace those of `[report]`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ghostnoise.lab.config.overrides import applied, flat
from ghostnoise.lab.config.section import Tree
from ghostnoise.lab.errors import UserError

SECTION = "variants"
KEYS = ("set", "grid", "report")
PLAN = ("grid", "select", "report")
"""The sections of an experiment with several runs."""


def extended(base: Tree, own: Tree) -> Tree:
    """Return the sections of a recipe that extends `base`, which gives it settings and a grid.

    It states its own `[select]`, `[report]` and variants; a variant that `base` has too adds to the settings of that.
    """
    plan = {key: own[key] for key in PLAN if key in own}
    if isinstance(grid := base.get("grid"), Mapping):
        plan["grid"] = _grid(dict(grid), own.get("grid", {}))
    inherited = {name: each.get("set", {}) for name, each in _variants(base).items()}
    given = {
        name: variant | {"set": flat(inherited[name]) | flat(variant.get("set", {}))} if name in inherited else variant
        for name, variant in _variants(own).items()
    }
    return applied(_settings(base), flat(_settings(own))) | plan | ({SECTION: given} if given else {})


def with_variant(parsed: Tree, name: str, source: str, having: Iterable[str]) -> Tree:
    """Return the sections of the recipe `source` with the changes of its variant `name`, without `[variants]`.

    `having` lists the recipes that have this variant, for the error if the recipe has none.
    """
    if name not in named(parsed):
        raise UserError(_missing(named(parsed), name, source, list(having)))
    variant, plan = parsed[SECTION][name], {key: parsed[key] for key in PLAN if key in parsed}
    _check(variant, f"{SECTION}.{name}")
    if "grid" in variant:
        plan["grid"] = _grid(plan.get("grid", {}), variant["grid"])
    if "report" in variant:
        plan["report"] = {**plan.get("report", {}), **variant["report"]}
    return applied(_settings(parsed), flat(variant.get("set", {}))) | plan


def named(parsed: Mapping[str, Any]) -> list[str]:
    """Return the names of the variants of a recipe."""
    found = parsed.get(SECTION, {})
    return list(found) if isinstance(found, Mapping) else []


def _variants(parsed: Tree) -> dict[str, Tree]:
    """Return the variants of a recipe, after checking them."""
    for name in named(parsed):
        _check(parsed[SECTION][name], f"{SECTION}.{name}")
    return {name: parsed[SECTION][name] for name in named(parsed)}


def _settings(parsed: Tree) -> Tree:
    return {key: value for key, value in parsed.items() if key not in (*PLAN, SECTION)}


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


def _grid(base: Tree, own: Any) -> Any:
    """Return a grid with the keys of `own`, and methods that are completed; `grid.load` reports what is invalid."""
    if not isinstance(own, Mapping):
        return own
    made, methods = {**base, **own}, own.get("methods")
    if isinstance(methods, list) and isinstance(base.get("methods"), list):
        known = {method.get("label"): method for method in base["methods"] if isinstance(method, Mapping)}
        made["methods"] = [
            _completed(known.get(method.get("label"), {}), method) if isinstance(method, Mapping) else method
            for method in methods
        ]
    return made


def _completed(own: Mapping[str, Any], given: Mapping[str, Any]) -> Tree:
    """Return a method with the entries of `own` that `given` does not have; settings are completed one by one."""
    made = {**own, **given}
    settings = [each.get("set", {}) for each in (own, given)]
    if all(isinstance(each, Mapping) for each in settings):
        made["set"] = flat(settings[0]) | flat(settings[1])
    return made
