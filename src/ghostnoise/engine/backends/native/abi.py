"""The C ABI of the native library: every exported function with the types of its arguments.

`src/exports.h` declares the same functions, and a test compares the two. `setup.py` runs this file, without torch, and
compiles `number()` into the library; a library with another number was built from other sources and is not used.
"""

import ctypes
import zlib
from typing import Any

# Raise this when a function changes its meaning and keeps its argument types.
REVISION = 1

I, D, P = "i", "d", "p"  # int64, double, and the address of a tensor or array
TYPES: dict[str, Any] = {I: ctypes.c_int64, D: ctypes.c_double, P: ctypes.c_void_p}

_TENSOR = P + I * 2  # address, stride over samples, stride over channels or positions
_TABLE = P + I * 2  # address, samples per row, last row
_PASS = I * 6  # dtype, channels last, threads, B, C, S
_SAMPLES = I * 7  # dtype of means, dtype, threads, B, C, rows, draws

SIGNATURES = {
    "moments": _PASS + _TENSOR + P * 2,
    "transform": _PASS + _TENSOR + _TABLE * 3 + _TENSOR,
    "noisy_transform": _PASS + _TENSOR + P * 3 + _TENSOR,
    "gradient_sums": _PASS + _TENSOR * 2 + _TABLE + P * 2,
    "input_gradient": _PASS + _TENSOR * 2 + _TABLE * 5 + _TENSOR,
    "scale_gradient": _PASS + _TENSOR + _TABLE + _TENSOR,
    "pool": I * 4 + P + I + P * 4,
    "coefficients": I * 4 + P * 2 + D * 2 + P * 3,
    "statistics_gradient": I * 6 + P * 6 + D * 2 + P * 5,
    "linear_term": I * 3 + P + I * 2 + P * 6,
    "exclusive_linear_term": I * 4 + P + I * 2 + P * 7,
    "update_running": I * 2 + P * 5 + D,
    "pool_drawn": _SAMPLES + P * 6,
    "noise_tables": _SAMPLES + P * 6 + I * 2 + P * 9,
    "fused_forward": I + P * 4 + D * 2 + P + I + D + I + P * 11,
    "fused_backward": I + P * 4 + D * 2 + I + P * 6,
}


def number() -> int:
    """Return the number that identifies this ABI."""
    return zlib.crc32(repr((REVISION, sorted(SIGNATURES.items()))).encode())
