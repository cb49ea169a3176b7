import pytest
from torch import nn

import ghostnoise
from ghostnoise import GhostNoise, OffAfter
from support.models import SIZES, convolutional, transformer


def test_rows_of_converted_layers():
    model = ghostnoise.convert(convolutional(), "gni", {"1": 4, "*": 8})
    assert list(ghostnoise.summary(model)) == [
        ("1", "GhostNoiseBatchNorm2d", "BatchNorm2d", "gni", 4, "local", ""),
        ("4.1", "GhostNoiseBatchNorm1d", "BatchNorm1d", "gni", 8, "local", ""),
    ]
    assert ghostnoise.summary(model)[1].ghost_size == 8


def test_rows_of_noise():
    model = ghostnoise.convert(transformer(), "agni-conv", 4, before=nn.LayerNorm).append(
        GhostNoise(3, components="shift")
    )
    assert list(ghostnoise.summary(model)) == [
        ("0", "AnalyticalGhostNoise", "", "agni-conv", 4, "local", "before LayerNorm"),
        ("3", "AnalyticalGhostNoise", "", "agni-conv", 4, "local", "before LayerNorm"),
        ("5", "GhostNoise", "", "gni-shift", 3, "local", ""),
    ]


@pytest.mark.parametrize("method", list(SIZES))
def test_methods_by_name(method):
    (row, *_) = ghostnoise.summary(ghostnoise.convert(convolutional(), method, **SIZES[method]))
    assert row.method == method
    assert row.ghost_size == SIZES[method].get("ghost_size")


def test_notes():
    shared = nn.BatchNorm1d(3)
    shared.register_forward_hook(lambda *args: None)
    shared.register_full_backward_hook(lambda *args: None)
    model = nn.Sequential(shared, shared, nn.LazyBatchNorm1d())
    schedule = OffAfter(4, steps=1)
    ghostnoise.convert(model, "gbn", schedule)
    first, second = ghostnoise.summary(model)
    assert first.notes == "OffAfter; hooks: 2; also 1"
    assert second[1:3] == ("GhostBatchNorm1d", "LazyBatchNorm1d")
    assert second.notes == "lazy; OffAfter"


def test_layers_built_by_hand():
    model = nn.Sequential(ghostnoise.EvalNorm2d(3, ghost_size=4))
    assert ghostnoise.summary(model)[0][:5] == ("0", "EvalNorm2d", "BatchNorm2d", "en", 4)


def test_prints_as_a_table():
    lines = str(ghostnoise.summary(ghostnoise.convert(convolutional(), "gbn", 4))).splitlines()
    assert lines[0].split() == ["name", "layer", "was", "method", "ghost_size", "scope", "notes"]
    assert lines[2].split() == ["1", "GhostBatchNorm2d", "BatchNorm2d", "gbn", "4", "local"]
    starts = [line.index(word) for line, word in zip(lines, ["layer", "---------", "Ghost", "Ghost"], strict=True)]
    assert starts[0] == starts[2] == starts[3]
    assert repr(ghostnoise.summary(nn.Linear(2, 2))) == "no ghostnoise layers"
    assert len(ghostnoise.summary(nn.Linear(2, 2))) == 0
