"""The report of `ghostnoise doctor`: versions, the CPU, and which backends can be used."""

import os
import platform
from pathlib import Path

import numpy
import torch

import ghostnoise
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.backends.native.library import huge_pages, thread_limit

CPUINFO = Path("/proc/cpuinfo")
# The features that affect the speed of the kernels, among many more flags.
FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16",
    "asimd", "asimdhp", "sve", "sve2", "bf16",
)  # fmt: skip


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
        "threads": thread_limit(),
        "huge pages": huge_pages(),
    }
    usable = {name: reason(name) for name in backends.NAMES if name != "auto"}
    lines |= {f"  {name}": f"not usable: {why}" if why else "usable" for name, why in usable.items()}
    lines["  auto"] = f"selects {automatic()} for a CPU tensor"
    texts = [f"{key:<11} {value}" for key, value in lines.items()]
    texts.insert(len(lines) - len(usable) - 1, "backends")
    return "\n".join(texts)


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


def reason(name: backends.Name) -> str | None:
    """Return why the backend cannot run on this machine, or None if it can."""
    return backends.load(name).unavailable()


def automatic() -> str:
    """Return the backend that "auto" selects for a float32 CPU tensor."""
    with backends.backend("auto"):
        return backends.select(torch.empty(2, 3, 4)).name
