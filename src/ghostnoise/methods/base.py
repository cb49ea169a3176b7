"""What all batch norms share: the layer, the checked arguments of a call, and the update of running statistics."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ghostnoise import checks, docstrings
from ghostnoise.engine import fused, general, masks, ranks
from ghostnoise.engine.general import Decide
from ghostnoise.engine.ranks import Extent, Group
from ghostnoise.engine.recompute import remembered
from ghostnoise.history import History
from ghostnoise.masking import mask_of
from ghostnoise.tables import Affine, Moments, counts, normalize, whole_batch
from ghostnoise.torch_private import AnyBatchNorm, batch_norm_state, in_backward
from ghostnoise.tracing import Leaf

# The statistics that the running statistics are updated towards: those of the whole batch with its biased or unbiased
# variance, or the average over samples of those that a function of moments returns, such as those of ghost batches.
Towards: TypeAlias = Literal["whole", "unbiased"] | Callable[[Moments], Moments]


class Call(NamedTuple):
    """The checked arguments that the functions of all batch norms share."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float | None
    eps: float
    channel_dim: int
    extent: Extent

    @property
    def buffers(self) -> fused.Buffers:
        """The running statistics and their count, each of which may be None."""
        return self.running_mean, self.running_var, self.num_batches_tracked

    def train(
        self,
        decide: Decide,
        towards: Towards = "unbiased",
        plan: fused.Plan | None = None,
        remember: Callable[[Moments], None] | None = None,
    ) -> Tensor:
        """Normalize with the map that `decide` returns, and update the running statistics.

        `plan` is the same method as settings of the fused operator, which is used where it can be; a function as
        `towards` must then be that of the plan's ghost batches. `remember` is called with the moments of the samples.
        """
        recomputed = in_backward()
        buffers = (None, None, None) if recomputed else (self.running_mean, self.running_var, self.num_batches_tracked)
        tracks = buffers[0] is not None or buffers[1] is not None or buffers[2] is not None
        if tracks and self.momentum is None and buffers[2] is None:
            raise ValueError("momentum=None: needs num_batches_tracked, the count of the cumulative average")
        alone = self.extent.ranks is None and self.extent.mask is None
        if plan is not None and alone and fused.covers(self.input, self.weight, self.bias):
            x, dim = self.input, self.channel_dim
            x = x if dim == 1 else x.movedim(dim, 1)
            y = fused.run(
                x,
                self.weight,
                self.bias,
                plan,
                decide,
                buffers,
                self.momentum,
                "ghosts" if callable(towards) else towards,
            )
            return y if dim == 1 else y.movedim(1, dim)
        y, m = self.normalize(decide)
        if tracks:
            update_running(*buffers, self.momentum, population(m, towards))
        if remember is not None and not recomputed:
            remember(m)
        return y

    def normalize(self, decide: Decide) -> tuple[Tensor, Moments]:
        """Normalize with the map that `decide` returns; also return the moments of all samples, as constants."""
        return general.run(self.input, decide, (self.weight, self.bias), self.extent, self.channel_dim)

    def infer(self) -> Tensor:
        """Run `torch.nn.functional.batch_norm` with the running buffers, or with the batch statistics without them."""
        mean, var, dim, mask = self.running_mean, self.running_var, self.channel_dim, self.extent.mask
        absent = mean is None and var is None
        if mask is not None and absent:
            return self.normalize(partial(decide_batch_norm, self.eps))[0]
        x = self.input if mask is None else masks.zero(self.input, mask, dim)
        x = x if dim == 1 else x.movedim(dim, 1)  # an exported movedim would be an operator
        y = F.batch_norm(x, mean, var, self.weight, self.bias, absent, 0.0, self.eps)
        y = y if dim == 1 else y.movedim(1, dim)
        return y if mask is None else masks.zero(y, mask, dim)


def decide_batch_norm(eps: float, m: Moments, weight: Tensor | None, bias: Tensor | None) -> Affine:
    """Normalize with the statistics of the whole batch."""
    return normalize(whole_batch(m), eps, 0.0, weight, bias)


def checked(
    name: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    num_batches_tracked: Tensor | None,
    channel_dim: int,
    process_group: Group,
    uneven: bool,
    mask: Tensor | None = None,
) -> Call:
    """Check the arguments that all batch norms share, and in training meet the other ranks."""
    _, spatial = checks.layout(input, name, channel_dim, (running_mean, running_var, weight, bias))
    if type(eps) is not float or not 0 <= eps < torch.inf:
        checks.number("eps", eps, 0)
    if momentum is not None and (type(momentum) is not float or not 0 <= momentum <= 1):
        checks.number("momentum", momentum, 0, 1)
    if mask is None and process_group is None:
        extent = Extent(input.shape, spatial)
    else:
        extent = met(name, input, spatial, channel_dim, process_group if training else None, uneven, mask)
    if training and (extent.mask is not None or not spatial or extent.shape[0] * spatial < 2):
        checks.trainable(extent.shape, name)
        checks.several_values(extent.shape, spatial, extent.counts)
    return Call(
        input, running_mean, running_var, num_batches_tracked, weight, bias, momentum, eps, channel_dim, extent
    )  # fmt: skip


def met(
    name: str,
    input: Tensor,
    spatial: int,
    channel_dim: int,
    process_group: Group,
    uneven: bool,
    mask: Tensor | None,
) -> Extent:
    """Return the extent of the batch that the input is a part of, with its mask, checked."""
    if mask is not None:
        checks.mask(mask, input, name, channel_dim)
    extent = ranks.meet(input, spatial, process_group, uneven, mask)
    if extent.counts is not None:
        checks.some_valid(extent.counts, name)
    return extent


def zeroed(input: Tensor, mask: Tensor | None, name: str, channel_dim: int) -> Tensor:
    """Return the input with 0 at invalid positions, of a function that does nothing else; the mask is checked."""
    if mask is None:
        return input
    checks.mask(mask, input, name, channel_dim)
    checks.some_valid(mask, name)
    return masks.zero(input, mask, channel_dim)


# Running statistics in plain PyTorch; the fused operators update them themselves.


def population(m: Moments, towards: Towards) -> Moments:
    """Return the moments (1, C) that the running statistics are updated towards; NaN for a batch without values."""
    whole = whole_batch(m)
    mean, var, count = whole
    if callable(towards):
        pools, weights = towards(m), counts(m)
        weights = weights / weights.sum().clamp_min(1)
        if pools.mean.shape[0] > 1:
            mean, var = ((weights * table).sum(0, keepdim=True) for table in pools[:2])
    elif towards == "unbiased":
        var = var * (count / (count - 1))
    if isinstance(count, Tensor):
        mean = mean + torch.where(count > 0, 0.0, torch.nan)
    return Moments(mean, var, count)


@torch.no_grad()
def update_running(
    mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, stats: Moments
) -> None:
    """Update running buffers (C,) in place towards `stats` (1, C), and the count, unless `stats` are not finite.

    Does not synchronize with the device. `momentum=None` is the cumulative average.
    """
    checks.writable((mean, var, count), stats.mean)
    pairs = [(old, stat) for old, stat in zip((mean, var), stats[:2], strict=True) if old is not None]
    updated = []
    for old, stat in pairs:
        weight: Any = momentum
        if momentum is None and count is not None:
            weight = (count + 1).to(old.dtype).reciprocal()
        updated.append(old.lerp(stat.to(old.dtype).flatten(), weight))
    # A sum is finite if and only if its terms are; the updated buffers are finite only if the statistics are.
    sums = [table.sum(dtype=stats.mean.dtype) for table in (updated or stats[:2])]
    finite = torch.isfinite(sums[0] + sums[-1])
    for (old, _), new in zip(pairs, updated, strict=True):
        old.copy_(torch.where(finite, new, old))
    if count is not None:
        count.add_(finite)


class Sampled(nn.Module):
    """A layer that `ghostnoise.sampling` can run in eval mode with the statistics of stored samples."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = checks.asking_for_ghost_size(cls.__init__)  # type: ignore[method-assign]

    kept: Moments | None = None  # the samples that `ghostnoise.calibrate` kept
    _sampling: Callable[[Tensor], Tensor] | None = None  # replaces the forward pass in eval mode
    injects_noise: ClassVar[bool] = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: all attributes except the sampler, which belongs to a block of code."""
        return {name: value for name, value in vars(self).items() if name != "_sampling"}

    def stored_noise(
        self, stored: Moments, whole: Moments, ghost_size: int, input: Tensor, generator: Generator | None
    ) -> Affine:
        """Draw noise for the samples of `input` from stored samples, whose pooled moments are `whole` (1, C)."""
        raise NotImplementedError


STORED = ("mean", "var", "counts")


class Remembering(Sampled):
    """A layer with a `history`, which is a part of the state_dict if it is persistent."""

    history: History | None

    def _described_history(self) -> list[str]:
        return [] if self.history is None else [f"history={self.history.size}"]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.history is not None and self.history.persistent:
            destination.update({f"{prefix}history_{name}": table for name, table in self.history.state().items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.history is not None and self.history.persistent:
            keys = {name: f"{prefix}history_{name}" for name in STORED}
            missing = [key for key in keys.values() if key not in state_dict]
            missing_keys.extend(missing if strict else [])
            saved = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
            try:
                self.history.load(saved) if not missing else None
            except ValueError as error:
                error_msgs.append(f"{prefix}history: {error}")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def check_history(history: object) -> None:
    """Check that the history of a function is one that keeps samples."""
    if not isinstance(history, History):
        raise ValueError(
            f"history={history!r}: a function takes a ghostnoise.History, which keeps the samples from call to call; "
            "use history=ghostnoise.History(256) of your own, or a layer, which takes a number"
        )


def stored_samples(history: History, input: Tensor, channel_dim: int, extent: Extent) -> Moments:
    """Return the samples of a history; those of the first pass if this one is recomputed.

    If they all weigh as much as a sample of the input, `n` is an integer, so that they are drawn and pooled faster.
    """
    checks.recordable()
    stored = remembered(partial(history.stored, input.shape[channel_dim], input.device))
    if extent.mask is None and checks.readable(stored.mean) and bool((counts(stored) == extent.spatial).all()):
        stored = stored._replace(n=extent.spatial)
    return stored


def history_of(size: int) -> History | None:
    """Return the history of a layer; None if it has none."""
    return History(size) if checks.history(size) else None


class NormLayer(Sampled, Leaf, AnyBatchNorm):
    """The layer that all batch norms derive from: the state of `nn.BatchNorm*d`, and a forward that is one call.

    A subclass names its function and the attributes that the function takes as keywords. It serves inputs of every
    rank; the layers with 1d, 2d or 3d in their name accept that rank only. The docstring of a subclass describes the
    arguments that are its own; the others are added to it.
    """

    function: ClassVar[Callable[..., Tensor]]
    options: ClassVar[tuple[str, ...]] = ("process_group", "uneven")
    least_ghost_size: ClassVar[int] = 1
    ndims: ClassVar[tuple[int, ...]] = (2, 3, 4, 5)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        docstrings.complete(cls, docstrings.BATCH_NORM, cls.ndims)

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
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        checks.number("eps", eps, 0)
        if momentum is not None:
            checks.number("momentum", momentum, 0, 1)
        checks.flag("uneven", uneven)
        newer: dict[str, Any] = {} if bias else {"bias": False}  # a keyword that older torch does not have
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer)
        self.process_group, self.uneven = ranks.named(process_group), uneven

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize with the statistics of the batch in training, and with the running statistics in eval.

        `mask` (B, *positions) is True at the valid positions of a padded batch; None is that of `ghostnoise.masked`.
        """
        self._check_input_dim(input)
        mask = mask_of(self, input, mask)
        if self._sampling is not None and not self.training:
            name = type(self).__name__
            y = self._sampling(zeroed(input, mask, name, 1))  # the gradient of the weight must not read the padding
            return zeroed(y, mask, name, 1)
        weight, bias, mean, var, count = batch_norm_state(self)
        if self.training and not self.track_running_stats:
            mean = var = count = None
        options: dict[str, Any] = {}
        for name in self.options:
            options[name] = getattr(self, name)
        given = (input, mean, var, weight, bias, self.training, self.momentum, self.eps)
        return self.function(*given, num_batches_tracked=count, mask=mask, **options)

    def extra_repr(self) -> str:
        """Return the settings of `nn.BatchNorm*d` and those of this layer."""
        hidden = ("generator", "history", *NormLayer.options)
        own = [f"{name}={getattr(self, name)!r}" for name in self.options if name not in hidden]
        return ", ".join([super().extra_repr(), *own, *ranks.described(self.process_group, self.uneven)])

    def _check_input_dim(self, input: Tensor) -> None:
        if isinstance(input, Tensor) and input.ndim in self.ndims:
            channels: Any = input.shape[1]
            if isinstance(channels, Tensor) or channels == self.num_features:
                return  # at once, since this runs in every call
        name = type(self).__name__
        checks.floating(input, name)
        if input.ndim not in self.ndims:
            expected = " or ".join(map(str, self.ndims))
            raise ValueError(
                f"{name} got an input of shape {tuple(input.shape)}: expected {expected}D input (got {input.ndim}D "
                "input); use the 1d, 2d or 3d layer that fits, or reshape"
            )
        raise ValueError(
            f"{name} got {channels} channels in dimension 1 of an input of shape {tuple(input.shape)}: must be "
            f"num_features={self.num_features}; build the layer for {channels}, or move the channels there"
        )
