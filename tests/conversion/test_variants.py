import copy
import pickle

import pytest
import torch
from torch import nn

from ghostnoise import EvalNorm2d, GhostBatchNorm2d
from ghostnoise.conversion import variants
from support.families import FAMILIES, OPTIONS, build, example, layer_class


@pytest.mark.parametrize("family", FAMILIES)
def test_activated_is_norm_drop_act(family):
    kind = variants.activated(layer_class(family, 2))
    layer, norm = kind(3, **OPTIONS[family]), build(family, 2)
    layer.drop, layer.act = nn.Identity(), nn.Sigmoid()
    outputs = []
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer, nn.Sequential(norm, nn.Sigmoid())):
        torch.manual_seed(0)
        outputs.append(each(example(2)))
    assert all(torch.equal(output, outputs[-1]) for output in outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_activated_classes_are_created_once_and_found_by_name(family):
    norm = layer_class(family, 2)
    kind = variants.activated(norm)
    assert kind is variants.activated(norm)
    assert kind is getattr(variants, f"Activated{norm.__name__}")
    assert kind.__mro__[1:3] == (variants.Activated, norm)
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_names_that_do_not_exist():
    for name in ("ActivatedNothing2d", "nothing"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(variants, name)


@pytest.mark.parametrize("kind", [GhostBatchNorm2d, EvalNorm2d])
def test_lazy_runs_as_the_layer_that_it_becomes(kind):
    layer, built = variants.LazyNorm2d(), kind(3, ghost_size=4)
    layer.cls_to_become = kind
    for name in kind.options:
        setattr(layer, name, getattr(built, name))
    assert torch.equal(layer(input=example(2)), built(example(2)))
    assert type(layer) is kind
