import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ghostnoise
from ghostnoise.engine import aten, native
from ghostnoise.moments import Moments
from passes import (
    ALL_DTYPES,
    check_draws,
    check_passes,
    check_tables,
    dtypes,
    layouts,
    row_sizes,
    shapes,
    tables,
    upstreams,
    values,
)

FOUND = native.library()
# Every copy of the passes that this machine can run.
COPIES = native.LEVELS[: native.LEVELS.index(FOUND.level) + 1]


@pytest.fixture(params=COPIES)
def passes(request, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: native.Library(FOUND.handle, request.param))
    return native


def taken(shape, dtype, layout, seed=0):
    return native.refuses(values(shape, dtype, layout, seed)) is None


@pytest.mark.parametrize("copy", COPIES)
def test_passes_equal_their_formulas(copy):
    @given(shapes, dtypes, layouts, upstreams, row_sizes)
    def check(shape, dtype, layout, upstream, each):
        if taken(shape, dtype, layout):
            check_passes(native, shape, dtype, layout, upstream, each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: native.Library(FOUND.handle, copy))
        check()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "shape", [(3, 70, 5, 5), (3, 70, 4, 4), (2, 40, 8, 8), (2, 64, 1, 1), (5, 130), (2, 3, 1100), (2, 600, 2, 3)]
)
def test_passes_in_both_layouts(passes, shape, dtype, layout):
    shape = shape if len(shape) > 2 else (*shape, 1)
    assert taken(shape, dtype, layout)
    check_passes(passes, shape, dtype, layout, "contiguous")


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 150), st.sampled_from([torch.float32, torch.float64]))
def test_draws_equal_the_naive_loop(rows, drawn, channels, dtype):
    check_draws(native, rows, drawn, channels, dtype)


@pytest.mark.parametrize("ghost_size", [2, 4, 9, None])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("pool", ["everyone", "others"])
def test_pools_equal_those_of_aten(passes, pool, ghost_size, single):
    """Also where samples have a single position, whose means come in float32 and without a variance."""
    x = torch.randn(9, 70, 1 if single else 5) + 3
    x[4] += 1e6
    ours = getattr(passes, pool)(passes.moments(x), ghost_size)
    wanted = getattr(aten, pool)(aten.moments(x), ghost_size)
    for actual, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@given(
    st.sampled_from([torch.float32, torch.float64]), st.integers(1, 9), st.integers(1, 150), st.integers(1, 9),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_tables_equal_those_of_aten(dtype, batch_size, channels, each, shift, scale, affine, min_std):
    check_tables(native, dtype, batch_size, channels, each, shift, scale, affine, min_std)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tables_equal_those_of_aten(passes, dtype):
    for each in (1, 32):
        check_tables(passes, dtype, 300, 130, each, True, True, True, 0.5)


@pytest.mark.parametrize("ghost_size", [2, 4, 9, None])
@pytest.mark.parametrize("single", [True, False])
def test_the_ramp_of_the_others_equals_that_of_aten(passes, ghost_size, single):
    moments = passes.moments(torch.randn(9, 70, 1 if single else 5) + 3)
    pooled = passes.others(moments, ghost_size).mean
    gradient = Moments(torch.randn(9, 70), torch.randn(9, 70))
    center, slope, offset = passes.others_ramp(moments.mean, pooled, gradient, ghost_size, 5)
    wanted = aten.others_ramp(moments.mean, pooled, gradient, ghost_size, 5)
    torch.testing.assert_close(slope.double(), wanted.slope, rtol=1e-5, atol=1e-5)
    at = (wanted.center - center).double() * wanted.slope + offset  # around the center that is not rounded
    torch.testing.assert_close(at, wanted.offset, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.7, 1.0, None])
@pytest.mark.parametrize("absent", [None, "mean", "var", "both"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_running_buffers_follow_as_in_aten(momentum, absent, bad, dtype):
    stats = Moments(torch.randn(1, 5, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64))
    if bad is not None:
        stats.var[0, 3] = bad
    buffers = {"mean": torch.randn(5).to(dtype), "var": torch.rand(5).to(dtype), "count": torch.tensor(4)}
    ours, theirs = (
        {
            name: None if absent in (name, "both") and name != "count" else table.clone()
            for name, table in buffers.items()
        }
        for _ in range(2)
    )
    version = ours["count"]._version
    native.follow(*ours.values(), momentum, stats)
    aten.follow(*theirs.values(), momentum, stats)
    assert ours["count"]._version > version
    for actual, expected in zip(ours.values(), theirs.values(), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected)
    assert ours["count"].item() == (5 if bad is None or absent == "var" else 4)


def test_draws_lose_no_digits_to_outliers_that_were_not_drawn():
    """Any number of them, since each pool is taken around its own first sample."""
    mean = torch.randn(9, 70, dtype=torch.float64)
    mean[:4] += 1e12
    moments = Moments(mean, torch.rand(9, 70, dtype=torch.float64))
    indices = torch.randint(4, 9, (9, 5))
    _, var = native.draws(moments, torch.zeros(1, 70, dtype=torch.float64), indices, torch.float64)
    for k in range(9):
        drawn = mean[indices[k]]
        wanted = moments.var[indices[k]].mean(0) + drawn.var(0, correction=0)
        torch.testing.assert_close(var[k], wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(66, 64, 32, 32), (66, 65, 32, 32), (66, 64, 32, 33), (4100, 1024, 1)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_too_large_for_the_caches(passes, shape, layout, dtype):
    """They are written past the caches where rows are whole lines, and as always where they are not."""
    x, dy = (values(shape, dtype, layout, seed) for seed in (0, 1))
    if dtype == torch.bfloat16:
        x, dy = x.repeat(2, *[1] * (x.ndim - 1)), dy.repeat(2, *[1] * (x.ndim - 1))
    assert x.numel() * x.element_size() > 2**24
    center, scale, slope, offset = tables(x, 2, 4)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    for name, arguments in (
        ("transform", (x, center, scale, offset)),
        ("input_gradient", (dy, x, scale, center, slope, offset)),
        ("scale_gradient", (dy, scale)),
    ):
        torch.testing.assert_close(getattr(passes, name)(*arguments), getattr(aten, name)(*arguments), **tolerance)


def test_what_is_refused():
    for x, why in (
        (torch.randn(2, 3, 4).to_sparse(), "plain strided"),
        (torch.randn(2, 3, 4, device="meta"), "plain strided"),
        (torch.randn(2, 3, 8)[..., ::2], "neither its positions nor its channels are contiguous"),
        (torch.ones(2, 3, 4, dtype=torch.float8_e5m2), "it takes torch.float32"),
    ):
        assert why in native.refuses(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    """Nor from run to run: each table entry is summed by one thread, in one order."""
    x, dy = (values((16, 70, 6, 6), dtype, "contiguous", seed) for seed in (0, 1))
    assert x.numel() > native.GRAIN
    (center,) = tables(x, 2, 1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append((*native.moments(x), *native.gradient_sums(dy, x, center)))
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
