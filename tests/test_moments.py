import torch

from ghostnoise.moments import Affine, Moments, table_dtype


def random_affine():
    return Affine(*(torch.randn(5, 3, dtype=torch.float64) for _ in range(3)))


def apply(affine, x):
    center, scale, shift = (table.unsqueeze(-1) for table in affine)
    return scale * (x - center) + shift


def moments_of(x):
    return Moments(x.mean(2), x.var(2, correction=0))


def test_then_is_one_after_the_other():
    x = torch.randn(5, 3, 7, dtype=torch.float64)
    first, second = random_affine(), random_affine()
    torch.testing.assert_close(apply(first.then(second), x), apply(second, apply(first, x)))


def test_moments_after_a_transformation():
    x = torch.randn(5, 3, 7, dtype=torch.float64)
    affine = random_affine()
    for ours, theirs in zip(affine.moments(moments_of(x)), moments_of(apply(affine, x)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_detach_keeps_the_numbers():
    moments = Moments(torch.randn(2, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True))
    detached = moments.detach()
    assert not detached.mean.requires_grad
    assert not detached.var.requires_grad
    assert torch.equal(detached.var, moments.var)


def test_tables_are_float64_where_the_device_has_it():
    assert table_dtype(torch.device("cpu")) == torch.float64
    assert table_dtype(torch.device("cuda")) == torch.float64
    assert table_dtype(torch.device("mps")) == torch.float32
