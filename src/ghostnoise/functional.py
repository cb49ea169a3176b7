"""Stateless functions, one for each method: they check the input, draw, and update the running buffers given to them.

Normalizers take the arguments of `torch.nn.functional.batch_norm`, in its order, and keyword-only options. Every method
defines its own function (`ghostnoise.methods`); this module collects them.

>>> import torch
>>> from ghostnoise import functional
>>> x = torch.randn(64, 3, 8, 8)
>>> functional.ghost_noise(x, ghost_size=16).shape
torch.Size([64, 3, 8, 8])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # exports: begin, written by tools/exports.py
    from ghostnoise.laws import LawDraws as LawDraws
    from ghostnoise.methods.analytical import analytical_ghost_noise as analytical_ghost_noise
    from ghostnoise.methods.analytical import analytical_ghost_noise_batch_norm as analytical_ghost_noise_batch_norm
    from ghostnoise.methods.batch_norm import batch_norm as batch_norm
    from ghostnoise.methods.batch_renorm import batch_renorm as batch_renorm
    from ghostnoise.methods.distribution_uncertainty import distribution_uncertainty as distribution_uncertainty
    from ghostnoise.methods.elementwise import additive_gaussian_noise as additive_gaussian_noise
    from ghostnoise.methods.elementwise import noisy_dropout as noisy_dropout
    from ghostnoise.methods.eval_norm import eval_norm as eval_norm
    from ghostnoise.methods.exclusive_batch_norm import exclusive_batch_norm as exclusive_batch_norm
    from ghostnoise.methods.ghost_batch_norm import Decomposition as Decomposition
    from ghostnoise.methods.ghost_batch_norm import decompose as decompose
    from ghostnoise.methods.ghost_batch_norm import ghost_batch_norm as ghost_batch_norm
    from ghostnoise.methods.ghost_noise import ghost_noise as ghost_noise
    from ghostnoise.methods.ghost_noise import ghost_noise_batch_norm as ghost_noise_batch_norm
    from ghostnoise.methods.micro_batch_norm import micro_batch_norm as micro_batch_norm
    from ghostnoise.methods.mix_style import mix_style as mix_style
    from ghostnoise.methods.prediction_time_batch_norm import prediction_time_batch_norm as prediction_time_batch_norm
    from ghostnoise.methods.shuffled_ghost_batch_norm import shuffled_ghost_batch_norm as shuffled_ghost_batch_norm
    from ghostnoise.methods.weight_standardization import standardize_weight as standardize_weight
    # exports: end
else:
    from ghostnoise.methods import registry

    __all__ = sorted(registry.functions())

    def __getattr__(name: str) -> Any:
        try:
            return registry.functions()[name]
        except KeyError:
            raise AttributeError(f"module 'ghostnoise.functional' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return __all__
