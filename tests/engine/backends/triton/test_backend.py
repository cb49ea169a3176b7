"""The Triton backend without a GPU: tests in Triton's interpreter, and of what it reports.

Triton decides at its import whether to interpret, so interpreted tests run in a process of their own: this folder
again, with TRITON_INTERPRET=1.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from ghostnoise.engine.backends.triton import backend
from ghostnoise.engine.backends.triton.backend import Triton

import ghostnoise
from ghostnoise.engine import op
from support.closeness import assert_close
from support.families import FAMILIES, build, example
from support.inputs import lay_out

TRITON = Triton()
MODULES = ("kernels", "decisions", "passes", "fused", "backend")


class TestCompiled:
    """Tests in a process that does not interpret."""

    __test__ = not backend.INTERPRETED

    @pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_the_interpreted_tests_pass(self, marker, pytestconfig):
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marker]
        run = subprocess.run(
            [*command, str(Path(__file__).parent)], cwd=pytestconfig.rootpath, env=env | {"TRITON_INTERPRET": "1"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        assert "skipped" not in run.stdout

    def test_without_triton_the_module_loads_and_reports_what_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        for name in MODULES:
            monkeypatch.delitem(sys.modules, f"ghostnoise.engine.backends.triton.{name}")
        module = importlib.import_module("ghostnoise.engine.backends.triton.backend")
        assert "not installed" in module.Triton().unavailable()

    def test_without_a_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA or ROCm device" in TRITON.unavailable()
        assert "device cpu" in TRITON.refuses(torch.ones(2, 3, 4))


class TestInterpreted:
    """Tests in Triton's interpreter."""

    __test__ = backend.INTERPRETED

    @pytest.mark.parametrize(
        ("x", "reason"),
        [
            (torch.ones(2, 3, 4, dtype=torch.int32), "dtype torch.int32"),
            (torch.ones(2, 3, 4, dtype=torch.complex64), "dtype torch.complex64"),
            (torch.ones(2, 3), "shape (2, 3)"),
            (torch.ones(2, 0, 4), "shape (2, 0, 4)"),
            (torch.ones(2, 3, 4, 5)[..., ::2], "strides (60, 20, 5, 2)"),
            (torch.ones(2, 3, 4, 5)[..., 1:], "strides (60, 20, 5, 1)"),
            (torch.ones(4, 3, 2).transpose(0, 2), "strides (1, 2, 6)"),
            (torch.ones(2, 3, 4).expand(2, 3, 4).to_sparse(), "plain strided"),
            (torch._neg_view(torch.ones(2, 3, 4)), "plain strided"),
            (torch.empty(2, 2**15, 2**15, device="meta"), "less than 2**30"),
        ],
    )
    def test_refusals_give_the_reason(self, x, reason):
        assert reason in TRITON.refuses(x)

    MORE: ClassVar = {
        "GhostNoise": lambda: ghostnoise.GhostNoise(5),
        "XBN + GNI": lambda: build("gni", 2, normalizer="exclusive"),
        "partition": lambda: build("gni", 2, ghost_size=4, draw="partition"),
    }

    @pytest.mark.parametrize("layout", ["contiguous", pytest.param("channels_last", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
    def test_layers_equal_those_of_aten(self, family, layout, monkeypatch):
        monkeypatch.setattr(op, "draws", lambda *given: True)  # both draw from the same seed
        results = {}
        for name in ("aten", "triton"):
            torch.manual_seed(0)
            x = lay_out(example(2), layout).requires_grad_()
            layer = self.MORE[family]() if family in self.MORE else build(family, 2)
            with ghostnoise.backend(name):
                y = layer(x)
                y.backward(torch.randn(x.shape))
            results[name] = [y, x.grad, *(parameter.grad for parameter in layer.parameters())]
        for direction, wanted, ours in zip(["output", *["gradient"] * 3], *results.values(), strict=False):
            assert_close(ours, wanted.double(), direction)
            assert wanted.stride() == ours.stride()
