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
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.config.section import json_text
from ghostnoise.lab.store.contents import (
    MOST_EPOCHS,
    MOST_FIELDS,
    Accuracies,
    Count,
    Environment,
    Identity,
    Losses,
    Part,
    Result,
    Scalar,
    Text,
    Tree,
    parse_json,
    reason,
)
from ghostnoise.text import counted

MOST_LAYERS = 10_000
TRAINED, EVALUATED = ("train_loss", "train_accuracy"), ("loss", "accuracy")


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
    noise: list[NoiseAt] = Field(default=[], max_length=MOST_EPOCHS)

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
        return json_text(self._tree_of_settings() | {"seed": 0}), self.settings.seed, self.identity

    def agrees(self, other: "RunRecord") -> bool:
        """Whether both are records of the same computation: equal curves, weights and numerics; times may differ."""
        mine, theirs = ((each.curve, each.result.status, each.result.weights_sha256) for each in (self, other))
        return mine == theirs and self.environment.numerics == other.environment.numerics

    def line(self) -> str:
        """Return the record as a line of JSON."""
        tree = {
            "identity": self.identity,
            "settings": json.loads(json_text(self._tree_of_settings())),
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
        raise ValueError(reason(error, "settings")) from None
    try:
        return RunRecord.model_validate(tree)
    except ValidationError as error:
        raise ValueError(reason(error)) from None


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _texts(each)
