import torch
from ghostnoise.engine.backends.aten import Aten

from ghostnoise.bench import comparison
from ghostnoise.methods import registry

CPU = torch.device("cpu")


def test_every_method_that_runs_on_backends_is_compared():
    found = {(case.method, case.layout) for case in comparison.cases()}
    for spec in registry.specs().values():
        for layout in comparison.LAYOUTS:
            assert ((spec.label, layout) in found) == (spec.norm is not None)
            assert ((f"{spec.label} alone", layout) in found) == (spec.noise in registry.noises())
    assert ("EN in eval mode", "tokens") in found


def test_a_wrong_result_and_an_error_are_failures(monkeypatch):
    transform = Aten.transform

    def wrong(self, x, affine, samples_per_pool=1):
        y = transform(self, x, affine, samples_per_pool)
        if x.dtype == torch.float16:
            raise RuntimeError("out of order\nmore")
        return y * (1 + 1e-4) if x.dtype == torch.float32 else y

    monkeypatch.setattr(Aten, "transform", wrong)
    monkeypatch.setattr(comparison, "LAYOUTS", {"features": comparison.LAYOUTS["features"]})
    found = comparison.compare(["aten"], CPU)
    by_dtype = {dtype: [each for each in found if each.dtype == dtype] for dtype in ("float64", "float32", "float16")}
    assert not any(each.failure for each in by_dtype["float64"])
    assert all(each.failure.startswith("output: the error is ") for each in by_dtype["float32"])
    assert all(each.failure == "RuntimeError: out of order" for each in by_dtype["float16"])
    assert all(each.error is None for each in by_dtype["float16"])


def test_results_that_are_not_finite_are_failures():
    exact = torch.ones(3, dtype=torch.float64)
    assert comparison._error(torch.tensor([1.0, float("nan"), 1.0]), exact) == float("inf")
    assert comparison._error(torch.ones(3), exact) == 0
