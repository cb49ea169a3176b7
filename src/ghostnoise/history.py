"""The moments of earlier samples, from which ghost batches are drawn together with those of the current batch."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ghostnoise import checks
from ghostnoise.tables import Moments, counts


class History:
    """The moments of the last `size` samples of a layer's input, in float32, as constants.

    A ring buffer: the oldest samples are overwritten first. It is a plain object and not a buffer of its layer, so that
    `nn.parallel.DistributedDataParallel` does not overwrite it with that of another rank, and a state_dict does not
    contain it unless it is `persistent`. Its tensors are created by the first batch, on the device of that batch.

    Args:
        size: the number of samples, H.
        persistent: whether the layer's state_dict contains it.

    Examples:
        >>> import ghostnoise
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
        self._ring: Tensor | None = None  # a row per sample: means, variances and count
        self._seen: Tensor | None = None  # the number of samples so far, on the device

    def stored(self, channels: int, device: torch.device) -> Moments:
        """Return the last `size` samples, the oldest first; those that are not there yet have a count of 0."""
        return _moments(self._in_order(*self._at(channels, device)))

    @torch.no_grad()
    def add(self, m: Moments) -> None:
        """Add the samples of a batch (B, C); those that are not finite are absent."""
        batch_size, channels = m.mean.shape
        if batch_size == 0:
            return
        ring, seen = self._at(channels, m.mean.device)
        kept = min(batch_size, self.size)
        slots = (seen + torch.arange(batch_size - kept, batch_size, device=seen.device)) % self.size
        ring.index_copy_(0, slots, _rows(m)[batch_size - kept :])
        seen.add_(batch_size)

    def state(self) -> dict[str, Tensor]:
        """Return the last `size` samples as tensors, which `load` takes."""
        known = self._ring is not None and self._seen is not None
        rows = self._in_order(self._ring, self._seen) if known else torch.zeros(0, 1)  # type: ignore[arg-type]
        mean, var, numbers = _moments(rows)
        return {"mean": mean.clone(), "var": var.clone(), "counts": numbers.flatten().clone()}  # type: ignore

    def load(self, state: dict[str, Tensor]) -> None:
        """Replace the samples by those of `state`, which must have the same `size`."""
        mean, var, counts = (torch.as_tensor(state[name]).detach().float() for name in ("mean", "var", "counts"))
        rows = mean.shape[0]
        if mean.ndim != 2 or mean.shape != var.shape or counts.shape != (rows,) or rows not in (0, self.size):
            raise ValueError(
                f"a saved history of shape {tuple(mean.shape)}, {tuple(var.shape)} and {tuple(counts.shape)}: must "
                f"have {self.size} samples, the history of this layer; build the layer with the same history=, or "
                "leave the saved one out"
            )
        self.clear()
        if rows:
            with _lasting():
                self._ring = torch.cat([mean, var, counts[:, None]], 1)
                self._seen = torch.tensor(0, device=mean.device)

    def _in_order(self, ring: Tensor, seen: Tensor) -> Tensor:
        """Return the rows, the oldest first."""
        return ring[(seen + torch.arange(self.size, device=seen.device)) % self.size]

    def _at(self, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ring and the number of samples so far, on this device."""
        checks.recordable()
        with _lasting():
            return self._ready(channels, device)

    def _ready(self, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._ring is None or self._seen is None:
            self._ring = torch.zeros(self.size, 2 * channels + 1, dtype=torch.float32, device=device)
            self._seen = torch.tensor(0, device=device)
        elif not torch.compiler.is_compiling() and self._ring.is_inference():  # copied or unpickled in inference mode
            self._ring, self._seen = self._ring.clone(), self._seen.clone()
        known = self._ring.shape[1] // 2
        if known != channels:
            raise ValueError(
                f"an input of {channels} channels, and a history of samples with {known}: a history belongs to one "
                "layer; use another one, or call its clear() first"
            )
        if self._ring.device != device:
            self._ring, self._seen = self._ring.to(device), self._seen.to(device)
        return self._ring, self._seen


def histories(model: nn.Module) -> dict[str, History]:
    """Return the histories of a model's layers by the names of the layers.

    Examples:
        >>> import ghostnoise
        >>> model = ghostnoise.convert(nn.Sequential(nn.BatchNorm1d(4)), "gni", ghost_size=32, history=256)
        >>> for history in histories(model).values():  # from now on, the state_dict contains them
        ...     history.persistent = True
        >>> histories(model)
        {'0': History(256, persistent=True)}
    """
    checks.module(model, "histories")
    found = {name: getattr(module, "history", None) for name, module in model.named_modules()}
    return {name: history for name, history in found.items() if isinstance(history, History)}


def _lasting() -> AbstractContextManager[None]:
    """Return a block whose tensors can be changed after inference mode, inside of which a history may be created."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():  # the latter cannot be compiled
        return nullcontext()
    return torch.inference_mode(False)


def _rows(m: Moments) -> Tensor:
    """Return the rows of a ring (B, 2C + 1) for the samples of a batch; one that is not finite is absent."""
    mean, var, _ = m.detach()
    rows = torch.cat([mean, var, counts(m).to(mean.dtype)], 1).to(torch.float32)
    return rows.where(rows.isfinite().all(1, keepdim=True), 0)


def _moments(rows: Tensor) -> Moments:
    channels = rows.shape[1] // 2
    return Moments(rows[:, :channels], rows[:, channels:-1], rows[:, -1:])
