"""`sampling` and `predict`: ghost noise in eval mode, from the moments of stored samples.

Training draws ghost batches from the batch. In eval mode the batch must not matter, so they are drawn from samples that
were stored before: those of a layer's history, or those that `calibrate(model, loader, keep=K)` kept. The outputs of
several draws are samples of a predictive distribution, as in MC dropout (Gal and Ghahramani, *Dropout as a Bayesian
Approximation*, 2016) and MC batch norm (Teye et al., *Bayesian Uncertainty Estimation for Batch Normalized Deep
Networks*, 2018).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ghostnoise import checks
from ghostnoise.conversion.schedules import has_ghost_size
from ghostnoise.conversion.targets import Found, channel_dim_of, everything, listing
from ghostnoise.engine import ops
from ghostnoise.masking import repeated as repeated_masks
from ghostnoise.methods.base import NormLayer, Remembering, Sampled
from ghostnoise.randomness import draw_rows
from ghostnoise.tables import Affine, Moments, drawn_samples, normalize, table_dtype, whole_batch
from ghostnoise.torch_private import needs_operators

ROWS = 4096
"""The number of rows of a batch that `predict` runs in one pass on a CPU, if no `chunk` is given."""

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


@contextmanager
def sampling(model: nn.Module, *, ghost_size: int | None = None, generator: Generator | None = None) -> Iterator[None]:
    """Turn on noise in eval mode, from stored moments, inside a `with` block.

    For each sample of a batch, each layer draws `ghost_size` of its stored samples, uniformly with replacement. With
    the moments m, s² of these and μ, σ² of all its stored samples, a layer that injects noise computes

        y = (x - (m - μ)) / sqrt((s² + noise_eps) / (σ² + noise_eps))

    where x is its input, or inside a batch norm the input normalized with the running statistics, and so are the stored
    samples. An analytical layer draws m and s² from its law instead. A batch norm without noise uses m and s² in place
    of the running statistics, which is MC batch norm: y = (x - m) / sqrt(s² + eps). Weight and bias follow as usual.
    The drawn moments are constants for the gradient.

    A layer takes part if it is one of this library and has a ghost size. Its stored samples are those that
    `calibrate(model, loader, keep=K)` kept, or else its history, as they are when the block begins. All other layers,
    and those in training mode, run as always. The previous state returns at the end, also after an exception. The block
    holds for the model, whichever thread runs it; blocks may end in any order.

    Args:
        model: the model.
        ghost_size: the number of samples in a ghost batch, N, for all layers, also for batch norms that have no ghost
            size; None is the one of each layer.
        generator: draws the samples; None is the default generator of the device. The generators of the layers
            themselves are not used.

    Examples:
        >>> import ghostnoise
        >>> model = ghostnoise.convert(nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8)), "gni", ghost_size=16)
        >>> calibration = ghostnoise.calibrate(model, [torch.randn(128, 20) for _ in range(10)], keep=256)
        >>> x = torch.randn(1, 20)
        >>> with sampling(model.eval()):
        ...     torch.equal(model(x), model(x))
        False
        >>> torch.equal(model(x), model(x))
        True
    """
    checks.module(model, "sampling")
    checks.generator(generator)
    size = checks.ghost_size_or_none(ghost_size)
    samplers = _samplers(model, size, generator)
    _begin(samplers)
    try:
        yield
    finally:
        _end(samplers)


class Prediction(NamedTuple):
    """The outputs of several passes with noise, and their moments."""

    mean: Tensor
    """The mean over the samples (B, ...)."""
    variance: Tensor
    """The variance over the samples (B, ...), biased."""
    outputs: Tensor
    """The output of each sample (samples, B, ...)."""


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Inputs,
    samples: int = 32,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    chunk: int | None = None,
    ghost_size: int | None = None,
    generator: Generator | None = None,
) -> Prediction:
    """Run a model several times in eval mode with noise (`sampling`), and return mean, variance and all outputs.

    The batch is repeated, so that all samples run in one pass where memory allows, and each has noise of its own. The
    masks of a block of `ghostnoise.masked` around the call are repeated with it. Modes are restored at the end. The
    same seed gives the same outputs if the passes are the same.

    Args:
        model: the model; its output must be a tensor with the batch in dimension 0.
        x: the input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, which must be
            tensors with the batch in dimension 0.
        samples: the number of outputs for each input.
        transform: is applied to the output before averaging, such as `lambda y: y.softmax(-1)` for classifiers.
        chunk: the number of samples in one pass. If None, all of them on a GPU, and elsewhere as many as make 4,096
            rows. It is halved as long as a GPU runs out of memory.
        ghost_size: see `sampling`.
        generator: see `sampling`.

    Examples:
        >>> import ghostnoise
        >>> model = ghostnoise.convert(nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8)), "gni", ghost_size=16)
        >>> calibration = ghostnoise.calibrate(model, [torch.randn(128, 20) for _ in range(10)], keep=256)
        >>> mean, variance, outputs = predict(model, torch.randn(5, 20), samples=10)
        >>> mean.shape, variance.shape, outputs.shape
        (torch.Size([5, 8]), torch.Size([5, 8]), torch.Size([10, 5, 8]))
    """
    checks.module(model, "predict")
    checks.samples("samples", samples)
    batch_size, device = _batch(x)
    if chunk is None:
        chunk = samples if device.type == "cuda" else max(ROWS // max(batch_size, 1), 1)
    checks.samples("chunk", chunk)
    parts: list[Tensor] = []
    left = samples
    with restored_modes(model), sampling(model, ghost_size=ghost_size, generator=generator):
        model.eval()
        while left:
            count = min(chunk, left)
            try:
                y = _run(model, x, count)
                y = y if transform is None else transform(y)
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
                chunk = count // 2
                continue
            _check_output(y, count * batch_size)
            parts.append(y.unflatten(0, (count, batch_size)))
            left -= count
    outputs = torch.cat(parts)
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return Prediction(wide.mean(0), wide.var(0, correction=0), outputs)


@dataclass(eq=False)
class Sampler:
    """Runs a layer with the statistics of drawn samples; `whole` are the moments (1, C) of all stored ones."""

    layer: Sampled
    name: str
    stored: Moments
    whole: Moments
    ghost_size: int
    generator: Generator | None

    def __post_init__(self) -> None:
        self.kind, self.channel_dim = type(self.layer), channel_dim_of(self.layer)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: a copy of a layer is not a part of the model that the block is for."""
        return type(None), ()

    def __call__(self, input: Tensor) -> Tensor:
        """Decide on a transformation from the stored moments, and apply it."""
        channel_dim = self.channel_dim
        channels, _ = checks.layout(input, type(self.layer).__name__, channel_dim)
        if channels != self.stored.mean.shape[1]:
            raise ValueError(
                f"{self.name} got {channels} channels in dimension {channel_dim} of an input of shape "
                f"{tuple(input.shape)}, and has stored samples with {self.stored.mean.shape[1]}: must be equal; run "
                "ghostnoise.calibrate(model, loader, keep=K) with such inputs"
            )
        x = input if channel_dim == 1 else input.movedim(channel_dim, 1)
        affine = self._affine(input).as_tables(self.stored.mean[:1].to(input.device))
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling() or needs_operators(x)
        y = ops.apply(x, *affine) if plain else ops.transform(x, *affine)
        return y if channel_dim == 1 else y.movedim(1, channel_dim)

    def _affine(self, input: Tensor) -> Affine:
        """Return the transformation of the input, with one row for each of its samples, or one for all."""
        layer, device = self.layer, input.device
        stored, whole = (Moments(*(_moved(table, device) for table in m)) for m in (self.stored, self.whole))
        if not layer.injects_noise:
            assert isinstance(layer, NormLayer)
            rows = draw_rows(len(stored.mean), input.shape[0], self.ghost_size, device, self.generator)
            return normalize(drawn_samples(stored, rows), layer.eps).then(*_affine_of(layer, stored))
        if not isinstance(layer, NormLayer):
            return layer.stored_noise(stored, whole, self.ghost_size, input, self.generator)
        running: Any = (layer.running_mean, layer.running_var)
        norm = normalize(Moments(*(table.to(whole.mean)[None] for table in running)), layer.eps)
        stored, whole = norm.moments(stored), norm.moments(whole)
        noise = layer.stored_noise(stored, whole, self.ghost_size, input, self.generator)
        return norm.before(noise).then(*_affine_of(layer, stored))


def _affine_of(layer: NormLayer, m: Moments) -> tuple[Tensor | None, ...]:
    """Return weight and bias in the dtype of tables."""
    return tuple(None if each is None else each.to(m.mean.dtype) for each in (layer.weight, layer.bias))


def _moved(table: Tensor | int, device: torch.device) -> Any:
    return table.to(device) if isinstance(table, Tensor) else table


_active: list[list[Sampler]] = []  # those of all blocks that have not ended, in the order in which they began
_changing = threading.Lock()


def _begin(samplers: list[Sampler]) -> None:
    """Give layers their samplers."""
    with _changing:
        _active.append(samplers)
        for sampler in samplers:
            sampler.layer._sampling = sampler


def _end(samplers: list[Sampler]) -> None:
    """Give layers the samplers of the latest of the other blocks, which may be those of other threads."""
    with _changing:
        _active[:] = [each for each in _active if each is not samplers]
        others = {sampler.layer: sampler for each in _active for sampler in each}
        for sampler in samplers:
            if type(sampler.layer) is not sampler.kind:
                continue  # conversion has removed the sampler together with the former class
            vars(sampler.layer).pop("_sampling", None)
            if sampler.layer in others:
                sampler.layer._sampling = others[sampler.layer]


def _samplers(model: nn.Module, ghost_size: int | None, generator: Generator | None) -> list[Sampler]:
    """Return a sampler for each layer that takes part; raises if one has no stored samples."""
    own = [each for each in everything(model) if isinstance(each.module, Sampled)]
    sizes = [(each, ghost_size or _ghost_size(each.module)) for each in own]
    taking = [(each, size) for each, size in sizes if size is not None]
    if not taking:
        have = "has layers of this library without a ghost size only" if own else "has no layer of this library"
        remedy = (
            "give ghost_size=16" if own else 'convert it first, as in ghostnoise.convert(model, "gni", ghost_size=16)'
        )
        raise ValueError(
            f"sampling of this {type(model).__name__}, which {have}: needs a layer that draws ghost batches; {remedy}"
        )
    stored = [(each, size, _stored(each.module)) for each, size in taking]
    missing = [each for each, _, found in stored if found is None]
    if missing:
        raise ValueError(
            f"sampling without stored moments in {listing(missing)}: in eval mode, ghost batches are drawn from the "
            "moments of stored samples; run ghostnoise.calibrate(model, loader, keep=1024) first, or train with "
            "history=256; nothing was changed"
        )
    return [_sampler(each, size, found, generator) for each, size, found in stored if found is not None]


def _ghost_size(layer: Any) -> int | None:
    return layer.ghost_size if has_ghost_size(layer) else None


def _sampler(found: Found, size: int, stored: Moments, generator: Generator | None) -> Sampler:
    layer: Any = found.module
    if isinstance(layer, NormLayer) and layer.injects_noise and layer.running_mean is None:
        raise ValueError(
            f"sampling with {found}, which has track_running_stats=False: the noise needs an input that is normalized "
            "with running statistics; build the layer with track_running_stats=True"
        )
    counts = stored.n
    assert isinstance(counts, Tensor)
    if isinstance(layer, NormLayer) and not layer.injects_noise and size * counts.max() < 2:
        raise ValueError(
            f"sampling with ghost batches of {size} samples with a single value per channel in {found}: a single "
            "value has no variance to divide by; give ghost_size=2 or more"
        )
    if (counts == counts[0]).all():  # samples that weigh equally are pooled faster
        stored = stored._replace(n=int(counts[0]))
    return Sampler(layer, str(found), stored, whole_batch(stored), size, generator)


def _stored(layer: nn.Module) -> Moments | None:
    """Return the samples that are stored for a layer, without absent ones; None if there are none."""
    stored = getattr(layer, "kept", None)
    if stored is None and isinstance(layer, Remembering) and layer.history is not None:
        mean, var, counts = layer.history.state().values()
        stored = Moments(mean, var, counts[:, None])
    if stored is None:
        return None
    present = stored.n.flatten() > 0
    stored = Moments(*(table[present].to(table_dtype(table.device)) for table in stored))
    return stored if len(stored.mean) else None


def _batch(x: Inputs) -> tuple[int, torch.device]:
    """Check the input of `predict`; return the batch size and the device."""
    values: list[Any] = list(x.values()) if isinstance(x, Mapping) else list(x) if isinstance(x, tuple) else [x]
    wrong = [value for value in values if not isinstance(value, Tensor) or value.ndim == 0]
    if not values or wrong:
        given = f"an input of type {type(x).__name__}" + (f" with {wrong[0]!r}" if wrong and wrong[0] is not x else "")
        raise ValueError(
            f"predict got {given}: must be a tensor, a tuple of tensors or a mapping of tensors, each with the batch "
            "in dimension 0; put other arguments into a module around the model"
        )
    sizes = {len(value) for value in values}
    if len(sizes) > 1:
        raise ValueError(f"predict got tensors with batches of {sorted(sizes)} samples: must be equal in dimension 0")
    return sizes.pop(), values[0].device


def _run(model: nn.Module, x: Inputs, count: int) -> Any:
    """Run the model on the batch, repeated `count` times."""

    def repeated(value: Tensor) -> Tensor:
        return value.repeat(count, *(1 for _ in value.shape[1:]))

    with repeated_masks(count):
        if isinstance(x, Mapping):
            return model(**{name: repeated(value) for name, value in x.items()})
        return model(*map(repeated, x)) if isinstance(x, tuple) else model(repeated(x))


def _check_output(y: object, rows: int) -> None:
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.ndim == 0 or len(y) != rows:
        kind = f"a tensor {tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(
            f"predict got {kind} as the output for a batch of {rows} samples: must be a floating tensor with {rows} "
            "rows; give transform=lambda y: ... that returns one"
        )


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Restore the modes, training or eval, of all modules at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
