"""Ghost batch norms and batch renormalization as other libraries have them, under the same class paths.

torchrl is not installed, and pytorch_tabular and Composer cannot be installed beside the versions of torch and
torchmetrics that the tests use, so modules with the same names, attributes and behaviour are defined here.
pytorch-tabnet itself is installed.
"""

import math

import torch
from torch import nn


class Divided(nn.Module):
    """Divide the batch with `torch.chunk`, and call the batch norm for each part."""

    def parts(self, x, size):
        return x.chunk(math.ceil(x.shape[0] / size), 0)


class GBN(Divided):
    """As in pytorch_tabular: divides in training alone."""

    __module__ = "pytorch_tabular.models.common.layers.batch_norm"

    def __init__(self, input_dim, virtual_batch_size=512):
        super().__init__()
        self.input_dim, self.virtual_batch_size = input_dim, virtual_batch_size
        self.bn = nn.BatchNorm1d(input_dim)

    def forward(self, x):
        if not self.training:
            return self.bn(x)
        return torch.cat([self.bn(part) for part in self.parts(x, self.virtual_batch_size)])


class _GhostBatchNorm(Divided):
    """As in Composer: wraps a batch norm, and divides its momentum by the number of parts."""

    __module__ = "composer.algorithms.ghost_batchnorm.ghost_batchnorm"

    def __init__(self, base_batchnorm, ghost_batch_size=32):
        super().__init__()
        self.ghost_batch_size, self.batchnorm = ghost_batch_size, base_batchnorm
        self.batchnorm._already_ghost_batchnormed = True

    def forward(self, input):
        if input.shape[0] < self.ghost_batch_size:
            raise ValueError("the batch is smaller than a ghost batch")
        parts, momentum = self.parts(input, self.ghost_batch_size), self.batchnorm.momentum
        if self.training:
            self.batchnorm.momentum = momentum / len(parts)
        y = torch.cat([self.batchnorm(part) for part in parts])
        self.batchnorm.momentum = momentum
        return y


class ComposerGhostBatchNorm2d(_GhostBatchNorm):
    __module__ = _GhostBatchNorm.__module__
    __qualname__ = "GhostBatchNorm2d"


class BatchRenorm1d(nn.Module):
    """As in torchrl, for (B, C). The number of batches divided by `warmup_steps` is a factor that is never limited."""

    __module__ = "torchrl.modules.models.batchrenorm"

    def __init__(
        self, num_features, *, momentum=0.01, eps=1e-5, max_r=3.0, max_d=5.0, warmup_steps=10000, smooth=False
    ):
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.max_r, self.max_d, self.warmup_steps, self.smooth = max_r, max_d, warmup_steps, smooth
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))

    def forward(self, x):
        std = (self.running_var + self.eps).sqrt()
        if not self.training:
            return self.weight * (x - self.running_mean) / std + self.bias
        mean, var = x.mean(0), x.var(0, correction=0)
        steps = self.num_batches_tracked
        factor = steps / self.warmup_steps if self.smooth else steps // self.warmup_steps
        own = (var + self.eps).sqrt()
        r = 1 + ((own.detach() / std).clamp(1 / self.max_r, self.max_r) - 1) * factor
        d = ((mean.detach() - self.running_mean) / std).clamp(-self.max_d, self.max_d) * factor
        y = (x - mean) / own * r + d
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (len(x) / (len(x) - 1)), self.momentum)
            self.num_batches_tracked += 1
        return self.weight * y + self.bias
