"""The record of a run that has ended: one line of JSON with all that a report needs, in a file of records or alone.

`{"identity": …, "settings": {…}, "environments": [{…}], "curve": {…}, "result": {…}}`

settings       all settings, with sorted names; their identity must be `identity`
environments   metadata of the environment of each segment of the training: commit, numerics number, threads, versions,
               machine. Format 1 has only the last one, as `environment`
curve          a list for each measure: `train_loss` and `train_accuracy` have a number for each epoch, `loss` and
               `accuracy` one for each epoch in `evaluated`; null where a number was not finite. `lr`, `seconds` and
               `images_per_second` have a number for each epoch, or are missing
result         the result, with the hash of the weights and the duration
noise          only of runs that measured their noise: for each measured epoch, a table with a row for each layer, as
               lists of its columns; the distributions are not part of it

All numbers have all of their digits. Records, and the files of a run in training, are untrusted: damaged, edited by
hand, or written by another version. The models define what a valid one is.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
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

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.overrides import RULES
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.config.section import json_text
from ghostnoise.lab.limits import MOST_DEPTH, MOST_DIGITS, read_bytes
from ghostnoise.lab.run import Run
from ghostnoise.text import counted, printable

MOST_EPOCHS = 100_000
MOST_FIELDS = 200
MOST_LAYERS = 10_000
MOST_SEGMENTS = 10_000
MOST_TEXT = 300
HEADER = ("recipe", "identity")  # of settings.json
TRAINED, EVALUATED = ("train_loss", "train_accuracy"), ("loss", "accuracy")
TIMED = ("lr", "images_per_second", "seconds")

Tree = dict[str, Any]


def _time(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("must be a time such as 2026-01-31T12:00:00+00:00") from None
    return text


def _single(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) > MOST_TEXT or not value.isprintable():
            raise ValueError(f"must be at most {MOST_TEXT} printable characters")
    elif isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        raise ValueError(f"must have at most {MOST_DIGITS} digits")
    elif not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError("must be a number, a text, true, false or null")
    return value


Time = Annotated[str, StringConstraints(max_length=40), AfterValidator(_time)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Positive = Annotated[int, Field(ge=1, le=10**6)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Identity = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Amounts = Annotated[list[Amount | None], Field(max_length=MOST_EPOCHS)]
Percents = Annotated[list[Percent | None], Field(max_length=MOST_EPOCHS)]
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


class Environment(Metadata):
    """The environment of a segment of a training."""

    numerics: Positive = 1
    commit: Text = ""
    threads: Positive = 1
    device_name: Text = ""
    torch: Text = ""
    started: Time | None = None


class Result(Metadata):
    """The result of a run."""

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

    train_loss: Amounts
    train_accuracy: Percents
    evaluated: Annotated[list[Count], Field(max_length=MOST_EPOCHS)]
    loss: Amounts
    accuracy: Percents
    lr: Amounts | None = None
    images_per_second: Amounts | None = None
    seconds: Amounts | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.train_loss) != len(self.train_accuracy):
            raise ValueError("train_loss and train_accuracy must have equal lengths")
        for column in (self.lr, self.images_per_second, self.seconds):
            if column is not None and len(column) != len(self.train_loss):
                raise ValueError("lr, images_per_second and seconds must be as long as train_loss")
        if not len(self.evaluated) == len(self.loss) == len(self.accuracy):
            raise ValueError("evaluated, loss and accuracy must have equal lengths")
        epochs = [0, *self.evaluated, len(self.train_loss) + 1]
        if any(first >= second for first, second in itertools.pairwise(epochs)):
            raise ValueError("evaluated must have increasing epochs, from 1 to the number of epochs")
        return self


class Noise(Part):
    """The noise that was measured after an epoch: columns of a table with a row for each layer."""

    epoch: Count
    layers: Annotated[dict[Text, Annotated[list[Scalar], Field(max_length=MOST_LAYERS)]], Field(max_length=MOST_FIELDS)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len({len(column) for column in self.layers.values()}) != 1 or "layer" not in self.layers:
            raise ValueError("layers must have columns of equal lengths, one of them called layer")
        return self


class Record(Part):
    """A record, which `parse` returns as a `Run`."""

    identity: Identity
    settings: Settings
    environments: Annotated[list[Environment], Field(min_length=1, max_length=MOST_SEGMENTS)]
    curve: Curve
    result: Result
    noise: list[Noise] = Field(default=[], max_length=MOST_EPOCHS)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        settings, result, curve = self.settings, self.result, self.curve
        if (made := recipe.identity(settings)) != self.identity:
            raise ValueError(f"identity {self.identity}: its settings have the identity {made}")
        if result.split != settings.data.evaluate:
            raise ValueError(f"result.split={result.split}: data.evaluate is {settings.data.evaluate}")
        if result.status == "diverged":
            return self
        if not result.epochs == settings.train.epochs == len(curve.train_loss):
            raise ValueError(
                f"result.epochs={result.epochs} and a curve of {counted(len(curve.train_loss), 'epoch')}: "
                f"train.epochs is {settings.train.epochs}"
            )
        if (curve.evaluated[-1:], curve.accuracy[-1:]) != ([result.epochs], [result.accuracy]):
            raise ValueError("result.accuracy must be the accuracy after the last epoch of the curve")
        return self


def parse(line: bytes, name: str, folder: Path | None = None) -> Run:
    """Read a record as a run of the recipe `name`; raises a ValueError whose message is one line."""
    tree = loads(line)
    if "environment" in tree and "environments" not in tree:  # format 1
        tree["environments"] = [tree.pop("environment")]
    try:
        if isinstance(tree.get("settings"), dict):
            if any(not text.isprintable() for text in _texts(tree["settings"])):
                raise ValueError("settings: must not contain control characters")
            tree["settings"] = recipe.stored(tree["settings"])
    except ValidationError as error:
        raise ValueError(reason(error, "settings")) from None
    try:
        Record.model_validate(tree)
    except ValidationError as error:
        raise ValueError(reason(error)) from None
    return Run(
        name, tree["identity"], tree["settings"], status=tree["result"]["status"], environments=tree["environments"],
        result=tree["result"], curve=tree["curve"], noise=tree.get("noise", ()), folder=folder,
    )  # fmt: skip


def line(run: Run) -> str:
    """Return the record of a run that has ended, as a line of JSON."""
    tree = {
        "identity": run.identity,
        "settings": json.loads(json_text(dict(run.tree))),
        "environments": list(run.environments) or [{}],
        "curve": run.curve,
        "result": run.result,
    }
    if run.noise:
        tree["noise"] = list(run.noise)
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def order(run: Run) -> tuple[str, int, str]:
    """Sort records by the settings without the seed, then by the seed."""
    return json_text({**run.tree, "seed": 0}), run.seed, run.identity


def agree(one: Run, other: Run) -> bool:
    """Return whether two records are of the same computation: equal weights, numerics and curves; times may differ.

    How often a run was evaluated is no part of its identity: only epochs that both evaluated are compared.
    """
    mine, theirs = (run.result or {} for run in (one, other))
    if any(mine.get(name) != theirs.get(name) for name in ("status", "weights_sha256")):
        return False
    curves = [(run.curve or {}) for run in (one, other)]
    trained = [[curve.get(name) for name in TRAINED] for curve in curves]
    columns = ([curve.get(name, ()) for name in ("evaluated", *EVALUATED)] for curve in curves)
    first, second = ({epoch: scores for epoch, *scores in zip(*each, strict=True)} for each in columns)
    same = all(first[epoch] == second[epoch] for epoch in first.keys() & second.keys())
    return same and trained[0] == trained[1] and one.numerics.number == other.numerics.number


def curve_of(lines: Sequence[Mapping[str, Any]]) -> Tree:
    """Return the curve of a record from the metrics after each epoch; raises a ValueError if one is missing."""
    curve: Tree = {"train_loss": [], "train_accuracy": [], "evaluated": [], "loss": [], "accuracy": []}
    for epoch, line in enumerate(lines, start=1):
        if line.get("epoch") != epoch:
            raise ValueError("metrics.jsonl: must have one line for each epoch, from 1")
        for name in TRAINED:
            curve[name].append(line.get(name))
        for name in TIMED:
            if name in line:
                curve.setdefault(name, []).append(line[name])
        if line.get("loss") is not None or line.get("accuracy") is not None:
            curve["evaluated"].append(epoch)
            for name in EVALUATED:
                curve[name].append(line.get(name))
    for name in TIMED:  # earlier versions have left some out
        if len(curve.get(name, lines)) < len(lines):
            del curve[name]
    return curve


def lines_of(curve: Mapping[str, Any]) -> list[Tree]:
    """Return the metrics after each epoch from the curve of a record; None where the network was not evaluated."""
    scores = dict(zip(curve["evaluated"], zip(curve["loss"], curve["accuracy"], strict=True), strict=True))
    names = ["epoch", *TRAINED, *(name for name in TIMED if curve.get(name) is not None)]
    columns = zip(itertools.count(1), *(curve[name] for name in names[1:]))  # counting is infinite
    return [dict(zip((*names, *EVALUATED), (*row, *scores.get(row[0], (None, None))), strict=True)) for row in columns]


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
ENVIRONMENTS = TypeAdapter(Annotated[list[Environment], Field(max_length=MOST_SEGMENTS)])
ENVIRONMENT, RESULT = TypeAdapter(Environment), TypeAdapter(Result)


def read(path: Path, kind: TypeAdapter[Any]) -> Any:
    """Read a JSON file and check it; raises an OSError or a ValueError whose message is one line.

    Fields may be missing, since other versions may have left them out, but for the status of a result.
    """
    content = read_bytes(path)
    try:
        kind.validate_json(content)
    except ValidationError as error:
        wrong = [each for each in error.errors() if each["type"] != "missing" or each["loc"] == ("status",)]
        if wrong:
            raise ValueError(describe(wrong[0])) from None
    return json.loads(content)


def read_json(path: Path) -> Tree:
    """Read a JSON object; raises an OSError or a ValueError whose message is one line."""
    return loads(read_bytes(path))


def read_settings(path: Path) -> Tree:
    """Read settings.json; raises an OSError or a ValueError whose message is one line.

    Settings that this version does not know are no damage: another version may have written them.
    """
    tree = loads(read_bytes(path))
    if _depth(tree) > MOST_DEPTH:
        raise ValueError("nested too deeply")
    for name in HEADER:
        if not isinstance(tree.get(name, ""), str):
            raise ValueError(f"{name}: must be a text")
    try:
        recipe.stored(tree)
    except ValidationError as error:
        if wrong := [each for each in error.errors() if not _of_another_version(each)]:
            raise ValueError(describe(wrong[0])) from None
    return {name: value for name, value in tree.items() if name not in HEADER}


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


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return dict(zip(value, map(finite, value.values()), strict=True))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none; control characters are escaped."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__))


def loads(content: bytes) -> Tree:
    """Parse an object in strict JSON: no NaN, no name twice, and a limit on the digits of integers."""
    try:
        found = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not complete JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
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


def _depth(value: object) -> int:
    """Count the levels of objects and lists; the JSON parser has limited them already."""
    deepest, level = 0, [value]
    while level and deepest <= MOST_DEPTH:
        deepest += 1
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inside for each in values if isinstance(each, dict | list)]  # type: ignore[attr-defined]
    return deepest


def _texts(value: object) -> list[str]:
    """Return all texts in a tree of settings."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inside for text in _texts(each)]


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
