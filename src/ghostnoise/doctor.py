"""The report of `ghostnoise doctor`: versions, the CPU, and what runs the operators."""

import ctypes
import os
import platform
from pathlib import Path

import numpy
import torch

import ghostnoise
from ghostnoise.engine import ops

CPUINFO = Path("/proc/cpuinfo")
# The features that affect the speed of the kernels, among many more flags.
FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16",
    "asimd", "asimdhp", "sve", "sve2", "bf16",
)  # fmt: skip
PLAIN, FUSED = "plain PyTorch", {"cpu": "C++", "cuda": "Triton"}


def report() -> str:
    """Return the report."""
    model, features = cpu()
    lines = {
        "ghostnoise": ghostnoise.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cpu": model,
        "features": " ".join(features) or "unknown",
        "torch uses": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **{f"{device} operators": _described(device) for device in FUSED},
    }
    return "\n".join(f"{key:<14} {value}" for key, value in lines.items())


def _described(device_type: str) -> str:
    if why := missing(device_type):
        return f"{PLAIN}: {why}"
    level = instruction_set() if device_type == "cpu" else None
    return operators(device_type) + (f" ({level})" if level else "")


def operators(device_type: str) -> str:
    """Return what runs the operators on a type of device: "C++", "Triton" or "plain PyTorch"."""
    return PLAIN if missing(device_type) else FUSED[device_type]


def missing(device_type: str) -> str | None:
    """Return why the operators run in plain PyTorch on a type of device; None if they do not."""
    return ops.MISSING.get(device_type, f"there are no other operators for {device_type}")


def instruction_set() -> str | None:
    """Return the instruction set that the C++ operators use on this machine, such as "avx512"; None if unknown."""
    for path in torch.ops.loaded_libraries:
        level = getattr(ctypes.CDLL(path), "ghostnoise_level", None)
        if level is not None:
            level.restype = ctypes.c_char_p
            return (level() or b"").decode() or None
    return None


def cpu() -> tuple[str, list[str]]:
    """Return the name of the CPU, and its features among `FEATURES`."""
    try:
        pairs = (line.partition(":") for line in CPUINFO.read_text().splitlines())
        info = {key.strip(): value.strip() for key, _, value in pairs}
    except OSError:
        info = {}
    name = info.get("model name") or platform.processor() or platform.machine() or "unknown"
    flags = (info.get("flags") or info.get("Features") or "").split()
    return name, [feature for feature in FEATURES if feature in flags]


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the CPU, also for the GPU of an Apple chip, which has no name of its own."""
    if device.type in ("cpu", "mps"):
        return cpu()[0]
    name: str = torch.get_device_module(device).get_device_name(device)
    return name


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
