import io
import random

import numpy
import torch

from ghostnoise.lab.train import generators

CPU = torch.device("cpu")


def draw():
    return torch.rand(3).tolist(), torch.randn(3).tolist(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist()  # noqa: NPY002


def test_all_generators_come_back_through_a_file():
    generators.seed(3)
    draw()
    buffer = io.BytesIO()
    torch.save(generators.states(CPU), buffer)
    expected = [draw() for _ in range(3)]
    generators.seed(4)
    buffer.seek(0)
    generators.restore(torch.load(buffer, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_seed_starts_all_of_them():
    generators.seed(2**62)
    first = draw()
    generators.seed(2**62)
    assert draw() == first
    generators.seed(5)
    assert all(ours != theirs for ours, theirs in zip(draw(), first, strict=True))
