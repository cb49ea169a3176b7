"""Settings out of what was written: every mistake is one line, with what was given, the rule and the remedy."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.settings import CUTTING, NormSettings, Section, Settings

SECTIONS: dict[str, type[Section]] = {
    name: kind
    for name, field in Settings.model_fields.items()
    for kind in (field.annotation, *get_args(field.annotation))  # a section, or one that may be left out
    if isinstance(kind, type) and issubclass(kind, Section)
}
KEYS = [
    *(name for name in Settings.model_fields if name not in SECTIONS),
    *(f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.model_fields),
]
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


def validated(tree: Mapping[str, Any], mistakes: Sequence[str] = (), place: str = "") -> Settings:
    """The settings in `tree`, which has a mapping for each section.

    All mistakes are in one UserError, with a line for each: `mistakes` that were found before, and those of `tree`,
    which open with `place`.
    """
    lines = list(mistakes)
    try:
        settings = Settings.model_validate(dict(tree))
    except ValidationError as error:
        lines += mistakes_of(error, place)
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return settings


def mistakes_of(error: ValidationError, place: str = "") -> list[str]:
    """A line for each mistake, which opens with `place`."""
    return [place + line for mistake in error.errors(include_url=False) for line in _lines(mistake)]


def changed(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """`settings` with other values in some sections, checked again; None unsets."""
    tree = settings.model_dump(exclude_none=True)
    for section, values in sections.items():
        tree[section] |= values
    return validated(tree)


def check(settings: Settings, processes: int | None = None) -> None:
    """Raise a UserError for what fits each section by itself, and not all of them together.

    `processes` share the batch: `train.processes` if None.
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
    lines += _misfits(norm, train.batch_size, processes)
    if optim.warmup_epochs > train.epochs:
        lines.append(
            f"optim.warmup_epochs={optim.warmup_epochs:g}: longer than the training of train.epochs={train.epochs}; "
            "lower it or raise train.epochs"
        )
    if train.amp == "fp16" and train.device == "cpu":
        lines.append("train.amp='fp16': needs a GPU, and the device is 'cpu'; set train.amp=bf16 or train.amp=none")
    if settings.data.stand_in and not train.smoke:
        lines.append("data.stand_in=true: random images are for --smoke alone; leave it out")
    if lines:
        raise UserError("\n".join(lines))


def _misfits(norm: NormSettings, batch_size: int, processes: int) -> Iterator[str]:
    """Lines for ghost batches that cannot be cut out of the batch; noise is drawn with replacement, and always fits."""
    if norm.method not in CUTTING:
        return
    together = norm.scope == "global" or processes == 1
    samples = batch_size if together else batch_size // processes
    whose = f"train.batch_size={batch_size}" if together else f"a process, {batch_size} / {processes} = {samples}"
    size, least = norm.ghost_size, 2 if norm.method == "xbn" else 1
    if samples < least:
        yield f"norm.method='xbn' with a batch of {samples}: needs 2 samples or more; raise train.batch_size"
    elif size is not None and size < least:
        yield f"norm.ghost_size={size}: xbn leaves the sample itself out, and needs {least} or more; raise it"
    elif size is not None and size > samples:
        yield (
            f"norm.ghost_size={size}: ghost size not fitting the batch of {whose}; "
            f"take {samples} or less, or raise train.batch_size"
        )


def unknown(key: str) -> str:
    """The line for a key that there is none of, with the nearest ones."""
    section, _, last = key.rpartition(".")
    same = [other for other in KEYS if other.rpartition(".")[2] == last]
    own = [f"{section}.{name}" for name in difflib.get_close_matches(last, _fields(section), n=1)]
    # Across sections a whole key can be near; inside of one, its name alone decides.
    elsewhere = [] if section in SECTIONS else difflib.get_close_matches(key, [*KEYS, *SECTIONS], n=1)
    if near := same or own or elsewhere:
        return f"{key}: unknown; did you mean {' or '.join(near)}?"
    if section in SECTIONS:
        return f"{key}: unknown; {section} has {', '.join(_fields(section))}"
    return f"{key}: unknown; a recipe has {', '.join(Settings.model_fields)}"


def spelled(value: object) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)


def _fields(section: str) -> list[str]:
    return list(SECTIONS[section].model_fields) if section in SECTIONS else []


def _lines(mistake: ErrorDetails) -> Iterator[str]:
    where, kind, given = mistake["loc"], mistake["type"], mistake["input"]
    context = mistake.get("ctx", {})
    key = ".".join(part for part in where if isinstance(part, str))
    item = "".join(f"[{part}]" for part in where if isinstance(part, int))
    match kind:
        case "extra_forbidden":
            yield unknown(key)
        case "missing" if item:  # of a pair
            yield f"{key}={spelled(given)}: must have more values"
        case "missing" if key in SECTIONS:
            yield f"{key}: missing; add a section [{key}]"
        case "missing":
            yield f"{key}: missing; it has no default, give one"
        case "model_type":
            yield f"{key}={spelled(given)}: must be a section, [{key}]"
        case "value_error":  # our own rules
            yield from (f"{key}.{line}" for line in str(context["error"]).splitlines())
        case _:
            bounds = {name: _plain(value) for name, value in context.items()}
            rule = RULES[kind].format(**bounds) if kind in RULES else mistake["msg"]
            yield f"{key}{item}={spelled(given)}: {rule}{_near(given, context) if kind == 'literal_error' else ''}"


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _near(given: object, context: Mapping[str, Any]) -> str:
    allowed = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
    near = difflib.get_close_matches(str(given).lower(), allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
