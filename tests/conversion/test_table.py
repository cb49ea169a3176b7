import pytest
from torch import nn

import ghostnoise
from ghostnoise.conversion import table
from ghostnoise.conversion.variants import Activated


@pytest.mark.parametrize("method", list(table.METHODS.values()), ids=list(table.METHODS))
def test_a_method_is_one_family(method):
    for dimensions, layer in enumerate(method.ranked, start=1):
        assert layer.__name__ == f"{method.norm.__name__}{dimensions}d"
        assert issubclass(layer, (method.norm, getattr(nn, f"BatchNorm{dimensions}d")))
        assert layer.options == method.norm.options
    assert method.activated.__mro__[1:3] == (Activated, method.ranked[1])


@pytest.mark.parametrize("name", list(table.METHODS))
def test_options_are_those_of_the_layer_that_conversion_does_not_name(name):
    method = table.find(name)
    options = method.options(method.norm)
    assert {*options, *method.fixed, "ghost_size"} >= {*method.norm.options} - {"process_group"}
    assert not {"ghost_size", "bias", "num_features", "device", *method.fixed} & {*options}
    if method.noise is not None:
        assert "eps" in method.options(method.noise)
        assert "channel_dim" not in method.options(method.noise)


def test_names_of_layers_built_with_other_options():
    layer = ghostnoise.GhostNoiseBatchNorm2d(3, ghost_size=4, shift=False)
    assert table.name_of(type(layer), vars(layer)) == "gni-scale"
    assert table.name_of(ghostnoise.BatchNorm2d, {}) == "bn"
