import copy

import pytest
import torch

import ghostnoise
from ghostnoise import functional
from ghostnoise.engine import ranks
from ghostnoise.engine.ranks import Ranks
from support import rank_cases
from support.families import FAMILIES, build, example
from support.ranks import launch


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_are_one_process_with_the_whole_batch(count, tmp_path):
    """And all other tests that need several processes, since starting them takes time."""
    launch(count, rank_cases.everything, tmp_path)


@pytest.mark.slow
def test_a_compiled_model(tmp_path):
    launch(2, rank_cases.compiled, tmp_path)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_rank_is_local(family):
    x = example(2)
    layer, alone = build(family, 2, process_group="world", uneven=True), build(family, 2)
    torch.manual_seed(0)
    y = layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, alone(x), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_without_ranks(family):
    layer = build(family, 2, process_group="world")
    with pytest.raises(
        ValueError, match=r"process_group='world' without torch.distributed: call torch.distributed.init_p"
    ):
        layer(example(2))
    layer.eval()(example(2))
    with pytest.raises(ValueError, match=r"process_group='world' without torch\.distributed"):
        functional.ghost_noise(example(2), 4, process_group="world")


def test_not_a_process_group():
    for given in (3, -100, object()):
        with pytest.raises(ValueError, match=r"process_group=.*: must be None .* 'world' .* that contains this rank"):
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
    assert ranks.resolve("world") is torch.distributed.group.WORLD


def test_ranks_are_shown_where_there_are_any():
    assert "uneven" not in repr(build("gbn", 2))
    assert "process_group" not in repr(ghostnoise.GhostNoise(4))
    assert repr(build("gbn", 2, process_group="world", uneven=True)).endswith(
        "ghost_size=4, running_var_from='ghost', process_group='world', uneven=True)"
    )


def test_own_rows():
    """A rank has the rows of its own samples; a single row serves all, and a table of its own rows is left alone."""
    table, single, rows = torch.arange(5)[:, None], torch.tensor([[5]]), torch.tensor([[3], [4]])
    own = [Ranks(None, rank, (2, 0, 3)).own(table).flatten().tolist() for rank in range(3)]
    assert own == [[0, 1], [], [2, 3, 4]]
    assert Ranks(None, 0, (2, 0, 3)).own(single) is single
    assert Ranks(None, 0, (2, 0, 3)).own(rows) is rows
