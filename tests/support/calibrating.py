"""What tests of `ghostnoise.calibrate` share."""

import copy

import pytest
import torch

import ghostnoise

METHODS = {
    "bn": {}, "gbn": {"ghost_size": 4}, "xbn": {"ghost_size": 4}, "en": {"ghost_size": 4}, "gni": {"ghost_size": 4},
    "agni": {"ghost_size": 4}, "brn": {}, "mbn": {"history": 64}, "ptbn": {}, "sgbn": {"ghost_size": 4},
}  # fmt: skip


def state(model):
    modules = list(model.modules())
    return copy.deepcopy(model.state_dict()), [(each.training, len(each._forward_pre_hooks)) for each in modules]


def fails(model, loader, match, kind=ValueError, **options):
    """Check that calibrating raises an error, and changes nothing."""
    tensors, modes = state(model)
    with pytest.raises(kind, match=match):
        ghostnoise.calibrate(model, loader, **options)
    after, modes_after = state(model)
    assert modes == modes_after
    assert all(torch.equal(tensors[name], after[name]) for name in tensors)
