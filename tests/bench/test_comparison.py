import pytest
import torch

from ghostnoise.bench import comparison
from ghostnoise.engine import fused, general, ops
from ghostnoise.methods import registry

CPU = torch.device("cpu")


@pytest.fixture
def features(monkeypatch):
    """Compare in one layout."""
    monkeypatch.setattr(comparison, "LAYOUTS", {"features": comparison.LAYOUTS["features"]})


def test_every_operator_and_every_method_is_compared():
    found = {(case.name, case.layout) for case in comparison.cases(CPU)}
    for layout in comparison.LAYOUTS:
        for spec in registry.specs().values():
            assert ((spec.label, layout) in found) == (spec.norm is not None)
            alone = spec.noise in registry.inserted() and (layout != "features" or not spec.inserts)
            assert ((f"{spec.label} alone", layout) in found) == alone
        assert {(name, layout) for name in comparison.OPERATORS} <= found
    assert ("EN in eval mode", "tokens") in found


def test_layers_are_compared_as_they_run_and_at_the_general_level(monkeypatch):
    levels = {case.level for case in comparison.cases(CPU)} - {"layer"}
    assert levels == {"operator", "general"}
    monkeypatch.setattr(fused, "covers", lambda *given: True)
    cases = [case for case in comparison.cases(CPU) if case.name == "BN" and case.layout == "features"]
    assert [case.level for case in cases] == ["layer", "general"]
    asked = []
    for case in cases:
        monkeypatch.setattr(fused, "covers", lambda *given: asked.append(given))
        before = len(asked)
        case.run(*comparison._inputs("features"))
        assert (len(asked) > before) == (case.level == "layer")


def test_the_reference_is_plain_pytorch_and_leaves_nothing_behind(monkeypatch):
    def fail(*given):
        raise AssertionError

    before = general.needs_operators, fused.covers
    cases = [case for case in comparison.cases(CPU) if case.layout == "features"]
    with monkeypatch.context() as changed:
        for name in ("moments", "transform", "gradient_sums", "input_gradient", "normalize", "ghost_noise"):
            changed.setattr(ops, name, fail)
        results = [case.exact(*comparison._inputs("features")) for case in cases]
    assert len(results) == len(cases)
    assert (general.needs_operators, fused.covers) == before


@pytest.mark.parametrize(("name", "level", "where"), [("BN", "general", "output"), ("transform", "operator", "result")])
def test_a_wrong_result_and_an_error_are_failures(monkeypatch, features, name, level, where):
    transform = ops.transform

    def wrong(x, *tables):
        y = transform(x, *tables)
        if x.dtype == torch.float16:
            raise RuntimeError("out of order\nmore")
        return y * (1 + 1e-4) if x.dtype == torch.float32 else y

    monkeypatch.setattr(ops, "transform", wrong)
    monkeypatch.setitem(comparison.OPERATORS, "transform", (wrong, ops.apply, False, 3))
    found = [each for each in comparison.compare(CPU) if (each.name, each.level) == (name, level)]
    by_dtype = {dtype: [each for each in found if each.dtype == dtype] for dtype in ("float64", "float32", "float16")}
    assert all(by_dtype.values())
    assert not any(each.failure for each in by_dtype["float64"])
    assert all(each.failure.startswith(f"{where}: the error is ") for each in by_dtype["float32"])
    assert all(each.failure == "RuntimeError: out of order" for each in by_dtype["float16"])
    assert all(each.error is None for each in by_dtype["float16"])


def test_results_that_are_not_finite_are_failures():
    exact = torch.ones(3, dtype=torch.float64)
    assert comparison._error(torch.tensor([1.0, float("nan"), 1.0]), exact, torch.ones(3)) == float("inf")
    assert comparison._error(torch.ones(3), exact, torch.ones(3)) == 0


def test_tables_in_float64_are_as_accurate_as_the_arithmetic_of_x():
    exact = torch.ones(3, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert comparison._error(exact + 2e-5, exact, torch.ones(3, dtype=dtype)) == pytest.approx(2)
