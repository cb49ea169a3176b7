"""The paper's methods as deliberately naive loops over samples, in float64.

They are written from the equations and do not use the library: no per-sample moments, no pooling formulas. A batch is a
tensor (B, C, S), or a list of samples (C, n) of different lengths, as a padded batch has; n = 0 is a sample of padding
alone. The functions return what they are given, and are differentiable.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_constant_statistics = False


@contextmanager
def constant_statistics() -> Iterator[None]:
    """Take statistics as constants: the gradient is then that of the transformation alone."""
    global _constant_statistics
    _constant_statistics = True
    try:
        yield
    finally:
        _constant_statistics = False


def lengths_mask(lengths, size: int) -> Tensor:
    """Return the mask (B, T) of samples that are padded at the end."""
    return torch.arange(size)[None] < torch.as_tensor(lengths)[:, None]


def fold(x: Tensor, channel_dim: int = 1, mask: Tensor | None = None):
    """Return (B, C, S) in float64, or with a mask the list of the valid values (C, n) of each sample."""
    x = (x.unsqueeze(2) if x.ndim == 2 else x.movedim(channel_dim, 1)).double()
    if mask is None:
        return x.flatten(2)
    mask = mask.unsqueeze(1) if mask.ndim == 1 else mask
    return [sample[:, valid] for sample, valid in zip(x, mask, strict=True)]


def unfold(samples, like: Tensor, channel_dim: int = 1, mask: Tensor | None = None) -> Tensor:
    """Return a tensor of the shape of `like` with the values of the samples; it is 0 at invalid positions."""
    shape = like.unsqueeze(2).shape if like.ndim == 2 else like.movedim(channel_dim, 1).shape
    if mask is None:
        y = torch.stack(list(samples)).reshape(shape)
    else:
        valid = (mask.unsqueeze(1) if mask.ndim == 1 else mask).unsqueeze(1).expand(shape)
        y = torch.zeros(shape, dtype=torch.float64).masked_scatter(
            valid, torch.cat([each.flatten() for each in samples])
        )
    return y.reshape(like.shape) if like.ndim == 2 else y.movedim(1, channel_dim)


def statistics(samples) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over all values of the samples, two-pass."""
    values = torch.cat(list(samples), dim=1)
    values = values.detach() if _constant_statistics else values
    mean = values.mean(1)
    return mean, ((values - mean[:, None]) ** 2).mean(1)


def ghost_batch_of(k: int, batch_size: int, ghost_size: int | None) -> list[int]:
    """Return the samples of k's ghost batch: consecutive ones; the remaining ones join the last ghost batch."""
    groups: list[list[int]] = []
    for sample in range(batch_size):
        if not groups or (ghost_size and len(groups[-1]) == ghost_size and batch_size - sample >= ghost_size):
            groups.append([])
        groups[-1].append(sample)
    return next(group for group in groups if k in group)


def partition(permutation: Tensor, ghost_size: int) -> list[list[int]]:
    """Return the drawn samples for each position: those of its ghost batch in the shuffled batch."""
    order = permutation.tolist()
    return [[order[n] for n in ghost_batch_of(k, len(order), ghost_size)] for k in range(len(order))]


def _affine(y, weight, bias):
    y = y if weight is None else y * weight[:, None]
    return y if bias is None else y + bias[:, None]


def _like(samples, out):
    return torch.stack(out) if isinstance(samples, Tensor) else out


def normalize(samples, members, weight=None, bias=None, eps=1e-5, min_std=0.0, clamp=None):
    """Normalize each sample k with the statistics of the samples members(k)."""
    out, known = [], {}  # samples of a ghost batch have the same members
    for k, sample in enumerate(samples):
        key = tuple(members(k))
        if sample.shape[1] == 0:
            out.append(sample)
            continue
        if key not in known:
            known[key] = statistics([samples[n] for n in key])
        mean, var = known[key]
        std = torch.sqrt(var + eps)
        std = torch.maximum(std, torch.full_like(std, min_std))
        y = (sample - mean[:, None]) / std[:, None]
        out.append(_affine(y if clamp is None else y.clamp(-clamp, clamp), weight, bias))
    return _like(samples, out)


def batch_norm(samples, weight=None, bias=None, eps=1e-5):
    return normalize(samples, lambda k: range(len(samples)), weight, bias, eps)


def micro_batch_norm(samples, stored, weight=None, bias=None, eps=1e-5):
    """The samples of the batch are normalized with their statistics and those of `stored` samples together."""
    hat = normalize([*samples, *stored], lambda k: range(len(samples) + len(stored)), weight, bias, eps)
    return _like(samples, list(hat)[: len(samples)])


def ghost_batch_norm(samples, ghost_size, weight=None, bias=None, eps=1e-5):
    return normalize(samples, lambda k: ghost_batch_of(k, len(samples), ghost_size), weight, bias, eps)


def shuffled_ghost_batch_norm(samples, indices, weight=None, bias=None, eps=1e-5):
    """Sample k is normalized with `indices[k]`, the samples of its ghost batch."""
    return normalize(samples, lambda k: indices[k], weight, bias, eps)


def shuffled_ghosts(permutation: Tensor, ghost_size: int) -> list[list[int]]:
    """Return the ghost batch of each sample in the shuffled batch."""
    parts, places = partition(permutation, ghost_size), permutation.tolist()
    return [parts[places.index(k)] for k in range(len(places))]


def exclusive_batch_norm(samples, ghost_size=None, weight=None, bias=None, eps=1e-5, **bounds):
    others = lambda k: [n for n in ghost_batch_of(k, len(samples), ghost_size) if n != k]  # noqa: E731
    return normalize(samples, others, weight, bias, eps, **bounds)


def self_weighted_batch_norm(samples, ghost_size, self_weight, weight=None, bias=None, eps=1e-5):
    """Every value of the ghost batch has a weight: those of the sample itself `self_weight`, the others' the rest."""
    out = []
    for k, sample in enumerate(samples):
        rest = torch.cat([samples[n] for n in ghost_batch_of(k, len(samples), ghost_size) if n != k], 1)
        shares = ((self_weight, sample.shape[1]), (1 - self_weight, rest.shape[1]))
        weights = torch.cat([torch.full((n,), share / max(n, 1), dtype=torch.float64) for share, n in shares])
        values = torch.cat([sample, rest], 1)
        values = values.detach() if _constant_statistics else values
        mean = (weights * values).sum(1)
        var = (weights * (values - mean[:, None]) ** 2).sum(1)
        out.append(_affine((sample - mean[:, None]) / torch.sqrt(var + eps)[:, None], weight, bias))
    return _like(samples, out)


def running_norm(samples, running_mean, running_var, weight=None, bias=None, eps=1e-5):
    std = torch.sqrt(running_var + eps)[:, None]
    return _like(samples, [_affine((sample - running_mean[:, None]) / std, weight, bias) for sample in samples])


def eval_norm(samples, running_mean, running_var, alpha, weight=None, bias=None, eps=1e-5):
    out = []
    for sample in samples:
        own_mean, own_var = statistics([sample]) if sample.shape[1] else (running_mean, running_var)
        mean = (1 - alpha) * running_mean + alpha * own_mean
        var = (1 - alpha) * running_var + alpha * own_var + alpha * (1 - alpha) * (own_mean - running_mean) ** 2
        out.append(_affine((sample - mean[:, None]) / torch.sqrt(var + eps)[:, None], weight, bias))
    return _like(samples, out)


def batch_renorm(samples, running_mean, running_var, r_max, d_max, weight=None, bias=None, eps=1e-5):
    """Batch Renormalization; r and d are constants for the gradient."""
    with torch.no_grad():
        mean, var = statistics(samples)
        std, running_std = torch.sqrt(var + eps), torch.sqrt(running_var + eps)
        r = torch.clip(std / running_std, 1 / r_max, r_max)
        d = torch.clip((mean - running_mean) / running_std, -d_max, d_max)
    hat = batch_norm(samples, eps=eps)
    return _like(samples, [_affine(y * r[:, None] + d[:, None], weight, bias) for y in hat])


def ghost_noise(samples, indices, noise_eps=1e-3, components="both"):
    """The paper's listing, for a table of drawn samples or a list of lists; a ghost batch without values is none."""
    out = []
    with torch.no_grad():
        batch_mean, batch_var = statistics(samples)
    for sample, drawn in zip(samples, indices if isinstance(indices, list) else indices.tolist(), strict=True):
        with torch.no_grad():
            members = [samples[n] for n in drawn]
            empty = not sum(each.shape[1] for each in members)
            mean, var = (batch_mean, batch_var) if empty else statistics(members)
            scale = torch.sqrt((var + noise_eps) / (batch_var + noise_eps))
        y = sample if components == "scale" else sample - (mean - batch_mean)[:, None]
        out.append(y if components == "shift" else y / scale[:, None])
    return _like(samples, out)


def ghost_noise_batch_norm(
    samples, indices, weight=None, bias=None, eps=1e-5, noise_eps=1e-3, components="both", normalizer="batch"
):
    hat = batch_norm(samples, eps=eps) if normalizer == "batch" else exclusive_batch_norm(samples, eps=eps)
    return _like(samples, [_affine(y, weight, bias) for y in ghost_noise(hat, indices, noise_eps, components)])


def variance_components(samples) -> tuple[Tensor, Tensor, float]:
    """The paper's σ_I² and σ_B² of each channel, as in a one-way random-effects model, and the mean length."""
    present = [sample for sample in samples if sample.shape[1]]
    total = sum(sample.shape[1] for sample in present)
    mean, degrees, length = statistics(present)[0], total - len(present), total / len(present)
    inside = sum(((sample - sample.mean(1, keepdim=True)) ** 2).sum(1) for sample in present)
    around = sum(sample.shape[1] * (sample.mean(1) - mean) ** 2 for sample in present) / total
    within = inside / degrees if degrees else torch.zeros_like(inside)
    return within, (around - within / length).clamp_min(0), length


def analytical_noise(
    samples, draws, ghost_size, law, dof="paper", noise_eps=1e-3, components="both", unit_variance=False
):
    """Analytical ghost noise from standard draws: N(0, 1), and chi-squares over their number of terms."""
    normal, chi_between, chi_within = draws
    with torch.no_grad():
        var = statistics(samples)[1]
        var = torch.ones_like(var) if unit_variance else var
        within, between, spatial = variance_components(samples) if law == "conv" else (torch.zeros_like(var), var, 1)
    out = []
    for k, sample in enumerate(samples):
        m = normal[k] * torch.sqrt(within / (ghost_size * spatial) + between / ghost_size)
        around_mean = between + within / spatial if dof == "exact" else between
        s2 = within * chi_within[k] + around_mean * chi_between[k]
        y = sample if components == "scale" else sample - m[:, None]
        out.append(y if components == "shift" else y / torch.sqrt((s2 + noise_eps) / (var + noise_eps))[:, None])
    return _like(samples, out)


def analytical_noise_batch_norm(samples, draws, ghost_size, law, weight=None, bias=None, eps=1e-5, **options):
    noisy = analytical_noise(batch_norm(samples, eps=eps), draws, ghost_size, law, unit_variance=True, **options)
    return _like(samples, [_affine(y, weight, bias) for y in noisy])
