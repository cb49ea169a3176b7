"""The parts of a training step of a network."""

import math

import pytest
import torch
from torch.profiler import record_function

import ghostnoise
from ghostnoise.bench import network_profile, profile
from ghostnoise.bench.profiler import profiled
from ghostnoise.bench.settings import Settings

CPU = torch.device("cpu")


def graph():
    """Run a convolution, an op of this library and another operator in what looks like a compiled graph."""
    with record_function("## Call CompiledFxGraph abc ##"):
        torch.nn.functional.conv2d(torch.ones(4, 3, 8, 8), torch.ones(3, 3, 3, 3))
        with record_function("ghostnoise::normalize"):
            torch.ones(4).add(1)
        torch.ones(4).mul(1)
    torch.ones(4).sub(1)
    torch.ones(4, 4).mm(torch.ones(4, 4))
    weight = torch.ones(4, requires_grad=True)
    torch.optim.SGD([weight.mean().backward() or weight], lr=0.1).step()


def test_events_belong_to_the_nearest_part_that_they_are_in():
    parts = {event.name: network_profile.part_of(event) for event in profiled(graph).events()}
    assert parts["aten::conv2d"] is None  # calls the others, and takes no time itself
    assert parts["aten::convolution"] == network_profile.CONVOLUTIONS
    assert parts["ghostnoise::normalize"] == parts["aten::add"] == network_profile.NORMALIZATION
    assert parts["## Call CompiledFxGraph abc ##"] == network_profile.GENERATED
    assert parts["aten::mul"] is None
    assert parts["aten::sub"] is None
    assert parts["aten::mm"] == network_profile.PRODUCTS
    assert parts["Optimizer.step#SGD.step"] == network_profile.OPTIMIZER


@pytest.mark.parametrize(
    ("layer", "name"),
    [(torch.nn.BatchNorm2d(3), "aten::native_batch_norm"), (ghostnoise.BatchNorm2d(3), "_Normalize")],
)
def test_layers_in_eager_mode_are_normalization(layer, name):
    x = torch.randn(4, 3, 2, 2, requires_grad=True)
    events = profiled(lambda: layer(x).sum().backward()).events()
    parts = {event.name: network_profile.part_of(event) for event in events if event.name.startswith(name)}
    assert len(parts) == 2  # both directions
    assert set(parts.values()) == {network_profile.NORMALIZATION}


def test_parts_take_less_time_than_the_step():
    step = network_profile.Profiled(graph)
    step.run()
    (taken,) = step.taken
    total = taken.pop("total")
    assert all(part > 0 for part in taken.values())
    assert sum(taken.values()) < total


@pytest.mark.slow
def test_a_compiled_network():
    (row,), _ = profile.plan(Settings("profile", CPU, quick=True, only=("resnet",)))
    records = profile.measure(row, Settings("profile", CPU, quick=True, rounds=1), lambda share: None)
    for contender, ours in (("nn.BatchNorm2d compiled", False), ("GNI-16 compiled", True)):
        own = {record["part"]: record["p50_ms"] for record in records if record["contender"] == contender}
        assert math.isclose(own.pop("step"), sum(own.values()))
        assert own["convolutions"] > 0
        assert own["generated code"] > 0
        assert own["optimizer"] > 0
        assert (own["normalization"] > 0) == ours


@pytest.mark.slow
def test_a_recipe_and_a_compiled_layer():
    rows, _ = profile.plan(Settings("profile", CPU, quick=True, only=("table4", "compiled")))
    assert [row.name for row in rows] == ["table4 batch 32 bf16", "64x32 compiled"]
    for row, contenders in zip(rows, (("baseline", "GNI-16"), ("BN+GNI-32", "BN+GNI-32 compiled")), strict=True):
        records = profile.measure(row, Settings("profile", CPU, quick=True, rounds=1), lambda share: None)
        for contender in contenders:
            own = {record["part"]: record["p50_ms"] for record in records if record["contender"] == contender}
            assert math.isclose(own.pop("step"), sum(own.values()))
            assert own["normalization"] > 0
            assert (own["generated code"] > 0) == ("compiled" in contender)
