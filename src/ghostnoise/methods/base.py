"""What all batch norms share: the layer, its running statistics, and the calls of the engine."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise import checks, docstrings
from ghostnoise.engine import op, ranks
from ghostnoise.engine.plan import Noise, Normalizer, Plan, Reference
from ghostnoise.engine.ranks import Extent, Group
from ghostnoise.statistics.moments import Moments, table_dtype
from ghostnoise.statistics.samples import GhostBatch
from ghostnoise.torch_private import AnyBatchNorm, in_backward
from ghostnoise.tracing import Leaf


class Running(NamedTuple):
    """The buffers of a batch norm, each of which may be None, and the momentum of their update."""

    mean: Tensor | None
    var: Tensor | None
    num_batches_tracked: Tensor | None = None
    momentum: float | None = 0.1

    @property
    def is_absent(self) -> bool:
        """Whether there are no running statistics to normalize with at inference."""
        return self.mean is None and self.var is None

    def moments(self, device: torch.device) -> Moments | None:
        """Return the running statistics (C,) in the dtype of tables, as they are now; None if one is absent."""
        if self.mean is None or self.var is None:
            return None
        table = table_dtype(device)
        return Moments(self.mean.detach().to(table, copy=True), self.var.detach().to(table, copy=True))

    def update(self, stats: Moments, measured: op.Measured) -> None:
        """Update the buffers towards the batch's `stats` (1, C), unless these are not finite."""
        if self.momentum is None and self.num_batches_tracked is None:
            raise ValueError("momentum=None: needs num_batches_tracked, the count of the cumulative average")
        checks.writable([self.mean, self.var, self.num_batches_tracked], stats.mean)
        measured.backend.update_running(self.mean, self.var, self.num_batches_tracked, self.momentum, stats)


class Call(NamedTuple):
    """The checked arguments that the functions of all batch norms share."""

    input: Tensor
    running: Running
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    channel_dim: int
    extent: Extent

    def train(
        self,
        normalizer: Normalizer,
        population: "Population",
        noise: Noise | None = None,
        reference: Reference | None = None,
    ) -> Tensor:
        """Normalize, and update the running buffers, if any, towards the `population` moments."""
        return self.train_and_measure(normalizer, population, noise, reference)[0]

    def train_and_measure(
        self,
        normalizer: Normalizer,
        population: "Population",
        noise: Noise | None = None,
        reference: Reference | None = None,
    ) -> tuple[Tensor, op.Measured]:
        """Run `train`, and also return the statistics of the batch."""
        plan, running, extent = Plan(normalizer, noise, reference), self.running, self.extent
        y, measured = op.normalize(self.input, plan, self.weight, self.bias, self.channel_dim, extent.ranks)
        if (not running.is_absent or running.num_batches_tracked is not None) and not is_recomputed():
            running.update(population(measured, extent), measured)
        return y, measured

    def infer(self) -> Tensor:
        """Run `torch.nn.functional.batch_norm` with the running buffers, or with the batch statistics without them."""
        running, dim = self.running, self.channel_dim
        folded = self.input if dim == 1 else self.input.movedim(dim, 1)  # an exported movedim would be an operator
        y = F.batch_norm(folded, running.mean, running.var, self.weight, self.bias, running.is_absent, 0.0, self.eps)
        return y if dim == 1 else y.movedim(1, dim)


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
) -> Call:
    """Check the arguments that all batch norms share, and in training meet the other ranks."""
    channels = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    _, spatial = checks.layout(input, name, channel_dim, channels)
    checks.number("eps", eps, 0)
    extent = ranks.meet(input, spatial, process_group if training else None, uneven)
    if training:
        checks.trainable(extent.shape, name)
        checks.several_values(extent.shape, spatial)
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    return Call(input, running, weight, bias, eps, channel_dim, extent)


def is_recomputed() -> bool:
    """Return whether this forward pass runs inside a backward pass, as the recomputation of a checkpoint does.

    `torch.compile` decides on recomputation after it has captured the update, and runs the update once.
    """
    return not torch.compiler.is_compiling() and in_backward()


# What the running statistics are updated towards, given the statistics of the batch.

Population: TypeAlias = Callable[[op.Measured, Extent], Moments]


def whole_batch(measured: op.Measured, extent: Extent) -> Moments:
    """Return the moments of the whole batch, the variance biased."""
    return measured.whole()


def whole_batch_unbiased(measured: op.Measured, extent: Extent) -> Moments:
    """Return the moments of the whole batch, the variance unbiased, as in `nn.BatchNorm*d`."""
    count = extent.shape[0] * extent.spatial
    mean, var = measured.whole()
    return Moments(mean, var * (count / (count - 1)))


def ghost_average(ghost_size: int | None) -> Population:
    """Return the average over samples of their ghost batches' means, and of their biased variances."""
    return partial(_ghost_average, GhostBatch(ghost_size))


def _ghost_average(contributors: GhostBatch, measured: op.Measured, extent: Extent) -> Moments:
    return Moments(*(contributors.average(table, extent.shape[0]) for table in measured.pooled))


class NormLayer(Leaf, AnyBatchNorm):
    """The layer that all batch norms derive from: the state of `nn.BatchNorm*d`, and a forward that is one call.

    A subclass names its function and the attributes that the function takes as keywords; those that start with an
    underscore are internal state. It serves inputs of every rank; the layers with 1d, 2d or 3d in their name accept
    that rank only. The docstring of a subclass describes the arguments that are its own; the others are added to it.
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
        checks.flag("uneven", uneven)
        newer: dict[str, Any] = {} if bias else {"bias": False}  # a keyword that older torch does not have
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer)
        self.process_group, self.uneven = ranks.named(process_group), uneven

    def forward(self, input: Tensor) -> Tensor:
        """Normalize with the statistics of the batch in training, and with the running statistics in eval."""
        self._check_input_dim(input)
        tracks = self.track_running_stats or not self.training
        return self.function(
            input,
            self.running_mean if tracks else None,
            self.running_var if tracks else None,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
            num_batches_tracked=self.num_batches_tracked if tracks else None,
            **{name: getattr(self, name) for name in self.options},
        )

    def extra_repr(self) -> str:
        """Return the settings of `nn.BatchNorm*d` and those of this layer."""
        hidden = ("generator", *NormLayer.options)
        shown = [name for name in self.options if name not in hidden and not name.startswith("_")]
        own = [f"{name}={getattr(self, name)!r}" for name in shown]
        return ", ".join([super().extra_repr(), *own, *ranks.described(self.process_group, self.uneven)])

    def _check_input_dim(self, input: Tensor) -> None:
        name = type(self).__name__
        checks.floating(input, name)
        shape = tuple(input.shape)
        if input.ndim not in self.ndims:
            expected = " or ".join(map(str, self.ndims))
            raise ValueError(
                f"{name} got an input of shape {shape}: expected {expected}D input (got {input.ndim}D input); use the "
                "1d, 2d or 3d layer that fits, or reshape"
            )
        if not checks.traced() and input.shape[1] != self.num_features:
            raise ValueError(
                f"{name} got {input.shape[1]} channels in dimension 1 of an input of shape {shape}: must be "
                f"num_features={self.num_features}; build the layer for {input.shape[1]}, or move the channels there"
            )
