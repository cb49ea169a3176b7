"""Which modules are converted, with which channel dimension, ghost size and process group."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from support.models import convolutional, images, state, transformer

synchronize = nn.SyncBatchNorm.convert_sync_batchnorm


# The selection of modules.


@pytest.mark.parametrize("method", ["gbn", "xbn", "en"])
def test_where_restricts_batch_norms(method):
    model = ghostnoise.convert(convolutional(), method, 4, where=lambda name, module: name.startswith("4"))
    assert type(model[1]) is nn.BatchNorm2d
    assert [row.name for row in ghostnoise.summary(model)] == ["4.1"]


def test_every_name_of_a_shared_layer_counts():
    norm = nn.BatchNorm1d(2)
    model = ghostnoise.convert(nn.Sequential(norm, norm), "gbn", 4, where=lambda name, module: name == "1")
    assert type(model[0]) is ghostnoise.GhostBatchNorm1d
    assert ghostnoise.convert(model, "gni", {"1": 8})[0].ghost_size == 8


class NormFree(nn.Sequential):
    """A network with norm in its name, which is not a norm layer."""


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            nn.Sequential(*(nn.LayerNorm(6) for _ in range(5)), nn.GroupNorm(2, 6), nn.Linear(6, 6)),
            {},
            r"no batch norm in this Sequential, whose norm layers are: LayerNorm x 5 \('0', '1', '2' and 2 more\); "
            r"GroupNorm x 1 \('5'\); to inject noise without batch norm, give .*, such as after=nn.LayerNorm$",
        ),
        (NormFree(nn.Linear(6, 6)), {}, "in this NormFree, whose norm layers are: none"),
        (
            convolutional(),
            {"where": lambda name, module: False},
            r"no batch norm for which where= returns True in this .* are: BatchNorm2d x 1",
        ),
        (
            transformer(),
            {"after": (nn.ReLU, nn.Tanh)},
            r"no ReLU or Tanh in this Sequential, whose norm layers are: LayerNorm x 2",
        ),
    ],
)
def test_nothing_to_convert(model, options, message):
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, "gni", 4, **options)


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
    with pytest.raises(ValueError, match="channel_dim=0: must be an integer other than 0"):
        channel_dim(module, channel_dim=0)


def test_all_unknown_types_are_listed():
    model = nn.Sequential(nn.LayerNorm(6), *(Own(6) for _ in range(6)))
    with pytest.raises(ValueError, match=r"for '1' \(Own\), '2' \(Own\), .*, '5' \(Own\) and 1 more: give"):
        ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)


# Ghost sizes, as patterns of names: the first that matches applies.


def converted_sizes(ghost_size, method="gni"):
    model = nn.ModuleDict({name: nn.BatchNorm1d(2) for name in ("a", "b1", "b2")})
    return [each.ghost_size for each in ghostnoise.convert(model, method, ghost_size).values()]


def test_sizes_of_patterns():
    assert converted_sizes({"a": None, "b[12]": 8}) == [None, 8, 8]
    assert converted_sizes({"?": 3, "b?": 5}, method="xbn") == [3, 5, 5]
    model = ghostnoise.convert(transformer(), "gni", {"0": 4, "*": 8}, after=nn.LayerNorm)
    assert [row.ghost_size for row in ghostnoise.summary(model)] == [4, 8]


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


@pytest.mark.parametrize(
    ("ghost_size", "message"),
    [
        ({"a": 4}, r"has no pattern for 'b1' \(BatchNorm1d\), 'b2' .*: every layer .*; add '\*' as the last"),
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


# Process groups.


def scopes(model):
    return [row.scope for row in ghostnoise.summary(model)]


def test_process_group_means_the_same_as_in_layers():
    """It needs no scope= beside it, and no ranks before the model runs; without it, a layer is local."""
    for group in ("world", "a group", None):
        layer = ghostnoise.convert(convolutional(), "gni", 4, process_group=group)[1]
        assert repr(layer) == repr(ghostnoise.GhostNoiseBatchNorm2d(4, ghost_size=4, process_group=group))
        noise = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm, process_group=group)[0].ghost_noise
        assert repr(noise) == repr(ghostnoise.GhostNoise(4, channel_dim=-1, process_group=group))
    with pytest.raises(ValueError, match=r"process_group='world' without torch.distributed: call"):
        ghostnoise.convert(convolutional(), "gni", 4, process_group="world")(images())
    assert scopes(ghostnoise.convert(convolutional(), "gni", 4)) == ["local", "local"]


@pytest.mark.usefixtures("one_rank")
def test_scope_is_short_for_a_process_group():
    group = torch.distributed.new_group([0])
    for arguments, expected in (
        ({"process_group": "world"}, "world"),
        ({"scope": "global"}, "world"),
        ({"scope": "global", "process_group": "world"}, "world"),
        ({"process_group": group}, group.group_name),
        ({"scope": "global", "process_group": group}, group.group_name),
        ({"process_group": group.group_name}, group.group_name),
        ({"process_group": None}, None),
        ({"scope": "local"}, None),
        ({"scope": "local", "process_group": None}, None),
    ):
        model = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
        ghostnoise.convert(model, "gni", 4, **arguments, uneven=True)
        ghostnoise.convert(model, "gni", 4, **arguments, uneven=True, after=nn.Conv2d)
        layers = [*model[:2], model[2].ghost_noise]
        assert [layer.process_group for layer in layers] == [expected] * 3
        assert scopes(model) == ["local" if expected is None else "global"] * 3
        assert all(layer.uneven for layer in layers)
        model(images())
        assert not ghostnoise.convert(model, "gni", 4, **arguments)[1].uneven
        ghostnoise.revert(model)
        assert "process_group" not in vars(model[1])


@pytest.mark.usefixtures("one_rank")
def test_contradictory_options():
    model = convolutional()
    before = state(model)
    for scope, group in (("local", "world"), ("global", None)):
        message = f"scope='{scope}' with process_group={group!r}: scope='global' is process_group='world', "
        with pytest.raises(ValueError, match=message + "and scope='local' is process_group=None; give one of the two"):
            ghostnoise.convert(model, "gni", 4, scope=scope, process_group=group)
    message = "draw='partition' with process_group='world': must be None, .*; use draw='replacement'"
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, "gni", 4, draw="partition", scope="global")
    assert state(model) == before


@pytest.mark.usefixtures("one_rank")
def test_synchronized_layers_keep_their_group_unless_one_is_given():
    group = torch.distributed.new_group([0])
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3, process_group=group), nn.BatchNorm2d(3))
    ghostnoise.convert(model, "gbn", 4)
    assert [layer.process_group for layer in model] == ["world", group.group_name, None]
    for scope, expected in (("local", None), ("global", "world")):
        ghostnoise.convert(model, "gni", 4, scope=scope)
        assert [layer.process_group for layer in model] == [expected] * 3
    ghostnoise.revert(model)
    assert [layer.process_group for layer in model[:2]] == [None, group]


def test_synchronized_layers_without_ranks(tmp_path):
    model = nn.Sequential(nn.SyncBatchNorm(3))
    with pytest.raises(ValueError, match=r"nn.SyncBatchNorm, which uses the statistics of all ranks, without .*scope="):
        ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is nn.SyncBatchNorm
    # A model that was saved with a process group can be reverted where torch.distributed is not initialized.
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    group = torch.distributed.new_group([0])
    model = ghostnoise.convert(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)), "gbn", 4)
    torch.distributed.destroy_process_group()
    assert ghostnoise.revert(model)[0].process_group is None


# Layers that nn.SyncBatchNorm.convert_sync_batchnorm replaces after a conversion are detected.


def test_layers_replaced_by_synchronized_ones_are_detected():
    model = ghostnoise.convert(convolutional(), "gni", 4)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in (model, *copies):
        each(images())
        with pytest.raises(
            RuntimeError, match=r"'1' is now a SyncBatchNorm: convert_sync_batchnorm .*scope=\"global\""
        ):
            synchronize(each)(images())
    torch._dynamo.reset()
    torch.compile(model.eval(), fullgraph=True, backend="eager")(images())  # nothing is done there
    ghostnoise.revert(model)(images())


def test_a_part_or_the_parent_of_a_model_and_later_conversions_are_watched_too():
    model = ghostnoise.convert(convolutional(), "gbn", 4, where=lambda name, module: name == "1")
    with pytest.raises(RuntimeError, match="'1' is now a SyncBatchNorm"):
        synchronize(nn.Sequential(copy.deepcopy(model)))(images())
    ghostnoise.convert(model[4], "gbn", 4)
    ghostnoise.convert(model, "gni", 4, before=nn.ReLU)
    synchronize(model[4])
    with pytest.raises(RuntimeError, match=r"'4\.1' is now a SyncBatchNorm"):
        model(images())


def test_layers_that_were_not_converted_may_be_replaced():
    model = ghostnoise.convert(convolutional(), "gbn", 4, where=lambda name, module: name == "1")
    synchronize(model[4])
    model(images())
    model[1] = nn.Identity()
    model(images())
    ghostnoise.revert(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
