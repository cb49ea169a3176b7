import copy
import pickle

import pytest
import torch
from torch import nn

import ghostnoise
from support.models import convolutional, images

synchronize = nn.SyncBatchNorm.convert_sync_batchnorm


def test_layers_replaced_by_synchronized_ones_are_detected():
    model = synchronize(ghostnoise.convert(convolutional(), "gni", 4))
    with pytest.raises(RuntimeError, match=r"'1' is now a SyncBatchNorm: convert_sync_batchnorm .*scope=\"global\""):
        model(images())


def test_a_part_or_the_parent_of_the_model():
    model = ghostnoise.convert(convolutional(), "gni", 4)
    synchronize(model[4])
    with pytest.raises(RuntimeError, match=r"'4\.1' is now a SyncBatchNorm"):
        model(images())
    model = ghostnoise.convert(convolutional(), "gni", 4)
    parent = synchronize(nn.Sequential(model))
    with pytest.raises(RuntimeError, match="'1' is now a SyncBatchNorm"):
        parent(images())


def test_copies_detect_it_too():
    model = ghostnoise.convert(convolutional(), "gni", 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(images())
        with pytest.raises(RuntimeError, match="is now a SyncBatchNorm"):
            synchronize(twin)(images())
    model(images())


def test_layers_that_were_not_converted_may_be_replaced():
    model = ghostnoise.convert(convolutional(), "gbn", 4, where=lambda name, module: name == "1")
    synchronize(model[4])
    model(images())
    model[1] = nn.Identity()
    model(images())


def test_revert_allows_it():
    model = synchronize(ghostnoise.convert(convolutional(), "gni", 4))
    ghostnoise.revert(model)(images())


def test_one_hook_however_often_a_model_is_converted():
    model = convolutional()
    for method in ("gni", "agni", "gbn"):
        ghostnoise.convert(model, method, 4)
    assert len(model._forward_pre_hooks) == 1
    ghostnoise.revert(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_later_conversion_of_a_part_is_watched_too():
    model = ghostnoise.convert(convolutional(), "gbn", 4, where=lambda name, module: name == "1")
    ghostnoise.convert(model[4], "gbn", 4)
    ghostnoise.convert(model, "gni", 4, before=nn.ReLU)
    synchronize(model[4])
    with pytest.raises(RuntimeError, match=r"'4\.1' is now a SyncBatchNorm"):
        model(images())


def test_nothing_is_done_under_compile():
    torch._dynamo.reset()
    model = synchronize(ghostnoise.convert(convolutional(), "gni", 4)).eval()
    torch.compile(model, fullgraph=True, backend="eager")(images())
