"""Large results lie in huge pages, where the system gives them to who asks."""

from pathlib import Path

import pytest
import torch

from ghostnoise import functional
from ghostnoise.engine.backends.native import passes as native

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ASKED = ENABLED.exists() and "[never]" not in ENABLED.read_text() and native.missing() is None


def flags(address):
    """Those of the mapping that has an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if last and not first.endswith(":"):
            found = int(first, 16) <= address < int(last, 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not ASKED, reason="needs Linux with huge pages, and the native backend")
def test_large_results_ask():
    middle = 2**23
    x = torch.randn(64, 64, 32, 32, requires_grad=True)  # 16 MiB
    y = functional.batch_norm(x, None, None, training=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert "hg" in flags(y.data_ptr() + middle)
    assert "hg" in flags(dx.data_ptr() + middle)
