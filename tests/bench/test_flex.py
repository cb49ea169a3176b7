"""`ghostnoise bench flex`: what is compared computes the same, and the records have the ratios."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

from ghostnoise import cli
from ghostnoise.bench import gallery
from ghostnoise.bench.gallery import GALLERY, Layer

GUIDE = Path(__file__).parents[2] / "docs/guides/any-normalization.md"


@pytest.mark.parametrize("name", GALLERY)
def test_a_normalization_and_its_usual_form_compute_the_same(name):
    """In float64, output and every gradient. Samples of ghost batches of 32 and 32."""
    generator = torch.Generator().manual_seed(0)
    x = (1 + 2 * torch.randn(64, 16, 5, 6, dtype=torch.float64, generator=generator)).requires_grad_()
    dy, results = torch.randn(x.shape, dtype=torch.float64, generator=generator), []
    for usual in (False, True):
        layer = Layer(GALLERY[name], x, usual).double()
        torch.nn.init.uniform_(layer.weight, generator=torch.Generator().manual_seed(1))
        y = layer(x)
        results.append((y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@pytest.mark.parametrize("entry", GALLERY.values(), ids=GALLERY)
def test_a_function_has_ten_lines_and_is_that_of_the_guide(entry):
    code = re.sub(r'    """.*"""\n', "", inspect.getsource(entry.decide))
    code = re.sub(r"(\w+): (?:Moments|Tensor)", r"\1", code.replace(") -> Affine:", "):"))
    assert len(code.splitlines()) <= 10
    prompts = "".join(f"{'...' if at else '>>>'} {line}\n" for at, line in enumerate(code.splitlines()))
    assert prompts in GUIDE.read_text()


def test_the_groups_are_those_of_the_functions():
    assert f"groups={gallery.GROUPS}" in inspect.getsource(gallery.group_norm)
    assert f"(m, {gallery.GHOST_SIZE})" in inspect.getsource(gallery.ghost_batch_norm)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "flex.json"
    assert cli.main(["bench", "flex", "--quick", "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    names = [f"{name} / {entry.counterpart}" for name, entry in GALLERY.items()]
    assert [record["contender"] for record in records] == 2 * names
    for record in records:
        assert record["ratio_p50"] == pytest.approx(record["p50_ms"] / record["counterpart_ms"])
    assert "ratios to what PyTorch has" in capsys.readouterr().out
