"""Plain batch norm on our engine: the base of the layers that hold batch-norm state."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ghostnoise import distributed, functional
from ghostnoise.distributed import Group
from ghostnoise.tracing import Leaf


class BatchNorm(Leaf, nn.modules.batchnorm._BatchNorm):
    """Normalize each channel with the mean and variance of the whole batch, then apply weight and bias.

    Arguments, parameters, buffers, state_dict and eval output are those of the `nn.BatchNorm*d` that it subclasses.
    Three things differ in training: statistics are accurate where |mean| is large against std; a batch whose statistics
    are not finite leaves the running buffers as they were; and so does a forward that runs inside a backward, which is
    a recomputation of activation checkpointing: each batch counts once.

    With a `process_group`, training takes the batch of all its ranks for one batch, as `nn.SyncBatchNorm` does, and on
    CPUs too: all of them must run the layer, forward and backward.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `nn.BatchNorm*d`.
        process_group: the ranks that share a batch: None is this process alone, "world" all, or a process group.
        uneven: let ranks hold different numbers of samples, or none, and exchange these numbers first; without, they
            must be equal, and nothing notices if they are not.

    A subclass names its function and the attributes that the function takes as keywords. It is the layer of every
    rank; those with 1d, 2d or 3d in their name take that rank alone.
    """

    function: ClassVar[Callable[..., Tensor]] = staticmethod(functional.batch_norm)
    options: ClassVar[tuple[str, ...]] = ("process_group", "uneven")

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
        newer: dict[str, Any] = {} if bias else {"bias": False}  # a keyword that older torch lacks
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer)
        self.process_group, self.uneven = distributed.named(process_group), uneven

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the batch's statistics in training, with the running ones in eval."""
        self._check_input_dim(x)
        tracks = self.track_running_stats or not self.training
        return self.function(
            x,
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
        """The settings of `nn.BatchNorm*d`, and this layer's own."""
        apart = ("generator", *BatchNorm.options)
        own = [f"{name}={getattr(self, name)!r}" for name in self.options if name not in apart]
        return ", ".join([super().extra_repr(), *own, *distributed.described(self.process_group, self.uneven)])

    def _check_input_dim(self, input: Tensor) -> None:
        name, shape = type(self).__name__, tuple(input.shape)
        try:
            super()._check_input_dim(input)
        except NotImplementedError:  # any rank: the function says which
            pass
        except ValueError as error:
            raise ValueError(
                f"{name} got an input of shape {shape}: {error}; use the 1d, 2d or 3d layer that fits, or reshape"
            ) from None
        if input.ndim > 1 and input.shape[1] != self.num_features:
            raise ValueError(
                f"{name} got {input.shape[1]} channels in dimension 1 of an input of shape {shape}: must be "
                f"num_features={self.num_features}; build the layer for {input.shape[1]}, or move the channels there"
            )


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    """Batch norm of (B, C) and (B, C, L)."""


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    """Batch norm of (B, C, H, W)."""


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    """Batch norm of (B, C, D, H, W)."""
