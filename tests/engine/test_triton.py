"""The Triton operators without a GPU: in Triton's interpreter, and compiled for GPUs.

Triton decides at its import whether to interpret, so interpreted tests run in a process of their own: this file again,
with TRITON_INTERPRET=1. They compare with plain PyTorch in float64 that pools the values themselves, sample by sample.
"""

import contextlib
import importlib
import inspect
import io
import math
import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from ghostnoise.engine import ops
from ghostnoise.engine.triton import operators
from support.closeness import assert_close
from support.interpreter import replace_once_per_launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    replace_once_per_launch()

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EPS, NOISE_EPS, DRAWS, COUNT = 1e-5, 1e-3, 5, 3
RENORM = {"r_max": 1.2, "d_max": 0.3, "warmup_steps": 1, "transition_steps": 4}  # after three batches, half of it
NOISE = {"indices": True, "shift": True, "scale": True}
SETTINGS = {
    "batch": {"running": "unbiased"},
    "ghost": {"running": "ghosts", "ghost_size": 3},
    "ghost with a remainder": {"running": "ghosts", "ghost_size": 4},
    "ghost to batch": {"running": "unbiased", "ghost_size": 4},
    "ghost size over half the batch": {"ghost_size": 5},
    "ghost size over the batch": {"ghost_size": 100},
    "exclusive": {"exclusive": True, "ghost_size": 4},
    "exclusive pairs": {"exclusive": True, "ghost_size": 2},
    "exclusive of the batch": {"exclusive": True, "running": "unbiased"},
    "floored": {"min_std": 0.9},
    "floored exclusive": {"exclusive": True, "min_std": 0.9},
    "renorm": {"running": "unbiased", **RENORM},
    "noisy": {"running": "unbiased", **NOISE},
    "shifted": {**NOISE, "scale": False},
    "scaled": {**NOISE, "shift": False},
    "noisy and floored": {**NOISE, "min_std": 1.5},
}
FAST = ("batch", "ghost with a remainder", "exclusive", "renorm", "noisy")
LAYOUTS = ("contiguous", "channels_last", "every other sample", "channels of a wider tensor", "sliced", "transposed")
UPSTREAM = (*LAYOUTS, "expanded", "expanded positions")
SHAPES = ((2, 3, 7), (3, 17, 1), (3, 5), (2, 8, 3, 5), (1, 1, 45), (1, 5, 2, 3, 4), (2, 40))
# Tiles of 32 elements make small tensors walk over tiles, and come in parts.
IN_USE = {"MIN_TILES": operators.MIN_TILES}
WALKED = {"TILE": 32, "POSITIONS": 8, "PROGRAMS": 1}
IN_PARTS = {"TILE": 32, "POSITIONS": 4, "PROGRAMS": 64, "MIN_TILES": 1}


def slow(*values):
    """Parameters that `make test-all` adds."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


every_setting = pytest.mark.parametrize("name", [*FAST, *slow(*(name for name in SETTINGS if name not in FAST))])


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lay_out(x, layout):
    """The same values in other strides; those of an expanded tensor are the first ones."""
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "every other sample":
        return x.repeat_interleave(2, 0)[::2]
    if layout == "channels of a wider tensor":
        return lay_out(torch.cat([x, x], 1), "channels_last")[:, : x.shape[1]]
    if layout == "sliced":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return x.flatten()[0].expand(x.shape)
    if layout == "expanded positions":
        return x[(..., *[slice(1)] * (x.ndim - 2))].expand(x.shape)
    return x.contiguous()


def fold(x):
    return x.detach().double().reshape(*x.shape[:2], -1)


def arithmetic(dtype):
    return torch.promote_types(dtype, torch.float32)


# Plain PyTorch.


def pools(B, ghost_size=None, exclusive=False, **rest):
    """The samples that contribute to the statistics of each sample."""
    N = B if ghost_size is None else min(ghost_size, B)
    last = (B // N - 1) * N
    ghosts = [list(range(min(b // N * N, last), B if b >= last else b // N * N + N)) for b in range(B)]
    return [[j for j in ghost if not (exclusive and j == b)] for b, ghost in enumerate(ghosts)]


def pooled(x, members):
    """The mean and the biased variance (B, C, 1) of the values of samples."""
    values = [x[member].transpose(0, 1).flatten(1) for member in members]
    return (torch.stack([reduce(v) for v in values])[..., None] for reduce in (lambda v: v.mean(1), biased))


def biased(values):
    return values.var(1, correction=0)


def wanted_normalize(x, weight, bias, mean_before, var_before, indices, settings):
    """y for x (B, C, S), and what the running statistics are updated towards."""
    members, floor = pools(len(x), **settings), settings.get("min_std", 0.0) ** 2
    mean, var = pooled(x, members)
    std = (var + EPS).clamp_min(floor).sqrt()
    normal = (x - mean) / std
    if "r_max" in settings:
        progress = min(max((COUNT - settings["warmup_steps"]) / max(settings["transition_steps"], 1), 0.0), 1.0)
        most, limit = 1 + (settings["r_max"] - 1) * progress, settings["d_max"] * progress
        running_std = (var_before + EPS).clamp_min(floor).sqrt()
        r = (std / running_std[:, None]).clamp(1 / most, most).detach()
        d = ((mean - mean_before[:, None]) / running_std[:, None]).clamp(-limit, limit).detach()
        normal = normal * r + d
    if indices is not None:
        normal = with_noise(normal, indices, settings)
    y = normal * weight[:, None] + bias[:, None]
    whole = [table[0, :, 0] for table in pooled(x, [list(range(len(x)))])]
    if settings.get("running") == "ghosts":
        whole = [table.mean(0)[:, 0] for table in (mean, var)]
    elif settings.get("running") == "unbiased":
        whole[1] = x.transpose(0, 1).flatten(1).var(1)
    return y, [table.detach() for table in whole]


def with_noise(x, indices, settings):
    """Equation 10 for x (B, C, S)."""
    constant = x.detach()
    mean, var = pooled(constant, [list(range(len(x)))])
    ghost_mean, ghost_var = pooled(constant, indices.tolist())
    if settings["shift"]:
        x = x - (ghost_mean - mean)
    return x * ((var + NOISE_EPS) / (ghost_var + NOISE_EPS)).sqrt() if settings["scale"] else x


# Calls.


class Buffers:
    def __init__(self, channels, dtype=torch.float32):
        self.mean, self.var = random(channels, seed=5).to(dtype), random(channels, seed=6).square().add(0.5).to(dtype)
        self.count = torch.tensor(COUNT)

    def all(self):
        return self.mean, self.var, self.count


def settings_of(settings, indices):
    """The arguments of `normalize` after the momentum, in their order."""
    given = {"running": "whole", "ghost_size": None, "exclusive": False, "eps": EPS, "min_std": 0.0, "indices": None}
    given |= {"seed": None, "law": None, "quantiles": None, "noise_eps": NOISE_EPS, "shift": False, "scale": False}
    given |= {"reference_mean": None, "reference_var": None, "reference_count": None}
    given |= {"r_max": None, "d_max": 0.0, "warmup_steps": 0, "transition_steps": 0}
    return given | settings | {"indices": indices}


def forward(x, settings, indices, weight=None, bias=None, buffers=(None, None, None), momentum=0.1):
    return operators.normalize(x, weight, bias, *buffers, momentum, *settings_of(settings, indices).values())


def backward(dy, x, settings, weight, saved, needs_x=True):
    settings = {"ghost_size": None, "exclusive": False, "min_std": 0.0, "shift": False, "scale": False} | settings
    picked = {name: settings[name] for name in ("ghost_size", "exclusive", "min_std", "shift", "scale")}
    return operators.normalize_backward(dy, x, weight, *saved, eps=EPS, **picked, needs_x=needs_x)


def draws(settings, B):
    return torch.randint(B, (B, DRAWS), generator=torch.Generator().manual_seed(4)) if "indices" in settings else None


def check_normalize(name, x, dy, momentum=0.1, buffer_dtype=torch.float32, affine=True):
    settings, C, dtype = SETTINGS[name], x.shape[1], arithmetic(x.dtype)
    indices, buffers, before = draws(settings, len(x)), Buffers(C, buffer_dtype), Buffers(C, buffer_dtype)
    parameters = [random(2 * C, seed=seed).to(buffer_dtype)[::2] for seed in (2, 3)] if affine else [None, None]
    y, *saved = forward(x, settings, indices, *parameters, buffers.all(), momentum)
    dx, g_weight, g_bias = backward(dy, x, settings, parameters[0], saved)

    wide = [fold(x).requires_grad_(), *(torch.ones(C), torch.zeros(C))] if not affine else [fold(x), *parameters]
    wide = [table.detach().double().requires_grad_() for table in wide]
    exact, whole = wanted_normalize(*wide, before.mean.double(), before.var.double(), indices, settings)
    gradients = torch.autograd.grad(exact, wide, fold(dy))

    largest = 2 if x.dtype == torch.bfloat16 else 1  # the interpreter cuts digits off that a GPU rounds
    assert y.dtype == dx.dtype == x.dtype
    assert y.stride() == torch.empty_like(x).stride() == dx.stride()
    assert_close(y, exact.detach().view(x.shape), "output", largest * exact.abs().max().item())
    for direction, ours, theirs in zip(["gradient"] * 3, (dx, g_weight, g_bias), gradients, strict=True):
        magnitude = max(
            theirs.abs().max().item(), (fold(dy).abs().max() if ours is dx else fold(dy).abs().sum((0, 2)).max()).item()
        )
        assert_close(ours, theirs.view(ours.shape), direction, largest * magnitude)
    assert g_weight.dtype == g_bias.dtype == dtype
    part = 1 / (COUNT + 1) if momentum is None else momentum
    tolerance = 4 * max(torch.finfo(buffer_dtype).eps, torch.finfo(dtype).eps)
    for ours, old, value in zip(buffers.all(), before.all()[:2], whole, strict=False):
        assert ours.dtype == buffer_dtype
        torch.testing.assert_close(ours.double(), old.double().lerp(value, part), rtol=tolerance, atol=tolerance)
    assert buffers.count == COUNT + 1
    assert torch.equal(operators.normalize_backward(
        dy, x, parameters[0], *saved, settings.get("ghost_size"), settings.get("exclusive", False), EPS,
        settings.get("min_std", 0.0), settings.get("shift", False), settings.get("scale", False), False,
    )[1], g_weight)  # fmt: skip
    return saved


class TestCompiled:
    """Tests in a process that does not interpret."""

    __test__ = not INTERPRETED

    @pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_the_interpreted_tests_pass(self, marker, pytestconfig):
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marker, __file__]
        run = subprocess.run(
            command, cwd=pytestconfig.rootpath, env=env | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "skipped" not in run.stdout

    def test_without_triton_the_package_loads_and_reports_what_is_missing(self, monkeypatch):
        for name in [name for name in sys.modules if name.startswith("ghostnoise.engine.triton")]:
            monkeypatch.delitem(sys.modules, name)
        assert importlib.import_module("ghostnoise.engine.triton").unavailable() is None
        for name in [name for name in sys.modules if name.startswith("ghostnoise.engine.triton")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "triton", None)
        assert "not installed" in importlib.import_module("ghostnoise.engine.triton").unavailable()

    def test_registered_operators(self):
        library = mock.Mock()
        operators.register(library)
        registered = {name: run for name, run, key in (call.args for call in library.impl.call_args_list)}
        assert {call.args[2] for call in library.impl.call_args_list} == {"CUDA"}
        assert registered.keys() == {schema.partition("(")[0] for schema in ops._SCHEMAS}
        for name, run in registered.items():
            schema = getattr(torch.ops.ghostnoise, name).default._schema
            assert [argument.name for argument in schema.arguments] == list(inspect.signature(run).parameters)


class TestPasses:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize(("i", "division"), [*enumerate([IN_USE, WALKED, IN_PARTS] * 7)])
    def test_passes_equal_their_formulas(self, i, division):
        check_passes(SHAPES[i % 7], DTYPES[i % 4], LAYOUTS[i % 6], UPSTREAM[i % 8], division)

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("division", [IN_USE, WALKED, IN_PARTS])
    def test_passes_equal_their_formulas_in_more_cases(self, division, dtype, layout):
        for i, shape in enumerate(SHAPES):
            check_passes(shape, dtype, layout, UPSTREAM[i], division)

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("division", [IN_USE, {"MIN_TILES": 1}])
    @pytest.mark.parametrize("positions", [100, 5000])
    def test_a_mean_far_from_zero(self, positions, division, layout):
        x = lay_out(random(2, 3, positions).add(1e4).float(), layout)
        exact = fold(x)
        mean, var = exact.mean(2), exact.var(2, correction=0)
        with mock.patch.multiple(operators, **division):
            ours, our_var = operators.moments(x)
            y = operators.transform(x, mean, var.rsqrt(), mean * 0)
            total, moment = operators.gradient_sums(x, x, mean)
        assert (ours - mean).abs().max() < 1e-6
        assert (our_var / var - 1).abs().max() < 1e-6
        normal = (exact - mean[..., None]) / var.sqrt()[..., None]
        assert (y - normal).abs().max() <= 1e-6 * normal.abs().max()
        terms = exact * (exact - mean[..., None])
        assert ((total - exact.sum(2)).abs() <= 1e-6 * exact.sum(2)).all()
        assert ((moment - terms.sum(2)).abs() <= 1e-6 * terms.abs().sum(2)).all()

    @pytest.mark.parametrize("division", [IN_USE, {"MIN_TILES": 1}])
    def test_moments_around_a_first_tile_unlike_the_rest(self, division):
        x = random(1, 2, 5000)
        x[..., :1024] += 1e6
        for dtype, tolerance in [(torch.float32, 1e-6), (torch.float64, 1e-13)]:
            with mock.patch.multiple(operators, **division):
                mean, var = operators.moments(x.to(dtype))
            exact = fold(x.to(dtype))
            std = exact.std(2, correction=0)
            assert ((mean - exact.mean(2)).abs() < tolerance * std).all()
            assert ((var / std.square() - 1).abs() < tolerance).all()

    def test_non_finite_values_stay_in_their_row(self):
        x = random(2, 3, 40).float()
        x[0, 1, 7], x[1, 2, 3] = math.inf, math.nan
        with mock.patch.multiple(operators, **WALKED), np.errstate(invalid="ignore"):
            for table in operators.moments(x):
                assert table.isfinite().tolist() == [[True, False, True], [True, True, False]]

    def test_results_repeat_to_the_bit(self):
        x = random(2, 3, 3000).float()
        with mock.patch.multiple(operators, MIN_TILES=1):
            assert all(map(torch.equal, operators.moments(x), operators.moments(x)))

    @pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
    def test_empty_tensors(self, shape):
        x, table = torch.ones(shape), torch.ones(1, shape[1], dtype=torch.float64)
        assert operators.transform(x, table, table, table).shape == shape
        assert operators.input_gradient(x, x, table, table, table, table).shape == shape
        assert [table.shape for table in operators.moments(x)] == [shape[:2]] * 2
        assert all(torch.equal(sums, sums * 0) for sums in operators.gradient_sums(x, x, table))

    def test_samples_with_too_many_elements(self):
        with pytest.raises(ValueError, match=r"needs less than 1073741824 elements in a sample"):
            operators.moments(torch.empty(2, 2**15, 2**15, device="meta"))


def check_passes(shape, dtype, layout, upstream, division):
    x = lay_out(random(*shape).add(0.5).to(dtype), layout)
    dy = lay_out(random(*shape, seed=1).to(dtype), upstream)
    full = [random(*shape[:2], seed=seed) for seed in range(2, 6)]
    first, second, third, fourth = (  # in all kinds of strides
        full[0], full[1][:1], full[2][:1].expand(shape[:2]), full[3].T.contiguous().T.to(arithmetic(dtype))
    )  # fmt: skip
    exact, exact_dy, tolerance = fold(x), fold(dy), 1e-13 if dtype == torch.float64 else 1e-6
    with mock.patch.multiple(operators, **division):
        mean, var = operators.moments(x)
        y = operators.transform(x, first, second, third)
        total, moment = operators.gradient_sums(dy, x, second)
        dx = operators.input_gradient(dy, x, first, second, third, fourth)
    first, second, third, fourth = (table.double()[..., None] for table in (first, second, third, fourth))

    wanted = exact.var(2, correction=0)
    assert mean.dtype == var.dtype == total.dtype == moment.dtype == torch.float64
    assert ((mean - exact.mean(2)).abs() <= tolerance * (wanted.sqrt() + 1e-3)).all()
    assert ((var - wanted).abs() <= tolerance * (wanted + 1e-6)).all()
    terms = exact_dy * (exact - second)
    assert ((total - exact_dy.sum(2)).abs() <= tolerance * exact_dy.abs().sum(2)).all()
    assert ((moment - terms.sum(2)).abs() <= tolerance * (terms.abs().sum(2) + 1)).all()
    through = third * (exact - second)
    for ours, theirs, terms, direction in [
        (y, second * (exact - first) + third, (second * first, third), "output"),
        (dx, first * exact_dy + through + fourth, (first * exact_dy, through, fourth), "gradient"),
    ]:
        largest = max(term.abs().max().item() for term in (theirs, *terms))
        assert ours.dtype == dtype
        assert ours.stride() == torch.empty_like(x).stride()
        # The interpreter cuts digits off that a GPU rounds.
        assert_close(ours, theirs.view(shape), direction, largest * (2 if dtype == torch.bfloat16 else 1))


class TestNormalize:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @every_setting
    def test_against_plain_pytorch(self, name):
        x, dy = random(9, 3, 2, 2).add(0.5).float(), random(9, 3, 2, 2, seed=1).float()
        stats, extra = check_normalize(name, x, dy)
        settings = SETTINGS[name]
        rows = 9 if settings.get("exclusive") else max(9 // settings.get("ghost_size", 9), 1)
        assert stats.shape == (2, rows, 3)
        assert stats.dtype == torch.float64
        components = settings.get("shift", 0) + settings.get("scale", 0)
        assert extra.shape == ((2, 1, 3) if "r_max" in settings else (components, 9, 3))
        assert extra.dtype == torch.float32

    @pytest.mark.parametrize(
        ("name", "shape", "dtype", "layout", "upstream", "momentum", "buffer_dtype", "affine"),
        [
            ("batch", (6, 5, 3, 3), torch.bfloat16, "channels_last", "contiguous", None, torch.float64, True),
            ("batch", (9, 4), torch.float32, "transposed", "contiguous", 1.0, torch.bfloat16, False),
            ("ghost", (8, 2, 7), torch.float64, "sliced", "expanded", 0.1, torch.float32, True),
            ("exclusive", (9, 4, 1, 1), torch.float32, "contiguous", "contiguous", None, torch.float32, True),
            ("exclusive", (9, 4), torch.float16, "contiguous", "channels_last", 0.1, torch.float16, False),
            ("noisy", (7, 20), torch.bfloat16, "every other sample", "contiguous", 0.1, torch.float32, True),
            ("renorm", (5, 3, 2, 3), torch.float16, "channels_last", "transposed", 0.1, torch.float32, True),
        ],
    )
    def test_shapes_layouts_and_dtypes(self, name, shape, dtype, layout, upstream, momentum, buffer_dtype, affine):
        x, dy = lay_out(random(*shape).add(0.5).to(dtype), layout), lay_out(random(*shape, seed=1).to(dtype), upstream)
        check_normalize(name, x, dy, momentum, buffer_dtype, affine)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", SETTINGS)
    def test_more_shapes_layouts_and_dtypes(self, name, dtype):
        for i, shape in enumerate([(7, 3, 5), (9, 20), (4, 1, 3, 2), (6, 40, 2), (12, 9, 1)]):
            if name == "exclusive pairs" and math.prod(shape[2:]) == 1:  # a single value has no variance
                continue
            x, dy = random(*shape).add(0.5).to(dtype), random(*shape, seed=1).to(dtype)
            check_normalize(name, lay_out(x, LAYOUTS[i]), lay_out(dy, UPSTREAM[-i]), [0.1, None][i % 2])

    @pytest.mark.parametrize("name", ["exclusive", *slow(*(SETTINGS.keys() - {"exclusive"}))])
    def test_samples_in_parts(self, name):
        """Many positions are measured by several programs, whose tables the decide kernels combine."""
        x = random(5, 2, 70).add(3).float()
        with mock.patch.multiple(operators, **IN_PARTS):
            assert operators._Part.of(x, reduce=True).K > 1
            check_normalize(name, x, random(*x.shape, seed=1).float())

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["batch", "ghost", "exclusive", "noisy"])
    def test_more_samples_and_channels_than_a_program_takes(self, name):
        check_normalize(name, random(140, 35).float(), random(140, 35, seed=1).float())

    @pytest.mark.parametrize("name", ["ghost", "exclusive", "noisy"])
    @pytest.mark.parametrize("shape", [(8, 2, 6), (8, 5)])
    def test_a_mean_far_from_zero(self, name, shape):
        x, settings = (random(*shape) + 1e4).float(), SETTINGS[name]
        dy, indices, ones, zeros = random(*shape, seed=1).float(), draws(settings, 8), torch.ones(shape[1]), None
        wide = [t.double().requires_grad_() for t in (fold(x), ones, ones * 0)]
        exact, _ = wanted_normalize(*wide, zeros, zeros, indices, settings)
        wanted = [exact, *torch.autograd.grad(exact, wide, fold(dy))]
        y, *saved = forward(x, settings, indices)
        for ours, theirs in zip((y, *backward(dy, x, settings, None, saved)), wanted, strict=True):
            assert (ours - theirs.view(ours.shape)).abs().max() <= 1e-5 * theirs.abs().max()

    def test_an_outlier_in_another_ghost_batch(self):
        x = random(6, 2, 5).float()
        x[0] += 1e8
        exact, _ = wanted_normalize(fold(x), torch.ones(2), torch.zeros(2), None, None, None, SETTINGS["ghost"])
        assert (fold(forward(x, SETTINGS["ghost"], None)[0]) - exact)[3:].abs().max() <= 1e-5

    def test_a_sample_that_is_the_outlier_of_its_own_ghost_batch(self):
        x, settings = random(4, 2, 5).float(), {"exclusive": True}
        x[1] += 1e4
        exact, _ = wanted_normalize(fold(x), torch.ones(2), torch.zeros(2), None, None, None, settings)
        assert (fold(forward(x, settings, None)[0]) - exact).abs().max() <= 1e-5 * exact.abs().max()

    @pytest.mark.parametrize("name", ["batch", *slow("ghost", "exclusive", "noisy", "renorm")])
    def test_a_non_finite_batch_leaves_the_buffers_alone(self, name):
        """Also those of channels that are finite."""
        x, buffers = random(9, 3, 2).float(), Buffers(3)
        x[2, 1, 0] = math.inf
        with np.errstate(invalid="ignore", over="ignore"):
            y, *_ = forward(x, SETTINGS[name], draws(SETTINGS[name], 9), buffers=buffers.all())
        assert y[:, 0].isfinite().all()
        assert all(map(torch.equal, buffers.all(), Buffers(3).all()))

    def test_buffers_that_are_views_or_absent(self):
        x, wide, wanted = random(6, 3, 2).float(), torch.ones(3, 2), Buffers(3)
        forward(x, SETTINGS["batch"], None, buffers=wanted.all())
        wide[:, 0] = Buffers(3).mean
        forward(x, SETTINGS["batch"], None, buffers=(wide[:, 0], None, None))
        assert torch.equal(wide[:, 0], wanted.mean)
        assert torch.equal(wide[:, 1], torch.ones(3))

    @pytest.mark.parametrize(("count", "progress"), [(0, 0), (2, 0.25), (9, 1), (None, 1)])
    def test_a_reference_of_its_own(self, count, progress):
        """The first pass of a recomputed one: its statistics and count, rather than the moved buffers."""
        x, buffers, reference = random(6, 3, 2).float(), Buffers(3), (random(3, seed=8), random(3, seed=9).square())
        given = dict(zip(("reference_mean", "reference_var"), reference, strict=True))
        settings = RENORM | given | {"reference_count": None if count is None else torch.tensor(count)}
        running = (*buffers.all()[:2], None if count is None else buffers.count)
        correction = forward(x, settings, None, buffers=running)[-1]
        std, limit = (reference[1] + EPS).sqrt(), 1 + 0.2 * progress
        values = x.double().transpose(0, 1).flatten(1)
        r = ((biased(values) + EPS).sqrt() / std).clamp(1 / limit, limit)
        d = ((values.mean(1) - reference[0]) / std).clamp(-0.3 * progress, 0.3 * progress)
        torch.testing.assert_close(correction[:, 0].double(), torch.stack([r, d]), rtol=1e-6, atol=1e-6)

    def test_settings_that_no_kernel_covers(self):
        x, indices = random(4, 2, 3), torch.zeros(4, 2, dtype=torch.int64)
        for settings, drawn, message in [
            ({"ghost_size": 2, "shift": True}, indices, "noise needs"),
            ({"shift": True}, None, "noise needs"),
            ({"seed": indices[:1, 0], "shift": True}, None, "pass indices"),
            ({"ghost_size": 2, **RENORM}, None, "all samples in one pool"),
            (RENORM, None, "running statistics or a reference"),
            ({"exclusive": True, "running": "ghosts"}, None, "'ghosts' if exclusive"),
            ({"running": "none"}, None, "must be one of"),
        ]:
            with pytest.raises(ValueError, match=message):
                forward(x, settings, drawn)


class TestNoise:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize(("shift", "scale"), [(True, True), (True, False), (False, True)])
    @pytest.mark.parametrize(("shape", "layout"), [((6, 3, 2, 2), "contiguous"), ((6, 20), "transposed")])
    def test_noise_alone(self, shape, layout, shift, scale):
        for dtype in (torch.float32, torch.bfloat16):
            x = lay_out(random(*shape).add(1).to(dtype), layout)
            settings = {"indices": True, "shift": shift, "scale": scale}
            indices = draws(settings, 6)
            y, factor = operators.ghost_noise(x, indices, NOISE_EPS, shift, scale)
            wide = fold(x).requires_grad_()
            exact = with_noise(wide, indices, settings)
            largest = 2 if dtype == torch.bfloat16 else 1
            assert_close(y, exact.detach().view(shape), "output", largest * max(exact.abs().max(), 2).item())
            assert factor.shape == (6 if scale else 0, shape[1])
            assert factor.dtype == torch.float32
            if scale:
                (gradient,) = torch.autograd.grad(exact.sum(), wide)
                torch.testing.assert_close(factor.double(), gradient[..., 0], rtol=1e-6, atol=0)

    def test_draws_lose_no_digits_to_an_outlier_that_was_not_drawn(self):
        x = random(6, 5, 3)
        x[3] += 1e8
        indices = torch.tensor([[0, 1, 2, 2], [4, 5, 0, 1], [1, 1, 2, 5], [0, 2, 4, 5], [5, 4, 4, 0], [2, 0, 1, 4]])
        y, _ = operators.ghost_noise(x, indices, NOISE_EPS, False, True)
        drawn = x[indices].transpose(1, 2).flatten(2)  # (B, C, N·S)
        wanted = ((x.var((0, 2), correction=0) + 1e-3) / (drawn.var(2, correction=0) + 1e-3)).sqrt()
        torch.testing.assert_close(y / x, wanted[..., None].expand_as(x), rtol=1e-9, atol=0)

    def test_indices_outside_the_batch_are_not_read(self):
        x, indices = random(4, 2, 3).float(), torch.tensor([[0, 1], [2, 4], [-1, 0], [3, 3]])
        for y in (forward(x, NOISE, indices)[0], operators.ghost_noise(x, indices, NOISE_EPS, True, True)[0]):
            assert y.isnan().flatten(1).all(1).tolist() == [False, True, True, False]


class TestFakes:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize("layout", ["transposed", *slow("channels_last", "channels of a wider tensor")])
    @pytest.mark.parametrize("shape", [*slow((6, 3, 2, 2)), (6, 3)])
    def test_results_are_those_that_the_fakes_describe(self, shape, layout):
        x, indices = lay_out(random(*shape).float(), layout), draws(NOISE, 6)
        table, ones, buffers = random(6, 3), torch.ones(3), Buffers(3).all()
        check_fake("moments", x)
        check_fake("transform", x, table, table[:1], table)
        check_fake("gradient_sums", x, x, table)
        check_fake("input_gradient", x, x, table, table, table, table[:1])
        check_fake("ghost_noise", x, indices, NOISE_EPS, False, True)
        for name in FAST:
            settings = SETTINGS[name]
            given = settings_of(settings, draws(settings, 6))
            _, *saved = check_fake("normalize", x, ones, None, *buffers, 0.1, *given.values())
            for needs_x in (True, False):
                picked = (given["ghost_size"], given["exclusive"], EPS, 0.0, given["shift"], given["scale"], needs_x)
                check_fake("normalize_backward", x, x, ones, *saved, *picked)


def check_fake(name, *arguments):
    """The dtypes, shapes and strides of what an operator returns."""
    found = getattr(operators, name)(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        described = getattr(ops, name)(*fakes)
    pairs = zip(
        *((result,) if isinstance(result, torch.Tensor) else result for result in (found, described)), strict=True
    )
    for ours, fake in pairs:
        assert (ours.dtype, ours.shape, ours.stride()) == (fake.dtype, fake.shape, fake.stride())
    return found


# The operations on the device.

ALLOCATIONS_AND_VIEWS = {
    "empty", "new_empty", "empty_like", "empty_strided", "detach", "view", "_unsafe_view", "unsqueeze", "squeeze",
    "select", "slice", "unbind", "expand", "alias", "as_strided", "transpose", "permute",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Records torch's operators that are neither allocations nor views, and the launches of kernels."""

    def __enter__(self):
        self.names = []
        launch = operators._launch

        def counted(kernel, *arguments, **options):
            self.names.append(kernel.fn.__name__)
            with torch.utils._python_dispatch._disable_current_modes():
                launch(kernel, *arguments, **options)

        self.patch = mock.patch.object(operators, "_launch", counted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ALLOCATIONS_AND_VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


DECIDE = {"ghost": "pools", "batch": "pools", "renorm": "pools", "exclusive": "exclusive", "noisy": "drawn"}


class TestLaunches:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize("layout", ["contiguous", *slow("channels_last")])
    @pytest.mark.parametrize("name", DECIDE)
    def test_nothing_else_runs_on_the_device(self, name, layout):
        x, ones = lay_out(random(8, 3, 2, 2).float(), layout), torch.ones(3)
        settings, decide = SETTINGS[name], DECIDE[name]
        indices, buffers = draws(settings, 8), Buffers(3).all()
        with Operations() as seen:
            _, *saved = forward(x, settings, indices, ones, ones, buffers)
            backward(x, x, settings, ones, saved)
        gradient = "exclusive" if decide == "exclusive" else "pools"
        assert seen.names == ["moments_kernel", f"{decide}_kernel", "combine_kernel",
                              "gradient_sums_kernel", f"{gradient}_gradient_kernel", "combine_kernel"]  # fmt: skip

    def test_noise_alone(self):
        x = random(8, 3, 2, 2).float()
        indices, table = draws(NOISE, 8), torch.ones(1, 3).double()
        with Operations() as seen:
            operators.ghost_noise(x, indices, NOISE_EPS, True, True)
            operators.transform(x, table, table, table)
        assert seen.names == ["moments_kernel", "drawn_kernel", "combine_kernel", "combine_kernel"]

    def test_a_single_position_is_not_measured(self):
        x, indices = random(8, 3).float(), draws(NOISE, 8)
        with Operations() as seen:
            forward(x, NOISE, indices)
            forward(x, {"exclusive": True}, None)
        assert seen.names == ["drawn_kernel", "combine_kernel", "exclusive_kernel", "combine_kernel"]

    def test_the_count_sees_further_operations(self):
        with Operations() as seen:
            torch.ones(3).add(1).to(torch.float64)
        assert seen.names == ["ones", "add", "_to_copy"]


# The kernels, compiled for GPUs without having one, and inspected.

PASSES = ("moments_kernel", "gradient_sums_kernel", "combine_kernel")
DECISIONS = ("pools_kernel", "exclusive_kernel", "drawn_kernel", "pools_gradient_kernel", "exclusive_gradient_kernel")
TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)]
SM_80, SM_90, _ = TARGETS
GFX_942 = GPUTarget("hip", "gfx942", 64)


class TestKernels:
    """Tests in a process that compiles, as on a GPU."""

    __test__ = not INTERPRETED

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path, monkeypatch):
        """Triton leaves the files that it hands to ptxas."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TMPDIR", str(tmp_path))

    def test_no_kernel_spills_registers(self, tmp_path):
        """One variant of each kernel; `make test-all` compiles all of them."""
        found = {named(launch): launch for launch in launches((256, 100, 7, 7), "contiguous", torch.float32)}
        assert found.keys() == {*PASSES, *DECISIONS}
        assert_no_spills(found.values(), SM_90, tmp_path)

    @pytest.mark.slow
    @pytest.mark.parametrize("kernels", [PASSES, DECISIONS], ids=["passes", "decisions"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("target", TARGETS, ids=["sm_80", "sm_90", "sm_100"])
    def test_no_variant_spills_registers(self, kernels, dtype, target, tmp_path):
        assert_no_spills(representative_launches(dtype, kernels), target, tmp_path)

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_kernels_compile_for_rocm_without_spills(self, layout, tmp_path):
        for kernel, arguments, options in launches((256, 100, 7, 7), layout, torch.float32):
            options.pop("maxnreg", None)
            _, assembly = compiled(kernel, arguments, options, GFX_942, tmp_path)
            assert re.findall(r"[sv]gpr_spill_count:\s+(\d+)", assembly["amdgcn"]) == ["0", "0"], kernel.fn.__name__

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_both_layouts_load_16_bytes_at_a_time(self, layout, dtype, tmp_path):
        """The threads lie along the stride of 1, whichever it is."""
        found = {}
        for launch in launches((256, 64, 32, 32), layout, dtype):
            if named(launch) in PASSES:
                found.setdefault(named(launch), launch)
        assert found.keys() == set(PASSES)
        for kernel, arguments, options in found.values():
            _, assembly = compiled(kernel, arguments, options, SM_80, tmp_path)
            assert re.search(r"ld\.global\S*\.(v4\.b32|v2\.b64)", assembly["ptx"]), kernel.fn.__name__


def assert_no_spills(found, target, folder):
    assert found
    for kernel, arguments, options in found:
        log, _ = compiled(kernel, arguments, options, target, folder)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
        assert spills == ["0", "0"], (kernel.fn.__name__, arguments[-4:], options, log)


class Recorder:
    """Replaces a kernel, and records the arguments of its launches."""

    def __init__(self, kernel, kept):
        self.kernel, self.kept = kernel, kept

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.kept.append((self.kernel, arguments, options))


def named(launch):
    return launch[0].fn.__name__


def launches(shape, layout, dtype):
    """All kernels that the operators launch on a GPU for such an x: (kernel, arguments, options)."""
    kept, table = [], torch.empty(shape[:2], dtype=torch.float64, device="meta")
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    ones = torch.empty(shape[1], device="meta")
    count, indices = (torch.empty(size, dtype=torch.int64, device="meta") for size in ((), (len(x), 32)))
    with mock.patch.multiple(
        operators, **{name: Recorder(getattr(operators, name), kept) for name in (*PASSES, *DECISIONS)}
    ):
        operators.moments(x)
        operators.transform(x, table[:1].expand(shape[:2]), table, table)
        operators.gradient_sums(x, x, table)
        operators.input_gradient(x, x, table, table, table, table)
        operators.ghost_noise(x, indices, NOISE_EPS, True, True)
        for settings in (
            {"running": "unbiased"},
            {"running": "unbiased", **RENORM},
            {"running": "unbiased", **NOISE},
            {"running": "ghosts", "ghost_size": 16},
            {"exclusive": True, "ghost_size": 16},
            {"exclusive": True},
        ):
            drawn = indices if "indices" in settings else None
            _, *saved = forward(x, settings, drawn, ones, ones, (ones, ones, count))
            dy = x if drawn is not None else torch.empty((), dtype=dtype, device="meta").expand(shape)
            backward(dy, x, settings, ones, saved)
    return kept


def representative_launches(dtype, names):
    """S = 1, small, odd and large, one tile and many, the channels a multiple of 16 or not; each variant once."""
    found = {}
    for layout, shape in [
        ("contiguous", (256, 64, 32, 32)),
        ("contiguous", (256, 100, 7, 7)),
        ("contiguous", (64, 100, 3, 3)),
        ("contiguous", (4, 3, 225, 225)),
        ("contiguous", (64, 1000)),
        ("channels_last", (256, 64, 32, 32)),
        ("channels_last", (256, 100, 7, 7)),
    ]:
        for launch in launches(shape, layout, dtype):
            if named(launch) in names:
                found[str(specialized(*launch, SM_80)[1:])] = launch
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
