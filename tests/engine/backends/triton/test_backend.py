"""The Triton backend without a GPU: its kernels run in Triton's interpreter, and are compiled for GPUs and inspected.

Triton decides at its import whether to interpret, so the interpreted tests run in a process of their own: this file
again, with TRITON_INTERPRET=1.
"""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

import ghostnoise
from ghostnoise.engine.backends.base import Affine
from ghostnoise.engine.backends.triton import backend
from ghostnoise.engine.backends.triton.backend import Triton
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import LinearTerm
from support import reference
from support.closeness import assert_close
from support.families import FAMILIES, build, example
from support.inputs import lay_out

TRITON = Triton()
KERNELS = ("moments_kernel", "gradient_sums_kernel", "combine_kernel", "draws_kernel")
SM_80, SM_90, GFX_942 = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
IN_USE = {"LEAST_TILES": backend.LEAST_TILES}
IN_PARTS = {"LEAST_TILES": 1}
# Tiles of 32 elements make small tensors walk over tiles, and come in parts.
WALKED = {"TILE": 32, "POSITIONS": 8, "PROGRAMS": 1}
WALKED_IN_PARTS = {"TILE": 32, "POSITIONS": 4, "PROGRAMS": 8, "LEAST_TILES": 1}


def arithmetic(dtype):
    return torch.promote_types(dtype, torch.float32)


class TestCompiled:
    """Tests in a process that compiles, as on a GPU."""

    __test__ = not backend.INTERPRETED

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path, monkeypatch):
        """Triton leaves the files that it hands to ptxas."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TMPDIR", str(tmp_path))

    def test_the_interpreted_tests_pass(self, pytestconfig):
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
        run = subprocess.run(
            command, cwd=pytestconfig.rootpath, env=env | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "skipped" not in run.stdout

    def test_without_triton_the_module_loads_and_reports_what_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        for name in ("ghostnoise.engine.backends.triton.kernels", "ghostnoise.engine.backends.triton.backend"):
            monkeypatch.delitem(sys.modules, name)
        module = importlib.import_module("ghostnoise.engine.backends.triton.backend")
        assert "not installed" in module.Triton().unavailable()

    def test_without_a_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA or ROCm device" in TRITON.unavailable()
        assert "device cpu" in TRITON.refuses(torch.ones(2, 3, 4))

    @pytest.mark.parametrize(
        ("dtype", "target"),
        [
            (torch.float32, SM_90),
            *(
                pytest.param(dtype, target, marks=pytest.mark.slow)
                for dtype, target in product((torch.float32, torch.bfloat16, torch.float64), (SM_80, SM_90))
                if (dtype, target) != (torch.float32, SM_90)
            ),
        ],
    )
    def test_no_kernel_spills_registers(self, dtype, target, tmp_path):
        for kernel, arguments, options in representative_launches(dtype):
            log, _ = compiled(kernel, arguments, options, target, tmp_path)
            spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
            assert spills == ["0", "0"], (kernel.fn.__name__, arguments[-4:], options, log)

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_kernels_compile_for_rocm_without_spills(self, layout, tmp_path):
        for kernel, arguments, options in launches((256, 100, 7, 7), layout, torch.float32):
            _, assembly = compiled(kernel, arguments, options, GFX_942, tmp_path)
            assert re.findall(r"[sv]gpr_spill_count:\s+(\d+)", assembly["amdgcn"]) == ["0", "0"], kernel.fn.__name__

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_both_layouts_load_16_bytes_at_a_time(self, layout, dtype, tmp_path):
        """The threads lie along the stride of 1, whichever it is."""
        for kernel, arguments, options in launches((256, 64, 32, 32), layout, dtype):
            _, assembly = compiled(kernel, arguments, options, SM_80, tmp_path)
            assert re.search(r"ld\.global\S*\.(v4\.b32|v2\.b64)", assembly["ptx"]), kernel.fn.__name__


class Recorder:
    """Replaces a kernel, and records the arguments of its launches."""

    def __init__(self, kernel, kept):
        self.kernel, self.kept = kernel, kept

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.kept.append((self.kernel, arguments, options))


def launches(shape, layout, dtype):
    """The kernels that all passes launch on a GPU for such an x: (kernel, arguments, options)."""
    kept = []
    recorders = {name: Recorder(getattr(backend, name), kept) for name in KERNELS}
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    table = torch.empty(shape[:2], dtype=arithmetic(dtype), device="meta")
    shared = table[:1].expand_as(table)
    indices = torch.empty(shape[0], 32, dtype=torch.int64, device="meta")
    with mock.patch.multiple(backend, **recorders):
        TRITON.moments(x)
        TRITON.transform(x, Affine(shared, table, table))
        TRITON.gradient_sums(x, x, table)
        TRITON.gradient_sums(torch.empty((), device="meta").expand(shape), x, shared)
        TRITON.input_gradient(x, x, table, None, LinearTerm(table, table, shared))
        TRITON.scale_gradient(x, table)
        TRITON.pool_drawn(Moments(table.double(), table.double()), table[:1].double(), indices, table.dtype)
    return kept


def representative_launches(dtype):
    """S = 1, small, odd and large, one tile and many, the channels a multiple of 16 or not; each variant once."""
    found = {}
    for layout, shape in [
        ("contiguous", (256, 64, 32, 32)),
        ("contiguous", (256, 100, 7, 7)),
        ("contiguous", (64, 100, 3, 3)),
        ("contiguous", (4, 3, 225, 225)),
        ("contiguous", (64, 1000, 1, 1)),
        ("channels_last", (256, 64, 32, 32)),
        ("channels_last", (256, 100, 7, 7)),
    ]:
        for kernel, arguments, options in launches(shape, layout, dtype):
            found[str(specialized(kernel, arguments, options, SM_80)[1:])] = kernel, arguments, options
    return found.values()


def specialized(kernel, arguments, options, target):
    """What Triton derives from the arguments of a launch: the source to compile, and what sets variants apart."""
    compiler = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, compiler)
    parsed, *variant = kernel._pack_args(compiler, options, *bind(*arguments, **options))
    return ASTSource(kernel, *variant), kernel.fn.__name__, parsed, variant


def compiled(kernel, arguments, options, target, folder):
    """The log of the `ptxas -v` that Triton runs, and what is compiled, of a kernel as it would be launched."""
    source, _, parsed, _ = specialized(kernel, arguments, options, target)
    log = io.StringIO()
    with triton.knobs.cache.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.cache.dir = str(folder)  # empty, so that ptxas runs
        triton.knobs.nvidia.dump_ptxas_log = True
        built = triton.compile(source, target=target, options=parsed.__dict__)
    return log.getvalue(), built.asm


LAYOUTS = ("contiguous", "channels_last", "every other sample", "channels of a wider tensor")
UPSTREAM = (*LAYOUTS, "sliced", "transposed", "expanded", "expanded positions")


def laid_out(x, layout):
    """The same values in other strides."""
    if layout == "every other sample":
        return x.repeat_interleave(2, 0)[::2]
    if layout == "channels of a wider tensor":
        return lay_out(torch.cat([x, x], 1), "channels_last")[:, : x.shape[1]]
    if layout == "expanded":
        return x.flatten()[0].expand(x.shape)
    if layout == "expanded positions":
        return x[(..., *[slice(1)] * (x.ndim - 2))].expand(x.shape)
    return lay_out(x, layout)


@st.composite
def cases(draw):
    """x, dy, and five tables, some of which all samples or all channels share."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 2, 3, 5, 8, 17))),
        *draw(st.sampled_from(((1,), (2,), (7,), (16,), (3, 5), (4, 4), (1, 1), (2, 3, 5), (45,)))),
    )
    dtype = draw(st.sampled_from(backend.DTYPES))

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x = laid_out(normal(*shape).add_(0.5).to(dtype), draw(st.sampled_from(LAYOUTS)))
    dy = laid_out(normal(*shape).to(dtype), draw(st.sampled_from(UPSTREAM)))
    tables = []
    for _ in range(4):
        table = normal(*shape[:2]).to(arithmetic(dtype))
        strides = draw(st.sampled_from(("full", "shared", "one", "transposed")))
        table = table[:1] if strides == "shared" else table[:1, :1] if strides == "one" else table
        tables.append(table.T.contiguous().T if strides == "transposed" else table.expand(shape[:2]))
    return x, dy, tables


def check(actual, exact, x, direction="output", magnitude=0.0):
    """`actual` equals `exact` (B, C, S), in x's dtype and in strides like x's."""
    if x.dtype == torch.bfloat16:  # the interpreter cuts off the digits that a GPU rounds
        magnitude = 2 * max(magnitude, exact.abs().max().item())
    assert actual.dtype == x.dtype
    assert_close(actual, exact.view(x.shape), direction, magnitude)


class TestInterpreted:
    """Tests in Triton's interpreter."""

    __test__ = backend.INTERPRETED

    @pytest.mark.parametrize("division", [IN_USE, WALKED, WALKED_IN_PARTS])
    @given(cases())
    @settings(max_examples=30)
    def test_passes_equal_their_formulas(self, division, case):
        x, dy, tables = case
        first, second, third, fourth = (table.double()[..., None] for table in tables)
        exact, exact_dy = reference.fold(x), reference.fold(dy)
        tolerance = 1e-13 if x.dtype == torch.float64 else 1e-6
        assert TRITON.refuses(x) is None
        with mock.patch.multiple(backend, **division):
            mean, var = TRITON.moments(x)
            y = TRITON.transform(x, Affine(*tables[:3]))
            total, moment = TRITON.gradient_sums(dy, x, tables[0])
            dx = TRITON.input_gradient(dy, x, tables[0], None, LinearTerm(*tables[1:]))
            alone = TRITON.scale_gradient(dy, tables[0])

        wanted = exact.var(2, correction=0)
        assert mean.dtype == var.dtype == torch.float64
        assert ((mean - exact.mean(2)).abs() <= tolerance * (wanted.sqrt() + 1e-3)).all()
        assert ((var - wanted).abs() <= tolerance * (wanted + 1e-6)).all()

        check(y, second * (exact - first) + third, x, magnitude=(second * first).abs().max().item())
        assert y.stride() == torch.empty_like(x).stride()

        terms = exact_dy * (exact - first)
        assert total.dtype == moment.dtype == arithmetic(x.dtype)
        assert ((total - exact_dy.sum(2)).abs() <= tolerance * exact_dy.abs().sum(2)).all()
        assert ((moment - terms.sum(2)).abs() <= tolerance * (terms.abs().sum(2) + 1)).all()

        through = third * (exact - second) + fourth
        magnitude = max((third * second).abs().max().item(), fourth.abs().max().item())
        check(dx, first * exact_dy + through, x, "gradient", magnitude)
        assert dx.stride() == torch.empty_like(x).stride()
        check(alone, first * exact_dy, x, "gradient")

    @given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), st.booleans(), st.booleans())
    @settings(max_examples=30)
    def test_draws_pool_the_rows_that_they_name(self, batch_size, lines, draws, channels, double, transposed):
        dtype = torch.float64 if double else torch.float32
        mean, var = torch.randn(2, batch_size, channels, dtype=torch.float64)
        around, var = mean.mean(0, keepdim=True), var.square()
        indices = torch.randint(batch_size, (lines, draws))
        tables = Moments(mean.T.contiguous().T, var.T.contiguous().T) if transposed else Moments(mean, var)
        with mock.patch.multiple(backend, TILE=64):
            drawn = TRITON.pool_drawn(tables, around, indices, dtype)
        wanted = mean[indices].mean(1)
        spread = (var[indices] + (mean[indices] - wanted[:, None]).square()).mean(1)
        assert drawn.mean.dtype == drawn.var.dtype == dtype
        assert_close(drawn.mean, wanted - around, magnitude=mean.abs().max().item())
        assert_close(drawn.var, spread)

    def test_draws_lose_no_digits_to_an_outlier_that_was_not_drawn(self):
        mean, var = torch.randn(2, 6, 5, dtype=torch.float64)
        mean[3] = 1e8
        indices = torch.tensor([[0, 1, 2, 2], [4, 5, 0, 1]])
        drawn = TRITON.pool_drawn(Moments(mean, var.square()), mean.mean(0, keepdim=True), indices, torch.float64)
        assert_close(drawn.var, var.square()[indices].mean(1) + mean[indices].var(1, correction=0))

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("division", [IN_USE, IN_PARTS])
    @pytest.mark.parametrize("positions", [100, 5000])
    def test_moments_of_a_mean_far_from_zero(self, positions, division, layout):
        x = lay_out(torch.randn(2, 3, positions) + 1e4, layout)
        with mock.patch.multiple(backend, **division):
            mean, var = TRITON.moments(x)
        exact = reference.fold(x)
        assert (mean - exact.mean(2)).abs().max() < 1e-6
        assert (var / exact.var(2, correction=0) - 1).abs().max() < 1e-6

    @pytest.mark.parametrize("division", [IN_USE, IN_PARTS])
    def test_moments_around_a_first_tile_unlike_the_rest(self, division):
        x = torch.randn(1, 2, 5000, dtype=torch.float64)
        x[..., :1024] += 1e6
        for dtype, tolerance in [(torch.float32, 1e-6), (torch.float64, 1e-13)]:
            with mock.patch.multiple(backend, **division):
                mean, var = TRITON.moments(x.to(dtype))
            exact = reference.fold(x.to(dtype))
            std = exact.std(2, correction=0)
            assert ((mean - exact.mean(2)).abs() < tolerance * std).all()
            assert ((var / std.square() - 1).abs() < tolerance).all()

    def test_non_finite_values_stay_in_their_row(self):
        x = torch.randn(2, 3, 40)
        x[0, 1, 7], x[1, 2, 3] = float("inf"), float("nan")
        with mock.patch.multiple(backend, **WALKED), np.errstate(invalid="ignore"):
            for table in TRITON.moments(x):
                assert table.isfinite().tolist() == [[True, False, True], [True, True, False]]

    def test_results_repeat_to_the_bit(self):
        x = torch.randn(2, 3, 3000)
        with mock.patch.multiple(backend, **IN_PARTS):
            assert all(map(torch.equal, TRITON.moments(x), TRITON.moments(x)))

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

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("family", [*FAMILIES, *MORE])
    def test_layers_equal_those_of_aten(self, family, layout):
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
