"""One call each way gives what the steps give, to the last bit: they are the same functions in the same order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ghostnoise
from copies import COPIES, FOUND
from ghostnoise import methods
from ghostnoise.engine import op
from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native import passes as native
from ghostnoise.ghosts import Itself
from ghostnoise.methods import Noise
from ghostnoise.moments import Moments
from passes import ALL_DTYPES, dtypes, layouts, shapes, upstreams, values

METHODS = {
    "batch": lambda size, noise: (methods.batch(1e-5), None),
    "ghost": lambda size, noise: (methods.ghost(1e-5, size), None),
    "exclusive": lambda size, noise: (methods.exclusive(1e-5, size + 1, 0.0), None),
    "floored exclusive": lambda size, noise: (methods.exclusive(1e-5, None, 0.9), None),
    "noisy": lambda size, noise: (methods.batch(1e-5), noise(True, True)),
    "shifted": lambda size, noise: (methods.batch(1e-5), noise(True, False)),
    "scaled": lambda size, noise: (methods.batch(1e-5), noise(False, True)),
    "neither": lambda size, noise: (methods.batch(1e-5), noise(False, False)),
    "noisy ghost": lambda size, noise: (methods.ghost(1e-5, size), noise(True, True)),
}


class Steps:
    """While it lasts, the library is called step by step; or it counts the calls."""

    def __init__(self, patch, whole):
        self.calls = []
        run = library.Library.run

        def counted(own, name, *arguments):
            self.calls.append(name)
            run(own, name, *arguments)

        patch.setattr(library.Library, "run", counted)
        if not whole:
            patch.setattr(native, "normalize", lambda *given: None)
            patch.setattr(native, "normalize_gradient", lambda *given: None)


def results(whole, x, dy, parameters, normalizer, noise, needs_x=True):
    """All that a step makes, and the calls that made it."""
    with pytest.MonkeyPatch.context() as patch, ghostnoise.backend("native"):
        steps = Steps(patch, whole)
        x = x.detach().requires_grad_(needs_x)
        weight, bias = (None if table is None else table.detach().requires_grad_() for table in parameters)
        y, seen = op.normalize(x, normalizer, noise, weight, bias)
        inputs = [tensor for tensor in (x, weight, bias) if tensor is not None and tensor.requires_grad]
        gradients = torch.autograd.grad(y, inputs, dy) if inputs else ()
    return [y, *seen.moments, *seen.stats, *gradients], steps.calls


def given_tensors(shape, dtype, layout, upstream="contiguous", affine="both"):
    x, dy = values(shape, dtype, layout, 0), values(shape, dtype, upstream, 1)
    of = {"both": dtype, "float32": torch.float32}.get(affine)
    vectors = (torch.randn(shape[1], generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    weight, bias = (None if of is None else vector.to(of) for vector in vectors)
    return x, dy, (weight, None if affine == "weight" else bias)


def drawn(batch_size, dtype=torch.int64):
    indices = torch.randint(batch_size, (batch_size, 3), generator=torch.Generator().manual_seed(4)).to(dtype)
    return lambda shift, scale: methods.ghost_noise(1e-3, shift, scale, indices)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride() or one.shape.numel() == 0
        assert torch.equal(one, other) or bool(one.isnan().any() & (one.isnan() == other.isnan()).all())


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", METHODS)
def test_one_call_equals_the_steps(copy, name):
    @given(shapes, dtypes, layouts, upstreams, st.integers(1, 4), st.sampled_from(["both", "float32", "none"]))
    def check(shape, dtype, layout, upstream, size, affine):
        shape = (shape[0] + 2, *shape[1:])
        x, dy, parameters = given_tensors(shape, dtype, layout, upstream, affine)
        if native.refuses(x):
            return
        normalizer, noise = METHODS[name](size, drawn(shape[0]))
        ours, calls = results(True, x, dy, parameters, normalizer, noise)
        theirs, steps = results(False, x, dy, parameters, normalizer, noise)
        assert_same(ours, theirs)
        whole = noise is None or normalizer.who.ghost_size is None or shape[0] < 2 * normalizer.who.ghost_size
        assert calls == ["normalize", "normalize_gradient"] if whole else calls[-1] == "normalize_gradient"
        assert "transform" in steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: library.Library(FOUND.handle, copy))
        check()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(1100, 130, 1), (1100, 70, 1, 2), (66, 64, 32, 32), (40, 70, 4, 4)])
@pytest.mark.parametrize("name", ["ghost", "exclusive", "noisy"])
def test_large_tensors_on_any_number_of_threads(name, shape, dtype, layout):
    """Many samples of few positions go through all steps in parts, of some ghost batches each."""
    x, dy, parameters = given_tensors(shape, dtype, layout, layout)
    method = METHODS[name](32, drawn(shape[0]))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, _ = results(False, x, dy, parameters, *method)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same(results(True, x, dy, parameters, *method)[0], expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["ghost", "exclusive", "noisy"])
def test_parameters_and_gradients_that_are_not_there(name):
    x, dy, (weight, bias) = given_tensors((9, 5, 3), torch.float32, "contiguous")
    method = METHODS[name](4, drawn(9, torch.int32))
    for parameters in ((weight, None), (None, bias), (None, None)):
        for needs_x in (True, False):
            ours, calls = results(True, x, dy, parameters, *method, needs_x)
            assert_same(ours, results(False, x, dy, parameters, *method, needs_x)[0])
            assert calls[0] == "normalize"


def test_a_gradient_of_another_dtype_or_layout():
    """As hooks may make it; it is copied to lie as x does."""
    x, dy, (weight, _) = given_tensors((9, 5, 3, 3), torch.float32, "channels_last")
    normalizer = methods.ghost(1e-5, 4)
    stats, noise = native.normalize(x, weight, None, normalizer, None)[2:]
    wanted = native.normalize_gradient(dy, x, weight, normalizer, stats, noise, True)
    crossed = dy.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (dy.double(), dy.contiguous(memory_format=torch.channels_last), crossed):
        assert_same(native.normalize_gradient(other, x, weight, normalizer, stats, noise, True), wanted)


def test_what_goes_step_by_step():
    x, dy, parameters = given_tensors((6, 4, 3), torch.float32, "contiguous")
    constant = Noise(lambda batch: Moments(torch.ones(6, 4), torch.ones(6, 4)), 1e-3, True, True, normalized=True)
    noisy = drawn(6)(True, True)
    for normalizer, noise, last in (
        (methods.Normalizer(Itself(), 1e-5), None, "input_gradient"),
        (methods.mixed(1e-5, Moments(torch.zeros(4).double(), torch.ones(4).double()), 0.5), None, "input_gradient"),
        (methods.batch(1e-5), constant, "normalize_gradient"),
        (methods.ghost(1e-5, 2), noisy, "normalize_gradient"),
        (methods.exclusive(1e-5, None, 0.0), noisy, "normalize_gradient"),
    ):
        ours, calls = results(True, x, dy, parameters, normalizer, noise)
        assert calls[0] == "moments"
        assert calls[-1] == last
        assert_same(ours, results(False, x, dy, parameters, normalizer, noise)[0])


@pytest.mark.parametrize("name", ["batch", "ghost", "exclusive", "noisy"])
@pytest.mark.parametrize("spatial", [1, 3])
def test_gradients_by_finite_differences(name, spatial):
    """Of noise, with the draws as constants: those of x at the point of the gradient."""
    x = torch.randn(6, 2, spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    normalizer, noise = METHODS[name](3, drawn(6))
    weight, bias = (torch.randn(2, dtype=torch.float64).requires_grad_() for _ in range(2))
    with ghostnoise.backend("native"):
        if noise is None:
            assert torch.autograd.gradcheck(lambda *given: op.normalize(given[0], normalizer, None, *given[1:])[0],
                                            (x, weight, bias))  # fmt: skip
            return
        y, _ = op.normalize(x, normalizer, noise, weight, bias)
        ours = torch.autograd.grad(y.cos().sum(), (x, weight, bias))
    composite = torch.autograd.grad(op._composite(x, weight, bias, normalizer, noise)[0].cos().sum(), (x, weight, bias))
    for one, other in zip(ours, composite, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "tables"), [("ghost", 2 * 2 * 4 * 8), ("exclusive", 2 * 8 * 4 * 8), ("noisy", 2 * 4 * 8 + 2 * 8 * 4 * 4)]
)
def test_no_memory_is_held_beside_what_is_saved(name, tables):
    """Saved tables are views, of memory that they alone share."""
    x, saved = torch.randn(8, 4, 3, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        op.normalize(x, *METHODS[name](4, drawn(8)))
    held = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert held == x.untyped_storage().nbytes() + tables
