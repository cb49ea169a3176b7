"""Recipes: TOML files of settings, found by name or path, changed by overrides, identified by what they compute.

A recipe opens with four comment lines, `# Claim:`, `# Command:`, `# Time:` and `# Score:`; then come an optional
`seed` and the sections of `settings.Settings`.
"""

import difflib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.overrides import Tree, overridden
from ghostnoise.lab.settings import NOISES, Settings
from ghostnoise.lab.smoke import shrink
from ghostnoise.lab.validation import changed, check, validated

__all__ = [
    "Recipe",
    "canonical",
    "check",
    "complete",
    "header",
    "identity",
    "load",
    "names",
    "read",
    "resolve",
    "shrink",
]

FOLDER = resources.files("ghostnoise.lab") / "recipes"
SUFFIX = ".toml"
PLAN = ("grid", "select", "report")  # sections of `grid.Experiment`
HEADER = ("claim", "command", "time", "score")


@dataclass(frozen=True)
class Recipe:
    """An experiment: what it claims, how to run it, how long it takes, what it scored, and its settings."""

    name: str
    claim: str
    command: str
    time: str
    score: str
    settings: Settings
    text: str
    """The file, without overrides."""
    tree: Tree = field(default_factory=dict)
    """The sections of settings as they were written, with overrides."""
    plan: Tree = field(default_factory=dict)
    """The sections of an experiment of many runs, as they were written."""

    @property
    def identity(self) -> str:
        """12 hexadecimal digits that are the same for the same settings."""
        return identity(self.settings)

    def canonical(self) -> str:
        """The settings as JSON, the same however they were written."""
        return canonical(self.settings)

    def with_settings(self, settings: Settings) -> "Recipe":
        """The same recipe with other settings, such as those that `resolve` makes."""
        return replace(self, settings=settings)


def names() -> list[str]:
    """The recipes that come with the package, in alphabetical order."""
    return sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.iterdir() if file.name.endswith(SUFFIX))


def load(name_or_path: str, overrides: Sequence[str] = (), *, smoke: bool = False) -> Recipe:
    """Read a recipe by its name or from a .toml file, apply overrides such as `norm.ghost_size=16`, and check it.

    `smoke` shrinks it to seconds. Noise without a placement gets the network's default. Raises a UserError with a line
    for each mistake.
    """
    text = read(name_or_path)
    parsed = _parsed(text, name_or_path)
    plan = {name: parsed.pop(name) for name in PLAN if name in parsed}
    tree, mistakes = overridden(parsed, overrides)
    settings = complete(validated(tree, mistakes), smoke)
    name = Path(name_or_path).name.removesuffix(SUFFIX)
    return Recipe(name=name, settings=settings, text=text, tree=tree, plan=plan, **header(text))


def complete(settings: Settings, smoke: bool = False) -> Settings:
    """With the network's default placement, checked, and shrunk if `smoke`."""
    settings = _placed(settings)
    check(changed(settings, train={"device": "auto"}) if smoke else settings)  # a CPU may try what needs a GPU
    if smoke:
        settings = shrink(settings)
        check(settings)
    return settings


def resolve(settings: Settings, *, device: str, processes: int, stand_in: bool = False) -> Settings:
    """Fill in what only the machine knows; it changes the numbers, and so the identity.

    A smoke run is fitted to it: a batch for each process, and bf16 in the place of fp16 on a CPU. Call `check` after.
    """
    settings = changed(settings, train={"device": device, "processes": processes}, data={"stand_in": stand_in})
    settings = _placed(settings)
    return shrink(settings) if settings.train.smoke else settings


def identity(settings: Settings) -> str:
    """12 hexadecimal digits that are the same for the same settings: the digest of what `canonical` writes."""
    return digest(canonical_tree(settings))


def digest(tree: Tree) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a tree of settings as JSON."""
    return hashlib.sha256(json_text(tree).encode()).hexdigest()[:12]


def canonical(settings: Settings) -> str:
    """The settings that identify a run, as JSON with sorted keys and without spaces."""
    return json_text(canonical_tree(settings))


def canonical_tree(settings: Settings) -> Tree:
    """The settings that identify a run: neither those that are unset nor a method's options that have their default.

    So a setting that is added later, unset by default, and an option that a method gets later change no identity.
    """
    tree = settings.model_dump(exclude_none=True)
    defaults = settings.norm.DEFAULTS["method"].get(settings.norm.method, {})
    tree["norm"] = {name: value for name, value in tree["norm"].items() if defaults.get(name) != value}
    return tree


def stored(record: Mapping[str, Any]) -> Settings:
    """The settings in the settings.json of a run folder; a ValueError if they are none."""
    own = {name: value for name, value in record.items() if name not in ("recipe", "identity")}
    return Settings.model_validate_json(json_text(own))


def json_text(tree: Tree) -> str:
    """A tree of settings as JSON: sorted keys, no spaces."""
    return json.dumps(_plain(tree), sort_keys=True, separators=(",", ":"))


def read(name_or_path: str) -> str:
    """The text of a recipe: of the package's, or of a path, which has a separator or ends with .toml."""
    separators = [separator for separator in (os.sep, os.altsep, "/") if separator]
    if name_or_path.endswith(SUFFIX) or any(separator in name_or_path for separator in separators):
        try:
            return Path(name_or_path).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"recipe {name_or_path}: cannot be read ({error.strerror}); give the path of a .toml file, or a name "
                "that `ghostnoise recipes` lists"
            ) from None
        except UnicodeDecodeError:
            raise UserError(f"recipe {name_or_path}: is not UTF-8 text; save it as UTF-8") from None
    if name_or_path in names():
        return (FOLDER / f"{name_or_path}{SUFFIX}").read_text(encoding="utf-8")
    near = difflib.get_close_matches(name_or_path, names(), n=3, cutoff=0.5)
    meant = f" did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"recipe {name_or_path!r}: there is none;{meant} `ghostnoise recipes` lists all")


def header(text: str) -> dict[str, str]:
    """Claim, command, time and score in a recipe's first comment lines; empty where there are none."""
    found = dict.fromkeys(HEADER, "")
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        key, _, value = line.removeprefix("#").partition(":")
        if key.strip().lower() in HEADER:
            found[key.strip().lower()] = value.strip()
    return found


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (.*)\)", str(error))
        what, where = found.groups() if found else (str(error), "some line")
        raise UserError(f"recipe {source}, {where}: {what}; mend the TOML there") from None


def _placed(settings: Settings) -> Settings:
    """With the network's default placement, if noise is injected and nothing says where; refuses unknown networks."""
    from ghostnoise.lab import models

    where = models.placement(settings.model.name, settings.norm.method)
    if settings.norm.placement is not None or settings.norm.method not in NOISES or where is None:
        return settings
    return changed(settings, norm={"placement": where})


def _plain(value: Any) -> Any:
    """Without the sign of zero, which would be a second way to write it."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value + 0.0 if isinstance(value, float) else value
