"""The backend for GPUs (CUDA, ROCm): `Aten` with its passes and its fused calls replaced by Triton kernels."""

import torch
from torch import Tensor

from ghostnoise.engine.backends.base import Affine, Capabilities, Gradients, Normalized, Saved
from ghostnoise.engine.backends.triton import fused
from ghostnoise.engine.backends.triton.kernels import INTERPRETED, triton
from ghostnoise.engine.backends.triton.passes import TritonPasses, has_layout
from ghostnoise.engine.plan import Noise, Plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Triton(TritonPasses):
    """Passes over x, and whole layers in a few launches."""

    name = "triton"
    capabilities = Capabilities(devices=("cuda",), dtypes=DTYPES)
    draws = True

    def unavailable(self) -> str | None:
        """Return why this backend cannot run on this machine, or None if it can."""
        if triton is None:
            return "the package triton is not installed"
        if not (INTERPRETED or torch.cuda.is_available()):
            return "PyTorch finds no CUDA or ROCm device"
        return None

    def refuses(self, x: Tensor) -> str | None:
        """Return why this backend cannot run on `x`, or None if it can."""
        if not fused.is_plain(x):
            return "not a plain strided tensor"
        if x.device.type not in self.capabilities.devices and not INTERPRETED:  # type: ignore[operator]
            return f"on device {x.device}, needs a CUDA or ROCm device"
        if x.dtype not in DTYPES:
            return f"dtype {x.dtype}, needs {', '.join(str(dtype) for dtype in DTYPES)}"
        if x.ndim < 3 or x.numel() == 0:
            return f"shape {tuple(x.shape)}, needs (B, C, *spatial) with no dimension of 0"
        if x.numel() // len(x) >= 2**30:
            return f"shape {tuple(x.shape)}, needs less than 2**30 elements in a sample"
        if not (has_layout(x) and has_layout(torch.empty_like(x, device="meta"))):
            return f"strides {x.stride()}, needs adjacent positions or adjacent channels"
        return None

    def fused_forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
        """Measure, decide and apply in three launches, if the kernels cover the plan."""
        return fused.forward(x, weight, bias, plan)

    def fused_noise(self, x: Tensor, noise: Noise) -> Affine | None:
        """Measure and decide in two launches, if the kernels cover the noise."""
        return fused.noise_alone(x, noise)

    def fused_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool
    ) -> Gradients | None:
        """Sum, decide and apply in three launches, if the kernels cover the plan."""
        return fused.backward(dy, x, weight, plan, saved, needs_x)
