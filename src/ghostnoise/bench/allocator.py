"""Two modes of glibc's malloc: default thresholds, and raised thresholds.

By default, the memory of a large tensor is mapped when it is allocated and unmapped when it is freed, so that every new
tensor causes page faults; for tensors of 64 MB, they take about half of the time of every layer. With raised
thresholds, the process keeps and reuses freed memory. malloc reads the thresholds when a process starts, so each mode
needs a process of its own.
"""

import os
import platform
from collections.abc import Mapping

RAISED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
WORDS = {
    "default": "malloc's default thresholds",
    "raised": "malloc's mmap and trim thresholds raised",
    "custom": "malloc's thresholds from the environment",
}


def active(environment: Mapping[str, str] = os.environ) -> str:
    """Return the mode of a process with this environment: "default", "raised", or "custom" for other values."""
    given = {name: environment[name] for name in RAISED if name in environment}
    return "default" if not given else "raised" if given == RAISED else "custom"


def environment(mode: str, current: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process in `mode`."""
    kept = {name: value for name, value in current.items() if name not in RAISED}
    return kept | RAISED if mode == "raised" else kept


def missing(mode: str) -> str | None:
    """Return why this machine cannot run in `mode`, or None if it can."""
    if mode == "default" or platform.libc_ver()[0] == "glibc":
        return None
    return f"--allocator {mode}: needs glibc, which this system does not have; use --allocator default"
