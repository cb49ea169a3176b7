"""Two modes of glibc's malloc: its defaults, and raised thresholds.

By default, a large tensor's memory is mapped when it is made and unmapped when it is freed, so that every fresh tensor
costs page faults; for tensors of 64 MB, that is about half of everyone's time. With raised thresholds, freed memory
stays in the process and is used again. malloc reads them when a process starts: each mode needs its own.
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
    """The mode that a process with this environment runs in: "default", "raised", or "custom" for other values."""
    given = {name: environment[name] for name in RAISED if name in environment}
    return "default" if not given else "raised" if given == RAISED else "custom"


def environment(mode: str, current: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that starts a process in `mode`."""
    kept = {name: value for name, value in current.items() if name not in RAISED}
    return kept | RAISED if mode == "raised" else kept


def missing(mode: str) -> str | None:
    """Why this machine cannot run in `mode`, or None if it can."""
    if mode == "default" or platform.libc_ver()[0] == "glibc":
        return None
    return f"--allocator {mode}: malloc's thresholds are glibc's, which this system does not have; use default"
