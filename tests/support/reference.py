"""The paper's methods as deliberately naive loops over samples, in float64.

They are written from the equations and do not use the library: no per-sample moments, no pooling formulas. Inputs have
shape (B, C, S), and the functions are differentiable.
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


def fold(x: Tensor, channel_dim: int = 1) -> Tensor:
    """Reshape (B, C, *spatial), or channels in another dimension, to (B, C, S) in float64."""
    x = x.double()
    if x.ndim > 2:
        x = x.movedim(channel_dim, 1)
    return x.reshape(x.shape[0], x.shape[1], -1)


def unfold(y: Tensor, like: Tensor, channel_dim: int = 1) -> Tensor:
    if like.ndim == 2:
        return y.reshape(like.shape)
    return y.reshape(like.movedim(channel_dim, 1).shape).movedim(1, channel_dim)


def statistics(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of (n, C, S), two-pass."""
    samples = samples.detach() if _constant_statistics else samples
    mean = samples.mean(dim=(0, 2))
    return mean, ((samples - mean[None, :, None]) ** 2).mean(dim=(0, 2))


def ghost_batch_of(k: int, batch_size: int, ghost_size: int) -> list[int]:
    """Return the samples of k's ghost batch: consecutive ones; the remaining ones join the last ghost batch."""
    groups: list[list[int]] = []
    for sample in range(batch_size):
        if not groups or (len(groups[-1]) == ghost_size and batch_size - sample >= ghost_size):
            groups.append([])
        groups[-1].append(sample)
    return next(group for group in groups if k in group)


def normalize(
    x: Tensor, members, weight=None, bias=None, eps: float = 1e-5, min_std: float = 0.0, clamp=None
) -> Tensor:
    """Normalize each sample k with the statistics of the samples members(k)."""
    out, known = [], {}  # samples of a ghost batch have the same members
    for k in range(x.shape[0]):
        key = tuple(members(k))
        if key not in known:
            known[key] = statistics(x[list(key)])
        mean, var = known[key]
        std = torch.sqrt(var + eps)
        std = torch.maximum(std, torch.full_like(std, min_std))
        y = (x[k] - mean[:, None]) / std[:, None]
        out.append(_affine(y if clamp is None else y.clamp(-clamp, clamp), weight, bias))
    return torch.stack(out)


def batch_norm(x, weight=None, bias=None, eps=1e-5):
    return normalize(x, lambda k: list(range(x.shape[0])), weight, bias, eps)


def ghost_batch_norm(x, ghost_size, weight=None, bias=None, eps=1e-5):
    return normalize(x, lambda k: ghost_batch_of(k, x.shape[0], ghost_size), weight, bias, eps)


def exclusive_batch_norm(x, ghost_size, weight=None, bias=None, eps=1e-5, min_std=0.0, clamp=None):
    size = ghost_size or x.shape[0]
    others = lambda k: [n for n in ghost_batch_of(k, x.shape[0], size) if n != k]  # noqa: E731
    return normalize(x, others, weight, bias, eps, min_std, clamp)


def self_weighted_batch_norm(x, ghost_size, self_weight, weight=None, bias=None, eps=1e-5):
    """Every value of the ghost batch has a weight: the sample's own share `self_weight`, the others' the rest."""
    batch_size, _, spatial = x.shape
    out = []
    for k in range(batch_size):
        members = ghost_batch_of(k, batch_size, ghost_size or batch_size)
        values = x[members].detach() if _constant_statistics else x[members]
        rest = (1 - self_weight) / ((len(members) - 1) * spatial)
        weights = [self_weight / spatial if n == k else rest for n in members]
        weights = torch.tensor(weights, dtype=x.dtype)[:, None, None]
        mean = (weights * values).sum(dim=(0, 2))
        var = (weights * (values - mean[None, :, None]) ** 2).sum(dim=(0, 2))
        out.append(_affine((x[k] - mean[:, None]) / torch.sqrt(var + eps)[:, None], weight, bias))
    return torch.stack(out)


def eval_norm(x, running_mean, running_var, alpha, weight=None, bias=None, eps=1e-5):
    out = []
    for sample in x:
        own_mean, own_var = statistics(sample[None])
        mean = (1 - alpha) * running_mean + alpha * own_mean
        var = (1 - alpha) * running_var + alpha * own_var + alpha * (1 - alpha) * (own_mean - running_mean) ** 2
        out.append(_affine((sample - mean[:, None]) / torch.sqrt(var + eps)[:, None], weight, bias))
    return torch.stack(out)


def ghost_noise(x, indices, noise_eps=1e-3, components="both"):
    """The paper's listing, for a given table of drawn samples, or a list of lists of different lengths."""
    with torch.no_grad():
        batch_mean, batch_var = statistics(x)
        noise = []
        for drawn in indices if isinstance(indices, list) else indices.tolist():
            ghost_mean, ghost_var = statistics(x[drawn])
            scale = torch.sqrt((ghost_var + noise_eps) / (batch_var + noise_eps))
            noise.append((ghost_mean - batch_mean, scale))
    out = []
    for sample, (m, s) in zip(x, noise, strict=True):
        y = sample if components == "scale" else sample - m[:, None]
        out.append(y if components == "shift" else y / s[:, None])
    return torch.stack(out)


def partition(permutation, ghost_size):
    """Return the drawn samples for each position: those of its ghost batch in the shuffled batch."""
    order = permutation.tolist()
    return [[order[n] for n in ghost_batch_of(k, len(order), ghost_size)] for k in range(len(order))]


def ghost_noise_batch_norm(
    x, indices, weight=None, bias=None, eps=1e-5, noise_eps=1e-3, components="both", normalizer="batch"
):
    hat = batch_norm(x, eps=eps) if normalizer == "batch" else exclusive_batch_norm(x, None, eps=eps)
    return torch.stack([_affine(y, weight, bias) for y in ghost_noise(hat, indices, noise_eps, components)])


def variance_components(x):
    """The paper's σ_I² and σ_B² of each channel, by the estimators of a one-way random-effects model."""
    spatial = x.shape[2]
    means = x.mean(2)
    between_means = ((means - means.mean(0)) ** 2).mean(0)
    if spatial == 1:
        return torch.zeros_like(between_means), between_means
    inside = ((x - means[:, :, None]) ** 2).sum(2).mean(0) / (spatial - 1)
    return inside, (between_means - inside / spatial).clamp_min(0)


def analytical_noise(x, draws, ghost_size, law, dof, noise_eps=1e-3, components="both", unit_variance=False):
    """Analytical ghost noise from standard draws: N(0, 1), and chi-squares over their number of terms."""
    normal, chi_between, chi_within = draws
    with torch.no_grad():
        var = torch.ones_like(x[0, :, 0]) if unit_variance else statistics(x)[1]
        within, between = variance_components(x) if law == "conv" else (torch.zeros_like(var), var)
        spatial = x.shape[2]
    out = []
    for k in range(x.shape[0]):
        m = normal[k] * torch.sqrt(within / (ghost_size * spatial) + between / ghost_size)
        around_mean = between + within / spatial if dof == "exact" else between
        s2 = within * chi_within[k] + around_mean * chi_between[k]
        y = x[k] if components == "scale" else x[k] - m[:, None]
        out.append(y if components == "shift" else y / torch.sqrt((s2 + noise_eps) / (var + noise_eps))[:, None])
    return torch.stack(out)


def analytical_noise_batch_norm(x, draws, ghost_size, law, dof, weight=None, bias=None, eps=1e-5, **options):
    hat = batch_norm(x, eps=eps)
    noisy = analytical_noise(hat, draws, ghost_size, law, dof, unit_variance=True, **options)
    return torch.stack([_affine(y, weight, bias) for y in noisy])


def batch_renorm(x, running_mean, running_var, r_max, d_max, weight=None, bias=None, eps=1e-5):
    """Batch Renormalization; r and d are constants for the gradient."""
    with torch.no_grad():
        mean, var = statistics(x)
        std, running_std = torch.sqrt(var + eps), torch.sqrt(running_var + eps)
        r = torch.clip(std / running_std, 1 / r_max, r_max)
        d = torch.clip((mean - running_mean) / running_std, -d_max, d_max)
    hat = batch_norm(x, eps=eps)
    return torch.stack([_affine(y * r[:, None] + d[:, None], weight, bias) for y in hat])


def _affine(y, weight, bias):
    y = y if weight is None else y * weight[:, None]
    return y if bias is None else y + bias[:, None]
