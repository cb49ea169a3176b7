"""The parts of a step of a layer, and their records."""

import json
import math

import pytest
import torch
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.backends.native.library import Library, library

from ghostnoise import cli
from ghostnoise.bench import memory, profile
from ghostnoise.bench.contenders import Contender, normalizers
from ghostnoise.bench.rows import Row
from ghostnoise.bench.settings import Settings
from ghostnoise.lab.errors import UserError

CPU = torch.device("cpu")
needs_library = pytest.mark.skipif(not isinstance(library(), Library), reason="the C++ library was not built")
NETWORKS = [
    "resnet-20 batch 128 contiguous",
    "table4 batch 1024 bf16",
    "1024x1024 compiled",
    "256x512x4x4 contiguous compiled",
]
PARTS = [profile.FLOOR, profile.DRAWS, "fused_forward", "fused_backward", profile.REST]
BACKWARD = ["gradient_sums", "statistics_gradient", "input_gradient"]
FUNCTIONS = {
    "BN": ["pool", "coefficients", "transform", "update_running", *BACKWARD, "linear_term"],
    "XBN-32": ["pool", "coefficients", "transform", "update_running", *BACKWARD, "exclusive_linear_term"],
    "BN+GNI-32": ["pool", "coefficients", "noise_tables", "transform", "update_running", *BACKWARD, "linear_term"],
}


@needs_library
@pytest.mark.parametrize("row", [Row((64, 8, 4, 4)), Row((64, 16))])
def test_parts_sum_to_the_step_and_functions_are_those_of_the_method(row):
    settings = Settings("profile", CPU, rounds=3, methods=tuple(FUNCTIONS))
    records = profile.measure(row, settings, lambda share: None)
    baseline = records[0]
    assert (baseline["kind"], baseline["level"], baseline["ratio_p50"]) == ("torch", "step", 1)
    assert {record["contender"] for record in records[1:]} == set(FUNCTIONS)
    for method, functions in FUNCTIONS.items():
        own = [record for record in records if record["contender"] == method]
        levels = {
            level: {record["part"]: record["p50_ms"] for record in own if record["level"] == level}
            for level in ("step", "part", "function")
        }
        assert list(levels["part"]) == PARTS
        assert math.isclose(sum(levels["part"].values()), levels["step"]["step"])
        assert (levels["part"][profile.DRAWS] > 0) == ("GNI" in method)
        assert set(levels["function"]) == {*functions, *(["moments"] if row.images else [])}
        assert all(taken > 0 for part, taken in levels["part"].items() if part not in (profile.DRAWS, profile.REST))
        for record in own:
            assert record["ratio_p50"] == pytest.approx(record["p50_ms"] / baseline["p50_ms"])
            assert record["n"] == 3


@needs_library
def test_nothing_is_timed_outside_of_a_recorded_step():
    def state():
        native = backends.load("native")
        return library().functions, torch.randint, native.fused_forward, native.fused_backward

    def fail():
        raise ZeroDivisionError

    before = state()
    with pytest.raises(ZeroDivisionError):
        profile.Recorded(fail, fused=False).run()
    assert state() == before


@needs_library
def test_recorded_times_are_sums_over_a_step_and_medians_over_steps(monkeypatch):
    ticks = iter([0, 1, 10, 12, 20, 25])  # a step with calls of 1 and 2 seconds, and one with a call of 5
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    counts = iter([2, 1])
    recorded = profile.Recorded(lambda: [torch.randint(2, (1,)) for _ in range(next(counts))])
    recorded.run()
    recorded.run()
    assert recorded.medians(warmup=0) == {profile.DRAWS: 4000.0}
    assert recorded.medians(warmup=1) == {profile.DRAWS: 5000.0}


@needs_library
@pytest.mark.parametrize("method", profile.METHODS)
def test_the_floor_saves_and_returns_as_much_as_the_layer(method):
    row = Row((64, 8, 4, 4))
    x, dy = row.draw(CPU)
    contender = Contender(method, "ours", normalizers(row)[method], "native")
    floor = Contender("", "ours", profile.Uncomputed(contender, x))
    assert memory.saved(floor, x) == memory.saved(contender, x)
    made, wanted = floor.step(x, dy)(), contender.step(x, dy)()
    assert [(each.shape, each.stride()) for each in made] == [(each.shape, each.stride()) for each in wanted]


def test_the_rows_are_the_promised_ones(monkeypatch):
    monkeypatch.setattr("ghostnoise.doctor.reason", lambda name: None if name != "triton" else "no device")
    rows, left_out = profile.plan(Settings("profile", CPU))
    layers = ["64x8x4x4 contiguous", "256x512", "1024x1024", "256x512x4x4 channels_last"]
    assert [row.name for row in rows] == [*layers, *NETWORKS]
    assert left_out == ["backend triton is left out: no device"]
    monkeypatch.setattr("ghostnoise.doctor.reason", lambda name: None if name == "aten" else "not built")
    rows, left_out = profile.plan(Settings("profile", CPU))
    assert [row.name for row in rows] == NETWORKS
    assert "backend native is left out: not built" in left_out


def test_what_cannot_be_profiled_is_refused():
    with pytest.raises(UserError, match="--method GBN: must be one of BN, GBN-32"):
        profile.plan(Settings("profile", CPU, methods=("BN", "GBN")))
    with pytest.raises(UserError, match="--device meta: the native backend runs on CPUs"):
        profile.plan(Settings("profile", torch.device("meta")))


@needs_library
def test_the_command(tmp_path, capsys):
    words = ["bench", "profile", "--quick", "--only", "64x16", "--method", "GBN-32", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())  # where lines break depends on the width of the numbers
    for text in ("64x16: µs of a step", "nn.BatchNorm1d", *PARTS, "as separate calls"):
        assert text in printed
    records = json.loads((tmp_path / "profile.json").read_text())["records"]
    assert {record["contender"] for record in records} == {"nn.BatchNorm1d", "GBN-32"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.csv", "profile.json"]
