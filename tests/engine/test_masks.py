"""Masks of every method: a padded batch equals the same samples computed without padding, by naive float64 loops."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ghostnoise
from ghostnoise import functional
from ghostnoise.engine import op
from ghostnoise.engine.masks import Mask, count
from ghostnoise.statistics.laws import Law
from ghostnoise.statistics.samples import Contributors, pool_all
from support import ragged
from support.closeness import assert_close
from support.reference import ghost_batch_of, partition

CHANNELS, GHOST = 3, 4
RUNNING = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64), torch.tensor([0.9, 1.7, 1.2], dtype=torch.float64)
BACKENDS = ["aten", "native"]


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
every_backend = pytest.mark.parametrize("backend", BACKENDS)

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


@every_backend
@every_batch
@every_case
def test_a_padded_batch_equals_the_samples_without_padding(name, batch, backend):
    with ghostnoise.backend(backend):
        check(name, *BATCHES[batch])
