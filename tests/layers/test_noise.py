import copy
import pickle

import pytest
import torch

from ghostnoise import AnalyticalGhostNoise, GhostNoise, functional

both = pytest.mark.parametrize("layer", [GhostNoise, AnalyticalGhostNoise])


@both
def test_forward_is_the_function(layer):
    x = torch.randn(6, 5, 3)
    options = {"shift": False, "channel_dim": -1}
    function = functional.ghost_noise if layer is GhostNoise else functional.analytical_ghost_noise
    expected = function(x, 4, 1e-2, **options, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(4, 1e-2, **options, generator=torch.Generator().manual_seed(1))(x), expected)


@both
def test_eval_returns_the_input_itself(layer):
    x = torch.randn(6, 3)
    assert layer(4).eval()(x) is x


@both
def test_no_state(layer):
    assert list(layer(4).state_dict()) == []


@both
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 2), (6, 3, 4, 2, 2)])
def test_any_rank(layer, shape):
    x = torch.randn(shape)
    assert layer(4)(x).shape == shape
    assert layer(4, channel_dim=-1)(x).shape == shape


@both
def test_repr_pickle_and_deepcopy(layer):
    original = layer(4, shift=False, channel_dim=-1)
    assert "ghost_size=4, eps=0.001" in repr(original)
    assert "shift=False, scale=True, channel_dim=-1" in repr(original)
    x = torch.randn(6, 3)
    for twin in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
        assert repr(twin) == repr(original)
        torch.manual_seed(0)
        y = original(x)
        torch.manual_seed(0)
        assert torch.equal(twin(x), y)


def test_analytical_options_reach_the_function():
    x = torch.randn(6, 3, 5)
    options = {"kind": "conv", "dof": "exact"}
    expected = functional.analytical_ghost_noise(x, 4, **options, generator=torch.Generator().manual_seed(1))
    assert torch.equal(AnalyticalGhostNoise(4, **options, generator=torch.Generator().manual_seed(1))(x), expected)


@both
def test_options_are_checked_when_built(layer):
    with pytest.raises(ValueError, match="ghost_size=0"):
        layer(0)
    with pytest.raises(ValueError, match="eps=-1"):
        layer(4, -1)
    with pytest.raises(ValueError, match="channel_dim=0"):
        layer(4, channel_dim=0)


def test_analytical_options_are_checked_when_built():
    with pytest.raises(ValueError, match="kind='x'"):
        AnalyticalGhostNoise(4, kind="x")
    with pytest.raises(ValueError, match="dof='x'"):
        AnalyticalGhostNoise(4, dof="x")


@both
def test_without_ghosts_the_input_itself_is_returned(layer):
    x = torch.randn(6, 3)
    assert layer(None)(x) is x
