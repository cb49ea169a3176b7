"""Ghost batch norms as other libraries have them, under the same class paths.

pytorch_tabular and Composer cannot be installed beside the versions of torch and torchmetrics that the tests use, so
modules with the same names, attributes and behaviour are defined here. pytorch-tabnet itself is installed.
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
