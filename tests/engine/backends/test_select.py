import pytest
import torch

import ghostnoise
from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native import passes as native


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    monkeypatch.setattr(backends, "_chosen", "auto")


def test_a_setting_and_a_context():
    ghostnoise.backend("aten")
    assert backends.chosen() == "aten"
    with ghostnoise.backend("native"):
        assert backends.chosen() == "native"
        with ghostnoise.backend("auto"):
            assert backends.chosen() == "auto"
        assert backends.chosen() == "native"
    assert backends.chosen() == "aten"


def test_a_context_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), ghostnoise.backend("aten"):
        _ = 1 / 0
    assert backends.chosen() == "auto"


def test_auto_takes_the_fastest_that_can():
    x = torch.randn(2, 3, 8)
    assert backends.serving(x) is native
    assert backends.serving(x[..., ::2]) is aten
    with ghostnoise.backend("aten"):
        assert backends.serving(x) is aten


def test_auto_without_the_library(monkeypatch):
    monkeypatch.setattr(library, "library", lambda: "the C++ library was not built")
    assert backends.serving(torch.randn(2, 3, 8)) is aten
    with pytest.raises(RuntimeError, match="backend='native' cannot run here: the C\\+\\+ library was not built"):
        ghostnoise.backend("native")


def test_by_name_and_unable():
    with (
        ghostnoise.backend("native"),
        pytest.raises(RuntimeError, match=r"cannot run this tensor: neither .*; use ghostnoise.backend\('auto'\)"),
    ):
        ghostnoise.GhostNoise(4)(torch.randn(4, 3, 8)[..., ::2])
    with pytest.raises(ValueError, match="backend='cuda': must be one of 'auto', 'aten', 'native', 'triton'"):
        ghostnoise.backend("cuda")


def test_an_empty_part_of_a_shared_batch_runs_anywhere():
    with ghostnoise.backend("native"):
        assert backends.serving(torch.randn(0, 3, 8)) is native
        assert backends.serving(torch.randn(0, 3, 8)[..., ::2]) is aten


def test_backward_uses_the_backend_of_forward(monkeypatch):
    x = torch.randn(4, 3, 8, requires_grad=True)
    with ghostnoise.backend("aten"):
        y = ghostnoise.BatchNorm1d(3)(x)
    monkeypatch.setattr(native, "gradient_sums", None)
    y.sum().backward()
    assert x.grad is not None
