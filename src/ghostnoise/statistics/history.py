"""The moments of earlier samples, from which ghost batches are drawn together with those of the current batch."""

import warnings

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.statistics.moments import Moments, Stored

REMEMBERED = 8  # batches beyond the history that are kept, so that a recomputed pass finds the samples before its own


class History:
    """The moments of the last `size` samples of a layer's input, in float32, as constants.

    A ring buffer: the oldest samples are overwritten first. It is a plain object and not a buffer of its layer, so that
    `nn.parallel.DistributedDataParallel` does not overwrite it with that of another rank, and a state_dict does not
    contain it unless it is `persistent`. Its tensors are created by the first batch, on the device of that batch.

    Args:
        size: the number of samples, H.
        persistent: whether the layer's state_dict contains it.

    Examples:
        >>> history = History(256)
        >>> for micro_batch in torch.randn(100, 2, 16, 10):
        ...     y = ghostnoise.functional.ghost_noise(micro_batch, ghost_size=32, history=history)
        >>> history
        History(256)
    """

    def __init__(self, size: int, persistent: bool = False) -> None:
        checks.flag("persistent", persistent)
        self.size, self.persistent = checks.history(size, least=1), persistent
        self.clear()

    def __repr__(self) -> str:
        return f"History({self.size}{', persistent=True' if self.persistent else ''})"

    def clear(self) -> None:
        """Forget all samples."""
        self._ring: Stored | None = None
        self._seen: Tensor | None = None  # the number of samples so far, on the device

    def stored(self, channels: int, device: torch.device) -> Stored:
        """Return the last `size` samples, the oldest first; those that are not there yet have a count of 0."""
        ring, seen = self._at(channels, device)
        return self._before(ring, seen)

    def before(self, moments: Moments, first: int = 0) -> Stored:
        """Return the samples that `stored` returned before the batch with these moments was added.

        `moments` (n, C) are those of some consecutive samples of that batch, and `first` is the position in the batch
        of the first of them. Synchronizes with the device.
        """
        count = moments.mean.shape[0]
        ring, seen = self._at(moments.mean.shape[1], moments.mean.device)
        rows = ring.mean.shape[0]
        room = rows - self.size - first - count + 1  # batches whose history is still complete
        if count == 0 or room < 1:
            return self._not_found(ring, seen)
        given = _storable(moments, 1)
        starts = seen - count - torch.arange(room, device=seen.device)  # the latest first
        difference = torch.zeros(room, device=seen.device)
        for row in (0, count - 1):  # the first and the last sample are enough to identify the batch
            found, wanted = ring.at((starts + row) % rows), given.at(torch.tensor([row], device=seen.device))
            difference += sum((table - one).abs().sum(1) for table, one in zip(found[:2], wanted[:2], strict=True))
            difference = difference.where((found.counts > 0) == (wanted.counts > 0), torch.inf)
        least, latest = difference.min(0)
        scale = sum(table.abs().sum(1).amax() for table in given[:2])
        if least > 1e-3 * scale:
            return self._not_found(ring, seen)
        return self._before(ring, starts[latest] - first)

    def _not_found(self, ring: Stored, seen: Tensor) -> Stored:
        warnings.warn(
            f"a recomputed forward pass that is not among the last {REMEMBERED} batches of {self!r}: its ghost batches "
            "are drawn from other samples than those of the first pass, so its gradient is not exact; run the backward "
            "pass of a batch before the forward passes of so many others, or leave this layer out of the checkpoint",
            stacklevel=2,
        )
        return self._before(ring, seen)

    @torch.no_grad()
    def add(self, moments: Moments, counts: Tensor | int) -> None:
        """Add the samples of a batch (B, C) with their numbers of values (B,); those that are not finite are absent."""
        batch_size, channels = moments.mean.shape
        if batch_size == 0:
            return
        ring, seen = self._at(channels, moments.mean.device, batch_size)
        rows, new = ring.mean.shape[0], _storable(moments, counts)
        kept = min(batch_size, rows)
        slots = (seen + torch.arange(batch_size - kept, batch_size, device=seen.device)) % rows
        for table, values in zip(ring, new, strict=True):
            table.index_copy_(0, slots, values[batch_size - kept :])
        seen.add_(batch_size)

    def state(self) -> dict[str, Tensor]:
        """Return the last `size` samples as tensors, which `load` takes."""
        if self._ring is None or self._seen is None:
            return dict(zip(Stored._fields, _absent(0, 0, torch.device("cpu")), strict=True))
        return self._before(self._ring, self._seen)._asdict()

    def load(self, state: dict[str, Tensor]) -> None:
        """Replace the samples by those of `state`, which must have the same `size`."""
        given = Stored(*(torch.as_tensor(state[name]) for name in Stored._fields))
        if given.mean.shape[0] not in (0, self.size) or given.mean.shape != given.var.shape:
            raise ValueError(
                f"a saved history of {given.mean.shape[0]} samples: must have {self.size}, the history of this layer; "
                "build it with the same history=, or leave the saved one out"
            )
        if given.mean.shape[0] == 0:
            self.clear()
            return
        self._ring = Stored(*(table.detach().to(torch.float32, copy=True) for table in given))
        self._seen = torch.tensor(self.size, device=given.mean.device)

    def _before(self, ring: Stored, seen: Tensor) -> Stored:
        """Return the `size` samples before the one with number `seen`."""
        numbers = seen - self.size + torch.arange(self.size, device=seen.device)
        return ring.at(numbers % ring.mean.shape[0])

    def _at(self, channels: int, device: torch.device, batch_size: int = 0) -> tuple[Stored, Tensor]:
        """Return the ring and the number of samples, on this device, with room for `batch_size` new samples.

        Under torch.compile there are no recomputed passes, and the ring has room for the history alone.
        """
        if self._ring is None or self._seen is None:
            self._ring, self._seen = _absent(self.size, channels, device), torch.tensor(0, device=device)
        if self._ring.mean.shape[1] != channels:
            raise ValueError(
                f"an input of {channels} channels, and a history of samples with {self._ring.mean.shape[1]}: a history "
                "belongs to one layer; use another one, or call its clear() first"
            )
        if self._ring.mean.device != device:
            self._ring, self._seen = Stored(*(table.to(device) for table in self._ring)), self._seen.to(device)
        rows, needed = self._ring.mean.shape[0], self.size + REMEMBERED * batch_size
        if rows < needed and not torch.compiler.is_compiling():
            grown, numbers = _absent(needed, channels, device), self._seen - rows + torch.arange(rows, device=device)
            for table, values in zip(grown, self._ring.at(numbers % rows), strict=True):
                table.index_copy_(0, numbers % needed, values)
            self._ring = grown
        return self._ring, self._seen


def _absent(rows: int, channels: int, device: torch.device) -> Stored:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    return Stored(zeros(rows, channels), zeros(rows, channels), zeros(rows))


def _storable(moments: Moments, counts: Tensor | int) -> Stored:
    """Return moments and counts in float32; a sample that is not finite is absent."""
    mean, var = (table.detach().to(torch.float32) for table in moments)
    finite = (mean.isfinite() & var.isfinite()).all(1)
    there = finite[:, None]
    return Stored(mean.where(there, 0), var.where(there, 0), finite.to(torch.float32) * counts)
