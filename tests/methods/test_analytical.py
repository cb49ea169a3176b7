import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ghostnoise import AnalyticalGhostNoise, AnalyticalGhostNoiseBatchNorm2d, GhostNoiseBatchNorm2d, functional
from ghostnoise.laws import Law
from ghostnoise.tables import COMPONENTS
from support import reference
from support.comparison import assert_equals_naive
from support.families import example
from support.inputs import cases

pytestmark = pytest.mark.filterwarnings("ignore:ghost_size=1 on samples")
every_law = (st.sampled_from(["fc", "conv"]), st.sampled_from(["paper", "exact"]), st.sampled_from(COMPONENTS))


def drawn(case, law, dof):
    shape = (case.batch_size, case.channels)
    return Law(case.ghost_size, law, dof).draw(shape, case.spatial, torch.device("cpu"), None)


@given(cases(least_values=1), *every_law)
def test_analytical_ghost_noise_equals_naive_loop(case, law, dof, components):
    draws, options = drawn(case, law, dof), {"law": law, "dof": dof, "components": components}

    def function(x, weight, bias):
        return functional.analytical_ghost_noise(
            x, case.ghost_size, channel_dim=case.channel_dim, draws=draws, **options
        )

    def naive(x, weight, bias):
        return reference.analytical_noise(x, draws, case.ghost_size, **options)

    assert_equals_naive(function, naive, case, affine=False)


@given(cases(), *every_law)
def test_analytical_ghost_noise_batch_norm_equals_naive_loop(case, law, dof, components):
    draws, options = drawn(case, law, dof), {"law": law, "dof": dof, "components": components}

    def function(x, weight, bias):
        return functional.analytical_ghost_noise_batch_norm(
            x, None, None, weight, bias, True, ghost_size=case.ghost_size, channel_dim=case.channel_dim, draws=draws,
            **options,
        )  # fmt: skip

    def naive(x, weight, bias):
        return reference.analytical_noise_batch_norm(x, draws, case.ghost_size, weight=weight, bias=bias, **options)

    assert_equals_naive(function, naive, case)


@pytest.mark.parametrize("law", ["fc", "conv"])
def test_running_statistics_are_batch_norms(law):
    x = torch.randn(8, 3, 4, dtype=torch.float64)
    plain = nn.BatchNorm1d(3, dtype=torch.float64)
    plain(x)
    for function, options in (
        (functional.ghost_noise_batch_norm, {}),
        (functional.analytical_ghost_noise_batch_norm, {"law": law}),
    ):
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        function(x, mean, var, training=True, ghost_size=4, **options)
        torch.testing.assert_close(mean, plain.running_mean)
        torch.testing.assert_close(var, plain.running_var)


def test_analytical_options_reach_the_function():
    x = torch.randn(6, 3, 5)
    options = {"law": "conv", "dof": "exact"}
    expected = functional.analytical_ghost_noise(x, 4, **options, generator=torch.Generator().manual_seed(1))
    assert torch.equal(AnalyticalGhostNoise(4, **options, generator=torch.Generator().manual_seed(1))(x), expected)


def test_analytical_options_are_checked_when_built():
    with pytest.raises(ValueError, match="law='x'"):
        AnalyticalGhostNoise(4, law="x")
    with pytest.raises(ValueError, match="dof='x'"):
        AnalyticalGhostNoise(4, dof="x")


def test_analytical_forward_is_the_function():
    options = {"ghost_size": 7, "law": "conv", "dof": "exact", "components": "scale", "noise_eps": 1e-2}
    layer = AnalyticalGhostNoiseBatchNorm2d(3, **options, generator=torch.Generator().manual_seed(1))
    y = functional.analytical_ghost_noise_batch_norm(
        example(2), None, None, layer.weight, layer.bias, True, **options, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(layer(example(2)), y)


def test_options_are_checked_when_built():
    for layer, options in (
        (GhostNoiseBatchNorm2d, {"ghost_size": 0}),
        (GhostNoiseBatchNorm2d, {"ghost_size": 4, "noise_eps": -1}),
        (AnalyticalGhostNoiseBatchNorm2d, {"ghost_size": 2.5}),
        (AnalyticalGhostNoiseBatchNorm2d, {"ghost_size": 4, "law": "x"}),
        (AnalyticalGhostNoiseBatchNorm2d, {"ghost_size": 4, "dof": "x"}),
    ):
        name = list(options)[-1]
        with pytest.raises(ValueError, match=f"{name}="):
            layer(3, **options)


def test_options_outside_their_range():
    x = torch.randn(6, 3)
    with pytest.raises(ValueError, match="law='dense': must be one of 'fc', 'conv'"):
        functional.analytical_ghost_noise(x, 4, law="dense")
    with pytest.raises(ValueError, match="dof='n': must be one of 'paper', 'exact'"):
        functional.analytical_ghost_noise(x, 4, dof="n")
    with pytest.raises(ValueError, match=r"draws.normal of shape \(2, 3\): must be \(B, C\) = \(6, 3\)"):
        functional.analytical_ghost_noise(x, 4, draws=[torch.zeros(2, 3)] * 3)
