"""`ghostnoise bench flex`: what is compared computes the same, and the records have the ratios."""

import json
import math

import pytest
import torch

from ghostnoise import cli
from ghostnoise.bench import flex
from ghostnoise.bench.rows import Row

CPU = torch.device("cpu")


@pytest.mark.parametrize("pair", flex.pairs(16)[:3], ids=lambda pair: pair.method)
def test_a_method_and_its_counterpart_compute_the_same(pair):
    x, dy = Row((64, 16, 5, 5)).draw(CPU)
    (y, dx), (expected, expected_dx) = (
        (y := layer(x), torch.autograd.grad(y, x, dy)[0]) for layer in pair.layers
    )  # fmt: skip
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(dx, expected_dx)


def test_batch_renorm_within_its_limits_normalizes_with_the_running_statistics():
    x = 1 + 2 * torch.randn(64, 16, 5, 5)
    layer, _ = flex.pairs(16)[3].layers
    torch.testing.assert_close(layer(x), (x - 1) / math.sqrt(4 + 1e-5))


def test_the_command(tmp_path, capsys):
    path = tmp_path / "flex.json"
    assert cli.main(["bench", "flex", "--quick", "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [record["contender"] for record in records] == 2 * [
        f"{pair.method} / {pair.counterpart}" for pair in flex.pairs(8)
    ]
    for record in records:
        assert record["ratio_p50"] == pytest.approx(record["p50_ms"] / record["counterpart_ms"])
    assert "ratios to what PyTorch has" in capsys.readouterr().out
