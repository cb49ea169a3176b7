import pytest
from torch import nn

import ghostnoise
from models import convolutional, transformer


def test_where_narrows_batch_norms():
    for method in ("gbn", "xbn", "en"):
        model = ghostnoise.convert(convolutional(), method, 4, where=lambda name, module: name.startswith("4"))
        assert type(model[1]) is nn.BatchNorm2d
        assert [row.name for row in ghostnoise.summary(model)] == ["4.1"]


def test_where_is_asked_for_every_name():
    norm = nn.BatchNorm1d(6)
    model = ghostnoise.convert(nn.Sequential(norm, norm), "gbn", 4, where=lambda name, module: name == "1")
    assert type(model[0]) is ghostnoise.GhostBatchNorm1d


def test_nothing_to_convert():
    model = nn.Sequential(*(nn.LayerNorm(6) for _ in range(5)), nn.GroupNorm(2, 6), nn.Linear(6, 6))
    with pytest.raises(
        ValueError,
        match=r"no batch norm in this Sequential, whose norm layers are: LayerNorm x 5 \('0', '1', '2' and 2 more\); "
        r"GroupNorm x 1 \('5'\); to inject noise without batch norm, give after= or before=",
    ):
        ghostnoise.convert(model, "gni", 4)
    with pytest.raises(ValueError, match="whose norm layers are: none"):
        ghostnoise.convert(nn.Linear(3, 3), "gbn", 4)


def test_a_network_that_is_named_after_norms_is_no_norm_layer():
    class NormFree(nn.Sequential):
        pass

    with pytest.raises(ValueError, match="in this NormFree, whose norm layers are: none"):
        ghostnoise.convert(NormFree(nn.Linear(6, 6)), "gni", 4)


def test_nothing_selected():
    with pytest.raises(ValueError, match=r"no batch norm for which where= is true in this .* are: BatchNorm2d x 1"):
        ghostnoise.convert(convolutional(), "gbn", 4, where=lambda name, module: False)
    with pytest.raises(ValueError, match=r"no ReLU or Tanh in this Sequential, whose norm layers are: LayerNorm x 2"):
        ghostnoise.convert(transformer(), "gni", 4, after=(nn.ReLU, nn.Tanh))


def test_inserted_noise_is_not_selected():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    ghostnoise.convert(model, "gni", 4, where=lambda name, module: name.startswith("0"))
    assert len(ghostnoise.summary(model)) == 2
