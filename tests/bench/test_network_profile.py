"""The parts of a training step of a network."""

import math

import pytest
import torch
from torch.profiler import record_function

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


def test_events_belong_to_the_nearest_part_that_they_are_in():
    parts = {event.name: network_profile.part_of(event) for event in profiled(graph).events()}
    assert parts["aten::conv2d"] is None  # calls the others, and takes no time itself
    assert parts["aten::convolution"] == network_profile.CONVOLUTIONS
    assert parts["ghostnoise::normalize"] == parts["aten::add"] == network_profile.NORMALIZATION
    assert parts["## Call CompiledFxGraph abc ##"] == network_profile.GENERATED
    assert parts["aten::mul"] is None
    assert parts["aten::sub"] is None


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
        assert (own["ghostnoise ops"] > 0) == ours
