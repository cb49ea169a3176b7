import copy

import pytest
import torch

import ghostnoise
from support import rank_cases
from support.families import OPTIONS, build, example
from ghostnoise import distributed, functional
from ghostnoise.distributed import Ranks
from support.ranks import launch


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_are_one_process_with_the_whole_batch(count, tmp_path):
    """And all else that needs several processes: starting them is what takes time."""
    launch(count, rank_cases.everything, tmp_path)


def test_a_compiled_model(tmp_path):
    launch(2, rank_cases.compiled, tmp_path)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", OPTIONS)
def test_a_single_rank_is_local(family):
    x = example(2)
    layer, alone = build(family, 2, process_group="world", uneven=True), build(family, 2)
    torch.manual_seed(0)
    y = layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, alone(x), rtol=0, atol=0)


@pytest.mark.parametrize("family", OPTIONS)
def test_a_group_without_ranks(family):
    layer = build(family, 2, process_group="world")
    with pytest.raises(ValueError, match=r"process_group='world' without ranks: call torch.distributed.init_process_g"):
        layer(example(2))
    layer.eval()(example(2))
    with pytest.raises(ValueError, match="process_group='world' without ranks"):
        functional.ghost_noise(example(2), 4, process_group="world")


def test_what_is_no_group():
    for given in (3, -100, object()):
        with pytest.raises(ValueError, match=r"process_group=.*: must be None .* 'world' .* that this rank is in"):
            ghostnoise.BatchNorm2d(3, process_group=given)
        with pytest.raises(ValueError, match="must be None"):
            ghostnoise.GhostNoise(3, process_group=given)


@pytest.mark.usefixtures("one_rank")
def test_layers_hold_groups_by_name():
    group = torch.distributed.new_group([0])
    for layer in (
        ghostnoise.BatchNorm2d(3, process_group=group),
        ghostnoise.GhostNoise(4, process_group=group),
        ghostnoise.AnalyticalGhostNoise(4, process_group=group),
    ):
        assert layer.process_group == group.group_name
        assert repr(copy.deepcopy(layer)).endswith(f", process_group={group.group_name!r})")
    assert distributed.resolve("world") is torch.distributed.group.WORLD


def test_ranks_are_shown_where_there_are_any():
    assert "uneven" not in repr(build("GhostBatchNorm", 2))
    assert "process_group" not in repr(ghostnoise.GhostNoise(4))
    assert repr(build("GhostBatchNorm", 2, process_group="world", uneven=True)).endswith(
        "ghost_size=4, running_var_from='ghost', process_group='world', uneven=True)"
    )


def test_own_rows():
    """Of pools of 3, 3 and 4 samples: a rank has those of its samples, in whichever pools they are."""
    table, single = torch.tensor([[0], [1], [2]]), torch.tensor([[5]])
    own = [Ranks(None, rank, (4, 0, 6)).own(table, each=3).flatten().tolist() for rank in range(3)]
    assert own == [[0, 0, 0, 1], [], [1, 1, 2, 2, 2, 2]]
    assert Ranks(None, 0, (4, 0, 6)).own(single, each=10) is single
