"""Settings from a recipe's tables and from `key=value` overrides.

Every mistake is one line of the error, with what was given, the rule and the remedy.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ghostnoise.lab import limits
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.config.section import Section, Tree
from ghostnoise.lab.errors import UserError
from ghostnoise.text import DEVICE_SYNONYMS, nearest

SECTIONS: dict[str, type[Section]] = {
    name: kind
    for name, field in Settings.model_fields.items()
    for kind in (field.annotation, *get_args(field.annotation))  # a required or an optional section
    if isinstance(kind, type) and issubclass(kind, Section)
}
RESERVED = {
    "model.init": "--init-from",
    "train.smoke": "--smoke",
    "data.stand_in": "--smoke",
    "train.processes": "torchrun",
}
NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+|\d+\.\d+)([eE][+-]?\d+)?")  # also .5 and 1., which are not valid TOML
SEPARATED = re.compile(r"""(?:[^,"'\[{]|"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\})+""")
RULES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string, in quotes",
    "list_type": "must be a list, such as [512, 300]",
    "tuple_type": "must be a list, such as [0.9, 0.999]",
    "greater_than_equal": "must be {ge} or more",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be {le} or less",
    "less_than": "must be below {lt}",
    "too_short": "must have {min_length} value or more",
    "too_long": "must have {max_length} values, not {actual_length}",
    "literal_error": "must be {expected}",
}


class Unset(Enum):
    """The value that removes a setting."""

    UNSET = "unset"


def validated(tree: Mapping[str, Any], before: Sequence[str] = (), place: str = "") -> Settings:
    """Return the settings in `tree`, which has a mapping for each section.

    Raises a UserError with a line for each mistake: those that were found `before`, and those in `tree`, whose lines
    start with `place`.
    """
    lines = list(before)
    try:
        settings = Settings.model_validate(dict(tree))
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        misspelled = {each["loc"][0] for each in mistakes if each["type"] == "extra_forbidden"}
        for each in mistakes:  # a name that is missing is probably the one that is misspelled
            if each["type"] != "missing" or each["loc"][0] not in misspelled:
                lines += [place + line for line in _lines(each, tree)]
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return settings


def changed(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """Return `settings` with other values in some sections, validated again; None unsets a setting."""
    tree = settings.model_dump(exclude_none=True)
    for section, values in sections.items():
        tree[section] |= values
    return validated(tree)


def check(settings: Settings, processes: int | None = None) -> None:
    """Raise a UserError for settings that are valid in their sections but not together.

    `processes` is the number of processes that share the batch: `train.processes` if None.
    """
    norm, optim, train = settings.norm, settings.optim, settings.train
    processes = processes or train.processes
    lines = []
    if train.batch_size % processes:
        fitting = -(-train.batch_size // processes) * processes
        lines.append(
            f"train.batch_size={train.batch_size}: must be a multiple of the {processes} processes that share it, "
            f"such as {fitting}"
        )
    micro = train.accumulation_steps or 1
    if micro > 1 and train.batch_size % (processes * micro):
        fitting = -(-train.batch_size // (processes * micro)) * processes * micro
        lines.append(
            f"train.accumulation_steps={micro} with train.batch_size={train.batch_size}: the batch must be a multiple "
            f"of {processes * micro}, so that all micro-batches are equal; take a batch such as {fitting}"
        )
    lines += _misfits(norm, train.batch_size, processes, micro)
    if optim.warmup_epochs > train.epochs:
        lines.append(
            f"optim.warmup_epochs={optim.warmup_epochs:g}: longer than the training of train.epochs={train.epochs}; "
            "lower it or raise train.epochs"
        )
    if train.amp == "fp16" and train.device == "cpu":
        lines.append("train.amp='fp16': needs a GPU, and the device is 'cpu'; set train.amp=bf16 or train.amp=none")
    if settings.data.stand_in and not train.smoke:
        lines.append("data.stand_in=true: random images are only for --smoke; leave it out")
    if lines:
        raise UserError("\n".join(lines))


def _misfits(norm: NormSettings, batch_size: int, processes: int, micro: int) -> Iterator[str]:
    """Check that the batch can be partitioned into ghost batches; noise is drawn with replacement and always fits."""
    if not norm.partitions:
        return
    together = norm.scope == "global" or processes == 1
    samples = (batch_size if together else batch_size // processes) // micro
    whose = f"train.batch_size={batch_size}" if together else f"a process, {batch_size} / {processes} = {samples}"
    if micro > 1:
        whose = f"train.accumulation_steps={micro}, {samples} samples"
    size, least = norm.ghost_size, norm.least_ghost_size
    if samples < least:
        yield (
            f"norm.method={norm.method!r} with a batch of {samples}: needs {least} samples or more; "
            "raise train.batch_size"
        )
    elif size is not None and size < least:
        yield f"norm.ghost_size={size}: {norm.method} needs {least} or more; raise it"
    elif size is not None and size > samples:
        yield (
            f"norm.ghost_size={size}: larger than the batch of {whose}; "
            f"take {samples} or less, or raise train.batch_size"
        )


def keys() -> list[str]:
    """Return the keys of all settings, such as "norm.ghost_size"."""
    return [
        *(name for name in Settings.model_fields if name not in SECTIONS),
        *(f"{section}.{name}" for section in SECTIONS for name in _fields(section)),
    ]


def known(key: str) -> bool:
    """Return whether a setting has this key; an argument of the user's own function has a key such as model.args.x."""
    return re.sub(r"\.args\.[A-Za-z_]\w*$", ".args", key) in keys()


def unknown(key: str) -> str:
    """Return the error for an unknown key, with the most similar ones."""
    section, _, last = key.rpartition(".")
    same = [other for other in keys() if other.rpartition(".")[2] == last]
    own = [f"{section}.{name}" for name in nearest(last, _fields(section))]
    # In a known section, only the name after the dot is compared.
    elsewhere = [] if section in SECTIONS else nearest(key, [*keys(), *SECTIONS])
    if near := same or own or elsewhere:
        return f"{key}: unknown; did you mean {' or '.join(near)}?"
    if section in SECTIONS:
        return f"{key}: unknown; {section} has {', '.join(_fields(section))}"
    return f"{key}: unknown; a recipe has {', '.join(Settings.model_fields)}"


def spelled(value: object) -> str:
    """Write a value as in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)


def overridden(tree: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    """Return a copy of `tree`, a recipe's sections, with `overrides` such as `norm.ghost_size=16`, and all mistakes.

    Later overrides win. Settings that do not belong to a new method, optimizer, data set or augmentation are removed,
    unless they are among the overrides. A new network removes its own settings, and a new network or method removes the
    placement, whose default depends on both.
    """
    given, lines = _parsed(overrides)
    return applied(tree, given), lines


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of the overrides that are not mistakes."""
    return _parsed(overrides)[0]


def several(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the overrides with one value, and the values of those with several, such as norm.ghost_size=4,8.

    Raises a UserError with a line for each mistake.
    """
    singles, axes, lines = list[str](), dict[str, list[Any]](), list[str]()
    for text in overrides:
        key, equals, value = text.partition("=")
        if len(parts := _separated(value)) == 1:
            singles.append(text)
        for part in parts:
            found, mistakes = _parsed([f"{key}{equals}{part}"])
            lines += mistakes
            for name, each in found.items() if len(parts) > 1 else ():
                axes.setdefault(name, []).append(each)
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return singles, axes


def _separated(value: str) -> list[str]:
    """Split a value at its commas, except for those in quotes, a list or a table."""
    parts = SEPARATED.findall(value)
    return [part.strip() for part in parts] if parts and ",".join(parts) == value else [value]


def applied(tree: Mapping[str, Any], given: Mapping[str, Any]) -> Tree:
    """Return a copy of `tree` with the values of `given`, whose keys are those of overrides."""
    made: Tree = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for key, value in given.items():
        section, _, name = key.partition(".")
        if name and isinstance(made.setdefault(section, {}), dict):  # otherwise `validated` refuses it
            _drop_strays(made, section, name, value)
    for key, value in given.items():
        section, _, name = key.partition(".")
        target = made[section] if name else made
        if not isinstance(target, dict):
            continue
        if name.startswith("args."):
            target["args"] = target = dict(target.get("args") or {})
        name = name.removeprefix("args.") or section
        if value is Unset.UNSET:
            target.pop(name, None)
        else:
            target[name] = value
    return {name: value for name, value in made.items() if value != {}}  # a section without settings is unset


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables as one table with dotted keys."""
    pairs: dict[str, Any] = {}
    for name, value in tables.items():
        nested = isinstance(value, Mapping)
        pairs |= {f"{name}.{key}": each for key, each in flat(value).items()} if nested else {name: value}
    return pairs


def _parsed(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by key, and a line for each mistake."""
    given: dict[str, Any] = {}
    lines = []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            lines.append(f"{_shown(text)}: must be key=value, such as norm.ghost_size=16")
        elif len(text) > limits.MOST_OVERRIDE:
            lines.append(f"{_shown(text)}: must have at most {limits.MOST_OVERRIDE:,} characters; shorten it")
        elif key in RESERVED:
            lines.append(f"{key}: set by {RESERVED[key]}, not by hand; leave it out")
        elif key in SECTIONS:
            lines.append(f"{key}: a section; name one of its settings, such as {key}.{_first(key)}=...")
        elif not known(key):
            lines.append(unknown(ascii(key)[1:-1][:80]))
        elif len(_separated(value)) > 1:
            lines.append(f"{_shown(text)}: several values are for `ghostnoise sweep`; give one, or quote a text")
        else:
            try:
                given[key] = _value(value, text_wanted=_takes_text(key))
            except tomllib.TOMLDecodeError:
                lines.append(
                    f"{_shown(text)}: the value is not valid TOML; write a number, true, false, a word, 'text' or "
                    "[1, 2]"
                )
            except ValueError as error:
                lines.append(f"{_shown(text)}: {error}; give another value")
    return given, lines


def _value(text: str, text_wanted: bool) -> Any:
    """Parse a TOML value, or else take a bare word as a string."""
    if text in ("", "unset"):
        return Unset.UNSET
    try:
        parsed = limits.parse_toml(f"value = {text}")
        if set(parsed) != {"value"}:  # a line break followed by more keys
            raise tomllib.TOMLDecodeError("more than one value")
    except tomllib.TOMLDecodeError:
        if NUMBER.fullmatch(text) and not text_wanted:
            return float(text)
        if text[0] in "\"'[{" or "\n" in text:
            raise
        for mistake in limits.mistakes(text):
            raise ValueError(mistake) from None
        return text
    value = parsed["value"]
    return text if text_wanted and not isinstance(value, str) else value


def _shown(text: str) -> str:
    """Quote an override for an error message."""
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}..."


def _takes_text(key: str) -> bool:
    """Whether a setting is free text, where 2012 is a name too."""
    section, _, name = key.partition(".")
    return bool(name) and SECTIONS[section].fields().get(name) is str


def _first(section: str) -> str:
    return next(iter(SECTIONS[section].model_fields))


def _drop_strays(tree: Tree, section: str, name: str, value: object) -> None:
    """Remove settings that do not belong to the new `value` of the setting `name`."""
    settings, base = tree[section], SECTIONS.get(section, Section)
    if name not in (base.TAG, "name", "augment"):
        return
    strays: list[str] = []
    if name == base.TAG and (kind := base.kind(None if value is Unset.UNSET else value)):
        strays += [each for each in settings if not kind.has(each)]
        strays += ["args"] if settings.get(name) != value else []
        types = {each: type_ for each, type_ in kind.fields().items() if each in settings and each != name}
        literals = [each for each, type_ in types.items() if get_origin(type_) is Literal]
        strays += [each for each in literals if settings[each] not in get_args(types[each])]
    match section, name:
        case "data", "name" if "augment" in strays:
            strays += ["padding"]
        case "data", "augment" if value != "flip-crop":
            strays += ["padding"]
        case "model", "name" if settings.get("name") != value:
            strays += ["width", "widths", "zero_init_last", "args"]
            _without(tree.get("norm"), "placement")
        case "norm", "method" if settings.get("method") != value:
            strays += ["placement"]
    _without(settings, *strays)


def _without(settings: object, *names: str) -> None:
    if isinstance(settings, dict):
        for name in names:
            settings.pop(name, None)


def _fields(section: str) -> list[str]:
    return list(SECTIONS[section].fields()) if section in SECTIONS else []


def _lines(mistake: ErrorDetails, tree: Mapping[str, Any]) -> Iterator[str]:
    where, kind, given = mistake["loc"], mistake["type"], mistake["input"]
    context = mistake.get("ctx", {})
    key = ".".join(part for part in where if isinstance(part, str))
    item = "".join(f"[{part}]" for part in where if isinstance(part, int))
    section, _, name = key.rpartition(".")
    base = SECTIONS.get(section, Section)
    tag = tree[section].get(base.TAG, base.model_fields[base.TAG].default) if base.TAG else None
    owners = base.owners(name) if base.TAG not in ("", name) and tag not in base.owners(name) else []
    match kind:
        case "extra_forbidden" | "none_required" | "literal_error" if owners:
            whose = f"a setting of {', '.join(owners)}, and {base.TAG} is {tag!r}"
            yield f"{key}={spelled(given)}: {whose}; leave {name} out"
        case "extra_forbidden":
            yield unknown(key)
        case "missing" if item:  # of a pair
            yield f"{key}={spelled(given)}: must have more values"
        case "missing" if key in SECTIONS:
            yield f"{key}: missing; add a section [{key}]"
        case "missing" if isinstance(tag, str):
            yield f"{key}: missing; {tag} has no default for it, give one"
        case "missing":
            yield f"{key}: missing; it has no default, give one"
        case "model_type":
            yield f"{key}={spelled(given)}: must be a section, [{key}]"
        case "value_error":  # raised by our own validators
            yield from (f"{key}.{line}" for line in str(context["error"]).splitlines())
        case _:
            bounds = {name: _plain(value) for name, value in context.items()}
            rule = RULES[kind].format(**bounds) if kind in RULES else mistake["msg"]
            yield f"{key}{item}={spelled(given)}: {rule}{_near(given, context) if kind == 'literal_error' else ''}"


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _near(given: object, context: Mapping[str, Any]) -> str:
    allowed = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
    synonym = DEVICE_SYNONYMS.get(str(given).lower())
    near = [synonym] if synonym in allowed else nearest(str(given).lower(), allowed)
    return f"; did you mean {near[0]!r}?" if near else ""
