import io
import math
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ghostnoise import GhostBatchNorm1d, GhostNoise
from ghostnoise.lab.config.schema import OptimSettings, Settings
from ghostnoise.lab.train.machine import Machine
from ghostnoise.lab.train.session import (
    Session,
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


def timm_rate(step, steps, warmup, peak, warmup_lr, min_lr, prefix):
    """The cosine schedule of timm, stepped on updates, as its documentation describes it."""
    if step < warmup:
        return warmup_lr * (1 - step / warmup) + peak * step / warmup
    if prefix:  # with a cosine of `steps - warmup` steps, timm's t_initial
        step, steps = step - warmup, steps - warmup
    half_turn = math.cos(math.pi * step / steps)
    return (peak + min_lr) / 2 + (peak - min_lr) / 2 * half_turn


@given(
    st.integers(1, 300), st.floats(0, 1), st.floats(1e-3, 10), st.floats(0, 0.9), st.floats(0, 0.9), st.booleans(),
)  # fmt: skip
def test_the_learning_rate_matches_that_of_timm(steps, share, peak, start, end, prefix):
    warmup, start, end = round(share * steps), start * peak, end * peak
    for step in range(steps):
        found = learning_rate(step, steps, warmup, peak, start=start, end=end, prefix=prefix)
        expected = timm_rate(step, steps, warmup, peak, start, end, prefix)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12 * peak)


def test_the_schedule_of_the_released_scripts():
    """ResNet-18 on CIFAR-100: 195 steps per epoch, 5 of 200 epochs of warm-up from 1e-6 to 0.3, floor 1e-5."""
    rates = [learning_rate(step, 39_000, 975, 0.3, start=1e-6, end=1e-5, prefix=False) for step in range(39_000)]
    assert rates[0] == 1e-6
    assert rates[974] == pytest.approx(1e-6 + 974 / 975 * (0.3 - 1e-6))
    assert rates[975] == pytest.approx(1e-5 + 0.5 * (0.3 - 1e-5) * (1 + math.cos(math.pi / 40)))  # already below 0.3
    assert max(rates) == rates[974]
    assert rates[19_500] == pytest.approx((0.3 + 1e-5) / 2)
    assert rates[-1] == pytest.approx(1e-5, rel=1e-3)


CPU = torch.device("cpu")
PLAIN = {
    "model": {"name": "mlp"},
    "norm": {"method": "bn"},
    "data": {"name": "digits"},
    "optim": {"lr": 0.1, "nesterov": True, "weight_decay": 0.01, "clip": 0.5},
    "train": {"epochs": 1, "batch_size": 24, "ema": 0.9, "label_smoothing": 0.1},
}


def trained(accumulation_steps, *norms):
    """A session after 4 steps in float64, and the batches that it was given."""
    torch.manual_seed(0)
    layers = (layer for norm in norms or (nn.Identity(),) for layer in (nn.Linear(16, 16), norm, nn.Tanh()))
    model = nn.Sequential(*layers, nn.Linear(16, 5)).double()
    train = PLAIN["train"] | {"accumulation_steps": accumulation_steps}
    session = Session(model, Settings.model_validate(PLAIN | {"train": train}), Machine(CPU))
    batches = [(torch.randn(24, 16, dtype=torch.float64), torch.randint(5, (24,))) for _ in range(4)]
    for images, labels in batches:
        session.step(images, labels, session.settings.optim.lr)
    return session, batches


@pytest.mark.parametrize("count", [2, 3, 8, 24])
def test_accumulated_steps_are_those_of_the_whole_batch(count):
    """The model has no statistics over samples, so that only rounding may differ."""
    (whole, _), (accumulated, _) = trained(1), trained(count)
    for ours, theirs in ((accumulated.model, whole.model), (accumulated.evaluated, whole.evaluated)):
        for (name, value), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-14, msg=name)
    torch.testing.assert_close(accumulated.progress.loss, whole.progress.loss, rtol=1e-6, atol=0)  # a float32 sum
    assert accumulated.progress.correct == whole.progress.correct
    assert all(parameter.grad is None for parameter in accumulated.model.parameters())


def test_batch_norm_uses_the_statistics_of_a_micro_batch():
    """Accumulation with batch norm is ghost batch norm, except for the running statistics."""
    (accumulated, _), (ghost, _) = trained(4, nn.BatchNorm1d(16)), trained(1, GhostBatchNorm1d(16, ghost_size=6))
    (whole, _) = trained(1, nn.BatchNorm1d(16))
    weights = dict(accumulated.model.named_parameters())
    for name, value in ghost.model.named_parameters():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(weights["0.weight"], whole.model[0].weight, rtol=1e-4)
    assert accumulated.model[1].num_batches_tracked == 16


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


def test_a_history_resumes_with_the_run():
    """Noise that is drawn after a checkpoint is restored is that of the uninterrupted run, bit for bit."""

    def session():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), GhostNoise(4, history=6), nn.Linear(4, 2))
        return Session(model, Settings.model_validate(PLAIN), Machine(CPU))

    def train(one, steps, seed):
        torch.manual_seed(seed)
        return [one.model(x).detach() for x in torch.randn(steps, 2, 3)]

    first = session()
    train(first, 5, seed=1)
    buffer = io.BytesIO()
    torch.save(first.state(), buffer)
    buffer.seek(0)
    second = session()
    second.restore(torch.load(buffer, weights_only=True))
    assert all(map(torch.equal, train(first, 4, seed=2), train(second, 4, seed=2)))
