"""The operators of a layer's step, and their records."""

import json
import math

import pytest
import torch

from ghostnoise import cli
from ghostnoise.bench import profile
from ghostnoise.bench.contenders import contenders
from ghostnoise.bench.rows import Row
from ghostnoise.bench.settings import Settings
from ghostnoise.lab.errors import UserError

CPU = torch.device("cpu")
PASSES = ["moments", "transform", "gradient_sums", "input_gradient"]


@pytest.mark.parametrize(
    ("row", "passes"), [(Row((64, 8, 4, 4)), PASSES), (Row((64, 16)), ["moments", "transform", "gradient_sums"])]
)
def test_parts_sum_to_the_step(row, passes):
    """The parts are the passes over x in their order, the pools between them, the draws, and the rest."""
    settings = Settings("profile", CPU, rounds=3, contenders=("flex BN", "flex BN+GNI-32"))
    records = profile.measure(row, settings, lambda share: None)
    baseline = records[0]
    assert (baseline["kind"], baseline["level"], baseline["ratio_p50"]) == ("torch", "step", 1)
    assert [record["contender"] for record in records].count(baseline["contender"]) == 1
    for name, others in (
        ("flex BN", ["ghost_batches", "ghost_batches_backward", "rest"]),
        ("flex BN+GNI-32", ["randint", "ghost_batches", "drawn_samples", "ghost_batches_backward", "rest"]),
    ):
        step, *own = [record for record in records if record["contender"] == name]
        parts = [record["part"] for record in own if not record["part"].startswith("normalizing_scale")]
        assert [part for part in parts if part in PASSES] == passes
        assert [part for part in parts if part not in PASSES] == others
        assert {record["level"] for record in own} == {"part"}
        assert math.isclose(sum(record["p50_ms"] for record in own), step["p50_ms"])
        for record in (step, *own):
            assert record["ratio_p50"] == pytest.approx(record["p50_ms"] / baseline["p50_ms"])
            assert record["n"] == 3


def test_operators_alone_have_the_arguments_of_the_step(monkeypatch):
    row = Row((64, 8, 4, 4))
    x, dy = row.draw(CPU)
    (contender,) = [each for each in contenders(row, CPU) if each.name == "flex GBN-32"]
    alone = profile.operators(contender.step(x, dy))
    assert [name for name in alone if name in PASSES] == PASSES
    called = profile.operators(alone["transform"])
    assert list(called) == ["transform"]


def test_the_rows_are_the_promised_ones():
    rows, _ = profile.plan(Settings("profile", CPU))
    assert [row.name for row in rows] == [
        "64x8x4x4 contiguous", "64x8x4x4 channels_last", "256x512", "1024x1024", "256x512x4x4 contiguous",
        "256x512x4x4 channels_last",
    ]  # fmt: skip


def test_an_unknown_layer_is_refused():
    with pytest.raises(UserError, match=r"--contender GBN: must be one of nn\.BatchNorm2d, BN, GBN-32"):
        profile.plan(Settings("profile", CPU, contenders=("BN", "GBN")))


def test_the_command(tmp_path, capsys):
    words = ["bench", "profile", "--quick", "--only", "64x16", "--contender", "flex GBN-32", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())  # where lines break depends on the width of the numbers
    for text in (
        "64x16: µs of a step",
        "nn.BatchNorm1d",
        "moments",
        "ghost_batches",
        "transform",
        "gradient_sums",
        "rest",
    ):
        assert text in printed
    records = json.loads((tmp_path / "profile.json").read_text())["records"]
    assert {record["contender"] for record in records} == {"nn.BatchNorm1d", "flex GBN-32"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.csv", "profile.json"]
