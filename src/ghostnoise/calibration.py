"""`calibrate`: exact statistics for inference, instead of the moving averages that training leaves.

The moving averages of batch norms lag behind the weights, and weigh the last few batches only. `calibrate` measures the
inputs of all batch norms over as many batches as wanted, and replaces the averages by the mean and variance of all
values (as Wu and Johnson recommend, *Rethinking "Batch" in BatchNorm*, 2021). It can also choose the weight that
EvalNorm gives to the sample itself (Summers and Dinneen, *Four Things Everyone Should Know to Improve Batch
Normalization*, 2020).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ghostnoise import checks
from ghostnoise.conversion.schedules import has_ghost_size
from ghostnoise.conversion.targets import Found, channel_dim_of, everything, is_fsdp
from ghostnoise.engine import general, ranks
from ghostnoise.engine.ranks import Group
from ghostnoise.history import histories
from ghostnoise.inference import restored_modes
from ghostnoise.masking import given_mask, mask_of
from ghostnoise.methods.base import Remembering, Sampled
from ghostnoise.methods.eval_norm import EvalNorm
from ghostnoise.tables import Moments, counts, table_dtype, whole_batch
from ghostnoise.torch_private import AnyBatchNorm
from ghostnoise.tracing import Leaf

ALPHAS = (0.0, *(2.0**-power for power in range(10, -1, -1)))
"""The weights that are compared: 0, which is plain batch norm, and the powers of 1/2 from 1/1024 to 1."""

Forward = Callable[[nn.Module, Any], Any]
Loss = Callable[[Any, Any], Tensor]


class Calibration(NamedTuple):
    """What `calibrate` measured and changed."""

    layers: tuple[str, ...]
    """The batch norms whose running statistics were replaced."""
    batches: int
    """The number of batches, of all ranks."""
    alpha: float | None = None
    """The chosen weight of EvalNorm; None without a validation loader."""
    losses: dict[float, float] | None = None
    """The mean validation loss of each weight."""


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    noise: bool = False,
    keep: int = 0,
    forward: Forward | None = None,
    process_group: Group = None,
    validation: Iterable[Any] | None = None,
    loss: Loss = F.cross_entropy,
    alphas: Sequence[float] = ALPHAS,
) -> Calibration:
    """Replace the running statistics of all batch norms by the mean and variance over all batches of `loader`.

    Works with `nn.BatchNorm*d` and all batch norms of this library. The mean and the unbiased variance are those of all
    values that reach a layer, whatever the sizes of the batches. While measuring, each batch norm normalizes with the
    statistics of the batch, as in training, so use the batch size of training or more. Weights, gradients, modes and
    all other buffers, including `num_batches_tracked`, stay as they are. If anything fails, nothing is changed.

    With masks, which layers take from `ghostnoise.masked` or as `mask=`, only valid positions count. Open the block in
    `forward`, as in the second example, or in the model. Batch norms of torch do not take masks: convert them first.

    Args:
        model: the model; batch norms without running statistics, and those that no batch reaches, are left as they are.
        loader: batches: a tensor, a tuple or list whose first item is the input, or a mapping of keyword arguments.
        noise: if True, everything runs in training mode, with ghost batches, noise and dropout. If False, noise and
            dropout are off, and ghost batches are the whole batch: the other layers then run as at inference.
        keep: also keep the moments of K samples in each layer of this library, for `ghostnoise.sampling`: a uniform
            random subset of all samples, the same in every call, and the same samples in all layers that are run once
            for each batch. They replace those of an earlier call, and are not a part of the state_dict. A model without
            batch norms can be calibrated to keep samples only.
        forward: `forward(model, batch)` runs the model, for batches of another kind; move them to the device there.
        process_group: the ranks whose batches count together: None is this process alone, "world" is all ranks. Each
            rank gives its own part of the data; all ranks get the same statistics.
        validation: batches of (input, target), on which the weight `alpha` of all `EvalNorm*d` layers is chosen.
        loss: `loss(output, target)` is the mean loss of a validation batch; batches weigh by their samples.
        alphas: the weights to compare, between 0 and 1; that with the least loss is set.

    Returns:
        The names of the layers, the number of batches, and the chosen `alpha` with the loss of each.

    Example:
        >>> model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU())
        >>> calibrate(model, [torch.randn(128, 20) for _ in range(10)])
        Calibration(layers=('1',), batches=10, alpha=None, losses=None)

        Padded batches, each with the valid positions of its samples:

        >>> import ghostnoise
        >>> model = ghostnoise.convert(nn.Sequential(nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8)), "bn")
        >>> padded = [(torch.randn(2, 4, 10), torch.arange(10) < torch.tensor([[10], [7]]))]
        >>> def forward(model, batch):
        ...     with ghostnoise.masked(batch[1]):
        ...         return model(batch[0])
        >>> calibrate(model, padded, forward=forward)
        Calibration(layers=('1',), batches=1, alpha=None, losses=None)
    """
    checks.module(model, "calibrate")
    checks.flag("noise", noise)
    for name, given in (("loader", loader), ("validation", () if validation is None else validation)):
        if isinstance(given, Tensor | Mapping) or not isinstance(given, Iterable):
            raise ValueError(f"{name} of type {type(given).__name__}: must be an iterable of batches, such as [batch]")
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    keeping = _keeping(inner, checks.samples("keep", keep, 0))
    norms = _tracking(inner, required=not keeping)
    mixing = _mixing(inner, alphas) if validation is not None else []
    run = _run if forward is None else forward
    group = None if process_group is None else ranks.resolve(process_group)
    populations = {norm: Population() for norm in norms}
    seed = 0 if group is None else dist.get_rank(group)
    reservoirs = {layer: Reservoir(keep, seed) for layer in keeping}
    with _restored(inner):
        batches = _all_ranks(group, lambda: _measure(inner, loader, noise, run, populations, reservoirs))
        merged = {norm: population.merged(group, norm.module) for norm, population in populations.items()}
        statistics = {norm: population.statistics(norm) for norm, population in merged.items() if population.count}
        kept = {layer: stored for layer, each in reservoirs.items() if (stored := each.merged(group)) is not None}
        if not statistics and not kept:
            raise ValueError(
                f"calibrate got {batches} batches, and none reached a batch norm: needs one batch or more; check the "
                "loader (a generator can be iterated once only), and that the model runs its batch norms"
            )
        alpha, losses = None, None
        if validation is not None:
            _write(statistics)  # until the end of this block
            losses = _compare(inner, mixing, validation, run, loss, alphas, group)
            alpha = min(losses, key=lambda each: losses[each])
    _write(statistics)
    for found, stored in kept.items():
        found.module.kept = stored  # type: ignore[assignment]
    for layer in mixing:
        layer.alpha = alpha
    return Calibration(tuple(norm.names[0] for norm in statistics), batches, alpha, losses)


class Population:
    """The number of values, their mean, and the sum of squared deviations from it, per channel (C,)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Add values by their own count, mean and sum of squared deviations."""
        total, shift = self.count + count, mean - self.mean.to(mean)
        self.squares = self.squares.to(mean) + squares + shift.square() * (self.count * count / total)
        self.mean = self.mean.to(mean) + shift * (count / total)
        self.count = total

    def merged(self, group: Any, module: nn.Module) -> "Population":
        """Return the population of all ranks, the same on each."""
        if group is None or dist.get_world_size(group) == 1:
            return self
        channels: Any = module.num_features
        table = torch.zeros(2, channels, dtype=torch.float64, device=_device(module))
        if self.count:
            table[0], table[1] = self.mean, self.squares
        counts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, self.count, group)
        tables = [torch.empty_like(table) for _ in counts]
        dist.all_gather(tables, table, group)
        merged = Population()
        for count, (mean, squares) in zip(counts, tables, strict=True):
            if count:
                merged.add(count, mean, squares)
        return merged

    def statistics(self, norm: Found) -> tuple[Tensor, Tensor]:
        """Return the mean and the unbiased variance."""
        if self.count == 1:
            raise ValueError(f"{norm} got a single value per channel, which has no variance: give more batches")
        return self.mean, self.squares / (self.count - 1)


class Reservoir:
    """The moments of at most `size` of the samples that a layer has seen: those with the largest random keys.

    The keys are independent and uniform, so this is a uniform subset of all samples, and so is that of all ranks.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(seed)
        self.keys, self.stored = torch.empty(0, dtype=torch.float64), Moments(*(torch.empty(0) for _ in range(3)))

    def add(self, m: Moments) -> None:
        """Add the samples of a batch (B, C); one without values is not kept."""
        tables = [table.detach().to(table_dtype(table.device)) for table in (*m[:2], counts(m))]
        keys = torch.rand(len(m.mean), dtype=torch.float64, generator=self.generator)
        present = tables[2].flatten() > 0
        self._keep([(self.keys, self.stored), (keys[present.cpu()], Moments(*(table[present] for table in tables)))])

    def merged(self, group: Any) -> Moments | None:
        """Return the samples of all ranks, the same on each; None if there are none."""
        if group is not None and dist.get_world_size(group) > 1:
            every: list[Any] = [None] * dist.get_world_size(group)
            mean, var, _ = self.stored
            here = Moments(mean.cpu(), var.cpu(), counts(self.stored).cpu())
            dist.all_gather_object(every, (self.keys, here), group)
            self._keep(every)
        return self.stored if len(self.keys) else None

    def _keep(self, parts: list[tuple[Tensor, Moments]]) -> None:
        parts = [part for part in parts if len(part[0])]
        if parts:
            keys = torch.cat([each for each, _ in parts])
            tables = (torch.cat(tables) for tables in zip(*(stored for _, stored in parts), strict=True))
            self.keys, rows = keys.topk(min(self.size, len(keys)))
            self.stored = Moments(*(table[rows.to(table.device)] for table in tables))


def _keeping(model: nn.Module, keep: int) -> list[Found]:
    """Return the layers that keep samples."""
    found = [each for each in everything(model) if keep and isinstance(each.module, Sampled)]
    if keep and not found:
        raise ValueError(
            f"keep={keep} for this {type(model).__name__}, which has no layer of this library: only these draw from "
            'kept samples; convert it first, as in ghostnoise.convert(model, "gni", ghost_size=16), or leave keep out'
        )
    return found


def _tracking(model: nn.Module, required: bool = True) -> list[Found]:
    """Return the batch norms that have running statistics."""
    for each in everything(model):
        if is_fsdp(each.module):
            raise ValueError(
                f"{each} is managed by FSDP: calibrate the model before it is sharded, or a full copy of it"
            )
    found = [each for each in everything(model) if isinstance(each.module, AnyBatchNorm)]
    tracking = [each for each in found if each.module.running_mean is not None]
    if not tracking and required:
        have = "has no batch norm" if not found else "has batch norms with track_running_stats=False only"
        raise ValueError(f"this {type(model).__name__} {have}: there are no running statistics to calibrate")
    return tracking


def _mixing(model: nn.Module, alphas: Sequence[float]) -> list[EvalNorm]:
    """Return the layers whose `alpha` is chosen."""
    if not alphas:
        raise ValueError("alphas is empty: must hold the weights to compare, between 0 and 1")
    for alpha in alphas:
        checks.number("alphas", alpha, 0, 1)
    layers = [each for each in model.modules() if isinstance(each, EvalNorm)]
    if not layers:
        raise ValueError(
            f"validation is given, and this {type(model).__name__} has no EvalNorm layer whose alpha could be chosen: "
            'convert it first, as in ghostnoise.convert(model, "en", ghost_size=None, alpha=0.0), or leave it out'
        )
    return layers


def _measure(
    model: nn.Module,
    loader: Iterable[Any],
    noise: bool,
    run: Forward,
    populations: dict[Found, Population],
    reservoirs: dict[Found, Reservoir],
) -> int:
    """Run all batches, and add the inputs of layers to their populations and reservoirs; return how many there were."""
    finite: list[tuple[Found, Tensor]] = []

    def hook(layer: Found) -> Any:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            if x.numel():
                mask = _mask(layer, x, given_mask(module, args, kwargs))
                m = general.measure(x, channel_dim_of(module), mask)
                values = int(counts(m).sum())
                if not values:  # the part of this rank is padded entirely; the layer raises if the whole batch is
                    return
                mean, var = (table[0] for table in whole_batch(m)[:2])
                if layer in populations:
                    populations[layer].add(values, mean, var * values)
                if layer in reservoirs:
                    reservoirs[layer].add(m)
                finite.append((layer, (mean.isfinite() & var.isfinite()).all()))

        return add

    layers = dict.fromkeys([*populations, *reservoirs])
    handles = [layer.module.register_forward_pre_hook(hook(layer), with_kwargs=True) for layer in layers]
    batches = 0
    try:
        with torch.no_grad(), _eager(), _measuring(model, list(populations), noise):
            for batch in loader:
                run(model, batch)
                bad = next((norm for norm, is_finite in finite if not is_finite), None)
                if bad is not None:
                    raise ValueError(
                        f"batch {batches} (counted from 0) reaches {bad} with values that are not finite: all must be "
                        "finite; leave the batch out of the loader, or repair the weights; nothing was changed"
                    )
                finite.clear()
                batches += 1
    finally:
        for handle in handles:
            handle.remove()
    return batches


def _mask(layer: Found, x: Tensor, given: Tensor | None) -> Tensor | None:
    """Return the valid positions of a layer's input; None if all are valid."""
    module, channel_dim = layer.module, channel_dim_of(layer.module)
    takes_masks = isinstance(module, Leaf)
    valid = mask_of(module, x, given, channel_dim, "" if takes_masks else f"{layer} got an input")
    if valid is None:
        return None
    checks.mask(valid, x, str(layer), channel_dim)
    if not takes_masks:
        if valid.all():
            return None
        raise ValueError(
            f"{layer} got a padded input of shape {tuple(x.shape)} inside of ghostnoise.masked: only layers of this "
            "library take masks, and this one would normalize with statistics that include the padding; convert the "
            'model first, as in ghostnoise.convert(model, "bn"); nothing was changed'
        )
    return valid


def _eager() -> AbstractContextManager[None]:
    """Run compiled models eagerly: their graphs do not call the hooks, and would be compiled again for each mode."""
    if "torch._dynamo" not in sys.modules:  # slow to import, and without it nothing can be compiled
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _measuring(model: nn.Module, norms: list[Found], noise: bool) -> Iterator[None]:
    """Set the modes for measuring: all of the model in training, or its batch norms, each with the batch alone."""
    if noise:
        model.train()
        yield
        return
    model.eval()
    changed: list[tuple[nn.Module, str, Any]] = []
    for norm in norms:
        norm.module.train()
        # Without a ghost size, EvalNorm needs a weight, which it does not use in training.
        settings: dict[str, Any] = {"ghost_size": None} if has_ghost_size(norm.module) else {}
        settings |= {"alpha": 0.0} if isinstance(norm.module, EvalNorm) else {}
        settings |= {"history": None} if isinstance(norm.module, Remembering) else {}
        for name, value in settings.items():
            changed.append((norm.module, name, getattr(norm.module, name)))
            setattr(norm.module, name, value)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _compare(
    model: nn.Module,
    layers: list[EvalNorm],
    validation: Iterable[Any],
    run: Forward,
    loss: Loss,
    alphas: Sequence[float],
    group: Any,
) -> dict[float, float]:
    """Return the mean loss over the validation batches, in eval mode, for each weight."""
    totals, before = torch.zeros(len(alphas) + 1, dtype=torch.float64), [layer.alpha for layer in layers]

    def add() -> int:
        batches = 0
        for batch in validation:
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                raise ValueError(
                    f"validation got a batch of type {type(batch).__name__}: must be (input, target), so that the loss "
                    "can be computed"
                )
            target = _moved(batch[1], _device(model))
            for at, alpha in enumerate(alphas):
                for layer in layers:
                    layer.alpha = float(alpha)
                totals[at] += float(loss(run(model, batch), target)) * len(target)
            totals[-1] += len(target)
            batches += 1
        return batches

    model.eval()
    try:
        with torch.no_grad(), _eager():
            _all_ranks(group, add)
    finally:
        for layer, alpha in zip(layers, before, strict=True):
            layer.alpha = alpha
    if group is not None:
        totals = totals.to(_device(model))
        dist.all_reduce(totals, group=group)
    *sums, count = totals.tolist()
    if not count:
        raise ValueError("validation has no batches: needs one or more; a generator can be iterated once only")
    losses = {float(alpha): total / count for alpha, total in zip(alphas, sums, strict=True)}
    if not all(math.isfinite(each) for each in losses.values()):
        worst = next(alpha for alpha, each in losses.items() if not math.isfinite(each))
        raise ValueError(f"the validation loss with alpha={worst:g} is not finite: leave this weight out of alphas")
    return losses


def _all_ranks(group: Any, run: Callable[[], int]) -> int:
    """Return the sum over ranks of what `run` returns. If it fails on one rank, it fails on all."""
    failure: Exception | None = None
    result = 0
    try:
        result = run()
    except Exception as error:
        failure = error
    if group is not None:
        results: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(results, None if failure else result, group)
        failed = [rank for rank, each in enumerate(results) if each is None]
        if failed and failure is None:
            failure = RuntimeError(f"rank {failed[0]} failed; nothing was changed on any rank")
        result = 0 if failed else sum(results)
    if failure is not None:
        raise failure
    return result


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the modes, buffers and histories of all modules at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    earlier = [(history, history.state()) for history in histories(model).values()]
    with restored_modes(model):
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
            for history, state in earlier:
                history.load(state)


def _write(statistics: dict[Found, tuple[Tensor, Tensor]]) -> None:
    for norm, (mean, var) in statistics.items():
        module: Any = norm.module
        module.running_mean.copy_(mean)
        module.running_var.copy_(var)


def _run(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch of one of the common kinds."""
    device = _device(model)
    if isinstance(batch, Mapping):
        return model(**{name: _moved(value, device) for name, value in batch.items()})
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise ValueError(
            f"calibrate got a batch of type {type(batch).__name__}: must be a tensor, a tuple or list whose first item "
            "is one, or a mapping of keyword arguments; give forward=lambda model, batch: ... for other batches"
        )
    return model(_moved(batch, device))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _device(module: nn.Module) -> torch.device:
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
