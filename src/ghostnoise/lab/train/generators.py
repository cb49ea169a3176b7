"""The states of all generators that a training step may draw from, as what a checkpoint can hold."""

import random
from typing import Any

import numpy
import torch

States = dict[str, Any]


def seed(value: int) -> None:
    """Start all generators from `value`."""
    torch.manual_seed(value)  # the device's too
    random.seed(value)
    numpy.random.seed(value % 2**32)  # noqa: NPY002  # the global one, which others draw from


def states(device: torch.device) -> States:
    """Where the generators are now."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)  # noqa: NPY002
    found: States = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
        "numpy": (torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), position, has_gauss, cached),
    }
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state()
    return found


def restore(found: States, device: torch.device) -> None:
    """Have the generators where `states` found them."""
    torch.set_rng_state(found["torch"])
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = found["numpy"]
    numpy.random.set_state(("MT19937", keys.numpy().astype(numpy.uint32), position, has_gauss, cached))  # noqa: NPY002
    if device.type != "cpu" and "device" in found:
        torch.get_device_module(device).set_rng_state(found["device"])
