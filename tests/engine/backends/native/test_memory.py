"""The memory of the C++ library: failed allocations raise, and huge pages are requested for large results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native.backend import Native

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
GIVEN = ENABLED.exists() and "[never]" not in ENABLED.read_text() and Native().unavailable() is None

# Leaves a few MiB of address space beyond what the arguments and results of the last call need.
LIMITED = """
import resource, sys, torch
from ghostnoise.engine.backends.native.backend import Native
from ghostnoise.engine.backends.native.fused import forward, backward
from ghostnoise.engine.backends.base import NO_NOISE, Saved
from ghostnoise.engine.plan import Drawn, Normalizer, Plan
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Exclusive, GhostBatch

torch.set_num_threads(1)
native, what = Native(), sys.argv[1]
x = torch.randn(2**14, 256, 1)
moments = native.moments(x)
indices = torch.randint(2**14, (4, 3))
around = torch.zeros(1, 256, dtype=torch.float64)
plan = Plan(Normalizer(Exclusive(), 1e-5))
native.fused_forward(x[:8], None, None, plan)

# glibc answers small requests from memory that it already has; a limit stops it from getting more.
size = int(open("/proc/self/statm").read().split()[0]) * 4096
room = {"draws": 2**20, "forward": 90 * 2**20, "backward": 40 * 2**20}[what]
resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
try:
    if what == "draws":
        native.pool_drawn(moments, around, indices, None, torch.float32)
    elif what == "forward":
        native.fused_forward(x, None, None, plan)
    else:
        native.fused_backward(x, x, None, plan, Saved(moments, NO_NOISE), False)
except MemoryError as error:
    print("MemoryError:", error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
@pytest.mark.parametrize("what", ["draws", "forward", "backward"])
def test_a_failed_allocation_raises(what):
    done = subprocess.run([sys.executable, "-c", LIMITED, what], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MemoryError: the native function" in done.stdout
    assert "could not allocate memory" in done.stdout


# Prints whether the mapping of y and that of the gradient of x have the flag "hg" of a request.
REQUESTED = """
import torch
from ghostnoise import functional

def flags(address):
    found = False
    for line in open("/proc/self/smaps"):
        first, _, last = line.split()[0].partition("-")
        if last and not first.endswith(":"):
            found = int(first, 16) <= address < int(last, 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []

x = torch.randn(64, 64, 32, 32, requires_grad=True)  # 16 MiB
y = functional.batch_norm(x, None, None, training=True)
(dx,) = torch.autograd.grad(y.square().sum(), x)
print(*("hg" in flags(tensor.data_ptr() + 2**23) for tensor in (y, dx)))
"""


@pytest.mark.skipif(not GIVEN, reason="needs Linux with huge pages, and the native backend")
@pytest.mark.parametrize(("value", "expected"), [("1", "True True"), ("0", "False False"), (None, "True True")])
def test_huge_pages_are_requested_unless_switched_off(value, expected):
    environment = {key: text for key, text in os.environ.items() if key != library.HUGE_PAGES}
    environment |= {} if value is None else {library.HUGE_PAGES: value}
    done = subprocess.run(
        [sys.executable, "-c", REQUESTED], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


def test_huge_pages_are_described(monkeypatch):
    for value, text in (("1", "set GHOSTNOISE_HUGE_PAGES=0 to disable"), ("0", "not requested")):
        monkeypatch.setenv(library.HUGE_PAGES, value)
        library._requests_huge_pages.cache_clear()
        assert text in library.huge_pages()
    library._requests_huge_pages.cache_clear()
