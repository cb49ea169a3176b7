import pytest
import torch
from torch import nn

import ghostnoise
from models import convolutional, transformer


def scopes(model):
    return [row.scope for row in ghostnoise.summary(model)]


def test_local_by_default():
    model = ghostnoise.convert(convolutional(), "gni", 4)
    assert model[1].process_group is None
    assert scopes(model) == ["local", "local"]


@pytest.mark.usefixtures("one_rank")
def test_global_is_every_rank_or_a_group():
    model = ghostnoise.convert(convolutional(), "gni", 4, scope="global")
    assert model[1].process_group == "world"
    assert scopes(model) == ["global", "global"]
    group = torch.distributed.new_group([0])
    assert ghostnoise.convert(model, "gni", 4, scope="global", process_group=group)[1].process_group == group.group_name
    assert ghostnoise.convert(model, "gni", 4)[1].process_group is None
    ghostnoise.revert(model)
    assert "process_group" not in vars(model[1])


@pytest.mark.usefixtures("one_rank")
def test_global_noise():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, scope="global")
    assert model[0].ghost_noise.process_group == "world"


@pytest.mark.usefixtures("one_rank")
def test_uneven_is_an_option():
    model = ghostnoise.convert(convolutional(), "gni", 4, scope="global", uneven=True)
    assert model[1].uneven
    assert ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, uneven=True)[0].ghost_noise.uneven
    assert not ghostnoise.convert(model, "gni", 4, scope="global")[1].uneven


def test_groups_that_are_gone(tmp_path):
    """A model that was saved with a group of its own can be reverted where there are no ranks."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    group = torch.distributed.new_group([0])
    model = ghostnoise.convert(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)), "gbn", 4)
    torch.distributed.destroy_process_group()
    assert ghostnoise.revert(model)[0].process_group is None


@pytest.mark.usefixtures("one_rank")
def test_synchronized_layers_are_global_unless_told():
    group = torch.distributed.new_group([0])
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3, process_group=group), nn.BatchNorm2d(3))
    ghostnoise.convert(model, "gbn", 4)
    assert scopes(model) == ["global", "global", "local"]
    assert [layer.process_group for layer in model] == ["world", group.group_name, None]
    ghostnoise.convert(model, "gni", 4, scope="local")
    assert scopes(model) == ["local", "local", "local"]
    ghostnoise.convert(model, "gni", 4, scope="global")
    assert [layer.process_group for layer in model] == ["world", group.group_name, "world"]
    ghostnoise.revert(model)
    assert [layer.process_group for layer in model[:2]] == [None, group]


def test_synchronized_layers_without_ranks():
    model = nn.Sequential(nn.SyncBatchNorm(3))
    with pytest.raises(
        ValueError, match=r"nn.SyncBatchNorm, which becomes a layer of global scope, without a process .*scope='local'"
    ):
        ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is nn.SyncBatchNorm
