"""Stateless calls, one per method: they check input, draw, and update the running buffers that they are given.

Normalizers take the arguments of `torch.nn.functional.batch_norm`, in its order, and keyword-only extras.

>>> import torch
>>> from ghostnoise import functional
>>> x = torch.randn(64, 3, 8, 8)
>>> functional.ghost_noise(x, ghost_size=16).shape
torch.Size([64, 3, 8, 8])
"""

from ghostnoise.element import additive_gaussian_noise, noisy_dropout
from ghostnoise.functional.decomposition import Decomposition, decompose
from ghostnoise.functional.noise import analytical_ghost_noise, ghost_noise
from ghostnoise.functional.noisy_norm import analytical_ghost_noise_batch_norm, ghost_noise_batch_norm
from ghostnoise.functional.norm import batch_norm, eval_norm, exclusive_batch_norm, ghost_batch_norm
from ghostnoise.weights import standardize_weight

__all__ = [
    "Decomposition",
    "additive_gaussian_noise",
    "analytical_ghost_noise",
    "analytical_ghost_noise_batch_norm",
    "batch_norm",
    "decompose",
    "eval_norm",
    "exclusive_batch_norm",
    "ghost_batch_norm",
    "ghost_noise",
    "ghost_noise_batch_norm",
    "noisy_dropout",
    "standardize_weight",
]
