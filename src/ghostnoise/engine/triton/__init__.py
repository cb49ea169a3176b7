"""The operators on CUDA and ROCm devices, as Triton kernels."""

from ghostnoise.engine.triton.operators import register, unavailable

__all__ = ["register", "unavailable"]
