"""The two levels of the engine: fused operators where a plan is covered, and the general level for everything."""

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from ghostnoise.engine import fused

LEVELS = ("fused", "general")


def running(level: str) -> AbstractContextManager:
    """Run a block on one level."""
    return nullcontext() if level == "fused" else mock.patch.object(fused, "covers", return_value=False)
