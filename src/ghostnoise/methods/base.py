"""What all batch norms share: the layer, its running statistics, and the calls of the engine."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ghostnoise import checks, docstrings
from ghostnoise.engine import op, ranks, repeat
from ghostnoise.engine.backends.base import State
from ghostnoise.engine.masks import zero_invalid
from ghostnoise.engine.plan import LiveReference, Noise, Normalizer, Plan, Reference
from ghostnoise.engine.ranks import Extent, Group
from ghostnoise.engine.repeat import After, Repeats
from ghostnoise.engine.running import Population, Running, Update
from ghostnoise.masking import active as masks_active
from ghostnoise.masking import mask_of
from ghostnoise.statistics.moments import Stored
from ghostnoise.statistics.samples import Exclusive, GhostBatch
from ghostnoise.torch_private import AnyBatchNorm, batch_norm_state, in_backward
from ghostnoise.tracing import Leaf

# What `NormLayer` takes from its attributes, beside the options of its function.
SETTINGS = ("training", "momentum", "eps", "num_features", "track_running_stats")


class Call(NamedTuple):
    """The checked arguments that the functions of all batch norms share."""

    input: Tensor
    running: Running
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    channel_dim: int
    extent: Extent

    def ghost_values(self, ghost_size: int | None) -> Tensor | None:
        """Return the numbers of valid positions of ghost batches (G, 1); None without a mask."""
        counts = self.extent.counts
        return None if counts is None else GhostBatch(ghost_size).values(counts)

    def other_values(self, ghost_size: int | None) -> Tensor | None:
        """Return the numbers of valid positions of the other samples of the ghost batch (B, 1); None without a mask.

        It is infinite for samples that have no valid positions themselves.
        """
        counts = self.extent.counts
        return None if counts is None else Exclusive(ghost_size).values(counts).where(counts > 0, torch.inf)

    def train(
        self,
        normalizer: Normalizer,
        population: Population,
        draw: Callable[[], Noise] | None = None,
        reference: LiveReference | None = None,
        after: After | None = None,
    ) -> Tensor:
        """Normalize, and update the running buffers, if any, towards the `population` moments.

        A layer may run this again with other tensors, without the function that calls it (`NormLayer.repeatable`). It
        then draws noise with `draw`, which must not refer to the input, and calls `after` with the pooled statistics
        and the running statistics that were used.
        """
        plan = self._plan(normalizer, population, None if draw is None else draw(), reference)
        y, measured = self.normalize(plan)
        if after is not None:
            after(measured.pooled, measured.reference)
        if self.extent.ranks is None and self.extent.mask is None and not torch.compiler.is_compiling():
            repeat.record(plan, draw, after, y)
        return y

    def train_and_measure(
        self,
        normalizer: Normalizer,
        population: Population,
        noise: Noise | None = None,
        reference: Reference | LiveReference | None = None,
    ) -> tuple[Tensor, op.Measured]:
        """Run `train`, and also return the statistics of the batch."""
        return self.normalize(self._plan(normalizer, population, noise, reference))

    def _plan(
        self,
        normalizer: Normalizer,
        population: Population,
        noise: Noise | None,
        reference: Reference | LiveReference | None,
    ) -> Plan:
        (mean, var, count, momentum), update = self.running, None
        if not (mean is None and var is None and count is None) and not is_recomputed():
            if momentum is None and count is None:
                raise ValueError("momentum=None: needs num_batches_tracked, the count of the cumulative average")
            update = Update(self.running, population)
        return Plan(normalizer, noise, reference, update)

    def normalize(self, plan: Plan) -> tuple[Tensor, op.Measured]:
        """Normalize as the plan says, and also return the statistics of the batch."""
        _, _, ranks, mask = self.extent
        return op.normalize(self.input, plan, self.weight, self.bias, self.channel_dim, ranks, mask)

    def infer(self) -> Tensor:
        """Run `torch.nn.functional.batch_norm` with the running buffers, or with the batch statistics without them."""
        running, dim, mask = self.running, self.channel_dim, self.extent.mask
        if mask is not None:
            if running.is_absent:
                return self.normalize(Plan(Normalizer(GhostBatch(), self.eps)))[0]
            unmasked = self._replace(input=mask.zero(self.input, dim), extent=self.extent._replace(mask=None))
            return mask.zero(unmasked.infer(), dim)
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
    mask: Tensor | None = None,
) -> Call:
    """Check the arguments that all batch norms share, and in training meet the other ranks."""
    _, spatial = checks.layout(input, name, channel_dim, (running_mean, running_var, weight, bias))
    checks.number("eps", eps, 0)
    if momentum is not None:
        checks.number("momentum", momentum, 0, 1)
    extent = met(name, input, spatial, channel_dim, process_group if training else None, uneven, mask)
    if training and (extent.mask is not None or not spatial or extent.shape[0] * spatial < 2):
        checks.trainable(extent.shape, name)
        checks.several_values(extent.shape, spatial, extent.counts)
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    return Call(input, running, weight, bias, eps, channel_dim, extent)


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
    if mask is None and process_group is None:
        return Extent(input.shape, spatial)
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
    return zero_invalid(input, mask, channel_dim)


def is_recomputed() -> bool:
    """Return whether this forward pass runs inside a backward pass, as the recomputation of a checkpoint does.

    `torch.compile` decides on recomputation after it has captured the update, and runs the update once.
    """
    return not torch.compiler.is_compiling() and in_backward()


# The moments of a batch that the running statistics are updated towards.

whole_batch = Population()
whole_batch_unbiased = Population(unbiased=True)  # as in `nn.BatchNorm*d`
ghost_average = Population(ghosts=True)


class Sampled(nn.Module):
    """A layer that `ghostnoise.sampling` can run in eval mode with the statistics of stored samples."""

    kept: Stored | None = None  # the samples that `ghostnoise.calibrate` kept
    _sampling: Callable[[Tensor], Tensor] | None = None  # replaces the forward pass in eval mode
    injects_noise: ClassVar[bool] = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: all attributes except the sampler, which belongs to a block of code."""
        return {name: value for name, value in vars(self).items() if name != "_sampling"}

    def stored_noise(
        self, stored: Stored, ghost_size: int, input: Tensor, spatial: int | Tensor, generator: Generator | None
    ) -> Noise | None:
        """Draw noise for the samples of `input` from stored samples; None if the layer does not inject noise.

        `spatial` is the number of positions of the stored samples, or a tensor with their mean if they differ.
        """
        return None


class NormLayer(Sampled, Leaf, AnyBatchNorm):
    """The layer that all batch norms derive from: the state of `nn.BatchNorm*d`, and a forward that is one call.

    A subclass names its function and the attributes that the function takes as keywords; those that start with an
    underscore are internal state. It serves inputs of every rank; the layers with 1d, 2d or 3d in their name accept
    that rank only. The docstring of a subclass describes the arguments that are its own; the others are added to it.
    """

    _repeats: Repeats | None = None

    function: ClassVar[Callable[..., Tensor]]
    options: ClassVar[tuple[str, ...]] = ("process_group", "uneven")
    repeatable: ClassVar[bool] = False  # whether the function does nothing in training but check, and call `Call.train`
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
        if mask is None and masks_active():
            self._check_input_dim(input)  # an input of a wrong rank has no mask either
        mask, training = mask_of(self, input, mask), self.training
        state = batch_norm_state(self)
        if training and not self.track_running_stats:
            state = *state[:2], None, None, None
        if not training or mask is not None or not self.repeatable or torch.compiler.is_compiling():
            return self._run(input, state, mask)
        if self._repeats is None:
            self._repeats = Repeats((*SETTINGS, *self.options))
        y = self._repeats.run(self, input, state)
        return self._repeats.record(self, input, state, self._run) if y is None else y

    def _run(self, input: Tensor, state: State, mask: Tensor | None = None) -> Tensor:
        """Check the input, and call the function of the layer."""
        self._check_input_dim(input)
        if self._sampling is not None and not self.training:
            name = type(self).__name__
            y = self._sampling(zeroed(input, mask, name, 1))  # the gradient of the weight must not read the padding
            return zeroed(y, mask, name, 1)
        weight, bias, mean, var, count = state
        options = {name: getattr(self, name) for name in self.options}
        given = (input, mean, var, weight, bias, self.training, self.momentum, self.eps)
        return self.function(*given, num_batches_tracked=count, mask=mask, **options)

    def extra_repr(self) -> str:
        """Return the settings of `nn.BatchNorm*d` and those of this layer."""
        hidden = ("generator", "history", *NormLayer.options)
        shown = [name for name in self.options if name not in hidden and not name.startswith("_")]
        own = [f"{name}={getattr(self, name)!r}" for name in shown]
        return ", ".join([super().extra_repr(), *own, *ranks.described(self.process_group, self.uneven)])

    def _check_input_dim(self, input: Tensor) -> None:
        name = type(self).__name__
        checks.floating(input, name)
        if input.ndim not in self.ndims:
            expected = " or ".join(map(str, self.ndims))
            raise ValueError(
                f"{name} got an input of shape {tuple(input.shape)}: expected {expected}D input (got {input.ndim}D "
                "input); use the 1d, 2d or 3d layer that fits, or reshape"
            )
        channels = input.shape[1]
        if not checks.is_recorded(channels) and channels != self.num_features:
            raise ValueError(
                f"{name} got {channels} channels in dimension 1 of an input of shape {tuple(input.shape)}: must be "
                f"num_features={self.num_features}; build the layer for {channels}, or move the channels there"
            )
