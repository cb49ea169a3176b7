"""Measure the noise in the layers of a network in training, and leave no trace on it."""

import copy
import io
from itertools import islice

import torch

from ghostnoise.lab.config.schema import MeterSettings, Settings
from ghostnoise.lab.data import Source
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.train import generators
from ghostnoise.lab.train.session import Session
from ghostnoise.meter import Meter

GHOST_SIZE = 32


def ghost_size(settings: Settings) -> int:
    """Of what is measured: the meter's, or else the norm's, or else 32."""
    own = settings.meter.ghost_size if settings.meter else None
    return own or settings.norm.ghost_size or GHOST_SIZE


def due(meter: MeterSettings | None, epoch: int, epochs: int) -> bool:
    """Whether there is a measurement after this epoch, counted from 1."""
    return meter is not None and (epoch in (1, epochs) or epoch % meter.every == 0)


def measure(session: Session, source: Source, epoch: int, batches: int | None = None) -> bytes:
    """What the meter reads while a copy of the network trains on the first batches of an epoch, as a file's content.

    The copy normalizes, and injects noise, as in training, without learning. In several processes each must call this.
    A UserError for a network or batches that have nothing to measure.
    """
    settings, device = session.settings, session.here.device
    assert settings.meter is not None
    model = copy.deepcopy(session.model).train()
    before = generators.states(device)
    try:
        meter = Meter(model, ghost_size(settings), draws=settings.meter.draws, seed=settings.seed)
        with torch.no_grad(), session.casting(), meter:
            for images, _ in islice(source.batches(epoch, 0), batches or settings.meter.batches):
                model(images)
        reading = meter.result()
    except ValueError as error:
        raise UserError(f"meter: {error}; leave the section [meter] out") from error
    finally:
        generators.restore(before, device)
    content = io.BytesIO()
    reading.write(content)
    return content.getvalue()
