"""Measure the noise in the layers of a network in training, and leave no trace on it."""

import copy
import io
from itertools import islice

import torch
from torch import nn

from ghostnoise.lab.data import Source
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.settings import MeterSettings, Settings
from ghostnoise.lab.train import generators
from ghostnoise.lab.train.session import Session
from ghostnoise.meter import Meter

GHOST_SIZE = 32


def due(meter: MeterSettings | None, epoch: int, epochs: int) -> bool:
    """Whether there is a measurement after this epoch, counted from 1."""
    return meter is not None and (epoch in (1, epochs) or epoch % meter.every == 0)


def meter_of(model: nn.Module, settings: Settings) -> Meter:
    """A meter as the settings say; a UserError for a network in which there is nothing to measure."""
    meter = settings.meter
    assert meter is not None
    size = meter.ghost_size or settings.norm.ghost_size or GHOST_SIZE
    try:
        return Meter(model, size, draws=meter.draws, seed=settings.seed)
    except ValueError as error:
        raise UserError(f"meter: {error}; leave the section [meter] out") from None


def measure(session: Session, source: Source, epoch: int) -> bytes:
    """What the meter reads while a copy of the network trains on the first batches of an epoch, as a file's content.

    The copy normalizes, and injects noise, as in training, without learning. In several processes each must call this.
    """
    settings, device = session.settings, session.here.device
    assert settings.meter is not None
    model = copy.deepcopy(session.model).train()
    before = generators.states(device)
    with torch.no_grad(), session.casting(), meter_of(model, settings) as meter:
        for images, _ in islice(source.batches(epoch, 0), settings.meter.batches):
            model(images)
    generators.restore(before, device)
    content = io.BytesIO()
    meter.result().write(content)
    return content.getvalue()
