import numpy as np
import pytest
import torch

from ghostnoise import checks
from ghostnoise.methods import registry
from support import families


@pytest.mark.parametrize("value", [0, -3, 2.0, 2.5, "8", True, None, [4], torch.tensor(2.5), np.array([1, 2]), 65_537])
def test_not_a_ghost_size(value):
    with pytest.raises(ValueError, match=r"ghost_size=.*: must be an integer from 1 to 65536"):
        checks.ghost_size(value)


@pytest.mark.parametrize("value", [1, 7, np.int64(5), torch.tensor(3), 65_536])
def test_ghost_sizes(value):
    size = checks.ghost_size(value)
    assert type(size) is int
    assert size == int(value)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), "0.5", True, None])
def test_numbers_outside_a_half_open_range(value):
    with pytest.raises(ValueError, match=r"p=.*: must be a number in \[0, 1\)"):
        checks.number("p", value, 0, 1, open_high=True)


def test_numbers():
    for value in (0, 0.5, np.float32(0.25)):
        checks.number("p", value, 0, 1)
    with pytest.raises(ValueError, match=r"clamp=0: must be a number in \(0, inf\)"):
        checks.number("clamp", 0, 0, open_low=True)


def test_infinity_is_refused():
    with pytest.raises(ValueError, match=r"eps=inf: must be a number in \[0, inf\)"):
        checks.number("eps", float("inf"), 0)


GHOST_NOISE = [spec.noise for spec in registry.specs().values() if spec.noise is not None and spec.ghost_size != "none"]


def calls():
    """Return all methods that use statistics of a batch, as functions of x."""
    for family in families.FAMILIES:
        function, options = families.function(family)
        yield lambda x, function=function, options=options, **more: function(
            x, None, None, training=True, **options, **more
        )
    for noise in GHOST_NOISE:
        yield lambda x, noise=noise, **more: noise(2, **more)(x)


@pytest.mark.parametrize("call", list(calls()))
def test_inputs_that_no_method_accepts(call):
    with pytest.raises(ValueError, match=r"shape \(4,\): must have 2 to 5 dimensions"):
        call(torch.randn(4))
    with pytest.raises(ValueError, match="must have 2 to 5 dimensions"):
        call(torch.randn(2, 2, 2, 2, 2, 2))
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(ValueError, match=rf"dtype {dtype}: must be float16, bfloat16, float32 or float64; convert"):
            call(torch.ones(4, 3, dtype=dtype))
    for shape in ((0, 3), (0, 3, 4), (4, 3, 0), (4, 0)):
        with pytest.raises(ValueError, match=r"empty input of shape .*skip empty batches"):
            call(torch.randn(shape))
    for dim in (0, 1.0, True, None):
        with pytest.raises(ValueError, match=r"channel_dim=.*: must be an integer other than 0, the batch dimension"):
            call(torch.randn(4, 3), channel_dim=dim)
    for dim in (2, -2, -3):
        with pytest.raises(ValueError, match=r"channel_dim=.*: must be a dimension of the input"):
            call(torch.randn(4, 3), channel_dim=dim)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("training", [True, False])
def test_channels_that_do_not_match(family, training):
    function, options = families.function(family)
    x, three, four = torch.randn(6, 4, 5), torch.ones(3), torch.ones(4)
    with pytest.raises(ValueError, match=r"got 4 channels .* running_mean of shape \(3,\): must be \(4,\)"):
        function(x, three, four, training=training, **options)
    with pytest.raises(ValueError, match=r"weight of shape \(3,\)"):
        function(x, four, four, three, training=training, **options)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\): must be \(5,\); check num_features or channel_dim"):
        function(x, None, None, None, four, training=training, channel_dim=-1, **options)


@pytest.mark.parametrize(
    ("value", "name"),
    [(np.ones((4, 3)), "numpy.ndarray"), ([[1.0, 2.0]], "builtins.list"), (None, "builtins.NoneType")],
)
def test_not_a_tensor(value, name):
    with pytest.raises(ValueError, match=rf"f got a {name}: must be a torch.Tensor; convert with torch.as_tensor"):
        checks.floating(value, "f")


def test_not_a_dense_tensor():
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged)
    with pytest.raises(
        ValueError, match=r"nested tensor: must be a dense tensor; pad with torch.nested.to_padded_tens"
    ):
        checks.floating(nested, "f")
    with pytest.raises(
        ValueError, match=r"dtype torch.float8_e5m2: must be float16, bfloat16, .*; convert with x.float"
    ):
        checks.floating(torch.randn(4, 3).to(torch.float8_e5m2), "f")
    with pytest.raises(ValueError, match=r"layout torch.sparse_coo: must be a dense tensor; convert with x.to_dense"):
        checks.floating(torch.randn(4, 3).to_sparse(), "f")


def test_indices_that_are_not_a_tensor():
    with pytest.raises(ValueError, match=r"indices of type list: must be a torch.Tensor \(B, N\)"):
        checks.index_table([[0, 1]], 1, 2, 4)


def test_flags_choices_steps_and_generators():
    checks.flag("uneven", True)
    with pytest.raises(ValueError, match="uneven='yes': must be True or False"):
        checks.flag("uneven", "yes")
    with pytest.raises(ValueError, match="law='x': must be one of 'fc', 'conv'"):
        checks.choice("law", "x", ("fc", "conv"))
    assert checks.steps(5) == 5
    with pytest.raises(ValueError, match="warmup=0: must be an integer of 1 or more, a number of steps"):
        checks.steps(0, name="warmup")
    checks.generator(None)
    checks.generator(torch.Generator())
    with pytest.raises(ValueError, match=r"generator=3: must be a torch.Generator or None; use torch.Generator\(\)"):
        checks.generator(3)


def test_options_of_layers_are_checked():
    for spec in registry.specs().values():
        layer = spec.norm or spec.noise
        given = (3,) if spec.norm else ()
        options = ({} if spec.ghost_size == "none" else {"ghost_size": 4}) | spec.example
        if "generator" in layer.__init__.__annotations__:
            with pytest.raises(ValueError, match=r"generator=3: must be a torch\.Generator"):
                layer(*given, **options, generator=3)
        if "uneven" in layer.__init__.__annotations__:
            with pytest.raises(ValueError, match="uneven='yes': must be True or False"):
                layer(*given, **options, uneven="yes")
        if spec.norm:
            with pytest.raises(ValueError, match=r"eps=-1: must be a number in \[0, inf\)"):
                layer(*given, **options, eps=-1)
