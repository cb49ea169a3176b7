"""The record of a finished run: one line of JSON with all that a report needs. Records are validated as untrusted data.

`{"identity": …, "settings": {…}, "environment": {…}, "curve": {…}, "result": {…}}`

settings      those of settings.json, with sorted names; their identity must be `identity`
environment   environment.json: commit, numerics number, threads, versions and machine
curve         a list for each measure: `train_loss` and `train_accuracy` have a number for each epoch, `loss` and
              `accuracy` one for each epoch in `evaluated`; null where a number was not finite
result        result.json, with the hash of the weights and the duration
noise         only of runs that measured their noise: for each measured epoch, a table with a row for each layer, as
              lists of its columns; the distributions are not part of it

All numbers have all of their digits.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.overrides import RULES
from ghostnoise.lab.config.schema import Settings
from ghostnoise.text import counted

MOST_DIGITS = 20  # of an integer
MOST_DEPTH = 8
MOST_EPOCHS = 100_000
MOST_FIELDS = 200
MOST_LAYERS = 10_000
MOST_TEXT = 300
TRAINED, EVALUATED = ("train_loss", "train_accuracy"), ("loss", "accuracy")

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


class Curve(Part):
    """The measures after each epoch."""

    train_loss: Losses
    train_accuracy: Accuracies
    evaluated: Annotated[list[Count], Field(max_length=MOST_EPOCHS)]
    loss: Losses
    accuracy: Accuracies

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.train_loss) != len(self.train_accuracy):
            raise ValueError("train_loss and train_accuracy must have equal lengths")
        if not len(self.evaluated) == len(self.loss) == len(self.accuracy):
            raise ValueError("evaluated, loss and accuracy must have equal lengths")
        epochs = [0, *self.evaluated, len(self.train_loss) + 1]
        if any(first >= second for first, second in itertools.pairwise(epochs)):
            raise ValueError("evaluated must have increasing epochs, from 1 to the number of epochs")
        return self

    def lines(self) -> list[Tree]:
        """Return the measures as lines of metrics.jsonl; None where the network was not evaluated."""
        scores = dict(zip(self.evaluated, zip(self.loss, self.accuracy, strict=True), strict=True))
        names, lines = ("epoch", *TRAINED, *EVALUATED), []
        for epoch, trained in enumerate(zip(self.train_loss, self.train_accuracy, strict=True), start=1):
            values = (epoch, *trained, *scores.get(epoch, (None, None)))
            lines.append(dict(zip(names, values, strict=True)))
        return lines


class NoiseAt(Part):
    """The noise that was measured after an epoch: columns of a table with a row for each layer."""

    epoch: Count
    layers: Annotated[dict[Text, Annotated[list[Scalar], Field(max_length=MOST_LAYERS)]], Field(max_length=MOST_FIELDS)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len({len(column) for column in self.layers.values()}) != 1 or "layer" not in self.layers:
            raise ValueError("layers must have columns of equal lengths, one of them called layer")
        return self

    def rows(self) -> list[Tree]:
        """Return the rows of the table."""
        return [dict(zip(self.layers, row, strict=True)) for row in zip(*self.layers.values(), strict=True)]


class RunRecord(Part):
    """The record of a run that finished or diverged."""

    identity: Identity
    settings: Settings
    environment: Environment
    curve: Curve
    result: Result
    noise: Annotated[list[NoiseAt], Field(max_length=MOST_EPOCHS)] = []

    @model_validator(mode="after")
    def _fits(self) -> Self:
        settings, result, curve = self.settings, self.result, self.curve
        if not all(text.isprintable() for text in _texts(self._tree_of_settings())):
            raise ValueError("settings: must not contain control characters")
        if (made := recipe.identity(settings)) != self.identity:
            raise ValueError(f"identity {self.identity}: its settings have the identity {made}")
        if result.split != settings.data.evaluate:
            raise ValueError(f"result.split={result.split}: data.evaluate is {settings.data.evaluate}")
        if result.status == "finished" and not result.epochs == settings.train.epochs == len(curve.train_loss):
            raise ValueError(
                f"result.epochs={result.epochs} and a curve of {counted(len(curve.train_loss), 'epoch')}: "
                f"train.epochs is {settings.train.epochs}"
            )
        if result.status == "finished" and (curve.evaluated[-1:], curve.accuracy[-1:]) != (
            [result.epochs],
            [result.accuracy],
        ):
            raise ValueError("result.accuracy must be the accuracy after the last epoch of the curve")
        return self

    @property
    def order(self) -> tuple[str, int, str]:
        """Sort by the settings without the seed, then by the seed."""
        return recipe.json_text(self._tree_of_settings() | {"seed": 0}), self.settings.seed, self.identity

    def agrees(self, other: "RunRecord") -> bool:
        """Whether both are records of the same computation: equal curves, weights and numerics; times may differ."""
        mine, theirs = ((each.curve, each.result.status, each.result.weights_sha256) for each in (self, other))
        return mine == theirs and self.environment.numerics == other.environment.numerics

    def line(self) -> str:
        """Return the record as a line of JSON."""
        tree = {
            "identity": self.identity,
            "settings": json.loads(recipe.json_text(self._tree_of_settings())),
            "environment": self.environment.tree(),
            "curve": self.curve.model_dump(),
            "result": self.result.tree(),
        }
        if self.noise:
            tree["noise"] = [each.model_dump() for each in self.noise]
        return json.dumps(tree, separators=(",", ":"), allow_nan=False)

    def _tree_of_settings(self) -> Tree:
        return self.settings.model_dump(exclude_none=True)


def parse(line: bytes) -> RunRecord:
    """Read a line of a file of records; raises a ValueError whose message is one line."""
    return validated(parse_json(line))


def validated(tree: Mapping[str, Any]) -> RunRecord:
    """Check a record; raises a ValueError whose message is one line."""
    tree = dict(tree)
    try:
        if isinstance(tree.get("settings"), dict):
            tree["settings"] = recipe.stored(tree["settings"])
    except ValidationError as error:
        raise ValueError(_reason(error, "settings")) from None
    try:
        return RunRecord.model_validate(tree)
    except ValidationError as error:
        raise ValueError(_reason(error)) from None


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


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _texts(each)


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


def _reason(error: ValidationError, *above: str) -> str:
    """Describe the first mistake in one line; names in the record are shown escaped."""
    mistake = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(
        ascii(part)[1:-1][:60] if isinstance(part, str) else str(part) for part in (*above, *mistake["loc"])
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
