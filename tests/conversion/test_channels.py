import pytest
from torch import nn

import ghostnoise

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
    with pytest.raises(ValueError, match=rf"channel_dim is not known for '0' \({name}\): give channel_dim=1, or -1"):
        channel_dim(module)
    assert channel_dim(module, channel_dim=-1) == -1


def test_all_that_are_unknown_are_listed():
    model = nn.Sequential(nn.LayerNorm(6), *(Own(6) for _ in range(6)))
    with pytest.raises(ValueError, match=r"for '1' \(Own\), '2' \(Own\), .*, '5' \(Own\) and 1 more: give"):
        ghostnoise.convert(model, "gni", 4, after=nn.LayerNorm)


def test_the_batch_dimension_has_no_channels():
    with pytest.raises(ValueError, match="channel_dim=0: must be an integer other than 0"):
        channel_dim(nn.ReLU(), channel_dim=0)
