"""The C ABI of the native library: every exported function with the types of its arguments, and structs with theirs.

`src/exports.h` declares the same, and a test compares the two. `setup.py` runs this file, without torch, and
compiles `number()` into the library; a library with another number was built from other sources and is not used.
"""

import ctypes
import struct
import zlib
from collections.abc import Callable
from typing import Any

# Raise this when a function changes its meaning and keeps its argument types.
REVISION = 2

# An int64, a double, and the address of a tensor or array.
TYPES: dict[str, Any] = {"i": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}
I64, F64, PTR = TYPES

_TENSOR = PTR + I64 * 2  # address, stride over samples, stride over channels or positions
_TABLE = PTR + I64 * 2  # address, samples per row, last row
_PASS = I64 * 6  # dtype, channels last, threads, B, C, S
_SAMPLES = I64 * 7  # dtype of means, dtype, threads, B, C, rows, draws
_NOISE = PTR + I64 + PTR * 3 + F64  # indices, draws, seed, law, quantiles, eps
_UPDATE = I64 + F64 + I64 + PTR * 3 + F64  # population, bessel, dtype, mean, var, count, factor

SIGNATURES = {
    "moments": _PASS + _TENSOR + PTR * 2,
    "transform": _PASS + I64 + _TENSOR + _TABLE * 3 + _TENSOR,
    "noisy_transform": _PASS + _TENSOR + PTR * 3 + _TENSOR,
    "gradient_sums": _PASS + _TENSOR * 2 + _TABLE + PTR * 2,
    "input_gradient": _PASS + I64 + _TENSOR * 2 + _TABLE * 5 + _TENSOR,
    "scale_gradient": _PASS + _TENSOR + _TABLE + _TENSOR,
    "pool": I64 * 4 + PTR + I64 + PTR * 4,
    "coefficients": I64 * 4 + PTR * 2 + F64 * 2 + PTR * 3,
    "statistics_gradient": I64 * 6 + PTR * 6 + F64 * 2 + PTR * 5,
    "linear_term": I64 * 3 + PTR + I64 * 2 + PTR * 6,
    "exclusive_linear_term": I64 * 4 + PTR + I64 * 2 + PTR * 7,
    "update_running": I64 * 2 + PTR * 5 + F64,
    "pool_drawn": _SAMPLES + PTR * 6,
    "noise_tables": _SAMPLES + PTR * 9 + I64 * 2 + PTR * 10,
    "fused_forward": PTR,
    "fused_backward": PTR,
    "fused_noise": PTR,
}

# The members of the structs that the last three take the addresses of.
STRUCTS = {
    "ForwardCall": I64 + PTR * 4 + F64 * 2 + _NOISE + I64 + PTR * 6 + I64 + PTR * 5 + _UPDATE + PTR,
    "BackwardCall": I64 + PTR * 4 + F64 * 2 + I64 + PTR * 9,
    "NoiseCall": I64 + PTR * 3 + I64 + F64 + PTR * 2,
}


def packer(name: str) -> Callable[..., bytes]:
    """Return a function that makes a struct of its members in their order; addresses are given as integers."""
    return struct.Struct(STRUCTS[name].replace(PTR, "q").replace(I64, "q")).pack


def number() -> int:
    """Return the number that identifies this ABI."""
    return zlib.crc32(repr((REVISION, sorted(SIGNATURES.items()), sorted(STRUCTS.items()))).encode())
