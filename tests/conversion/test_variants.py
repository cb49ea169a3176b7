import pickle

import torch
from torch import nn

from families import example
from ghostnoise import GhostBatchNorm2d
from ghostnoise.conversion import variants


def test_activated_is_norm_drop_act():
    layer, norm = variants.ActivatedGhostBatchNorm2d(3, ghost_size=4), GhostBatchNorm2d(3, ghost_size=4)
    layer.drop, layer.act = nn.Identity(), nn.Sigmoid()
    assert torch.equal(layer(example(2)), norm(example(2)).sigmoid())
    assert torch.equal(pickle.loads(pickle.dumps(layer))(example(2)), norm(example(2)).sigmoid())


def test_lazy_runs_as_what_it_becomes():
    layer = variants.LazyNorm2d()
    layer.cls_to_become, layer.ghost_size, layer.running_var_from = GhostBatchNorm2d, 4, "ghost"
    layer.process_group, layer.uneven = None, False
    assert torch.equal(layer(example(2)), GhostBatchNorm2d(3, ghost_size=4)(example(2)))
    assert type(layer) is GhostBatchNorm2d
