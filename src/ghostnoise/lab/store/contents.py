"""The contents of a run's files, which are untrusted: damaged, edited by hand, or written by another version.

The models define what a valid file is, for run folders and for the records that are made from them.
"""

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Required, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from ghostnoise.lab.config import methods, recipe
from ghostnoise.lab.config.overrides import RULES
from ghostnoise.lab.limits import MOST_DEPTH, MOST_DIGITS, read_bytes
from ghostnoise.text import printable

MOST_EPOCHS = 100_000
MOST_FIELDS = 200
MOST_TEXT = 300
HEADER = ("recipe", "identity")  # of settings.json and result.json

Tree = dict[str, Any]


def _time(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("must be a time such as 2026-01-31T12:00:00+00:00") from None
    return text


Time = Annotated[str, StringConstraints(max_length=40), AfterValidator(_time)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Positive = Annotated[int, Field(ge=1, le=10**6)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Identity = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Losses = Annotated[list[Amount | None], Field(max_length=MOST_EPOCHS)]
Accuracies = Annotated[list[Percent | None], Field(max_length=MOST_EPOCHS)]


def _single(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) > MOST_TEXT or not value.isprintable():
            raise ValueError(f"must be at most {MOST_TEXT} printable characters")
    elif isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        raise ValueError(f"must have at most {MOST_DIGITS} digits")
    elif not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError("must be a number, a text, true, false or null")
    return value


Scalar = Annotated[Any, AfterValidator(_single)]
Text = Annotated[str, AfterValidator(_single)]


class Part(BaseModel):
    """A part of a record."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Metadata(Part):
    """Fields of which only some are known: others, from other versions, must be single values."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Scalar]

    @model_validator(mode="after")
    def _limit(self) -> Self:
        if len(self.__pydantic_extra__) > MOST_FIELDS:
            raise ValueError(f"must have at most {MOST_FIELDS} fields")
        for name in self.__pydantic_extra__:
            if len(name) > 100 or not name.isprintable():
                raise ValueError("must have short and printable names")
        return self

    def tree(self) -> Tree:
        """Return the fields that were given."""
        return self.model_dump(exclude_unset=True)


class Environment(Metadata):
    """The contents of environment.json."""

    numerics: Positive = 1
    commit: Text = ""
    threads: Positive = 1
    device_name: Text = ""
    torch: Text = ""
    started: Time | None = None


class Result(Metadata):
    """The contents of result.json, without the name and the identity of the run."""

    status: Literal["finished", "diverged"]
    split: Literal["validation", "test"]
    epochs: Count
    steps: Count
    train_loss: Amount | None
    train_accuracy: Percent | None
    loss: Amount | None
    accuracy: Percent | None
    best_accuracy: Percent | None
    best_epoch: Count | None
    parameters: Count
    weights_sha256: Hash
    images_per_second: Amount
    seconds: Amount
    ended: Time

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.accuracy is None) == (self.status == "finished"):
            raise ValueError("accuracy must be a number if the run finished, and null if it diverged")
        return self


class MetricsLine(TypedDict, total=False):
    """A line of metrics.jsonl; other fields are ignored. A dictionary, since it is faster to validate than a model."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)  # type: ignore[misc]

    epoch: Required[Annotated[int, Field(ge=1, le=10**9)]]
    step: Count
    lr: Amount | None
    split: Literal["validation", "test"]
    train_loss: Amount | None
    train_accuracy: Percent | None
    loss: Amount | None
    accuracy: Percent | None
    images_per_second: Amount | None
    seconds: Amount | None


LINES = TypeAdapter(list[MetricsLine])


def read(path: Path, kind: type[Metadata]) -> Tree:
    """Read a JSON file and check it; raises an OSError or a ValueError whose message is one line.

    Fields may be missing, since other versions may have left them out, but for the status of a result.
    """
    content = read_bytes(path)
    try:
        kind.model_validate_json(content)
    except ValidationError as error:
        wrong = [each for each in error.errors() if each["type"] != "missing" or each["loc"] == ("status",)]
        if wrong:
            raise ValueError(describe(wrong[0])) from None
    tree: Tree = json.loads(content)
    return tree


def read_settings(path: Path) -> Tree:
    """Read settings.json; raises an OSError or a ValueError whose message is one line.

    Settings that this version does not know are no damage: another version may have written them.
    """
    tree = parse_json(read_bytes(path))
    for name in HEADER:
        if not isinstance(tree.get(name, ""), str):
            raise ValueError(f"{name}: must be a text")
    try:
        recipe.stored(tree)
    except ValidationError as error:
        if wrong := [each for each in error.errors() if not _of_another_version(each)]:
            raise ValueError(describe(wrong[0])) from None
    return tree


def numerics(settings: Mapping[str, Any]) -> int:
    """Return the numerics number that the method of a run, which settings.json names, has in this version."""
    norm = settings.get("norm")
    return methods.numerics(norm.get("method") if isinstance(norm, dict) else None)


def recorded_numerics(environment: Mapping[str, Any]) -> int:
    """Return the numerics number in environment metadata; 1 for runs from before it was recorded."""
    number = environment.get("numerics", 1)
    return number if isinstance(number, int) and not isinstance(number, bool) else 1


def _of_another_version(mistake: ErrorDetails) -> bool:
    kind = mistake["type"]
    name = kind == "literal_error" and isinstance(mistake["input"], str)
    return name or kind in ("missing", "extra_forbidden", "none_required", "value_error")


def read_lines(path: Path) -> list[Tree]:
    """Read metrics.jsonl; raises an OSError or a ValueError whose message is one line.

    An incomplete last line is left out: the run is writing it, or was killed while it did.
    """
    content = read_bytes(path)
    return parse_lines(b"[" + b",".join(content[: content.rfind(b"\n") + 1].splitlines()) + b"]")


def parse_lines(content: bytes) -> list[Tree]:
    """Return the lines of metrics in a JSON list; raises a ValueError whose message is one line."""
    try:
        found: list[Tree] = LINES.validate_json(content)  # type: ignore[assignment]
    except ValidationError as error:
        raise ValueError(reason(error, "metrics", first=1)) from None
    return found


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none; control characters are escaped."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__))


def parse_json(line: bytes) -> Tree:
    """Read an object in strict JSON: no NaN, no name twice, and limits on digits and nesting."""
    try:
        text = line.decode()
        found = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer, parse_float=_float
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not complete JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    if _depth(found) > MOST_DEPTH:
        raise ValueError("nested too deeply")
    return found


def _object(pairs: list[tuple[str, Any]]) -> Tree:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has the same name twice")
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits: must have at most {MOST_DIGITS}")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if len(text) > 2 * MOST_DIGITS or not math.isfinite(number):
        raise ValueError("a number that is out of range or has too many digits")
    return number


def _depth(value: object) -> int:
    """Count the levels of objects and lists; the JSON parser has limited them already."""
    deepest, level = 0, [value]
    while level := [
        each
        for found in level
        for each in (found.values() if isinstance(found, dict) else found if isinstance(found, list) else ())
        if isinstance(each, dict | list)
    ]:
        deepest += 1
        if deepest > MOST_DEPTH:
            break
    return deepest + 1


def reason(error: ValidationError, *above: str, first: int = 0) -> str:
    """Describe the first mistake in one line; names are shown escaped, and items are counted from `first`."""
    return describe(error.errors(include_url=False, include_input=False)[0], *above, first=first)


def describe(mistake: ErrorDetails, *above: str, first: int = 0) -> str:
    """Describe a mistake in one line; see `reason`."""
    where = ".".join(
        ascii(part)[1:-1][:60] if isinstance(part, str) else str(part + first) for part in (*above, *mistake["loc"])
    )
    kind = mistake["type"]
    if kind == "extra_forbidden":
        rule = "unknown; a newer version of ghostnoise may have written it"
    elif kind == "missing":
        rule = "missing"
    elif kind == "value_error":
        rule = str(mistake["ctx"]["error"]).splitlines()[0]
    else:
        bounds = {
            name: f"{value:g}" if isinstance(value, float) else value for name, value in mistake.get("ctx", {}).items()
        }
        rule = RULES[kind].format(**bounds) if kind in RULES else mistake["msg"]
    return f"{where}: {rule}" if where else rule
