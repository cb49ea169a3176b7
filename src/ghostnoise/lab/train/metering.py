"""Measure the noise in the layers of a network during training, without affecting the training."""

import copy
import io
from itertools import islice

import torch

from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.data import Source
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.train.session import Session, generator_states, restore_generators
from ghostnoise.meter import Meter

GHOST_SIZE = 32


def ghost_size(settings: Settings) -> int:
    """Return the ghost size to measure with: that of the meter, or else of the norm, or else 32."""
    own = settings.meter.ghost_size if settings.meter else None
    return own or settings.norm.ghost_size or GHOST_SIZE


def measure(session: Session, source: Source, epoch: int, batches: int | None = None) -> bytes:
    """Measure a copy of the network on the first batches of an epoch, and return the reading as the content of a file.

    The copy is in training mode, but its weights are not updated. All processes must call this function. Raises a
    UserError if the network or the batches cannot be measured.
    """
    settings, device = session.settings, session.here.device
    assert settings.meter is not None
    model = copy.deepcopy(session.model).train()
    before = generator_states(device)
    try:
        meter = Meter(model, ghost_size(settings), draws=settings.meter.draws, seed=settings.seed)
        with torch.no_grad(), session.autocast(), meter:
            for images, labels in islice(source.batches(epoch, 0), batches or settings.meter.batches):
                for some, _ in session.micro_batches(images, labels):
                    model(some)
        reading = meter.result()
    except ValueError as error:
        raise UserError(f"meter: {error}; leave the section [meter] out") from error
    finally:
        restore_generators(before, device)
    content = io.BytesIO()
    reading.write(content)
    return content.getvalue()
