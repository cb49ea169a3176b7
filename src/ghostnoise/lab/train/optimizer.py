"""The optimizer of a recipe, and the learning rate of each step."""

import math

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ghostnoise.lab.config.schema import OptimSettings


def build(model: nn.Module, settings: OptimSettings) -> Optimizer:
    """SGD or AdamW; weight decay on weights alone: gains and biases have one dimension or none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [
        {"params": weights, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    if settings.name == "adamw":
        betas, eps = settings.betas or (0.9, 0.999), settings.eps or 1e-8
        return AdamW(groups, lr=settings.lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
    momentum, nesterov = settings.momentum or 0.0, bool(settings.nesterov)
    return SGD(groups, lr=settings.lr, momentum=momentum, nesterov=nesterov, fused=fused)


def rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """The learning rate of `step`, from 0: up to the peak in `warmup` steps, then down to 0 by half a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def set_rate(optimizer: Optimizer, value: float) -> None:
    """Use this learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = value
