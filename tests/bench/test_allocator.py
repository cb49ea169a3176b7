import os
import subprocess
import sys

import pytest

from ghostnoise.bench import allocator


def test_the_mode_is_read_from_the_environment():
    assert allocator.active({}) == "default"
    assert allocator.active({"PATH": "x", **allocator.RAISED}) == "raised"
    assert allocator.active({"MALLOC_TRIM_THRESHOLD_": "1"}) == "custom"


@pytest.mark.parametrize("current", [{}, dict(allocator.RAISED), {"MALLOC_MMAP_THRESHOLD_": "1"}])
@pytest.mark.parametrize("mode", ["default", "raised"])
def test_an_environment_starts_its_mode_and_keeps_the_rest(mode, current):
    made = allocator.environment(mode, current | {"PATH": "x"})
    assert allocator.active(made) == mode
    assert made["PATH"] == "x"


def test_other_systems_have_the_default_mode_alone(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert allocator.missing("default") is None
    assert "glibc" in allocator.missing("raised")


@pytest.mark.slow
@pytest.mark.skipif(allocator.missing("raised") is not None, reason="needs glibc")
def test_raised_thresholds_keep_freed_memory_in_the_process():
    """The page faults of ten tensors of 64 MB: all of them by default, those of a few places when raised."""
    code = """
import resource, torch
x = torch.ones(2**24)
for _ in range(10):
    y = x * 2
    del y
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    faults = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", code], env=allocator.environment(mode, os.environ), check=True,
                capture_output=True, text=True,
            ).stdout
        )
        for mode in ("default", "raised")
    }  # fmt: skip
    assert faults["raised"] < faults["default"]
