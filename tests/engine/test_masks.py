"""Masks of every method: a padded batch equals the same samples computed without padding, by naive float64 loops."""

import functools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ghostnoise
from ghostnoise import functional
from ghostnoise.engine import general
from ghostnoise.laws import Law
from support import ragged
from support.closeness import assert_close
from support.reference import ghost_batch_of, partition

CHANNELS, GHOST = 3, 4
RUNNING = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64), torch.tensor([0.9, 1.7, 1.2], dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@functools.cache
def drawn(batch_size, seed=7):
    return torch.randint(batch_size, (batch_size, GHOST), generator=seeded(seed))


@functools.cache
def order(batch_size):
    return torch.randperm(batch_size, generator=seeded(8))


@functools.cache
def draws(batch_size, law):
    return Law(GHOST, law).draw((batch_size, CHANNELS), 3, torch.device("cpu"), seeded(9))


def norm(function, reference, population=None, options=lambda b: {}, theirs=lambda b: {}):
    """Ours and the reference, as functions of the input and the parameters; and the moments that buffers move towards.

    `options` and `theirs` are keywords as functions of the batch size.
    """

    def ours(x, weight, bias, running, **more):
        return function(x, *running, weight, bias, True, 0.1, **options(x.shape[0]), **more)

    def naive(samples, weight, bias):
        return reference(samples, weight=weight, bias=bias, **theirs(len(samples)))

    return ours, naive, population


def noise(function, reference, options, theirs):
    def ours(x, weight, bias, running, **more):
        return function(x, GHOST, **options(x.shape[0]), **more)

    return ours, lambda samples, weight, bias: reference(samples, **theirs(len(samples))), None


def whole(samples):
    return ragged.statistics(samples)


def whole_unbiased(samples):
    mean, var = ragged.statistics(samples)
    n = sum(sample.shape[1] for sample in samples)
    return mean, var * n / (n - 1)


def ghosts(samples):
    """The average over values of the statistics of their ghost batches."""
    total = sum(sample.shape[1] for sample in samples)
    mean, var = 0, 0
    for k, sample in enumerate(samples):
        if sample.shape[1]:
            own = ragged.statistics([samples[n] for n in ghost_batch_of(k, len(samples), GHOST)])
            mean, var = mean + own[0] * sample.shape[1] / total, var + own[1] * sample.shape[1] / total
    return mean, var


F, R = functional, ragged
sized, none = lambda b: {"ghost_size": GHOST}, lambda b: {}
CASES = {
    "bn": norm(F.batch_norm, R.batch_norm, whole_unbiased),
    "gbn": norm(F.ghost_batch_norm, R.ghost_batch_norm, ghosts, sized, sized),
    "gbn, running_var_from": norm(
        F.ghost_batch_norm, R.ghost_batch_norm, whole_unbiased,
        lambda b: {"ghost_size": GHOST, "running_var_from": "batch"}, sized,
    ),
    "xbn": norm(F.exclusive_batch_norm, R.exclusive_batch_norm, whole),
    "xbn of ghost batches": norm(
        F.exclusive_batch_norm, R.exclusive_batch_norm, whole,
        lambda b: {"ghost_size": GHOST, "min_std": 0.9}, lambda b: {"ghost_size": GHOST, "min_std": 0.9},
    ),
    "self-weighted xbn": norm(
        F.exclusive_batch_norm, R.self_weighted_batch_norm, whole,
        lambda b: {"ghost_size": GHOST, "self_weight": 0.2}, lambda b: {"ghost_size": GHOST, "self_weight": 0.2},
    ),
    "clamped xbn": norm(
        F.exclusive_batch_norm, R.exclusive_batch_norm, whole,
        lambda b: {"clamp_output": 0.7}, lambda b: {"clamp": 0.7},
    ),
    "en": norm(F.eval_norm, R.ghost_batch_norm, ghosts, sized, sized),
    "brn": norm(
        F.batch_renorm, R.batch_renorm, whole_unbiased,
        lambda b: {"r_max": 1.1, "d_max": 0.3, "warmup_steps": 0, "transition_steps": 0},
        lambda b: {"running_mean": RUNNING[0], "running_var": RUNNING[1], "r_max": 1.1, "d_max": 0.3},
    ),
    "gni": norm(
        F.ghost_noise_batch_norm, R.ghost_noise_batch_norm, whole_unbiased,
        lambda b: {"ghost_size": GHOST, "indices": drawn(b)}, lambda b: {"indices": drawn(b)},
    ),
    "gni-scale": norm(
        F.ghost_noise_batch_norm, R.ghost_noise_batch_norm, whole_unbiased,
        lambda b: {"ghost_size": GHOST, "indices": drawn(b), "components": "scale"},
        lambda b: {"indices": drawn(b), "components": "scale"},
    ),
    "gni after xbn": norm(
        F.ghost_noise_batch_norm, R.ghost_noise_batch_norm, whole,
        lambda b: {"ghost_size": GHOST, "indices": drawn(b), "normalizer": "exclusive"},
        lambda b: {"indices": drawn(b), "normalizer": "exclusive"},
    ),
    "gni by partition": norm(
        F.ghost_noise_batch_norm, R.ghost_noise_batch_norm, whole_unbiased,
        lambda b: {"ghost_size": 2, "indices": order(b), "draw": "partition"},
        lambda b: {"indices": partition(order(b), 2)},
    ),
    "agni": norm(
        F.analytical_ghost_noise_batch_norm, R.analytical_noise_batch_norm, whole_unbiased,
        lambda b: {"ghost_size": GHOST, "draws": draws(b, "fc")},
        lambda b: {"ghost_size": GHOST, "draws": draws(b, "fc"), "law": "fc"},
    ),
    "agni-conv": norm(
        F.analytical_ghost_noise_batch_norm, R.analytical_noise_batch_norm, whole_unbiased,
        lambda b: {"ghost_size": GHOST, "draws": draws(b, "conv"), "law": "conv", "dof": "exact"},
        lambda b: {"ghost_size": GHOST, "draws": draws(b, "conv"), "law": "conv", "dof": "exact"},
    ),
    "noise": noise(F.ghost_noise, R.ghost_noise, lambda b: {"indices": drawn(b)}, lambda b: {"indices": drawn(b)}),
    "noise by partition": noise(
        F.ghost_noise, R.ghost_noise, lambda b: {"indices": order(b), "draw": "partition"},
        lambda b: {"indices": partition(order(b), GHOST)},
    ),
    "analytical noise": noise(
        F.analytical_ghost_noise, R.analytical_noise,
        lambda b: {"draws": draws(b, "conv"), "law": "conv"},
        lambda b: {"draws": draws(b, "conv"), "law": "conv", "ghost_size": GHOST},
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)

# Batches of 12 samples, with an empty sample and an empty ghost batch; images; samples that are valid or not.
LENGTHS = [5, 2, 7, 3, 0, 0, 0, 0, 7, 6, 0, 4]
BATCHES = {
    "sequences": ((12, CHANNELS, 7), ragged.lengths_mask(LENGTHS, 7), 1),
    "tokens": ((12, 7, CHANNELS), ragged.lengths_mask(LENGTHS, 7), -1),
    "images": ((12, CHANNELS, 4, 5), torch.rand(12, 4, 5, generator=seeded(0)) < 0.6, 1),
    "samples": ((12, CHANNELS), ragged.lengths_mask(LENGTHS, 7).any(1), 1),
}
every_batch = pytest.mark.parametrize("batch", BATCHES)


def inputs(shape, seed=1, dtype=torch.float64):
    generator = seeded(seed)
    made = (torch.randn(each, dtype=torch.float64, generator=generator) for each in (shape, CHANNELS, CHANNELS, shape))
    x, weight, bias, dy = (tensor.to(dtype) for tensor in made)
    return (x * 1.5 + 0.7).requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), dy


def poisoned(x, mask, channel_dim, value=torch.nan):
    """Return x with other values in the padding, differentiable where it is valid."""
    return torch.where(mask.unsqueeze(channel_dim % x.ndim), x, value)


def results(call, x, weight, bias, dy, running):
    x, weight, bias = (tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias))
    y = call(x, weight, bias, running)
    gradients = torch.autograd.grad(y, (x, weight, bias), dy, allow_unused=True)
    return y.detach(), *(None if gradient is None else gradient for gradient in gradients)


def check(name, shape, mask, channel_dim, seed=1):
    ours, naive, population = CASES[name]
    x, weight, bias, dy = inputs(shape, seed)
    running = [table.clone() for table in RUNNING]
    call = lambda x, w, b, r: ours(x, w, b, r, mask=mask, channel_dim=channel_dim)  # noqa: E731
    actual = results(call, poisoned(x, mask, channel_dim), weight, bias, dy, running)

    def reference(x, weight, bias, _):
        return ragged.pad(naive(ragged.unpad(x, mask, channel_dim), weight, bias), mask, x, channel_dim)

    expected = results(reference, x, weight, bias, dy, None)
    for one, other, kind in zip(actual, expected, ("output", *["gradient"] * 3), strict=True):
        if one is None or other is None:
            assert one is other is None or not (other if one is None else one).any()
            continue
        assert_close(one, other, kind, magnitude=dy.abs().sum(0).max().item() if kind == "gradient" else 0.0)
    blank = ~mask.unsqueeze(channel_dim % x.ndim).expand_as(x)
    assert not actual[0][blank].any()
    assert not actual[1][blank].any()
    if population is not None:
        moments = population(ragged.unpad(x.detach(), mask, channel_dim))
        for buffer, old, towards in zip(running, RUNNING, moments, strict=True):
            assert_close(buffer, 0.9 * old + 0.1 * towards)


@every_batch
@every_case
def test_a_padded_batch_equals_the_samples_without_padding(name, batch):
    check(name, *BATCHES[batch])


@given(st.data())
@settings(max_examples=25)
def test_any_shape_and_mask(data):
    """Every sample has 3 valid positions or more, or none: a pool then has values enough for every method."""
    name = data.draw(st.sampled_from(sorted(CASES)))
    positions = data.draw(st.sampled_from([(3,), (7,), (2, 3), (2, 2, 2)]))
    batch_size, last = data.draw(st.integers(8, 11)), data.draw(st.booleans())
    size = torch.Size(positions).numel()
    number = st.one_of(st.integers(3, size), st.just(0))
    lengths = [3, 3, *data.draw(st.lists(number, min_size=batch_size - 4, max_size=batch_size - 4)), 3, 3]
    scores = torch.rand(batch_size, size, generator=seeded(data.draw(st.integers(0, 1000))))
    mask = (scores.argsort(1).argsort(1) < torch.tensor(lengths)[:, None]).view(batch_size, *positions)
    shape = (batch_size, *positions, CHANNELS) if last else (batch_size, CHANNELS, *positions)
    check(name, shape, mask, -1 if last else 1)


@every_case
def test_a_mask_of_all_positions_is_no_mask(name):
    ours = CASES[name][0]
    x, weight, bias, dy = inputs((12, CHANNELS, 7))
    buffers = [[table.clone() for table in RUNNING] for _ in range(2)]
    masks = [{}, {"mask": torch.ones(12, 7, dtype=torch.bool)}]
    plain, masked = (
        results(lambda *given, more=more: ours(*given, **more), x, weight, bias, dy, running)
        for more, running in zip(masks, buffers, strict=True)
    )
    for one, other in zip((*masked, *buffers[1]), (*plain, *buffers[0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def compared(name, x, dtype, mask):
    """Output and gradient of x in `dtype`, and those of the reference for the same values."""
    ours, naive, _ = CASES[name]
    _, *rest = (tensor.detach() for tensor in inputs(x.shape))
    weight, bias, dy = (tensor.to(dtype) for tensor in rest)
    call = lambda x, w, b, r: ours(x, w, b, r, mask=mask)  # noqa: E731
    y, dx, *_ = results(call, x, weight, bias, dy, [table.float() for table in RUNNING])
    reference = lambda x, w, b, _: ragged.pad(naive(ragged.unpad(x, mask), w, b), mask, x)  # noqa: E731
    expected = results(reference, *(tensor.double() for tensor in (x, weight, bias, dy)), None)
    assert y.dtype == dx.dtype == dtype
    return y, dx, *expected[:2]


@pytest.mark.parametrize("name", ["bn", "gbn", "xbn", "gni", "gni after xbn", "noise"])
def test_precision_with_a_mean_far_from_zero(name):
    shape, mask, _ = BATCHES["sequences"]
    x = (inputs(shape)[0].detach() + 1e4).float()
    y, dx, expected, expected_dx = compared(name, x, torch.float32, mask)
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max() + (1e-3 if name == "noise" else 0)  # 1e4 * 2**-24
    assert (dx - expected_dx).abs().max() <= 1e-5 * expected_dx.abs().max()


@pytest.mark.parametrize("deviation", [1e4, 1e8])
@pytest.mark.parametrize("count", [2, 12])
def test_precision_next_to_an_outlier(deviation, count):
    """Of the sample itself, without cancelling; and for ghost batches of others."""
    mask = ragged.lengths_mask(LENGTHS[:3] + LENGTHS[6:] if count > 2 else [7, 6], 7)
    x = inputs((len(mask), CHANNELS, 7), dtype=torch.float32)[0].detach()
    x[0] += deviation
    y, _, expected, _ = compared("xbn", x, torch.float32, mask)
    assert (y[0] - expected[0]).abs().max() <= 1e-5 * expected[0].abs().max()
    if count > 2:
        y, _, expected, _ = compared("gbn", x, torch.float32, mask)
        assert (y[4:] - expected[4:]).abs().max() <= 1e-5 * expected[4:].abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bn", "gbn", "xbn", "gni", "gni after xbn"])
def test_half_types(name, dtype):
    shape, mask, _ = BATCHES["sequences"]
    y, dx, expected, expected_dx = compared(name, inputs(shape)[0].detach().to(dtype), dtype, mask)
    assert_close(y, expected)
    assert_close(dx, expected_dx, "gradient")


@pytest.mark.parametrize("name", ["bn", "gbn", "xbn", "xbn of ghost batches"])
def test_gradcheck(name):
    ours, mask = CASES[name][0], ragged.lengths_mask([3, 2, 0, 3, 2], 3)
    shapes = (5, 1, 3), (1,), (1,)
    given = [torch.randn(each, dtype=torch.float64, generator=seeded(3)).requires_grad_() for each in shapes]
    call = lambda *given: ours(*given, (None, None), mask=mask)  # noqa: E731
    torch.autograd.gradcheck(call, given, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(call, given, fast_mode=True)


@every_case
def test_torch_func(name):
    ours = CASES[name][0]
    shape, mask, _ = BATCHES["sequences"]
    x, weight, bias, dy = (tensor.detach() for tensor in inputs(shape))

    def loss(x, mask):
        return (ours(x, weight, bias, [table.clone() for table in RUNNING], mask=mask) * dy).sum()

    expected = results(
        lambda x, w, b, r: ours(x, w, b, r, mask=mask), x, weight, bias, dy, [table.clone() for table in RUNNING]
    )[1]
    torch.testing.assert_close(torch.func.grad(loss)(x, mask), expected, rtol=1e-9, atol=1e-9)


def test_vmap_over_masks():
    shape, mask, _ = BATCHES["sequences"]
    xs, masks = torch.stack([inputs(shape, seed)[0].detach() for seed in (1, 2)]), torch.stack([mask, mask.flip(0)])
    run = lambda x, mask: F.ghost_batch_norm(x, None, None, training=True, ghost_size=GHOST, mask=mask)  # noqa: E731
    mapped = torch.func.vmap(run)(xs, masks)
    for y, x, own in zip(mapped, xs, masks, strict=True):
        torch.testing.assert_close(y, run(x, own))


# Methods of their own, and other ways to call.


@pytest.mark.parametrize("scaled", [False, True])
def test_running_statistics_once_per_ghost_batch(scaled):
    shape, mask, _ = BATCHES["sequences"]
    x = inputs(shape)[0].detach()
    layer = ghostnoise.GhostBatchNorm1d(
        CHANNELS, ghost_size=GHOST, running_var_from="each-scaled" if scaled else "each", dtype=torch.float64
    )
    layer(poisoned(x, mask, 1), mask)
    samples, momentum = ragged.unpad(x, mask), 0.1 / 3 if scaled else 0.1
    mean, var = torch.zeros(CHANNELS, dtype=torch.float64), torch.ones(CHANNELS, dtype=torch.float64)
    for start in (0, 8):  # the second ghost batch is empty
        own = whole_unbiased(samples[start : start + GHOST])
        mean, var = torch.lerp(mean, own[0], momentum), torch.lerp(var, own[1], momentum)
    assert_close(layer.running_mean, mean)
    assert_close(layer.running_var, var)
    assert layer.num_batches_tracked == 2


@every_batch
def test_evaluation(batch):
    shape, mask, channel_dim = BATCHES[batch]
    x, weight, bias, dy = inputs(shape)
    more = {"mask": mask, "channel_dim": channel_dim}
    cases = {
        "bn": (F.batch_norm, {}, RUNNING, lambda s, w, b: R.running_norm(s, *RUNNING, w, b)),
        "no buffers": (F.batch_norm, {}, (None, None), R.batch_norm),
        "en": (F.eval_norm, {"ghost_size": 4}, RUNNING, lambda s, w, b: R.eval_norm(s, *RUNNING, 0.25, w, b)),
    }
    for function, options, running, naive in cases.values():
        call = lambda x, w, b, r: function(x, *r, w, b, **options, **more)  # noqa: B023, E731
        actual = results(call, poisoned(x, mask, channel_dim), weight, bias, dy, running)
        reference = lambda x, w, b, _: R.pad(naive(R.unpad(x, mask, channel_dim), w, b), mask, x, channel_dim)  # noqa: B023, E731
        expected = results(reference, x, weight, bias, dy, None)
        for one, other, kind in zip(actual, expected, ("output", *["gradient"] * 3), strict=True):
            assert_close(one, other, kind, magnitude=dy.abs().sum(0).max().item())


@pytest.mark.parametrize("training", [True, False])
def test_noise_that_does_not_depend_on_the_batch(training):
    shape, mask, _ = BATCHES["tokens"]
    x, _, _, dy = inputs(shape)
    layers = [
        ghostnoise.NoisyDropout(0.3, channel_dim=-1),
        ghostnoise.NoisyDropout(0.3, distribution="gaussian", per="channel", channel_dim=-1),
        ghostnoise.AdditiveGaussianNoise(0.1, channel_dim=-1),
        ghostnoise.GhostNoise(None, channel_dim=-1),
        ghostnoise.GhostNoise(4, channel_dim=-1),
        ghostnoise.AnalyticalGhostNoise(4, channel_dim=-1),
    ]
    for layer in layers:
        given = poisoned(x.detach(), mask, -1).requires_grad_()
        y = layer.train(training)(given, mask)
        (dx,) = torch.autograd.grad(y, given, dy)
        assert not y[~mask].any()
        assert not dx[~mask].any()
        assert y.isfinite().all()
        assert dx.isfinite().all()
        if not training or getattr(layer, "ghost_size", 0) is None:
            assert torch.equal(y[mask], x[mask])


def test_empty_samples_are_not_drawn():
    """If one were, the ghost batch of a single drawn sample would have the moments 0."""
    mask = ragged.lengths_mask([6, 0, 0, 6, 0, 6], 6).repeat(50, 1)
    x = torch.randn(300, 1, 6, generator=seeded(0), dtype=torch.float64) + 10
    y = F.ghost_noise(x, 1, components="shift", generator=seeded(1), mask=mask)
    values = mask.unsqueeze(1)
    mean = x[values.expand_as(x)].mean()
    shift = (x - y)[mask.any(1), 0, 0]  # the mean of the drawn sample, relative to that of the batch
    assert torch.isin((shift + mean).round(decimals=9), x[mask.any(1)].mean((1, 2)).round(decimals=9)).all()
    assert len(shift.round(decimals=9).unique()) > 50


@pytest.mark.parametrize("law", ["fc", "conv"])
@pytest.mark.parametrize("dof", ["paper", "exact"])
def test_draws_from_a_law(law, dof):
    """The drawn chi-squares are those of the mean number of positions, 4: their means are degrees over terms."""
    mask = ragged.lengths_mask([6, 2, 0, 4], 6)
    drawn_by = Law(8, law, dof)
    spatial = torch.tensor(4.0, dtype=torch.float64)
    draws = drawn_by.draw((20_000, 1), spatial, torch.device("cpu"), seeded(0))
    expected = {"paper": 1.0, "exact": 3 / 4}[dof] if law == "conv" else 0.0
    assert abs(draws.within.mean() - expected) <= 5 * (2 / (8 * 4) / 20_000) ** 0.5
    x = inputs((4, CHANNELS, 6))[0]
    y = F.analytical_ghost_noise(x, 8, law=law, dof=dof, mask=mask)
    assert not y[~mask.unsqueeze(1).expand_as(y)].any()


def test_one_position_per_sample_has_no_variance_within():
    draws = Law(4, "conv", "exact").draw((5, 2), torch.tensor(1.0), torch.device("cpu"), seeded(0))
    assert not draws.within.any()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_is_kept(layout):
    shape, mask, _ = BATCHES["images"]
    x = inputs(shape)[0].detach().contiguous(memory_format=layout).requires_grad_()
    y = F.batch_norm(x, None, None, training=True, mask=mask)
    y.sum().backward()
    assert y.is_contiguous(memory_format=layout)
    assert x.grad.is_contiguous(memory_format=layout)


def test_moments_over_valid_positions():
    shape, mask, channel_dim = BATCHES["tokens"]
    x = inputs(shape)[0].detach()
    m = general.measure(poisoned(x, mask, channel_dim), channel_dim, mask)
    assert m.n.flatten().tolist() == LENGTHS
    for sample, mean, var in zip(ragged.unpad(x, mask, channel_dim), m.mean, m.var, strict=True):
        expected = ragged.statistics([sample]) if sample.shape[1] else (torch.zeros_like(mean),) * 2
        torch.testing.assert_close((mean, var), expected)


def test_a_valid_value_that_is_not_finite_leaves_the_buffers():
    shape, mask, _ = BATCHES["sequences"]
    for value in (torch.nan, torch.inf):
        layer = ghostnoise.BatchNorm1d(CHANNELS)
        x = inputs(shape, dtype=torch.float32)[0].detach()
        x[0, 1, 0] = value
        assert layer(x, mask)[0, 1, 0].isnan()
        assert torch.equal(layer.running_mean, torch.zeros(CHANNELS))
        assert layer.num_batches_tracked == 0


def test_a_sample_that_is_not_finite_is_not_part_of_its_own_exclusive_statistics():
    shape, mask, _ = BATCHES["sequences"]
    x = inputs(shape)[0].detach()
    x[0, 1, 0] = torch.inf
    y = F.exclusive_batch_norm(x, None, None, training=True, mask=mask)
    assert y[0, 1, 1:].isfinite().all()
    assert y[1, 1, 0].isnan()
    assert y[1:, [0, 2]].isfinite().all()
    assert not y[~mask.unsqueeze(1).expand_as(y)].any()


# Bad input.

X = torch.randn(4, CHANNELS, 5)
MASK = torch.ones(4, 5, dtype=torch.bool)
BAD = {
    "dtype": (MASK.float(), r"mask of dtype torch.float32: must be .* torch.bool, True at valid .* with mask.bool\(\)"),
    "type": ([[True]], r"mask of type list: must be a torch.Tensor of dtype torch.bool"),
    "shape": (MASK[:, :4], r"mask of shape \(4, 4\) for an input of shape \(4, 3, 5\): must be .* = \(4, 5\), .* give"),
    "channels": (MASK.unsqueeze(1).expand(4, 3, 5), r"mask of shape \(4, 3, 5\) for an input .* = \(4, 5\)"),
    "no dimension": (torch.tensor(True), r"mask of shape \(\): must be \(B, \*positions\)"),
    "device": (MASK.to("meta"), r"mask on meta for an input on cpu: must be on the same device; move it with mask\.to"),
    "padded entirely": (~MASK, r"mask that is False everywhere: at least one position .* must be valid; skip batches"),
}
FUNCTIONS = {
    "batch_norm": {"training": True},
    "ghost_batch_norm": {"training": True, "ghost_size": 2},
    "exclusive_batch_norm": {"training": True},
    "eval_norm": {"training": False, "ghost_size": 2},
    "batch_renorm": {"training": False},
    "ghost_noise_batch_norm": {"training": True, "ghost_size": 2},
    "analytical_ghost_noise_batch_norm": {"training": True, "ghost_size": 2},
    "ghost_noise": {"ghost_size": 2},
    "analytical_ghost_noise": {"ghost_size": 2},
    "noisy_dropout": {},
    "additive_gaussian_noise": {"std": 0.1},
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bad_mask_raises_and_changes_nothing(name, kind):
    mask, message = BAD[kind]
    running = [torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.tensor(0)]
    arguments = [X, *running[:2]] if "training" in FUNCTIONS[name] else [X]
    more = {"num_batches_tracked": running[2]} if "training" in FUNCTIONS[name] else {}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"{name} got a {message}"):
        getattr(functional, name)(*arguments, **FUNCTIONS[name], **more, mask=mask)
    assert torch.equal(torch.get_rng_state(), state)
    assert [running[0].sum(), running[1].sum(), running[2]] == [0, CHANNELS, 0]


def test_too_few_valid_positions():
    one = torch.zeros_like(MASK)
    one[2, 3] = True
    with pytest.raises(ValueError, match=r"more than 1 value per channel .* and a mask with 1 valid position"):
        F.batch_norm(X, None, None, training=True, mask=one)
    one[1, 1] = True
    with pytest.raises(ValueError, match=r"ghost_size=2 .* and a mask: a ghost batch with one valid position would be"):
        F.ghost_batch_norm(X, None, None, training=True, ghost_size=2, mask=one)
    with pytest.raises(ValueError, match=r"sample 1 of an input .* the other samples of its batch have fewer than 2"):
        F.exclusive_batch_norm(X, None, None, training=True, mask=one)
    alone = ragged.lengths_mask([5, 0, 5, 5], 5)
    with pytest.raises(ValueError, match=r"sample 0 .* samples of its ghost batch have fewer than 2 valid positions"):
        F.exclusive_batch_norm(X, None, None, training=True, ghost_size=2, mask=alone)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unread_masks_stay_finite_and_update_nothing(name):
    """Graphs and accelerators do not read the mask: the output of a batch without valid positions is then 0."""
    running = [torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.tensor(0)]
    trains = "training" in FUNCTIONS[name]
    if name == "batch_renorm":
        more = {"training": True, "warmup_steps": 0, "transition_steps": 0, "num_batches_tracked": running[2]}
    else:
        more = FUNCTIONS[name] | ({"num_batches_tracked": running[2]} if trains else {})

    x = X.clone().requires_grad_()
    with mock.patch("ghostnoise.checks.readable", return_value=False):
        y = getattr(functional, name)(*([x, *running[:2]] if trains else [x]), **more, mask=~MASK)
    y.sum().backward()
    assert not y.any()
    assert not x.grad.any()
    assert [running[0].sum(), running[1].sum(), running[2]] == [0, CHANNELS, 0]


@pytest.mark.parametrize("ghost_size", [None, 2])
def test_a_sample_without_others_stays_finite_if_the_mask_is_not_read(ghost_size):
    x, mask = X.clone().requires_grad_(), ragged.lengths_mask([5, 0, 0, 0], 5)
    with mock.patch("ghostnoise.checks.readable", return_value=False):
        y = F.exclusive_batch_norm(x, None, None, training=True, ghost_size=ghost_size, mask=mask)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
