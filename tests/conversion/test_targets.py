import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from support.models import convolutional, state, transformer

# The selection of modules.


def test_where_restricts_batch_norms():
    for method in ("gbn", "xbn", "en"):
        model = ghostnoise.convert(convolutional(), method, 4, where=lambda name, module: name.startswith("4"))
        assert type(model[1]) is nn.BatchNorm2d
        assert [row.name for row in ghostnoise.summary(model)] == ["4.1"]


def test_where_is_called_for_every_name():
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


def test_a_network_with_norm_in_its_name_is_not_a_norm_layer():
    class NormFree(nn.Sequential):
        pass

    with pytest.raises(ValueError, match="in this NormFree, whose norm layers are: none"):
        ghostnoise.convert(NormFree(nn.Linear(6, 6)), "gni", 4)


def test_nothing_selected():
    with pytest.raises(
        ValueError, match=r"no batch norm for which where= returns True in this .* are: BatchNorm2d x 1"
    ):
        ghostnoise.convert(convolutional(), "gbn", 4, where=lambda name, module: False)
    with pytest.raises(ValueError, match=r"no ReLU or Tanh in this Sequential, whose norm layers are: LayerNorm x 2"):
        ghostnoise.convert(transformer(), "gni", 4, after=(nn.ReLU, nn.Tanh))


def test_inserted_noise_is_not_selected():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    ghostnoise.convert(model, "gni", 4, where=lambda name, module: name.startswith("0"))
    assert len(ghostnoise.summary(model)) == 2


# The channel dimension of inserted noise.


KNOWN = [
    (nn.LayerNorm(6), -1), (nn.RMSNorm(6), -1), (nn.Linear(6, 6), -1), (nn.BatchNorm1d(6), 1), (nn.BatchNorm2d(6), 1),
    (nn.BatchNorm3d(6), 1), (nn.GroupNorm(2, 6), 1), (nn.InstanceNorm1d(6), 1), (nn.InstanceNorm2d(6), 1),
    (nn.InstanceNorm3d(6), 1), (nn.Conv1d(6, 6, 1), 1), (nn.Conv2d(6, 6, 1), 1), (nn.Conv3d(6, 6, 1), 1),
    (nn.ConvTranspose2d(6, 6, 1), 1), (nn.ReLU(), 1), (nn.GELU(), 1), (nn.SiLU(), 1), (nn.Tanh(), 1),
    (ghostnoise.GhostBatchNorm2d(6, ghost_size=4), 1),
]  # fmt: skip


def channel_dim(module, **options):
    return ghostnoise.convert(nn.Sequential(module), "gni", 4, after=type(module), **options)[0].ghost_noise.channel_dim


@pytest.mark.parametrize(("module", "expected"), KNOWN, ids=lambda value: type(value).__name__)
def test_known_types(module, expected):
    assert channel_dim(module) == expected
    assert channel_dim(module, channel_dim=2) == 2


class Own(nn.LayerNorm):
    pass


@pytest.mark.parametrize("module", [Own(6), nn.LayerNorm([5, 6]), nn.RMSNorm([5, 6]), nn.Dropout(), nn.Embedding(3, 6)])
def test_unknown_types(module):
    name = type(module).__name__
    with pytest.raises(ValueError, match=rf"channel_dim is not known for '0' \({name}\): give channel_dim=1"):
        channel_dim(module)
    assert channel_dim(module, channel_dim=-1) == -1


def test_all_unknown_types_are_listed():
    model = nn.Sequential(nn.LayerNorm(6), *(Own(6) for _ in range(6)))
    with pytest.raises(ValueError, match=r"for '1' \(Own\), '2' \(Own\), .*, '5' \(Own\) and 1 more: give"):
        ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)


def test_the_batch_dimension_has_no_channels():
    with pytest.raises(ValueError, match="channel_dim=0: must be an integer other than 0"):
        channel_dim(nn.ReLU(), channel_dim=0)


# Ghost sizes.


def converted_sizes(ghost_size, names=("a", "b1", "b2"), method="gni"):
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.BatchNorm1d(2))
    ghostnoise.convert(model, method, ghost_size)
    return [getattr(model, name).ghost_size for name in names]


def test_the_first_matching_pattern_applies():
    assert converted_sizes({"b1": 4, "b*": 8, "*": 16}) == [16, 4, 8]
    assert converted_sizes({"*": 16, "b*": 8}) == [16, 16, 16]
    assert converted_sizes({"a": None, "b[12]": 8}) == [None, 8, 8]
    assert converted_sizes({"?": 3, "b?": 5}, method="xbn") == [3, 5, 5]


def test_patterns_for_inserted_noise():
    model = ghostnoise.convert(transformer(), "gni", {"0": 4, "*": 8}, after=nn.LayerNorm)
    assert [row.ghost_size for row in ghostnoise.summary(model)] == [4, 8]


def test_any_name_of_a_shared_layer_matches():
    norm = nn.BatchNorm1d(2)
    model = ghostnoise.convert(nn.Sequential(norm, norm), "gni", {"1": 4})
    assert model[0].ghost_size == 4


@pytest.mark.parametrize(
    ("ghost_size", "message"),
    [
        (
            {"a": 4},
            r"ghost_size has no pattern for 'b1' \(BatchNorm1d\), 'b2' .*: every layer .*; add '\*' as the last",
        ),
        ({"*": 4, "c*": 8, "d": 2}, r"ghost_size has 'c\*', 'd', which no layer to convert matches: these are 'a'"),
        ({"*": "4"}, "ghost_size='4': must be an integer"),
        ({"*": 4, 3: 4}, "ghost_size has the key 3: must be a pattern of module names"),
        ({}, "ghost_size has no pattern for 'a'"),
        ([4], r"ghost_size=\[4\]: must be an integer"),
        (4.0, "ghost_size=4.0: must be an integer"),
    ],
)
def test_invalid_sizes(ghost_size, message):
    with pytest.raises(ValueError, match=message):
        converted_sizes(ghost_size)


def test_a_mapping_for_a_method_without_ghost_batches():
    with pytest.raises(ValueError, match="'bn' normalizes the whole batch"):
        converted_sizes({"*": 4}, method="bn")


def test_an_error_in_the_last_layer_leaves_the_first_unchanged():
    model = convolutional()
    before = state(model)
    with pytest.raises(ValueError, match="ghost_size=0"):
        ghostnoise.convert(model, "gni", {"1": 4, "*": 0})
    assert state(model) == before


@given(st.lists(st.sampled_from(["a", "b1", "b2", "b*", "*", "?"]), unique=True))
def test_every_layer_has_the_size_of_its_first_pattern(patterns):
    fitting = {"a": {"a", "*", "?"}, "b1": {"b1", "b*", "*"}, "b2": {"b2", "b*", "*"}}
    first = [next((pattern for pattern in patterns if pattern in fits), None) for fits in fitting.values()]
    mapping = {pattern: 2 + number for number, pattern in enumerate(patterns)}
    if None in first:
        with pytest.raises(ValueError, match="no pattern for"):
            converted_sizes(mapping)
    else:
        assert converted_sizes(mapping) == [mapping[pattern] for pattern in first]


# Process groups.


def scopes(model):
    return [row.scope for row in ghostnoise.summary(model)]


def test_local_by_default():
    model = ghostnoise.convert(convolutional(), "gni", 4)
    assert model[1].process_group is None
    assert scopes(model) == ["local", "local"]


@pytest.mark.usefixtures("one_rank")
def test_global_scope_is_all_ranks_or_a_group():
    model = ghostnoise.convert(convolutional(), "gni", 4, scope="global")
    assert model[1].process_group == "world"
    assert scopes(model) == ["global", "global"]
    group = torch.distributed.new_group([0])
    assert ghostnoise.convert(model, "gni", 4, scope="global", process_group=group)[1].process_group == group.group_name
    assert ghostnoise.convert(model, "gni", 4)[1].process_group is None
    ghostnoise.revert(model)
    assert "process_group" not in vars(model[1])


def test_process_group_means_the_same_as_in_layers():
    """It needs no scope= beside it, and no ranks before the model runs."""
    for group in ("world", "a group", None):
        layer = ghostnoise.convert(convolutional(), "gni", 4, process_group=group)[1]
        assert repr(layer) == repr(ghostnoise.GhostNoiseBatchNorm2d(4, ghost_size=4, process_group=group))
        noise = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, process_group=group)[0].ghost_noise
        assert repr(noise) == repr(ghostnoise.GhostNoise(4, channel_dim=-1, process_group=group))
    with pytest.raises(ValueError, match=r"process_group='world' without torch.distributed: call"):
        ghostnoise.convert(convolutional(), "gni", 4, process_group="world")(torch.randn(8, 3, 6, 6))


@pytest.mark.usefixtures("one_rank")
def test_scope_is_short_for_a_process_group():
    group = torch.distributed.new_group([0])
    for arguments, expected in (
        ({"process_group": "world"}, "world"),
        ({"scope": "global"}, "world"),
        ({"scope": "global", "process_group": "world"}, "world"),
        ({"process_group": group}, group.group_name),
        ({"process_group": group.group_name}, group.group_name),
        ({"process_group": None}, None),
        ({"scope": "local"}, None),
        ({"scope": "local", "process_group": None}, None),
    ):
        model = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm2d(3))
        ghostnoise.convert(model, "gni", 4, **arguments)
        assert [layer.process_group for layer in model] == [expected, expected]
        assert scopes(model) == ["local" if expected is None else "global"] * 2
        model(torch.randn(8, 3, 6, 6))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("scope", "process_group"), [("local", "world"), ("global", None)])
def test_contradictory_scopes_and_groups(scope, process_group):
    model = convolutional()
    before = state(model)
    with pytest.raises(
        ValueError,
        match=f"scope='{scope}' with process_group={process_group!r}: scope='global' is process_group='world', "
        "and scope='local' is process_group=None; give one of the two",
    ):
        ghostnoise.convert(model, "gni", 4, scope=scope, process_group=process_group)
    assert state(model) == before


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


def test_revert_without_the_process_group(tmp_path):
    """A model that was saved with a process group can be reverted where torch.distributed is not initialized."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    group = torch.distributed.new_group([0])
    model = ghostnoise.convert(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)), "gbn", 4)
    torch.distributed.destroy_process_group()
    assert ghostnoise.revert(model)[0].process_group is None


@pytest.mark.usefixtures("one_rank")
def test_synchronized_layers_keep_their_group_unless_one_is_given():
    group = torch.distributed.new_group([0])
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3, process_group=group), nn.BatchNorm2d(3))
    ghostnoise.convert(model, "gbn", 4)
    assert scopes(model) == ["global", "global", "local"]
    assert [layer.process_group for layer in model] == ["world", group.group_name, None]
    ghostnoise.convert(model, "gni", 4, scope="local")
    assert scopes(model) == ["local", "local", "local"]
    ghostnoise.convert(model, "gni", 4, scope="global")
    assert [layer.process_group for layer in model] == ["world", "world", "world"]
    ghostnoise.revert(model)
    assert [layer.process_group for layer in model[:2]] == [None, group]


def test_synchronized_layers_without_ranks():
    model = nn.Sequential(nn.SyncBatchNorm(3))
    with pytest.raises(
        ValueError, match=r"nn.SyncBatchNorm, which uses the statistics of all ranks, without .*scope='local'"
    ):
        ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is nn.SyncBatchNorm
