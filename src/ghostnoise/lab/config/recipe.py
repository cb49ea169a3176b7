"""Recipes: TOML files of settings, found by name or path, changed by overrides, identified by what they compute.

A recipe starts with four comment lines, `# Claim:`, `# Command:`, `# Time:` and `# Score:`, followed by an optional
`extends` and `seed`, the sections of `schema.Settings`, those of `grid`, and variants.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from ghostnoise.lab import limits
from ghostnoise.lab.config import inheritance, own
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.overrides import changed, check, overridden, validated
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.config.section import Section, Tree, json_text
from ghostnoise.lab.errors import UserError
from ghostnoise.text import nearest

__all__ = [
    "Recipe",
    "canonical",
    "check",
    "complete",
    "having_variant",
    "header",
    "identity",
    "key",
    "load",
    "names",
    "read",
    "resolve",
    "shrink",
    "stored",
    "whole_batch_warning",
    "with_value",
]

FOLDER = resources.files("ghostnoise.lab") / "recipes"
SUFFIX = ".toml"
MOST_EXTENDED = 8  # recipes, one after the other
HEADER = ("claim", "command", "time", "score")

# Sizes of smoke runs.
EPOCHS = 2
BATCH, LEAST = 32, 4  # of all processes together, and of each
TIMM_BATCH = 8  # networks of timm keep their size
MICRO_BATCHES = 2  # of gradient accumulation
BATCHES, TEST_BATCHES = 5, 2
WIDTH, MLP_WIDTH = 16, 64  # 16 channels divide into heads and into quarters for bottlenecks
IMAGE_SIZE, RESIZE = 64, 72
METERED, DRAWS = 2, 32  # batches to measure, and ghost batches to draw from each

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class Recipe:
    """An experiment: its claim, command, duration, score and settings."""

    name: str
    """The name of the file, with that of the variant: the folder of its runs."""
    claim: str
    command: str
    time: str
    score: str
    settings: Settings
    text: str
    """The file, without overrides."""
    tree: Tree = field(default_factory=dict)
    """The sections of settings as written, without overrides."""
    plan: Tree = field(default_factory=dict)
    """The sections of an experiment with several runs, as written."""
    variant: str | None = None

    @property
    def words(self) -> str:
        """The words that select it on the command line: its name, and its variant if it is one."""
        return f"{self.name.removesuffix(f'-{self.variant}')} --variant {self.variant}" if self.variant else self.name

    @property
    def identity(self) -> str:
        """12 hexadecimal digits that are equal for equal settings."""
        return identity(self.settings)

    def canonical(self) -> str:
        """The settings that identify the run, as JSON; see `canonical`."""
        return canonical(self.settings)

    def with_settings(self, settings: Settings) -> "Recipe":
        """Return the same recipe with other settings, such as those from `resolve`."""
        return replace(self, settings=settings)


def names() -> list[str]:
    """Return the names of the recipes of the package, in alphabetical order."""
    return sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.iterdir() if file.name.endswith(SUFFIX))


def having_variant(variant: str) -> list[str]:
    """Return the names of the recipes of the package that have this variant, in alphabetical order."""
    return [name for name in names() if variant in inheritance.named(_parsed(read(name), name))]


def load(
    name_or_path: str, overrides: Sequence[str] = (), *, smoke: bool = False, variant: str | None = None
) -> Recipe:
    """Read a recipe by its name or from a .toml file, apply overrides such as `norm.ghost_size=16`, and check it.

    `variant` selects one of the file's variants, which overrides change further. `smoke` shrinks the run to seconds.
    Noise without a placement gets the network's default. Raises a UserError with a line for each mistake.
    """
    text = read(name_or_path)
    parsed, about = _sections(name_or_path, text), header(text)
    name = Path(name_or_path).name.removesuffix(SUFFIX)
    if variant is not None:
        parsed = inheritance.with_variant(parsed, variant, name_or_path, having_variant(variant))
        name = f"{name}-{variant}"
        about |= {"command": f"{about['command']} --variant {variant}" if about["command"] else ""}
    _check_name(name, name_or_path)
    parsed.pop(inheritance.SECTION, None)
    plan = {name: parsed.pop(name) for name in inheritance.PLAN if name in parsed}
    tree, mistakes = overridden(parsed, overrides)
    settings = complete(validated(tree, mistakes), smoke)
    return Recipe(name=name, settings=settings, text=text, tree=parsed, plan=plan, variant=variant, **about)


def _sections(source: str, text: str, below: int = 0) -> Tree:
    """Return the sections of a recipe, with those of the recipe that it extends, if any."""
    own_sections = _parsed(text, source)
    base = own_sections.pop("extends", None)
    if base is None:
        return own_sections
    if not isinstance(base, str):
        raise UserError(f"recipe {source}: extends={base!r}: must be the name or the path of a recipe, in quotes")
    path = str(Path(source).parent / base) if _is_path(base) else base
    if below >= MOST_EXTENDED:
        raise UserError(f"recipe {source}: extends {base}, and so on, more than {MOST_EXTENDED} times; remove one")
    return inheritance.extended(_sections(path, read(path), below + 1), own_sections)


def complete(settings: Settings, smoke: bool = False) -> Settings:
    """Set the network's default placement, check the settings, and shrink them if `smoke`."""
    for section in ("model", "data", "optim"):
        if own.named(name := getattr(settings, section).name):
            own.load(name, f"{section}.name")
    if (norm := placed(settings.norm, settings.model.name)) is not settings.norm:
        settings = settings.model_copy(update={"norm": norm})
    check(
        changed(settings, train={"device": "auto"}) if smoke else settings
    )  # a smoke run of what needs a GPU may run on a CPU
    if smoke:
        settings = shrink(settings)
        check(settings)
    return settings


def resolve(settings: Settings, *, device: str, processes: int, stand_in: bool = False) -> Settings:
    """Fill in what depends on the machine; it changes the results, and therefore the identity.

    A smoke run is adapted to it: a batch for each process, and bf16 instead of fp16 on a CPU. Call `check` afterwards.
    """
    settings = changed(settings, train={"device": device, "processes": processes}, data={"stand_in": stand_in})
    settings = settings.model_copy(update={"norm": placed(settings.norm, settings.model.name)})
    return shrink(settings) if settings.train.smoke else settings


def whole_batch_warning(settings: Settings, processes: int = 1) -> str:
    """Return a warning if ghost batches of the size that was asked for do not fit, and the whole batch is used instead.

    The last ghost batch also takes the remaining samples, so that a batch of 120 has one ghost batch of 120 instead of
    64. A ghost size that equals the batch size is as asked for.
    """
    size, norm = settings.norm.ghost_size, settings.norm
    batch = settings.train.batch_size // (settings.train.accumulation_steps or 1) // processes
    if not norm.partitions or size is None or batch >= 2 * size or batch == size:
        return ""
    label = f"{norm.method.upper()}-{size}"
    smaller = f"norm.ghost_size={max(batch // 2, 1)} or less"
    return (
        f"{label} with batches of {batch}: each batch is a single ghost batch of {batch} samples, as in batch norm; "
        f"use {smaller}, or a batch size of {2 * size} or more per process"
    )


def shrink(settings: Settings) -> Settings:
    """Make a run small enough for seconds on two CPU cores; its results are meaningless.

    Two epochs of five batches of 32, in at most two micro-batches; ghost batches no larger than the batch of a process;
    networks of 16 channels; images of 64 pixels from folders; warm-up in proportion; no compilation; on a CPU, bf16
    instead of fp16. Networks of timm keep their width and image size, and get batches of 8. Smaller values are kept, so
    that shrinking a second time changes nothing.
    """
    tree = settings.model_dump(exclude_none=True)
    model, norm, data, optim, train = (tree[name] for name in ("model", "norm", "data", "optim", "train"))
    timm = ":" in model["name"]  # or a network of the user
    epochs = min(train["epochs"], EPOCHS)
    size, processes = train["batch_size"], train["processes"]
    share = max(min(LEAST, -(-size // processes)), min(size, TIMM_BATCH if timm else BATCH) // processes)
    micro = min(train.get("accumulation_steps", 1), MICRO_BATCHES)
    share = max(micro, share - share % micro)
    batch = share * processes
    if settings.norm.partitions and "ghost_size" in norm:
        norm["ghost_size"] = min(norm["ghost_size"], share // micro)
    optim["warmup_epochs"] *= epochs / train["epochs"]
    data["limit"] = _least(data, "limit", BATCHES * batch)
    data["test_limit"] = _least(data, "test_limit", TEST_BATCHES * batch)
    if data["name"] == "imagefolder" and not timm:
        data["image_size"] = _least(data, "image_size", IMAGE_SIZE)
        data["resize"] = _least(data, "resize", RESIZE)
    if "widths" in model:
        model["widths"] = [min(width, MLP_WIDTH) for width in model["widths"]]
    elif not timm:
        model["width"] = _least(model, "width", MLP_WIDTH if model["name"] == "mlp" else WIDTH)
    if "meter" in tree:
        tree["meter"] |= {"every": 1, "batches": min(tree["meter"]["batches"], METERED), "draws": DRAWS}
    train |= {"epochs": epochs, "batch_size": batch, "accumulation_steps": micro, "compile": False, "smoke": True}
    if train["device"] == "cpu" and train["amp"] == "fp16":
        train["amp"] = "bf16"
    return validated(tree)


def identity(settings: Settings) -> str:
    """Return 12 hexadecimal digits that are equal for equal settings, the name of a run's folder.

    Unset settings, options of the method that have their default, and how often a run is evaluated are left out. So
    identities do not change when a setting is added that is unset by default, or an option is added to a method. The
    code of a user's own network, data set or optimizer is not part of it, only the name and the arguments.
    """
    return _digest(settings, "canonical")


def key(settings: Settings) -> str:
    """Return an identity that does not depend on the machine: a report may be made on another one than the runs."""
    return _digest(settings, "portable")


def canonical(settings: Settings, form: str = "canonical") -> str:
    """Return the settings that identify a run, as JSON with sorted keys and without spaces."""
    texts = [
        f'"{name}":{getattr(value, form) if isinstance(value, Section) else value}'
        for name, value in sorted(settings.__dict__.items())
        if value is not None
    ]
    return f"{{{','.join(texts)}}}"


def _digest(settings: Settings, form: str) -> str:
    return hashlib.sha256(canonical(settings, form).encode()).hexdigest()[:12]


def stored(record: Mapping[str, Any]) -> Settings:
    """Return the settings of a run folder or a record; raises a ValueError if they are invalid."""
    given = {name: value for name, value in record.items() if name not in ("recipe", "identity")}
    seed = given.get("seed", 0)
    if type(seed) is not int or not 0 <= seed < 2**63:
        return Settings.model_validate(given)  # raises
    return _of_seed_0(json_text(given | {"seed": 0})).model_copy(update={"seed": seed})


@lru_cache(maxsize=4096)
def _of_seed_0(text: str) -> Settings:
    """Validate settings once for all seeds: thousands of runs are read at a time."""
    return Settings.model_validate_json(text)


def read(name_or_path: str) -> str:
    """Return the text of a recipe: one of the package, or a path, which has a separator or ends with .toml."""
    if _is_path(name_or_path):
        _check_name(Path(name_or_path).name.removesuffix(SUFFIX), name_or_path)
        try:
            return limits.read_bytes(Path(name_or_path), limits.MOST_RECIPE_BYTES, follow=True).decode()
        except UnicodeDecodeError:
            raise UserError(f"recipe {name_or_path}: is not UTF-8 text; save it as UTF-8") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"recipe {name_or_path}: cannot be read ({reason}); give the path of a .toml file, or a name "
                "that `ghostnoise recipes` lists"
            ) from None
    if name_or_path in names():
        return (FOLDER / f"{name_or_path}{SUFFIX}").read_text(encoding="utf-8")
    near = nearest(name_or_path, names(), count=3, cutoff=0.5)
    meant = f" did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"recipe {name_or_path!r}: not found;{meant} `ghostnoise recipes` lists all")


def _is_path(name: str) -> bool:
    return name.endswith(SUFFIX) or any(separator in name for separator in {os.sep, os.altsep or "/", "/"})


def header(text: str) -> dict[str, str]:
    """Return claim, command, time and score from a recipe's first comment lines; empty where missing."""
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
        return limits.parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (.*)\)", str(error))
        what, where = found.groups() if found else (str(error), "some line")
        raise UserError(f"recipe {source}, {where}: {what}; fix the TOML there") from None
    except ValueError as error:
        raise UserError(f"recipe {source}: {error}; shorten it") from None


def _check_name(name: str, source: str) -> None:
    """Raise a UserError if runs cannot have a folder of this name."""
    try:
        limits.checked_name(name)
    except ValueError:
        raise UserError(
            f"recipe {source}: its runs would have the folder {ascii(name)[:80]}; a name has 1 to "
            f"{limits.MOST_NAME_BYTES} printable characters, none of / \\ and :, and does not start with a dot; rename "
            "the recipe"
        ) from None


def placed(norm: NormSettings, network: str) -> NormSettings:
    """Set the network's default placement for noise that has none; raises a UserError for unknown networks."""
    from ghostnoise.lab import models

    where = models.placement(network, norm.method)
    return norm if norm.placement is not None or where is None else with_value(norm, "placement", where)


@lru_cache(maxsize=4096)
def with_value(section: AnySection, name: str, value: Any) -> AnySection:
    """Return a copy of a section with another value, which the runs of a grid share with its canonical form."""
    return section.model_copy(update={name: value})


def _least(section: dict[str, Any], name: str, bound: int) -> int:
    return min(int(section.get(name, bound)), bound)
