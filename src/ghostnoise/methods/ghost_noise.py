"""Ghost noise injection: the noise of random ghost batches, inside batch norm or on its own."""

from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Generator, Tensor, nn

from ghostnoise import checks
from ghostnoise.engine import fused, general, masks, ranks
from ghostnoise.engine.ranks import Extent, Group, Ranks
from ghostnoise.engine.recompute import drawing
from ghostnoise.history import History
from ghostnoise.masking import mask_of
from ghostnoise.methods.base import (
    NormLayer,
    check_history,
    checked,
    decide_batch_norm,
    history_of,
    stored_samples,
    zeroed,
)
from ghostnoise.methods.exclusive_batch_norm import check_other_values, decide_exclusive_batch_norm
from ghostnoise.methods.noise_base import (
    Drawing,
    check_noise,
    checked_input,
    inject,
    warn_without_variance,
    without_noise,
)
from ghostnoise.methods.registry import MeterSpec, MethodSpec, register
from ghostnoise.randomness import draw_present, draw_rows, drawn_by
from ghostnoise.tables import (
    COMPONENTS,
    Affine,
    Components,
    Moments,
    counts,
    drawn_samples,
    excluding_sample,
    normalize,
    partition,
    whole_batch,
)
from ghostnoise.tables import (
    ghost_noise as noise_of,
)
from ghostnoise.torch_private import in_backward
from ghostnoise.tracing import Leaf

__all__ = [
    "GhostNoise",
    "GhostNoiseBatchNorm",
    "GhostNoiseBatchNorm1d",
    "GhostNoiseBatchNorm2d",
    "GhostNoiseBatchNorm3d",
    "ghost_noise",
    "ghost_noise_batch_norm",
]

DrawName: TypeAlias = Literal["replacement", "partition"]
DRAWS: tuple[DrawName, ...] = get_args(DrawName)
NormalizerName: TypeAlias = Literal["batch", "exclusive"]
NORMALIZERS: tuple[NormalizerName, ...] = get_args(NormalizerName)


def ghost_noise(
    input: Tensor,
    ghost_size: int | None,
    noise_eps: float = 1e-3,
    *,
    components: Components = "both",
    draw: DrawName = "replacement",
    channel_dim: int = 1,
    indices: Tensor | None = None,
    generator: Generator | None = None,
    history: History | None = None,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Shift and scale each sample's channels as the statistics of a random ghost batch would (eq. 10).

        y = (x - (m - μ)) / sqrt((s² + noise_eps) / (σ² + noise_eps))

    μ and σ² are the moments of the batch, m and s² those of `ghost_size` samples drawn with replacement, separately for
    each sample and shared by its channels. All four are constants for the gradient.

    Args:
        ghost_size: the number of samples in a ghost batch, N; `None` disables the noise and returns the input.
        noise_eps: added to both variances.
        components: "both", or only the "shift" (m - μ) or the "scale" (the square root).
        draw: "replacement", or "partition": one random permutation of the batch is divided into ghost batches of
            `ghost_size` samples, the last one with the remaining samples too, so that each sample is drawn once. All
            samples at the positions of a ghost batch then get its noise. Not available with a `process_group`.
        channel_dim: the dimension of the channels.
        indices: the drawn samples (B, N), or the permutation (B,) of a partition. If None, they are drawn.
        generator: draws the samples; None is the default generator of the device.
        history: samples of earlier batches, which are drawn too: μ, σ² and the ghost batches are then those of batch
            and history together, and the samples of this batch are added to the history. `indices` count its samples,
            the oldest first, after those of the batch.
        process_group: the ranks that share the batch; `indices` then have a row for each sample of this rank, and
            count the samples of all ranks.
        uneven: if True, ranks may hold different numbers of samples.
        mask: the valid positions of a padded batch; see `batch_norm`. Samples without valid positions are not drawn.

    Shape:
        (B, C, *spatial) with 2 to 5 dimensions, or with the channels in `channel_dim`.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    _check(noise_eps, components, generator, draw, process_group, history)
    extent = checked_input(input, "ghost_noise", channel_dim, process_group, uneven, mask)
    if ghost_size is None:
        checks.no_draws("indices", indices)
        return input if extent.mask is None else masks.zero(input, extent.mask, channel_dim)
    if ghost_size * extent.spatial == 1 < extent.shape[0] and components != "shift":
        warn_without_variance(input)
    noise = _drawn(input, channel_dim, extent, ghost_size, noise_eps, components, draw, indices, generator, history)
    plain = noise.stored is None and noise.partition_size is None and extent.ranks is None and extent.mask is None
    if plain and fused.covers(input):
        x = input if channel_dim == 1 else input.movedim(channel_dim, 1)
        y = fused.inject(x, noise.indices, float(noise_eps), components != "scale", components != "shift")
        return y if channel_dim == 1 else y.movedim(1, channel_dim)
    y, m = general.run(input, noise.alone, (), extent, channel_dim)
    _remember(history, m)
    return y


def ghost_noise_batch_norm(
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
    components: Components = "both",
    draw: DrawName = "replacement",
    normalizer: NormalizerName = "batch",
    indices: Tensor | None = None,
    generator: Generator | None = None,
    history: History | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize with the statistics of the whole batch, inject ghost noise, then apply weight and bias (eq. 9).

    The gradient flows through the statistics of batch norm; the drawn statistics are constants of the normalized input.
    `noise_eps`, `components`, `draw`, `indices` and `generator` are those of `ghost_noise`; `ghost_size=None` is plain
    `batch_norm`. A `history` holds moments of the input, which are normalized with the statistics of this batch when
    they are drawn. Evaluation, running statistics, shapes and the other arguments are those of `batch_norm`.

    With `normalizer="exclusive"`, normalization and running statistics are those of `exclusive_batch_norm` of the whole
    batch: each sample is excluded from its own statistics. The moments of the noise are those of normalized samples.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    _check(noise_eps, components, generator, draw, process_group, history)
    if normalizer not in NORMALIZERS:
        checks.choice("normalizer", normalizer, NORMALIZERS)
    call = checked(
        "ghost_noise_batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps,
        num_batches_tracked, channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    extent, exclusive = call.extent, normalizer == "exclusive"
    if exclusive:
        check_other_values(call, None, "normalizer='exclusive'")
    if ghost_size is None:
        checks.no_draws("indices", indices)
        if exclusive:
            decide = partial(decide_exclusive_batch_norm, eps, None, 0.0, 0.0)
            return call.train(decide, "whole", fused.Plan(eps, exclusive=True))
        return call.train(partial(decide_batch_norm, eps), plan=fused.Plan(eps))
    if ghost_size * extent.spatial == 1 and components != "shift":
        warn_without_variance(input)
    samples = extent.shape[0] if extent.counts is None else checks.present(extent.counts)
    if history is None and samples < (2 * ghost_size if draw == "partition" else 2):
        name = f"ghost_noise_batch_norm of {input.shape[channel_dim]} channels"
        checks.few_samples(without_noise(name, ghost_size, draw), num_batches_tracked)
    noise = _drawn(input, channel_dim, extent, ghost_size, noise_eps, components, draw, indices, generator, history)
    given = partial(decide_with_noise, eps, exclusive, noise, extent.ranks)
    plan = None
    if not exclusive and noise.stored is None and noise.partition_size is None:
        shift, scale = components != "scale", components != "shift"
        plan = fused.Plan(eps, indices=noise.indices, noise_eps=float(noise_eps), shift=shift, scale=scale)
    return call.train(given, "whole" if exclusive else "unbiased", plan, None if history is None else history.add)


class DrawnNoise(NamedTuple):
    """The noise of drawn samples: `indices` (B, N), or the permutation (B,) of a partition into ghost batches.

    `stored` are samples of earlier batches, which follow those of the batch.
    """

    eps: float
    components: Components
    indices: Tensor
    partition_size: int | None = None
    stored: Moments | None = None

    def alone(self, m: Moments) -> Affine:
        """Decide on the noise of a batch that is not normalized."""
        return self.on(m.detach(), self.stored)

    def on(self, m: Moments, stored: Moments | None) -> Affine:
        """Decide on the noise, given the moments of the samples and of stored ones in the same units."""
        pool = m if stored is None else m.join(stored)
        if self.partition_size is None:
            ghost = drawn_samples(pool, self.indices)
        else:
            ghost = partition(pool, self.indices, self.partition_size)
        return noise_of(whole_batch(pool), ghost, self.eps, self.components)


def decide_with_noise(
    eps: float,
    exclusive: bool,
    noise: "DrawnNoise",
    ranks: Ranks | None,
    m: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Affine:
    """Normalize, inject the noise of normalized samples as a constant, then apply weight and bias."""
    whole = whole_batch(m)
    stats = excluding_sample(m) if exclusive else whole
    # Detached rather than only without gradients, which forward-mode tangents would pass.
    hat = normalize(stats.detach(), eps).moments(m.detach())
    stored = None if noise.stored is None else normalize(whole.detach(), eps).moments(noise.stored)
    return inject(stats, eps, noise.on(hat, stored), ranks, weight, bias)


def _check(
    noise_eps: float,
    components: Components,
    generator: Generator | None,
    draw: str,
    process_group: Group,
    history: object,
) -> None:
    if type(noise_eps) is not float or noise_eps < 0 or components not in COMPONENTS or generator is not None:
        check_noise(noise_eps, components, generator)
    if draw not in DRAWS:
        checks.choice("draw", draw, DRAWS)
    if history is not None:
        check_history(history)
    if draw == "partition" and history is not None:
        raise ValueError(
            f"draw='partition' with history={history!r}: must be without one, since the batch alone is partitioned; "
            "use draw='replacement'"
        )
    if draw == "partition" and process_group is not None:
        raise ValueError(
            f"draw='partition' with process_group={ranks.named(process_group)!r}: must be None, since ranks do not "
            "share a permutation; use draw='replacement', or process_group=None to partition each process's own batch"
        )


def _drawn(
    input: Tensor,
    channel_dim: int,
    extent: Extent,
    ghost_size: int,
    noise_eps: float,
    components: Components,
    draw: DrawName,
    indices: Tensor | None,
    generator: Generator | None,
    history: History | None,
) -> DrawnNoise:
    """Return noise from samples of the batch and those that are stored, with the given indices or new ones."""
    rows, device, stored = input.shape[0], input.device, None
    if history is None and indices is None and generator is None and extent.mask is None and draw == "replacement":
        return DrawnNoise(float(noise_eps), components, draw_rows(extent.shape[0], rows, ghost_size, device, None))
    if history is not None:
        stored = stored_samples(history, input, channel_dim, extent)
    size = extent.shape[0] + (0 if stored is None else stored.mean.shape[0])
    weighted = extent.mask is not None or (stored is not None and isinstance(stored.n, Tensor))
    if indices is not None:
        if draw == "partition":
            checks.permutation(indices, rows, "with draw='partition'")
        else:
            checks.index_table(indices, rows, ghost_size, size)
        drawn = indices.to(device, torch.int64, copy=True)  # the backward pass needs them unchanged
    else:
        drawn = _draw(rows, size, extent, stored, weighted, ghost_size, draw, device, drawing(generator))
    return DrawnNoise(float(noise_eps), components, drawn, ghost_size if draw == "partition" else None, stored)


def _draw(
    rows: int, size: int, extent: Extent, stored: Moments | None, weighted: bool, ghost_size: int, draw: DrawName,
    device: torch.device, generator: Generator | None,
) -> Tensor:  # fmt: skip
    """Draw samples of the batch and of those that are stored, or a permutation of the batch."""
    if draw == "partition":
        return torch.randperm(rows, device=device, **drawn_by(generator))
    if not weighted:
        return draw_rows(size, rows, ghost_size, device, generator)
    parts = [] if stored is None else [counts(stored)]
    own = parts[0].new_ones(extent.shape[0], 1) if extent.counts is None else extent.counts
    return draw_present(torch.cat([own, *(part.to(own) for part in parts)]).flatten(), ghost_size, rows, generator)


def _remember(history: History | None, m: Moments) -> None:
    """Add the samples of this batch to the history, unless this is a recomputed pass."""
    if history is not None and not in_backward():
        history.add(m)


class GhostNoise(Drawing, Leaf):
    """Shift and scale each sample as the statistics of a random ghost batch would, in training (GNI, eq. 10).

        y = (x - (m - μ)) / sqrt((s² + noise_eps) / (σ² + noise_eps))

    μ and σ² are the moments of the batch, m and s² those of `ghost_size` samples drawn from it. In eval mode the input
    is returned unchanged.

    Args:
        ghost_size: the number of samples in a ghost batch, N; smaller is stronger noise, `None` disables the noise.
        noise_eps: added to both variances.
        components: "both", or only the "shift" or the "scale".
        draw: with "replacement" for each sample, or a "partition" of the shuffled batch; see `functional.ghost_noise`.
        channel_dim: the dimension of the channels: 1, or -1 for tokens (B, T, C).
        generator: draws the samples; None is the default generator of the device.
        history: draw from the moments of the last H samples of earlier batches too, for small batches; 0 draws from the
            batch alone. The state_dict does not contain it unless asked, see `histories`.
        process_group: the ranks that share a batch in training: None is this process alone, "world" is all ranks.
        uneven: if True, ranks may hold different numbers of samples, or none; see `BatchNorm2d`.

    Shape:
        2 to 5 dimensions, the batch first, in any memory format; the output has the same shape.

    Examples:
        >>> after_layer_norm = nn.Sequential(nn.LayerNorm(32), GhostNoise(ghost_size=12, channel_dim=-1))
        >>> after_layer_norm(torch.randn(64, 10, 32)).shape
        torch.Size([64, 10, 32])
    """

    def __init__(
        self,
        ghost_size: int | None,
        noise_eps: float = 1e-3,
        *,
        components: Components = "both",
        draw: DrawName = "replacement",
        channel_dim: int = 1,
        generator: Generator | None = None,
        history: int = 0,
        process_group: Group = None,
        uneven: bool = False,
    ) -> None:
        super().__init__()
        self.history = history_of(history)
        _check(noise_eps, components, generator, draw, process_group, self.history)
        checks.dimension(channel_dim)
        checks.flag("uneven", uneven)
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.noise_eps, self.components, self.draw = noise_eps, components, draw
        self.channel_dim, self.generator = channel_dim, generator
        self.process_group, self.uneven = ranks.named(process_group), uneven

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Inject noise in training. `mask` is that of `BatchNorm2d.forward`."""
        mask = mask_of(self, input, mask, self.channel_dim)
        if not self.training:
            y = input if self._sampling is None else self._sampling(input)
            return zeroed(y, mask, type(self).__name__, self.channel_dim)
        y = ghost_noise(
            input, self.ghost_size, self.noise_eps, components=self.components, draw=self.draw,
            channel_dim=self.channel_dim, generator=self.generator, history=self.history,
            process_group=self.process_group, uneven=self.uneven, mask=mask,
        )  # fmt: skip
        size = self.ghost_size
        if self.history is None and self.process_group is None and size is not None:
            samples = len(input) if mask is None else checks.present(mask.flatten(1).sum(1))
            if samples < (2 * size if self.draw == "partition" else 2):
                name = f"GhostNoise {self._ghostnoise_path!r}" if self._ghostnoise_path else "GhostNoise"
                checks.warn_once(without_noise(name, size, self.draw))
        return y

    def extra_repr(self) -> str:
        """Return the settings."""
        own = (
            f"ghost_size={self.ghost_size}, noise_eps={self.noise_eps}, components={self.components!r}, "
            f"channel_dim={self.channel_dim}, draw={self.draw!r}"
        )
        return ", ".join([own, *self._described_history(), *ranks.described(self.process_group, self.uneven)])


class GhostNoiseBatchNorm(Drawing, NormLayer):
    """Normalize with the whole batch, inject the noise of random ghost batches, then apply the affine (GNI, eq. 9).

    Each sample gets the noise of `ghost_size` samples that are drawn from the batch. Parameters, buffers, state_dict
    and eval output are those of `nn.BatchNorm*d`.

    Args:
        ghost_size: the number of samples in a ghost batch, N; smaller is stronger noise, `None` disables the noise.
        noise_eps: added to the two variances whose ratio is the scale noise.
        components: "both", or only the "shift" or the "scale".
        draw: with "replacement" for each sample, or a "partition" of the shuffled batch; see `functional.ghost_noise`.
        normalizer: "batch", or "exclusive": each sample is excluded from its own statistics, as in exclusive batch norm
            of the whole batch, and the running variance is biased.
        generator: draws the samples; None is the default generator of the device.
        history: draw from the moments of the last H samples of earlier batches too, for small batches; 0 draws from the
            batch alone. The state_dict does not contain it unless asked, see `histories`.

    Examples:
        >>> layer = GhostNoiseBatchNorm2d(16, ghost_size=32)
        >>> layer(torch.randn(64, 16, 8, 8)).shape
        torch.Size([64, 16, 8, 8])
        >>> nn.BatchNorm2d(16).load_state_dict(layer.state_dict())
        <All keys matched successfully>
    """

    function = staticmethod(ghost_noise_batch_norm)
    options = (
        "ghost_size",
        "noise_eps",
        "components",
        "draw",
        "normalizer",
        "generator",
        "history",
        *NormLayer.options,
    )

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
        components: Components = "both",
        draw: DrawName = "replacement",
        normalizer: NormalizerName = "batch",
        generator: Generator | None = None,
        history: int = 0,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        self.history = history_of(history)
        _check(noise_eps, components, generator, draw, process_group, self.history)
        checks.choice("normalizer", normalizer, NORMALIZERS)
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.noise_eps, self.components, self.generator = noise_eps, components, generator
        self.draw, self.normalizer = draw, normalizer

    def extra_repr(self) -> str:
        """Return the settings."""
        return ", ".join([super().extra_repr(), *self._described_history()])


class GhostNoiseBatchNorm1d(GhostNoiseBatchNorm, nn.BatchNorm1d):
    """Batch norm with ghost noise of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class GhostNoiseBatchNorm2d(GhostNoiseBatchNorm, nn.BatchNorm2d):
    """Batch norm with ghost noise of (B, C, H, W)."""

    ndims = (4,)


class GhostNoiseBatchNorm3d(GhostNoiseBatchNorm, nn.BatchNorm3d):
    """Batch norm with ghost noise of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="gni",
        label="GNI",
        title="Ghost noise injection",
        equation="y = (x̂ - (m - μ)) / sqrt((s² + ε) / (σ² + ε)) with the moments m, s² of N drawn samples",
        card="ghost-noise.md",
        norm=GhostNoiseBatchNorm,
        noise=GhostNoise,
        placements=("inside", "after", "activation"),
        shorthands={"gni-shift": {"components": "shift"}, "gni-scale": {"components": "scale"}},
        meter=MeterSpec(bounded=False, sampling="replacement"),
    )
)
