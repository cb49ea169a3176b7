"""EvalNorm: let inference depend on the sample as training does."""

import sys
from typing import Any

import torch
from torch import nn

from ghostnoise import checks, functional
from ghostnoise.distributed import Group
from ghostnoise.layers.batch_norm import BatchNorm

FOLDING = ("fuse_conv_bn_eval", "fuse_linear_bn_eval")


class EvalNorm(BatchNorm):
    """Train as ghost batch norm; in eval, mix each sample's own moments into the running statistics (EN).

    Parameters, buffers and state_dict are those of `nn.BatchNorm*d`; the eval output is not:

        mean = (1-α)·running_mean + α·mean_b
        var  = (1-α)·running_var + α·var_b + α(1-α)·(mean_b - running_mean)²

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `nn.BatchNorm*d`.
        process_group, uneven: as in `BatchNorm*d`.
        ghost_size: samples in a ghost batch, N; None: the whole batch is one, and alpha is needed.
        alpha: the sample's share; 1/N, its share in training, if None.
    """

    function = staticmethod(functional.eval_norm)
    options = ("ghost_size", "alpha", *BatchNorm.options)

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
        alpha: float | None = None,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        checks.share(alpha, self.ghost_size)
        self.alpha = alpha

    def _get_eps(self) -> float:
        # torch folds a batch norm into a convolution from its attributes alone, and there is nothing else to notice it.
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code.co_name in FOLDING:
            raise ValueError(
                f"{type(self).__name__} in {sys._getframe(1).f_code.co_name}: its eval output depends on each sample, "
                "so no weights stand for it; ghostnoise.revert(model) makes it plain batch norm, whose eval differs"
            )
        value: float = vars(self)["eps"]
        return value

    def _set_eps(self, value: float) -> None:
        vars(self)["eps"] = value

    eps: Any = property(_get_eps, _set_eps)


class EvalNorm1d(EvalNorm, nn.BatchNorm1d):
    """EvalNorm of (B, C) and (B, C, L)."""


class EvalNorm2d(EvalNorm, nn.BatchNorm2d):
    """EvalNorm of (B, C, H, W)."""


class EvalNorm3d(EvalNorm, nn.BatchNorm3d):
    """EvalNorm of (B, C, D, H, W)."""
