"""A meter measures every batch once, in any mode, and refuses what it cannot measure."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostnoise.meter import Meter
from support.metering import measure_model
from support.models import convolutional, images, tokens, transformer


def test_layers_are_in_the_order_of_their_first_call():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first, self.never = nn.LayerNorm(3), nn.LayerNorm(3), nn.LayerNorm(3)

        def forward(self, x):
            return self.last(self.first(x))

    assert list(measure_model(Backwards(), [torch.randn(8, 3)])) == ["first", "last"]


def test_a_shared_module_is_one_layer():
    norm = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(norm)})
    x = torch.randn(8, 3)
    with Meter(model, 4) as meter:
        model["b"](model["a"](x))
    found = meter.result()
    assert list(found) == ["a.0"]
    assert found["a.0"] is found["b.0"]
    assert found["a.0"].names == ("a.0", "b.0")
    assert (found["a.0"].batches, found["a.0"].samples) == (2, 16)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_a_batch_once(reentrant):
    block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.LayerNorm(4))
    x = torch.randn(8, 3, requires_grad=True)
    with Meter(block, 4) as meter:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert [layer.batches for layer in meter.result().layers] == [1, 1]


def test_with_blocks_can_be_repeated_but_not_nested():
    model, x = nn.Sequential(nn.BatchNorm1d(3)), torch.randn(8, 3)
    meter = Meter(model, 4)
    for number in (1, 2):
        with meter:
            model(x)
        assert meter.result()["0"].batches == number
    model(x)
    assert meter.result()["0"].batches == 2
    with meter, pytest.raises(RuntimeError, match="already active"), meter:
        pass


def test_two_meters_with_the_same_seed_agree():
    model, x = convolutional().eval(), images()
    with torch.no_grad(), Meter(model, 4, seed=3) as one, Meter(model, 4, seed=3) as other, Meter(model, 4) as third:
        model(x)
    assert one.result() == other.result()
    assert one.result() != third.result()


def sizes(thing):
    """Sizes of all tensors and containers of a meter, at any depth."""
    if isinstance(thing, torch.Tensor):
        return [thing.numel()]
    held = []
    if isinstance(thing, (list, tuple, dict)):
        held = [*(thing.values() if isinstance(thing, dict) else thing)]
    elif type(thing).__module__.startswith("ghostnoise.meter"):
        held = [*vars(thing).values()]
    return [len(held), *(size for each in held for size in sizes(each))]


def test_memory_does_not_grow_with_batches():
    model, seen = convolutional(), []
    with Meter(model, 4) as meter, torch.no_grad():
        for batch_size in (8, 64, 8, 32):
            model(images(batch_size))
            seen.append(sizes(meter))
    assert max(seen[0]) > 100
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize(
    "modes", [(torch.inference_mode, torch.enable_grad), (torch.enable_grad, torch.inference_mode)]
)
def test_batches_with_and_without_inference_mode(modes):
    model, x = nn.Sequential(nn.BatchNorm1d(3)).eval(), torch.randn(8, 3)
    with Meter(model, 4) as meter:
        for mode in modes:
            with mode():
                model(x)
    assert meter.result()["0"].batches == 2


def test_another_default_device():
    model, x = nn.Sequential(nn.BatchNorm1d(3)), torch.randn(8, 3)
    expected = measure_model(copy.deepcopy(model), [x])
    with torch.device("meta"):
        assert measure_model(model, [x]) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_and_autocast(dtype):
    x = torch.randn(16, 6)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)).to(dtype)
    found = measure_model(model, [x.to(dtype)])
    exact = model[0](x.to(dtype)).double()
    np.testing.assert_allclose(found["1"].mean, exact.mean(0).detach(), atol=1e-6)
    np.testing.assert_allclose(found["1"].var, exact.var(0, correction=0).detach(), rtol=1e-5)
    wide = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    with torch.autocast("cpu", dtype):
        assert (measure_model(wide, [x])["1"].noise["gni"].shift.var > 0).all()


def test_channels_last_images():
    plain, last = (
        measure_model(convolutional(), [x]) for x in (images(), images().to(memory_format=torch.channels_last))
    )
    np.testing.assert_allclose(plain["1"].within, last["1"].within, rtol=1e-5)
    np.testing.assert_allclose(plain["1"].noise["gni"].scale.mean, last["1"].noise["gni"].scale.mean, rtol=1e-5)


def test_tokens_through_layer_norm():
    model, x = transformer(), tokens()
    found = measure_model(model, [x])["0"]
    y = model[0](x).double().detach()
    assert (found.side, found.channels, found.spatial) == ("output", 6, 5)
    np.testing.assert_allclose(found.mean, y.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(found.var, y.var((0, 1), correction=0), rtol=1e-5)


def test_a_compiled_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(model, backend="eager")
    with Meter(model, 4) as meter, torch.no_grad():
        compiled(torch.randn(8, 3))
        compiled(torch.randn(8, 3))
    assert meter.result()["1"].batches == 2


def test_nothing_measured():
    model = nn.Sequential(nn.BatchNorm1d(3)).eval()
    meter = Meter(model, 4)
    with pytest.raises(ValueError, match="nothing was measured in 1 layers, because no batch reached them"):
        meter.result()
    with meter:
        model(torch.randn(1, 3))
        model(torch.randn(0, 3))
        model(torch.full((4, 3), float("nan")))
    with pytest.raises(
        ValueError, match=r"3 batches had fewer than two samples or values that are not finite: .*; run forward passes"
    ):
        meter.result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ghost_size": 0}, "ghost_size=0: must be an integer from 1 to 65536"),
        ({"ghost_size": 2.5}, "ghost_size=2.5: must be an integer"),
        ({"draws": 0}, "draws=0: must be an integer of 1 or more"),
        ({"draws": True}, "draws=True: must be an integer"),
        ({"side": "left"}, "side='left': must be one of 'input', 'output'"),
        ({"channel_dim": 0}, "channel_dim=0: must be an integer other than 0"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        Meter(nn.Sequential(nn.BatchNorm1d(3)), **options)
