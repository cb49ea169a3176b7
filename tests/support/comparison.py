"""Run a function of (x, weight, bias) beside its naive float64 loop, and compare the output and every gradient."""

import torch

from support import reference
from support.closeness import assert_close
from support.inputs import Case


def assert_equals_naive(function, naive, case: Case, affine: bool = True) -> None:
    """`function(x, weight, bias)` equals `naive(x (B, C, S), weight, bias)` for the case's input."""
    x = case.tensor().requires_grad_()
    weight, bias = (case.vector(1).requires_grad_(), case.vector(2).requires_grad_()) if affine else (None, None)
    dy = case.tensor(offset=5)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]

    y = function(x, weight, bias)
    assert y.dtype == x.dtype
    assert y.stride() == torch.empty_like(x).stride()
    gradients = torch.autograd.grad(y, inputs, dy)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    def expectation():
        folded = reference.fold(exact[0], case.channel_dim)
        output = reference.unfold(naive(folded, *(exact[1:] if affine else (None, None))), x, case.channel_dim)
        return output, torch.autograd.grad(output, exact, dy.double())

    expected, wanted = expectation()
    with reference.constant_statistics():
        _, terms = expectation()
    assert_close(y, expected)
    for actual, gradient, term in zip(gradients, wanted, terms, strict=True):
        assert_close(actual, gradient, "gradient", magnitude=term.abs().max().item())
