"""Prediction-time batch normalization: inference uses the statistics of the test batch, with the running ones as prior.

Schneider et al., *Improving robustness against common corruptions by covariate shift adaptation* (2020); Nado et al.,
*Evaluating prediction-time batch normalization for robustness under covariate shift* (2020).
"""

import math
from functools import partial

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine.fused import Plan
from ghostnoise.engine.ranks import Group
from ghostnoise.methods.base import NormLayer, checked, decide_batch_norm
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.tables import Affine, Moments, counts, normalize, whole_batch

__all__ = [
    "PredictionTimeBatchNorm",
    "PredictionTimeBatchNorm1d",
    "PredictionTimeBatchNorm2d",
    "PredictionTimeBatchNorm3d",
    "prediction_time_batch_norm",
]


def prediction_time_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    prior_samples: float = 16.0,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Train as `batch_norm`; in evaluation, average the statistics of the batch with the running statistics.

        mean = (n₀·running_mean + n·mean_B) / (n₀ + n)      var = (n₀·running_var + n·var_B) / (n₀ + n)

    n is the number of samples in the batch, n₀ is `prior_samples`: 0 uses the batch alone, infinity is the evaluation
    of `batch_norm`. Evaluation does not change the buffers; the gradient flows through the statistics of the batch,
    which are those of this process. Without running buffers, evaluation is that of `batch_norm`, and so are shapes and
    the other arguments.
    """
    _check(prior_samples)
    call = checked(
        "prediction_time_batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps,
        num_batches_tracked, channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if training:
        return call.train(partial(decide_batch_norm, eps), plan=Plan(eps))
    if running_mean is None or running_var is None or math.isinf(prior_samples) or input.numel() == 0:
        return call.infer()
    if prior_samples == 0 and call.extent.shape[0] * call.extent.spatial == 1:
        raise ValueError(
            f"prior_samples=0 with an input of shape {tuple(input.shape)}: the statistics of a single value per "
            "channel would normalize it to zero; give a larger batch, or prior_samples=16"
        )
    return call.normalize(partial(_decide, eps, float(prior_samples), running_mean, running_var))[0]


def _decide(
    eps: float,
    prior: float,
    running_mean: Tensor,
    running_var: Tensor,
    m: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Affine:
    batch, masked = whole_batch(m), isinstance(m.n, Tensor) and m.n.ndim > 0
    samples = (counts(m) > 0).sum(dtype=m.mean.dtype) if masked else m.mean.shape[0]
    share = samples / (prior + samples)
    mean, var = (buffer.detach().to(m.mean.dtype)[None] for buffer in (running_mean, running_var))
    stats = Moments(mean + share * (batch.mean - mean), var + share * (batch.var - var))
    return normalize(stats, eps).then(weight, bias)


def _check(prior_samples: float) -> None:
    if not (isinstance(prior_samples, float) and prior_samples == math.inf):
        checks.number("prior_samples", prior_samples, 0)


class PredictionTimeBatchNorm(NormLayer):
    """Train as batch norm; in eval, average the statistics of the batch with the running statistics (PTBN).

        mean = (n₀·running_mean + n·mean_B) / (n₀ + n)      var = (n₀·running_var + n·var_B) / (n₀ + n)

    For inputs whose distribution has shifted since training, such as images with noise or blur. Parameters, buffers and
    state_dict are those of `nn.BatchNorm*d`; the eval output depends on the other samples of the batch. So these
    layers are not instances of `nn.BatchNorm1d`, `2d` or `3d`: code that folds such layers leaves them alone.

    Args:
        prior_samples: the number of samples n₀ that the running statistics count for, beside the n of the batch; 0 uses
            the batch alone, `float("inf")` the running statistics alone.

    Examples:
        >>> layer = PredictionTimeBatchNorm2d(16, prior_samples=0).eval()
        >>> y = layer(torch.randn(64, 16, 8, 8) + 3)
        >>> bool(y.mean().abs() < 1e-5)
        True
    """

    function = staticmethod(prediction_time_batch_norm)
    options = ("prior_samples", *NormLayer.options)

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
        prior_samples: float = 16.0,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        _check(prior_samples)
        self.prior_samples = prior_samples


class PredictionTimeBatchNorm1d(PredictionTimeBatchNorm):
    """Prediction-time batch norm of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class PredictionTimeBatchNorm2d(PredictionTimeBatchNorm):
    """Prediction-time batch norm of (B, C, H, W)."""

    ndims = (4,)


class PredictionTimeBatchNorm3d(PredictionTimeBatchNorm):
    """Prediction-time batch norm of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="ptbn",
        label="PTBN",
        title="Prediction-time batch normalization",
        equation="BN in training; in eval, statistics (n₀·running + n·batch) / (n₀ + n) of a batch of n samples",
        card="prediction-time-batch-norm.md",
        norm=PredictionTimeBatchNorm,
        changes_inference=True,
    )
)
