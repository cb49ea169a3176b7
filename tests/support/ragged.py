"""Padded batches, and the methods as naive loops over samples of different lengths, in float64.

The loops take a list of samples (C, n) without padding, n = 0 for a sample that is padding only. They are written from
the definitions and do not use the library.
"""

import torch
from torch import Tensor

from support.reference import ghost_batch_of


def lengths_mask(lengths, size: int) -> Tensor:
    """Return the mask (B, T) of samples that are padded at the end."""
    return torch.arange(size)[None] < torch.as_tensor(lengths)[:, None]


def unpad(x: Tensor, mask: Tensor, channel_dim: int = 1) -> list[Tensor]:
    """Return the valid values (C, n) of each sample, in float64; differentiable."""
    x = (x.unsqueeze(2) if x.ndim == 2 else x.movedim(channel_dim, 1)).double()
    mask = mask.unsqueeze(1) if mask.ndim == 1 else mask
    return [sample[:, valid] for sample, valid in zip(x, mask, strict=True)]


def pad(samples: list[Tensor], mask: Tensor, like: Tensor, channel_dim: int = 1) -> Tensor:
    """Return a tensor of the shape of `like` with the values of the samples at valid positions, and 0 at the others."""
    folded = torch.zeros_like(like.unsqueeze(2) if like.ndim == 2 else like.movedim(channel_dim, 1)).double()
    rows = []
    for row, sample, valid in zip(folded, samples, mask.unsqueeze(1) if mask.ndim == 1 else mask, strict=True):
        row = row.clone()
        row[:, valid] = sample
        rows.append(row)
    out = torch.stack(rows)
    return out.squeeze(2) if like.ndim == 2 else out.movedim(1, channel_dim)


def statistics(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over all values of the samples."""
    values = torch.cat(samples, dim=1)
    mean = values.mean(1)
    return mean, ((values - mean[:, None]) ** 2).mean(1)


def affine(y, weight, bias):
    y = y if weight is None else y * weight[:, None]
    return y if bias is None else y + bias[:, None]


def normalize(samples, members, weight=None, bias=None, eps=1e-5, min_std=0.0, clamp=None):
    out = []
    for k, sample in enumerate(samples):
        if sample.shape[1] == 0:
            out.append(sample)
            continue
        mean, var = statistics([samples[n] for n in members(k)])
        std = torch.sqrt(var + eps)
        std = torch.maximum(std, torch.full_like(std, min_std))
        y = (sample - mean[:, None]) / std[:, None]
        out.append(affine(y if clamp is None else y.clamp(-clamp, clamp), weight, bias))
    return out


def batch_norm(samples, weight=None, bias=None, eps=1e-5):
    return normalize(samples, lambda k: range(len(samples)), weight, bias, eps)


def ghost_batch_norm(samples, ghost_size, weight=None, bias=None, eps=1e-5):
    return normalize(samples, lambda k: ghost_batch_of(k, len(samples), ghost_size), weight, bias, eps)


def exclusive_batch_norm(samples, ghost_size=None, weight=None, bias=None, eps=1e-5, **more):
    size = ghost_size or len(samples)
    others = lambda k: [n for n in ghost_batch_of(k, len(samples), size) if n != k]  # noqa: E731
    return normalize(samples, others, weight, bias, eps, **more)


def self_weighted_batch_norm(samples, ghost_size, self_weight, weight=None, bias=None, eps=1e-5):
    """Every value of the ghost batch has a weight: those of the sample itself `self_weight`, the others' the rest."""
    out = []
    for k, sample in enumerate(samples):
        others = [n for n in ghost_batch_of(k, len(samples), ghost_size or len(samples)) if n != k]
        rest = torch.cat([samples[n] for n in others], 1)
        shares = ((self_weight, sample.shape[1]), (1 - self_weight, rest.shape[1]))
        parts = [torch.full((count,), share / max(count, 1), dtype=torch.float64) for share, count in shares]
        weights = torch.cat(parts)
        values = torch.cat([sample, rest], 1)
        mean = (weights * values).sum(1)
        var = (weights * (values - mean[:, None]) ** 2).sum(1)
        out.append(affine((sample - mean[:, None]) / torch.sqrt(var + eps)[:, None], weight, bias))
    return out


def eval_norm(samples, running_mean, running_var, alpha, weight=None, bias=None, eps=1e-5):
    out = []
    for sample in samples:
        own_mean, own_var = statistics([sample]) if sample.shape[1] else (running_mean, running_var)
        mean = (1 - alpha) * running_mean + alpha * own_mean
        var = (1 - alpha) * running_var + alpha * own_var + alpha * (1 - alpha) * (own_mean - running_mean) ** 2
        out.append(affine((sample - mean[:, None]) / torch.sqrt(var + eps)[:, None], weight, bias))
    return out


def running_norm(samples, running_mean, running_var, weight=None, bias=None, eps=1e-5):
    return [
        affine((sample - running_mean[:, None]) / torch.sqrt(running_var + eps)[:, None], weight, bias)
        for sample in samples
    ]


def batch_renorm(samples, running_mean, running_var, r_max, d_max, weight=None, bias=None, eps=1e-5):
    with torch.no_grad():
        mean, var = statistics(samples)
        std, running_std = torch.sqrt(var + eps), torch.sqrt(running_var + eps)
        r = torch.clip(std / running_std, 1 / r_max, r_max)
        d = torch.clip((mean - running_mean) / running_std, -d_max, d_max)
    return [affine(y * r[:, None] + d[:, None], weight, bias) for y in batch_norm(samples, eps=eps)]


def ghost_noise(samples, indices, noise_eps=1e-3, components="both"):
    """Ghost noise of drawn samples; a ghost batch without values is the identity."""
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
    return out


def ghost_noise_batch_norm(samples, indices, weight=None, bias=None, normalizer="batch", components="both"):
    hat = batch_norm(samples) if normalizer == "batch" else exclusive_batch_norm(samples)
    return [affine(y, weight, bias) for y in ghost_noise(hat, indices, components=components)]


def analytical_noise(samples, draws, ghost_size, law, dof="paper", noise_eps=1e-3, unit_variance=False):
    """Analytical noise: S is the mean number of positions of the samples that have any, and samples weigh by theirs."""
    normal, chi_between, chi_within = draws
    with torch.no_grad():
        mean, var = statistics(samples)
        var = torch.ones_like(var) if unit_variance else var
        within, between, spatial = torch.zeros_like(var), var, 1.0
        if law == "conv":
            present = [sample for sample in samples if sample.shape[1]]
            total = sum(sample.shape[1] for sample in present)
            spatial = total / len(present)
            inside = sum(((sample - sample.mean(1, keepdim=True)) ** 2).sum(1) for sample in present)
            around = sum(sample.shape[1] * (sample.mean(1) - mean) ** 2 for sample in present) / total
            degrees = total - len(present)
            within = inside / degrees if degrees else torch.zeros_like(inside)
            between = (around - within / spatial).clamp_min(0)
    out = []
    for k, sample in enumerate(samples):
        m = normal[k] * torch.sqrt(within / (ghost_size * spatial) + between / ghost_size)
        around_mean = between + within / spatial if dof == "exact" else between
        s2 = within * chi_within[k] + around_mean * chi_between[k]
        out.append((sample - m[:, None]) / torch.sqrt((s2 + noise_eps) / (var + noise_eps))[:, None])
    return out


def analytical_noise_batch_norm(samples, draws, ghost_size, law, weight=None, bias=None, dof="paper"):
    noisy = analytical_noise(batch_norm(samples), draws, ghost_size, law, dof, unit_variance=True)
    return [affine(y, weight, bias) for y in noisy]
