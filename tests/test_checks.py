import numpy as np
import pytest
import torch

from ghostnoise import checks, functional


@pytest.mark.parametrize("value", [0, -3, 2.0, 2.5, "8", True, None, [4], torch.tensor(2.5), np.array([1, 2])])
def test_ghost_sizes_that_are_none(value):
    with pytest.raises(ValueError, match=r"ghost_size=.*: must be an integer from 1 to 65536"):
        checks.ghost_size(value)


@pytest.mark.parametrize("value", [1, 7, np.int64(5), torch.tensor(3)])
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


def test_infinity_is_no_number():
    with pytest.raises(ValueError, match=r"eps=inf: must be a number in \[0, inf\)"):
        checks.number("eps", float("inf"), 0)


NORMS = [
    (functional.batch_norm, {}),
    (functional.ghost_batch_norm, {"ghost_size": 2}),
    (functional.exclusive_batch_norm, {}),
    (functional.eval_norm, {"ghost_size": 2}),
    (functional.ghost_noise_batch_norm, {"ghost_size": 2}),
    (functional.analytical_ghost_noise_batch_norm, {"ghost_size": 2}),
]
NOISES = [functional.ghost_noise, functional.analytical_ghost_noise]


def calls():
    for function, options in NORMS:
        yield lambda x, function=function, options=options, **more: function(
            x, None, None, training=True, **options, **more
        )
    for function in NOISES:
        yield lambda x, function=function, **more: function(x, 2, **more)


@pytest.mark.parametrize("call", list(calls()))
def test_inputs_that_no_method_takes(call):
    with pytest.raises(ValueError, match=r"shape \(4,\): must have 2 to 5 dimensions"):
        call(torch.randn(4))
    with pytest.raises(ValueError, match="must have 2 to 5 dimensions"):
        call(torch.randn(2, 2, 2, 2, 2, 2))
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(ValueError, match=rf"dtype {dtype}: must be a real floating dtype; convert"):
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


@pytest.mark.parametrize(("function", "options"), NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_channels_that_do_not_match(function, options, training):
    x, three, four = torch.randn(6, 4, 5), torch.ones(3), torch.ones(4)
    with pytest.raises(ValueError, match=r"got 4 channels .* running_mean of shape \(3,\): must be \(4,\)"):
        function(x, three, four, training=training, **options)
    with pytest.raises(ValueError, match=r"weight of shape \(3,\)"):
        function(x, four, four, three, training=training, **options)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\): must be \(5,\); check num_features or channel_dim"):
        function(x, None, None, None, four, training=training, channel_dim=-1, **options)
