"""The kernels, compiled for GPUs without having one, and inspected."""

import contextlib
import io
import re
import tempfile
from unittest import mock

import pytest
import torch
import triton
from ghostnoise.engine.backends.base import Saved
from ghostnoise.engine.backends.triton import backend, fused, passes
from ghostnoise.engine.backends.triton.backend import Triton
from ghostnoise.engine.plan import Drawn, Limits, LiveReference, Normalizer, Plan, Seeded
from ghostnoise.engine.running import Population, Running, Update
from ghostnoise.statistics.samples import Exclusive, GhostBatch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

TRITON = Triton()
PASSES = ("moments_kernel", "gradient_sums_kernel", "combine_kernel")
DECISIONS = ("pools_kernel", "exclusive_kernel", "drawn_kernel", "pools_gradient_kernel", "exclusive_gradient_kernel")
TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)]
SM_80, SM_90, _ = TARGETS
GFX_942 = GPUTarget("hip", "gfx942", 64)


class TestCompiled:
    """Tests in a process that compiles, as on a GPU."""

    __test__ = not backend.INTERPRETED

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
    """All kernels that layers launch on a GPU for such an x: (kernel, arguments, options)."""
    kept = []
    on_passes = {name: Recorder(getattr(passes, name), kept) for name in PASSES}
    on_decisions = {name: Recorder(getattr(fused, name), kept) for name in DECISIONS}
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    with mock.patch.multiple(passes, **on_passes), mock.patch.multiple(fused, **on_decisions):
        for plan in plans(x):
            layer(x, plan)
        noise = Seeded(1e-3, "both", torch.empty(1, dtype=torch.int64, device="meta"), 32)
        affine = TRITON.fused_noise(x, noise)
        TRITON.transform(x, affine)
        TRITON.scale_gradient(x, affine.scale)
    return kept


def plans(x):
    channels = torch.empty(x.shape[1], device="meta")
    count = torch.empty((), dtype=torch.int64, device="meta")
    running = Running(channels, channels, count)
    indices = torch.empty(x.shape[0], 32, dtype=torch.int64, device="meta")
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    whole, update = Normalizer(GhostBatch(), 1e-5), Update(running, Population(unbiased=True))
    yield Plan(whole, None, None, update)
    yield Plan(whole, None, LiveReference(running, Limits(3.0, 5.0, 10, 20)), update)
    yield Plan(whole, Drawn(1e-3, "both", indices), None, update)
    yield Plan(whole, Seeded(1e-3, "both", seed, 32), None, update)
    yield Plan(Normalizer(GhostBatch(16), 1e-5), None, None, Update(running, Population(ghosts=True)))
    yield Plan(Normalizer(Exclusive(16), 1e-5), None, None, update)
    yield Plan(Normalizer(Exclusive(), 1e-5), None, None, update)


def layer(x, plan):
    weight = bias = torch.empty(x.shape[1], device="meta")
    made = TRITON.fused_forward(x, weight, bias, plan)
    kept = made.moments if plan.normalizer.contributors.keeps_moments else made.pooled
    dy = torch.empty((), dtype=x.dtype, device="meta").expand(x.shape) if plan.noise is None else x
    TRITON.fused_backward(dy, x, weight, plan, Saved(kept, made.noise, made.correction), True)


def representative_launches(dtype, names):
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
