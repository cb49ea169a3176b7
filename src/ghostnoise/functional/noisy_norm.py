"""Batch norm with ghost noise between its normalization and its weight and bias, as one op."""

from functools import partial

from torch import Generator, Tensor

from ghostnoise import checks, methods
from ghostnoise.distributed import Group
from ghostnoise.functional.noise import drawn_law, drawn_samples, warn_without_variance
from ghostnoise.functional.norm import check, infer, train
from ghostnoise.functional.running import Running, whole_batch_unbiased
from ghostnoise.laws import Dof, Kind, LawDraws


def ghost_noise_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    ghost_size: int | None,
    noise_eps: float = 1e-3,
    shift: bool = True,
    scale: bool = True,
    indices: Tensor | None = None,
    generator: Generator | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Normalize with the whole batch's statistics, inject ghost noise, then apply weight and bias (eq. 9).

    Batch norm's gradient flows as always; the drawn statistics are constants of the normalized input. `indices`
    (B, N), `generator`, `shift` and `scale` are those of `ghost_noise`; `ghost_size=None` is plain `batch_norm`.
    Evaluation and running statistics are those of `batch_norm`, as are shapes and the other arguments.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    checks.number("noise_eps", noise_eps, 0)
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    extent = check(x, "ghost_noise_batch_norm", running, weight, bias, training, channel_dim, process_group, uneven)
    if not training:
        return infer(x, running, weight, bias, eps, channel_dim)
    population = partial(whole_batch_unbiased, spatial=extent.spatial)
    if ghost_size is None:
        checks.nothing_drawn("indices", indices)
        return train(x, running, weight, bias, methods.batch(eps), population, channel_dim, extent.ranks)
    warn_without_variance(scale and ghost_size * extent.spatial == 1, x)
    drawn = drawn_samples(x, extent.shape[0], ghost_size, indices, generator)
    noise = methods.ghost_noise(noise_eps, shift, scale, drawn)
    return train(x, running, weight, bias, methods.batch(eps), population, channel_dim, extent.ranks, noise)


def analytical_ghost_noise_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    ghost_size: int | None,
    noise_eps: float = 1e-3,
    kind: Kind = "fc",
    dof: Dof = "paper",
    shift: bool = True,
    scale: bool = True,
    draws: LawDraws | None = None,
    generator: Generator | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Normalize with the whole batch's statistics, inject analytical ghost noise, then apply weight and bias.

        y = (x̂ - shift) / sqrt((scale² + noise_eps) / (1 + noise_eps))        shift ~ N(0, 1/N), scale² ~ χ²(N)/N

    for `kind="fc"` (eqs. 11-13), and the law of eqs. 15-16 with the variances measured on x̂ for `kind="conv"`;
    `dof`, `draws` and `generator` are those of `analytical_ghost_noise`; `ghost_size=None` is plain `batch_norm`.
    Evaluation and running statistics are those of `batch_norm`, as are shapes and the other arguments.
    """
    checks.number("noise_eps", noise_eps, 0)
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    extent = check(
        x, "analytical_ghost_noise_batch_norm", running, weight, bias, training, channel_dim, process_group, uneven
    )
    if not training:
        return infer(x, running, weight, bias, eps, channel_dim)
    population = partial(whole_batch_unbiased, spatial=extent.spatial)
    if ghost_size is None:
        checks.nothing_drawn("draws", draws)
        return train(x, running, weight, bias, methods.batch(eps), population, channel_dim, extent.ranks)
    law, draws = drawn_law(x, ghost_size, x.shape[channel_dim], extent.spatial, kind, dof, draws, generator)
    warn_without_variance(scale and not law.has_variance, x)
    noise = methods.analytical_noise(noise_eps, shift, scale, law, draws, normalized=True)
    return train(x, running, weight, bias, methods.batch(eps), population, channel_dim, extent.ranks, noise)
