import io
import math
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ghostnoise.lab.config.schema import OptimSettings
from ghostnoise.lab.train.session import (
    build_optimizer,
    generator_states,
    learning_rate,
    restore_generators,
    seed_generators,
)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_gains_and_biases_are_not_decayed(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model.register_parameter("scalar", nn.Parameter(torch.ones(())))
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    made = build_optimizer(model, OptimSettings(name=name, lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    changed = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    assert changed == {"0.weight", "3.weight"}
    assert torch.allclose(model[3].weight, before["3.weight"] * (1 - 0.1 * 0.5))


def test_frozen_parameters_are_not_optimized():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    made = build_optimizer(model, OptimSettings(lr=0.1))
    assert [len(group["params"]) for group in made.param_groups] == [1]


@given(st.integers(1, 500), st.floats(0, 1), st.floats(1e-4, 10))
def test_the_learning_rate_rises_to_its_peak_and_falls_towards_0(steps, share, peak):
    warmup = round(share * steps)
    rates = [learning_rate(step, steps, warmup, peak) for step in range(steps)]
    up, down = rates[:warmup], rates[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert max(rates) == pytest.approx(peak)
    assert min(rates) > 0
    if warmup:
        assert up[0] == pytest.approx(peak / warmup)
        assert up[-1] == pytest.approx(peak)


def test_the_learning_rate_matches_torch():
    """Compare the cosine decay with torch's scheduler."""
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=30)
    for step in range(30):
        assert learning_rate(step + 5, 35, 5, 0.3) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        made.step()
        schedule.step()
    assert learning_rate(20, 35, 5, 0.3) == pytest.approx(0.3 * 0.5 * (1 + math.cos(math.pi / 2)))


CPU = torch.device("cpu")


def draw():
    return torch.rand(3).tolist(), torch.randn(3).tolist(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist()  # noqa: NPY002


def test_generator_states_are_restored_from_a_file():
    seed_generators(3)
    draw()
    buffer = io.BytesIO()
    torch.save(generator_states(CPU), buffer)
    expected = [draw() for _ in range(3)]
    seed_generators(4)
    buffer.seek(0)
    restore_generators(torch.load(buffer, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_seed_determines_all_generators():
    seed_generators(2**62)
    first = draw()
    seed_generators(2**62)
    assert draw() == first
    seed_generators(5)
    assert all(ours != theirs for ours, theirs in zip(draw(), first, strict=True))
