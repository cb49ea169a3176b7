"""The composite form of a normalizer, in differentiable PyTorch: for `torch.func` and derivatives of higher order."""

import torch
from torch import Tensor

from ghostnoise.engine import steps
from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.plan import Plan
from ghostnoise.statistics.moments import Moments, arithmetic_dtype, expand_pools


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> tuple[Tensor, Moments, Moments]:
    """Return y, and the moments of the samples and of the pools as constants."""
    # Converted once: the gradients of all uses of a tensor are then summed before they are rounded to its dtype.
    dtype = arithmetic_dtype(x)
    wide = x.to(dtype)
    weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (weight, bias))
    moments = steps.valid_moments(aten.measure(wide), plan.valid, wide)
    affine, pooled, _, _ = steps.decide(ATEN, moments, weight, bias, plan, wide)
    shared = plan.normalizer.contributors.samples_per_pool(x.shape[0])
    y = aten.apply(wide, *(expand_pools(table, x.shape[0], shared) for table in affine)).to(x.dtype)
    return y, moments.detach(), pooled.detach()


def gradient(
    plan: Plan, x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias, differentiable themselves."""
    given = [tensor for tensor in (weight, bias) if tensor is not None]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        left = iter(parameters)
        own_weight = None if weight is None else next(left)
        return normalize(x, own_weight, None if bias is None else next(left), plan)[0]

    dx, *gradients = torch.func.vjp(run, x, *given)[1](dy)
    left = iter(gradients)
    return dx, None if weight is None else next(left), None if bias is None else next(left)
