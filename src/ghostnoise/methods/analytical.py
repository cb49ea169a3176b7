"""Analytical ghost noise: noise from the law of ghost batches instead of drawn samples."""

from functools import partial
from typing import NamedTuple, get_args

import torch
from torch import Generator, Tensor, nn

from ghostnoise import checks
from ghostnoise.engine import fused, general, masks, ranks
from ghostnoise.engine.fused import Plan
from ghostnoise.engine.ops import arithmetic_dtype
from ghostnoise.engine.ranks import Extent, Group, Ranks
from ghostnoise.engine.recompute import drawing
from ghostnoise.laws import Dof, Law, LawDraws, LawName, law_tables
from ghostnoise.masking import mask_of
from ghostnoise.methods.base import NormLayer, Sampled, checked, decide_batch_norm, zeroed
from ghostnoise.methods.noise_base import check_noise, checked_input, inject, warn_without_variance
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.randomness import draw_seed
from ghostnoise.tables import Affine, Components, Moments, ghost_noise, mean_count, normalize, whole_batch
from ghostnoise.tracing import Leaf

__all__ = [
    "AnalyticalGhostNoise",
    "AnalyticalGhostNoiseBatchNorm",
    "AnalyticalGhostNoiseBatchNorm1d",
    "AnalyticalGhostNoiseBatchNorm2d",
    "AnalyticalGhostNoiseBatchNorm3d",
    "LawDraws",
    "analytical_ghost_noise",
    "analytical_ghost_noise_batch_norm",
]


LAWS, DOFS = get_args(LawName), get_args(Dof)


def analytical_ghost_noise(
    input: Tensor,
    ghost_size: int | None,
    noise_eps: float = 1e-3,
    *,
    law: LawName = "fc",
    dof: Dof = "paper",
    components: Components = "both",
    channel_dim: int = 1,
    draws: LawDraws | None = None,
    generator: Generator | None = None,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Shift and scale as `ghost_noise` does, with moments from the analytical law of ghost batches (eqs. 11-16).

    Args:
        ghost_size: the number of samples in a ghost batch, N; `None` disables the noise and returns the input.
        noise_eps: added to both variances.
        law: "fc" draws m - μ from N(0, σ²/N) and s² from σ²·χ²(N)/N, separately for each sample and channel; "conv"
            uses the variances within and between samples that the batch has.
        dof: "paper", or "exact" to account for the degrees of freedom of the drawn mean (χ²(N-1)/N for "fc").
        components: "both", or only the "shift" or the "scale".
        channel_dim: the dimension of the channels.
        draws: the standard draws (`LawDraws`). If None, they are drawn.
        generator: draws the noise; None is the default generator of the device.
        process_group: the ranks that share the batch.
        uneven: if True, ranks may hold different numbers of samples.
        mask: the valid positions of a padded batch; see `batch_norm`. The law takes the mean number of valid positions
            of the samples that have any.

    Shape:
        (B, C, *spatial) with 2 to 5 dimensions, or with the channels in `channel_dim`.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    _check(noise_eps, components, generator, law, dof)
    extent = checked_input(input, "analytical_ghost_noise", channel_dim, process_group, uneven, mask)
    if ghost_size is None:
        checks.no_draws("draws", draws)
        return input if extent.mask is None else masks.zero(input, extent.mask, channel_dim)
    ghost_law = Law(ghost_size, law, dof)
    if components != "shift" and not ghost_law.has_variance(extent.spatial):
        warn_without_variance(input)
    drawn = _drawn(ghost_law, input, channel_dim, extent, draws, generator)
    noise = LawNoise(float(noise_eps), components, ghost_law, drawn)
    return general.run(input, noise.alone, (), extent, channel_dim)[0]


def analytical_ghost_noise_batch_norm(
    input: Tensor,
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
    law: LawName = "fc",
    dof: Dof = "paper",
    components: Components = "both",
    draws: LawDraws | None = None,
    generator: Generator | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize with the statistics of the whole batch, inject analytical ghost noise, then apply weight and bias.

        y = (x̂ - shift) / sqrt((scale² + noise_eps) / (1 + noise_eps))        shift ~ N(0, 1/N), scale² ~ χ²(N)/N

    for `law="fc"` (eqs. 11-13), and the law of eqs. 15-16 with the variances measured on x̂ for `law="conv"`. The
    options are those of `analytical_ghost_noise`; `ghost_size=None` is plain `batch_norm`. Evaluation, running
    statistics, shapes and the other arguments are those of `batch_norm`.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    _check(noise_eps, components, generator, law, dof)
    call = checked(
        "analytical_ghost_noise_batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps,
        num_batches_tracked, channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    if ghost_size is None:
        checks.no_draws("draws", draws)
        return call.train(partial(decide_batch_norm, eps), plan=Plan(eps))
    extent, ghost_law = call.extent, Law(ghost_size, law, dof)
    if components != "shift" and not ghost_law.has_variance(extent.spatial):
        warn_without_variance(input)
    drawn = _drawn(ghost_law, input, channel_dim, extent, draws, generator, fused.covers(input))
    noise = LawNoise(float(noise_eps), components, ghost_law, drawn, normalized=True)
    plan = None
    if isinstance(drawn, Tensor) and input.is_cpu:
        numbers, quantiles = law_tables(drawn, ghost_law, extent.spatial, arithmetic_dtype(input))
        shift, scale = components != "scale", components != "shift"
        plan = Plan(
            eps, seed=drawn, law=numbers, quantiles=quantiles, noise_eps=float(noise_eps), shift=shift, scale=scale
        )
    return call.train(partial(_decide, eps, noise, extent.ranks), plan=plan)


class LawNoise(NamedTuple):
    """The noise of a law: its draws, or a seed (1,) from which they follow. A normalized batch has the variance 1."""

    eps: float
    components: Components
    law: Law
    draws: LawDraws | Tensor
    normalized: bool = False

    def alone(self, m: Moments) -> Affine:
        """Decide on the noise of a batch that is not normalized."""
        return self.on(m.detach())

    def on(self, m: Moments) -> Affine:
        """Decide on the noise, given the moments of the samples."""
        whole, spatial, draws = whole_batch(m), mean_count(m), self.draws
        var = torch.ones_like(whole.var) if self.normalized else whole.var
        if not isinstance(draws, LawDraws):
            assert isinstance(spatial, int)  # with a mask, the draws are made before
            batch_size, channels = m.mean.shape
            draws = self.law.draws_from(draws, (batch_size, channels), spatial)
        ghost = self.law.ghost_moments(draws, *self.law.variances(m, var), spatial)
        return ghost_noise(Moments(torch.zeros_like(var), var), ghost, self.eps, self.components)


def _decide(
    eps: float, noise: LawNoise, ranks: Ranks | None, m: Moments, weight: Tensor | None, bias: Tensor | None
) -> Affine:
    stats = whole_batch(m)
    hat = normalize(stats.detach(), eps).moments(m.detach())
    return inject(stats, eps, noise.on(hat), ranks, weight, bias)


def _check(noise_eps: float, components: str, generator: Generator | None, law: str, dof: str) -> None:
    check_noise(noise_eps, components, generator)
    if law not in LAWS or dof not in DOFS:
        checks.choice("law", law, LAWS)
        checks.choice("dof", dof, DOFS)


def _drawn(
    law: Law,
    input: Tensor,
    channel_dim: int,
    extent: Extent,
    draws: LawDraws | None,
    generator: Generator | None,
    in_kernel: bool = False,
) -> LawDraws | Tensor:
    """Return draws from the law of ghost batches of the input: the given ones, checked, or new ones, or their seed."""
    shape = (input.shape[0], input.shape[channel_dim])
    if draws is None:
        return _draw(law, shape, input.device, extent, drawing(generator), in_kernel)
    draws = LawDraws(*(table.clone() for table in draws))  # the backward pass needs them unchanged
    for name, table in zip(draws._fields, draws, strict=True):
        if table.shape != shape:
            raise ValueError(f"draws.{name} of shape {tuple(table.shape)}: must be (B, C) = {shape}")
    return draws


def _draw(
    law: Law, shape: tuple[int, int], device: torch.device, extent: Extent, generator: Generator | None, in_kernel: bool
) -> LawDraws | Tensor:
    # A graph contains a seed only if the fused operator takes it.
    if device.type != "cpu" or extent.counts is not None or (torch.compiler.is_compiling() and not in_kernel):
        spatial: Tensor | int = extent.spatial
        if extent.counts is not None:
            spatial = mean_count(Moments(extent.counts, extent.counts, extent.counts))
        return law.draw(shape, spatial, device, generator)
    seed = draw_seed(device, generator)
    return seed if extent.ranks is None else law.draws_from(seed, shape, extent.spatial)


class Lawful(Sampled):
    """A layer that injects noise from the law of ghost batches."""

    noise_eps: float
    components: Components
    law: LawName
    dof: Dof
    injects_noise = True

    def stored_noise(
        self, stored: Moments, whole: Moments, ghost_size: int, input: Tensor, generator: Generator | None
    ) -> Affine:
        """Draw noise from the law, whose variances are those of stored samples."""
        law, spatial = Law(ghost_size, self.law, self.dof), mean_count(stored)
        if self.components != "shift" and isinstance(spatial, int) and not law.has_variance(spatial):
            warn_without_variance(input)
        draws = law.draw((input.shape[0], stored.mean.shape[1]), spatial, input.device, generator)
        return LawNoise(float(self.noise_eps), self.components, law, draws, isinstance(self, NormLayer)).on(stored)


class AnalyticalGhostNoise(Lawful, Leaf):
    """Shift and scale as `GhostNoise` does, with moments from the analytical law of ghost batches, in training (AGNI).

    In eval mode the input is returned unchanged.

    Args:
        ghost_size: the number of samples in a ghost batch, N; smaller is stronger noise, `None` disables the noise.
        noise_eps: added to both variances.
        law: "fc" for fully connected layers (eqs. 11-12), or "conv" for convolutional ones (eqs. 15-16).
        dof: "paper" draws squares around the true mean, χ²(N)/N; "exact" around the drawn one, χ²(N-1)/N for "fc".
        components: "both", or only the "shift" or the "scale".
        channel_dim: the dimension of the channels: 1, or -1 for tokens (B, T, C).
        generator: draws the noise; None is the default generator of the device.
        process_group: the ranks that share a batch in training: None is this process alone, "world" is all ranks.
        uneven: if True, ranks may hold different numbers of samples, or none; see `BatchNorm2d`.

    Shape:
        2 to 5 dimensions, the batch first, in any memory format; the output has the same shape.
    """

    def __init__(
        self,
        ghost_size: int | None,
        noise_eps: float = 1e-3,
        *,
        law: LawName = "fc",
        dof: Dof = "paper",
        components: Components = "both",
        channel_dim: int = 1,
        generator: Generator | None = None,
        process_group: Group = None,
        uneven: bool = False,
    ) -> None:
        super().__init__()
        _check(noise_eps, components, generator, law, dof)
        checks.dimension(channel_dim)
        checks.flag("uneven", uneven)
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.noise_eps, self.law, self.dof, self.components = noise_eps, law, dof, components
        self.channel_dim, self.generator = channel_dim, generator
        self.process_group, self.uneven = ranks.named(process_group), uneven

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Inject noise in training. `mask` is that of `BatchNorm2d.forward`."""
        mask = mask_of(self, input, mask, self.channel_dim)
        if not self.training:
            y = input if self._sampling is None else self._sampling(input)
            return zeroed(y, mask, type(self).__name__, self.channel_dim)
        return analytical_ghost_noise(
            input, self.ghost_size, self.noise_eps, law=self.law, dof=self.dof, components=self.components,
            channel_dim=self.channel_dim, generator=self.generator, process_group=self.process_group,
            uneven=self.uneven, mask=mask,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the settings."""
        own = (
            f"ghost_size={self.ghost_size}, noise_eps={self.noise_eps}, law={self.law!r}, dof={self.dof!r}, "
            f"components={self.components!r}, channel_dim={self.channel_dim}"
        )
        return ", ".join([own, *ranks.described(self.process_group, self.uneven)])


class AnalyticalGhostNoiseBatchNorm(Lawful, NormLayer):
    """Normalize with the whole batch, inject noise from the law of ghost batches, then apply weight and bias (AGNI).

    Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        ghost_size: the number of samples in a ghost batch, N; smaller is stronger noise, `None` disables the noise.
        noise_eps: added to the two variances whose ratio is the scale noise.
        law: "fc" for fully connected layers (eqs. 11-12), or "conv" for convolutional ones (eqs. 15-16).
        dof: "paper" draws squares around the true mean, χ²(N)/N; "exact" around the drawn one, χ²(N-1)/N for "fc".
        components: "both", or only the "shift" or the "scale".
        generator: draws the noise; None is the default generator of the device.
    """

    function = staticmethod(analytical_ghost_noise_batch_norm)
    options = ("ghost_size", "noise_eps", "law", "dof", "components", "generator", *NormLayer.options)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ghost_size: int | None,
        noise_eps: float = 1e-3,
        law: LawName = "fc",
        dof: Dof = "paper",
        components: Components = "both",
        generator: Generator | None = None,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        _check(noise_eps, components, generator, law, dof)
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.noise_eps, self.law, self.dof = noise_eps, law, dof
        self.components, self.generator = components, generator


class AnalyticalGhostNoiseBatchNorm1d(AnalyticalGhostNoiseBatchNorm, nn.BatchNorm1d):
    """Batch norm with analytical ghost noise of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class AnalyticalGhostNoiseBatchNorm2d(AnalyticalGhostNoiseBatchNorm, nn.BatchNorm2d):
    """Batch norm with analytical ghost noise of (B, C, H, W)."""

    ndims = (4,)


class AnalyticalGhostNoiseBatchNorm3d(AnalyticalGhostNoiseBatchNorm, nn.BatchNorm3d):
    """Batch norm with analytical ghost noise of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="agni",
        label="AGNI",
        title="Analytical ghost noise injection",
        equation="GNI with m - μ ~ N(0, σ²/N) and s² ~ σ²·χ²(N)/N, or the law of convolutional layers",
        card="analytical-ghost-noise.md",
        norm=AnalyticalGhostNoiseBatchNorm,
        noise=AnalyticalGhostNoise,
        placements=("inside", "after", "activation"),
        shorthands={"agni-conv": {"law": "conv"}},
        numerics=2,
        example={"law": "conv"},
    )
)
