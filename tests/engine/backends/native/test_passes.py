import pytest
import torch
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.backends.base import Affine
from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native.backend import Native
from ghostnoise.statistics.samples import LinearTerm
from hypothesis import given

import ghostnoise
from support.backend_checks import (
    ALL_DTYPES,
    check_passes,
    dtypes,
    layouts,
    pool_sizes,
    shapes,
    tables,
    upstreams,
    values,
)
from support.copies import COPIES, FOUND

NATIVE = Native()


def taken(shape, dtype, layout, seed=0):
    return NATIVE.refuses(values(shape, dtype, layout, seed)) is None


@pytest.mark.parametrize("copy", COPIES)
def test_passes_equal_their_formulas(copy):
    @given(shapes, dtypes, layouts, upstreams, pool_sizes)
    def check(shape, dtype, layout, upstream, per_pool):
        assert taken(shape, dtype, layout) or layout in ("sliced", "transposed", "channel slice")
        check_passes(NATIVE, shape, dtype, layout, upstream, per_pool)  # `aten` serves what is refused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: library.Library(FOUND.handle, copy))
        check()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "shape", [(3, 70, 5, 5), (3, 70, 4, 4), (2, 40, 8, 8), (2, 64, 1, 1), (5, 130), (2, 3, 1100), (2, 600, 2, 3)]
)
def test_passes_in_both_layouts(native, shape, dtype, layout):
    shape = shape if len(shape) > 2 else (*shape, 1)
    assert taken(shape, dtype, layout)
    check_passes(native, shape, dtype, layout, "contiguous")


@pytest.mark.parametrize("shape", [(66, 64, 32, 32), (66, 65, 32, 32), (66, 64, 32, 33), (4100, 1024, 1)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_too_large_for_the_caches(native, shape, layout, dtype):
    """They are written with non-temporal stores if rows are whole lines, and otherwise as usual."""
    x, dy = (values(shape, dtype, layout, seed) for seed in (0, 1))
    if dtype == torch.bfloat16:
        x, dy = x.repeat(2, *[1] * (x.ndim - 1)), dy.repeat(2, *[1] * (x.ndim - 1))
    assert x.numel() * x.element_size() > 2**24
    center, scale, slope, offset = tables(x, 2, 4)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    for name, arguments in (
        ("transform", (x, Affine(center, scale, offset))),
        ("input_gradient", (dy, x, scale, None, LinearTerm(center, slope, offset))),
        ("scale_gradient", (dy, scale)),
    ):
        torch.testing.assert_close(getattr(native, name)(*arguments), getattr(ATEN, name)(*arguments), **tolerance)


def test_what_is_refused():
    for x, why in (
        (torch.randn(2, 3, 4).to_sparse(), "plain strided CPU tensors"),
        (torch.randn(2, 3, 4, device="meta"), "plain strided CPU tensors"),
        (torch._neg_view(torch.randn(2, 3, 4)), "plain strided CPU tensors"),
        (torch.randn(2, 3, 8)[..., ::2], "adjacent positions or adjacent channels"),
        (torch.randn(8, 3, 1).expand(8, 3, 5), "adjacent positions or adjacent channels"),
        (torch.randn(0, 3, 5), "without empty dimensions"),
        (torch.ones(2, 3, 4, dtype=torch.float8_e5m2), "it takes torch.float32"),
    ):
        assert why in NATIVE.refuses(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    """Nor from run to run: each table entry is summed by one thread, in one order."""
    x, dy = (values((16, 70, 6, 6), dtype, "contiguous", seed) for seed in (0, 1))
    assert x.numel() > library.GRAIN
    (center,) = tables(x, 2, 1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append((*NATIVE.moments(x), *NATIVE.gradient_sums(dy, x, center)))
    finally:
        torch.set_num_threads(before)
    for ours in results[1:]:
        for one, other in zip(results[0], ours, strict=True):
            assert torch.equal(one, other)


def test_gradcheck_through_native():
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    with ghostnoise.backend("native"):
        for layer in (
            ghostnoise.BatchNorm2d(3, dtype=torch.float64),
            ghostnoise.GhostBatchNorm2d(3, dtype=torch.float64, ghost_size=2),
            ghostnoise.ExclusiveBatchNorm2d(3, dtype=torch.float64, ghost_size=2),
        ):
            assert torch.autograd.gradcheck(layer, x)


@pytest.mark.parametrize(
    "build",
    [
        lambda: ghostnoise.GhostBatchNorm2d(4, ghost_size=8),
        lambda: ghostnoise.GhostNoiseBatchNorm2d(4, ghost_size=8),
        lambda: ghostnoise.ExclusiveBatchNorm2d(4, ghost_size=8),
    ],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_short_training_ends_at_the_same_loss(build, memory_format):
    def loss(name):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), build(), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
        )
        model = model.to(memory_format=memory_format)
        x, labels = torch.randn(32, 3, 8, 8).contiguous(memory_format=memory_format), torch.randint(5, (32,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with ghostnoise.backend(name):
            for _ in range(20):
                optimizer.zero_grad()
                value = torch.nn.functional.cross_entropy(model(x), labels)
                value.backward()
                optimizer.step()
        return value.item()

    assert loss("native") == pytest.approx(loss("aten"), rel=1e-3)
