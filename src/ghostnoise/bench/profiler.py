"""PyTorch's profiler, without its messages."""

import os
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise writes two lines to stderr on each use


def profiled(run: Callable[[], object], memory: bool = False) -> profile:
    """Run a function under the profiler and return it; with `memory`, it has also recorded allocations."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=memory)
    with profiler:
        run()
    return profiler
