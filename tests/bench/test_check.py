import json

import pytest
import torch

from ghostnoise.bench import check
from ghostnoise.bench.comparison import Comparison

CPU = torch.device("cpu")


@pytest.fixture
def found():
    passed = Comparison("BN", "general", "contiguous", "float32", 0.25)
    failed = Comparison("GNI", "layer", "features", "float16", None, "RuntimeError: a | b")
    times = [{"row": "8x4", "mode": "eager", "name": "GBN-32", "ratio": 1.5, "p50": 2.0, "n": 3}]
    return check.Found({"torch": "2.13.0"}, [passed, failed], times, ["the operators run in plain PyTorch: not built"])


def test_failures_come_first(found):
    lines = check.markdown(found).splitlines()
    assert lines[0] == "# ghostnoise check: 1 of 2 comparisons failed"
    assert lines[4] == "| GNI | layer | features | float16 | RuntimeError: a \\| b |"
    assert "| general | float32 | 1 | 0 | 0.25 |" in lines
    assert "| 8x4 | eager | GBN-32 | 2.000 | 1.50 | 3 |" in lines
    assert lines[-1] == "- the operators run in plain PyTorch: not built"


def test_without_failures(found):
    found.comparisons.pop()
    assert check.markdown(found).startswith("# ghostnoise check: all 1 comparisons passed")


def test_both_files_are_written(found, tmp_path):
    text, data = check.save(found, tmp_path / "new")
    assert text.read_text().startswith("# ghostnoise check")
    assert json.loads(data.read_text())["comparisons"][1]["failure"] == "RuntimeError: a | b"


def test_what_cannot_be_timed_is_left_out(found):
    def make(mode):
        raise RuntimeError("no compiler\ndetails")

    found.times.clear()
    makers = {check.BASELINE: lambda mode: lambda: None, "GNI": make}
    check._time(found, "row", "compiled", makers, check.Length(rounds=2, warmup=0), CPU)
    assert found.left_out[-1] == "GNI, row, compiled: RuntimeError: no compiler"
    assert [each["name"] for each in found.times] == [check.BASELINE]


def test_the_environment_names_versions_and_processors():
    assert {"ghostnoise", "python", "torch", "processor", "device", "operators"} <= check.environment(CPU).keys()
