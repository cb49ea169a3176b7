"""One table of tolerances, measured against float64, and the one comparison that uses it."""

import torch
from torch import Tensor

# Largest error over the largest absolute value of the result. Half types: one rounding of the result, to the nearest.
TOLERANCES = {
    (torch.float64, "output"): 1e-12,
    (torch.float64, "gradient"): 1e-10,
    (torch.float32, "output"): 1e-6,
    (torch.float32, "gradient"): 3e-6,
    (torch.bfloat16, "output"): 2**-8,
    (torch.bfloat16, "gradient"): 2**-8,
    (torch.float16, "output"): 2**-11,
    (torch.float16, "gradient"): 2**-11,
}
SLACK = 1.01  # a half type's rounding comes on top of float32 arithmetic


def assert_close(actual: Tensor, expected: Tensor, direction: str = "output", magnitude: float = 0.0) -> None:
    """`actual` equals the float64 `expected` within its dtype's tolerance.

    `magnitude` is that of the terms that make up the result, where they cancel and the result is smaller than they.
    """
    assert actual.shape == expected.shape
    largest = max(expected.abs().max().item() if expected.numel() else 0.0, magnitude, 1e-30)
    error = (actual.double() - expected).abs().max().item() if expected.numel() else 0.0
    bound = TOLERANCES[actual.dtype, direction] * SLACK * largest
    assert error <= bound, (
        f"{direction} error {error:.3e} over {bound:.3e}, {actual.dtype}, shape {tuple(actual.shape)}"
    )
