"""The steps of the engine as `torch.library` ops, which `torch.compile` and dispatch modes see as single operators.

There is one op per direction, for every device, with a fake implementation. A plan crosses the boundary as names,
numbers and lists of tensors (`Plan.encode`). An op returns lists of the tables that the backward pass and the caller
need. It does not write to its arguments: `normalize` returns updated copies of the running statistics, and the caller
writes them to the buffers.

These ops have no autograd formula. In a compiled graph, nothing is left to differentiate, but torch would still run the
Python function of a formula in every call of the op. Instead, `normalize_autograd` and `inject_autograd` are composite
ops around an autograd function, and a captured graph has only the ops that they call.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ghostnoise.engine import composite, steps
from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends.base import NO_NOISE, Latest, NoiseTables, Normalized, Prepared, Saved
from ghostnoise.engine.backends.select import chosen, select
from ghostnoise.engine.masks import Valid
from ghostnoise.engine.plan import Correction, DrawnWithHistory, Noise, Normalizer, Plan, decode, positions
from ghostnoise.engine.running import Population, Running, Update
from ghostnoise.statistics.moments import Moments, arithmetic_dtype, table_dtype
from ghostnoise.statistics.samples import SampleItself


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> tuple[Tensor, Moments, Moments]:
    """Return y, the moments of the samples and the pooled statistics, and update the running statistics.

    Of the moments and the pooled statistics, those that neither the backward pass nor a history needs have no rows.
    """
    running, population = plan.update or NO_UPDATE
    given = (*plan.tensors(), *plan.encode(), *running, *population)
    y, kept, samples, updated = torch.ops.ghostnoise.normalize_autograd(x, weight, bias, *given)
    buffers = [buffer for buffer in running[:3] if buffer is not None]
    for buffer, value in zip(buffers, updated, strict=True):
        buffer.copy_(value)
    if plan.normalizer.contributors.keeps_moments:
        return y, steps.sample_moments(x, _moments(x, kept)), _moments(x, [])
    moments = _moments(x, samples)
    with_history = isinstance(plan.noise, DrawnWithHistory)
    return y, steps.sample_moments(x, moments) if with_history else moments, _moments(x, kept)


def inject(x: Tensor, noise: Noise, valid: Valid | None = None) -> tuple[Tensor, Moments | None]:
    """Return x with the noise, and the moments of the samples if they are kept for a history."""
    plan = Plan(Normalizer(SampleItself(), 0.0), noise, valid=valid)
    drawn, _, masked = plan.tensors()
    y, moments = torch.ops.ghostnoise.inject_autograd(x, drawn, masked, *plan.encode())
    return y, Moments(*moments) if moments else None


NO_UPDATE = Update(Running(None, None), Population())

_LIBRARY = torch.library.Library("ghostnoise", "DEF")
# Inductor runs convolutions on CPUs in channels_last. The ops take their results as they are, instead of copies in the
# strides that they had when the graph was captured.
_TAGS = (torch.Tag.flexible_layout,)
_HOW = "Tensor[] valid, str names, int[] integers, float[] floats"
_GIVEN = (
    f"Tensor x, Tensor? weight, Tensor? bias, Tensor[] drawn, Tensor[] reference, {_HOW}, Tensor? running_mean, "
    "Tensor? running_var, Tensor? num_batches_tracked, float? momentum, bool ghosts, bool unbiased"
)
for _schema in (
    f"normalize({_GIVEN}) -> "
    "(Tensor y, Tensor[] kept, Tensor[] noise, Tensor[] correction, Tensor[] samples, Tensor[] running)",
    f"normalize_autograd({_GIVEN}) -> (Tensor y, Tensor[] kept, Tensor[] samples, Tensor[] running)",
    "normalize_backward(Tensor dy, Tensor x, Tensor? weight, Tensor[] kept, Tensor[] noise, Tensor[] correction, "
    f"Tensor[] reference, {_HOW}, bool needs_x) -> (Tensor, Tensor, Tensor)",
    f"inject(Tensor x, Tensor[] drawn, {_HOW}) -> (Tensor y, Tensor scale, Tensor[] samples)",
    f"inject_autograd(Tensor x, Tensor[] drawn, {_HOW}) -> (Tensor y, Tensor[] samples)",
    "inject_backward(Tensor dy, Tensor scale) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, drawn: list[Tensor], reference: list[Tensor], *how: Any
) -> tuple[Any, ...]:
    """Return y, and lists: the tables for the backward pass, m and k, r and d, moments for a history, and buffers."""
    valid, names, integers, floats, *running, momentum, ghosts, unbiased = how
    mean, var, count = (None if buffer is None else buffer.clone() for buffer in running)
    state, updated = (weight, bias, mean, var, count), [buffer for buffer in (mean, var, count) if buffer is not None]
    update = Update(Running(mean, var, count, momentum), Population(ghosts, unbiased)) if updated else None
    asked = decode(drawn, reference, valid, names, integers, floats, update)
    numbers = tuple(integers), tuple(floats), momentum, ghosts, unbiased
    shapes = x.shape, *(each.shape for each in drawn)
    key = names, numbers, shapes, torch.get_num_threads(), chosen()
    known = () if reference or valid else _prepared.get(key)
    for again in known:
        if (at := again.admitted(x, state)) is not None:
            made = again.forward(x, state, at, asked.noise)
            return made.y, _tables(x, asked, made), _joined(x, made.noise), [], [], updated
    backend = select(x)
    made = steps.forward(backend, x, weight, bias, asked, None)
    if update is not None and not made.updated:
        measured = (asked.normalizer.contributors, made.moments, made.pooled, x.shape[0], positions(x))
        backend.update_running(*update.running, update.population.moments(*measured, backend.pool, asked.counts))
    elif not reference and not valid and (new := backend.prepare(x, state, asked)) is not None:
        _prepared.add(key, new)
    wide, remembers = table_dtype(x.device), _kept(x, asked)[2]
    groups = _tables(x, asked, made), made.moments if remembers else ()
    kept, samples = ([one.to(wide).contiguous() for one in group] for group in groups)
    return made.y, *_outputs(x, kept, _joined(x, made.noise), made.correction or (), samples), updated


# The forward passes of a graph run again and again: the latest ones that were prepared, by the plan and shapes.
# There may be several: torch calls a graph inside or outside of autograd, which counts as metadata of its tensors.
_prepared = Latest[Prepared]()


def _tables(x: Tensor, plan: Plan, made: Normalized) -> list[Tensor]:
    """Return the moments that are kept for the backward pass."""
    keeps_moments, keeps_pools, _ = _kept(x, plan)
    return [*made.pooled] if keeps_pools else [*made.moments] if keeps_moments else []


def _fake_normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, drawn: list[Tensor], reference: list[Tensor], *how: Any
) -> tuple[Any, ...]:
    asked, (batch_size, channels) = decode(drawn, reference, *how[:4]), x.shape[:2]
    wide, dtype, noise = table_dtype(x.device), arithmetic_dtype(x), asked.noise
    keeps_moments, keeps_pools, remembers = _kept(x, asked)
    rows = asked.normalizer.contributors.pools(batch_size) if keeps_pools else batch_size
    return (
        torch.empty_like(x),
        [x.new_empty(rows, channels, dtype=wide) for _ in range(2 if keeps_pools or keeps_moments else 0)],
        [] if noise is None else _fake_joined(x, noise, dtype),
        [x.new_empty(channels, dtype=dtype) for _ in range(2 if asked.corrects else 0)],
        [x.new_empty(batch_size, channels, dtype=wide) for _ in range(2 if remembers else 0)],
        [torch.empty_like(buffer) for buffer in how[4:7] if buffer is not None],
    )


def _joined(x: Tensor, noise: NoiseTables) -> list[Tensor]:
    """Return noise as outputs: none, m and k as one tensor (2, B, C), or two tensors of which one is empty."""
    m, k = noise
    if m is None or k is None:
        return [] if m is k else [x.new_empty(0) if one is None else one for one in noise]
    if m.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():  # as `NoiseTables.allocated` makes them
        return [m.as_strided((2, *m.shape), (m.numel(), *m.stride()), 0)]
    return [torch.stack([m, k])]


def _fake_joined(x: Tensor, noise: Noise, dtype: torch.dtype) -> list[Tensor]:
    shape = x.shape[:2]
    if noise.shifts and noise.scales:
        return [x.new_empty((2, *shape), dtype=dtype)]
    return [x.new_empty(shape, dtype=dtype) if has else x.new_empty(0) for has in (noise.shifts, noise.scales)]


def _separated(noise: list[Tensor]) -> NoiseTables:
    """Return the noise that `_joined` made outputs of."""
    if not noise:
        return NO_NOISE
    tables = noise[0].unbind() if len(noise) == 1 else noise
    return NoiseTables(*(table if table.numel() else None for table in tables))


def _kept(x: Tensor, plan: Plan) -> tuple[bool, bool, bool]:
    """Return whether the samples' moments, or the pooled ones, are kept for the backward pass; and for a history.

    The moments of samples with a single position are x itself.
    """
    keeps, several = plan.normalizer.contributors.keeps_moments, positions(x) > 1
    return keeps and several, not keeps, isinstance(plan.noise, DrawnWithHistory) and several and not keeps


def _normalize_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    kept: list[Tensor],
    noise: list[Tensor],
    correction: list[Tensor],
    reference: list[Tensor],
    valid: list[Tensor],
    names: str,
    integers: list[int],
    floats: list[float],
    needs_x: bool,
) -> tuple[Tensor, ...]:
    asked = decode(None, reference, valid, names, integers, floats)
    saved = Saved(_moments(x, kept), _separated(noise), Correction(*correction) if correction else None)
    dx, *gradients = steps.backward(select(x), dy, x, weight, asked, saved, None, needs_x)
    dtype = _parameter_dtype(x, weight)
    found = (x.new_empty(0) if dx is None else dx, *(gradient.to(dtype) for gradient in gradients))
    return tuple(_outputs(x, found)[0])


def _fake_normalize_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, *rest: Any, needs_x: bool | None = None
) -> tuple[Tensor, ...]:
    gradients = [x.new_empty(x.shape[1], dtype=_parameter_dtype(x, weight)) for _ in range(2)]
    wanted = rest[-1] if needs_x is None else needs_x
    return torch.empty_like(x) if wanted else x.new_empty(0), *gradients


def _inject_op(x: Tensor, drawn: list[Tensor], *how: Any) -> tuple[Any, ...]:
    """Return y, the scale, and a list of the samples' mean and variance for a history."""
    asked, backend = decode(drawn, [], *how), select(x)
    assert asked.noise is not None
    affine, moments = steps.inject_tables(backend, x, asked.noise, None, asked.valid)
    kept: list[Tensor] = []
    if isinstance(asked.noise, DrawnWithHistory) and moments is not None:
        kept = [table.to(table_dtype(x.device)).contiguous() for table in moments]
    return backend.transform(x, affine), affine.scale, *_outputs(x, kept)


def _fake_inject(x: Tensor, drawn: list[Tensor], *how: Any) -> tuple[Any, ...]:
    noise = decode(drawn, [], *how).noise
    assert noise is not None
    rows, remembers = x.shape[0] if noise.scales else 1, isinstance(noise, DrawnWithHistory)
    kept = [x.new_empty(x.shape[:2], dtype=table_dtype(x.device)) for _ in range(2 if remembers else 0)]
    return torch.empty_like(x), x.new_empty((rows, x.shape[1]), dtype=arithmetic_dtype(x)), kept


def _inject_backward(dy: Tensor, scale: Tensor) -> Tensor:
    return select(dy).scale_gradient(dy, scale)


def _fake_inject_backward(dy: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(dy)


for _name, _run, _fake in (
    ("normalize", _normalize, _fake_normalize),
    ("normalize_backward", _normalize_backward, _fake_normalize_backward),
    ("inject", _inject_op, _fake_inject),
    ("inject_backward", _inject_backward, _fake_inject_backward),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _device)
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"ghostnoise::{_name}", _fake, lib=_LIBRARY)


class _Call:
    """What a call of an autograd function takes beside tensors with a gradient, and the tables that its op returned."""

    def __init__(self, *how: Any) -> None:
        self.how = how
        self.tables: list[list[Tensor]]


class _Normalize(torch.autograd.Function):
    """The op `normalize` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        y: Tensor
        y, *call.tables = torch.ops.ghostnoise.normalize(x, weight, bias, *call.how)
        drawn, reference, valid, *how = call.how
        given = (*call.tables[:3], drawn, reference, valid)
        ctx.how, ctx.sizes = how[:3], [len(each) for each in given]
        ctx.save_for_backward(x, weight, bias, *(tensor for each in given for tensor in each))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *given = ctx.saved_tensors
        left = iter(given)
        kept, noise, correction, drawn, reference, valid = ([next(left) for _ in range(size)] for size in ctx.sizes)
        if torch.is_grad_enabled():  # for a second derivative, which the op of the backward pass does not have
            plan = decode(drawn, reference, valid, *ctx.how)
            return *composite.gradient(plan, x, weight, bias, dy), None
        needs_x = ctx.needs_input_grad[0]
        arguments = (dy, x, weight, kept, noise, correction, reference, valid, *ctx.how, needs_x)
        dx, g_weight, g_bias = torch.ops.ghostnoise.normalize_backward(*arguments)
        return dx if needs_x else None, _cast(g_weight, weight), _cast(g_bias, bias), None


class _Inject(torch.autograd.Function):
    """The op `inject` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        y: Tensor
        y, scale, *call.tables = torch.ops.ghostnoise.inject(x, *call.how)
        ctx.save_for_backward(scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return aten.rescale(dy, scale).to(dy.dtype), None
        return torch.ops.ghostnoise.inject_backward(dy, scale), None


def _normalize_autograd(x: Tensor, weight: Tensor | None, bias: Tensor | None, *how: Any) -> tuple[Any, ...]:
    call = _Call(*how)
    y = _Normalize.apply(x, weight, bias, call)
    kept, _, _, samples, running = call.tables
    return y, kept, samples, running


def _inject_autograd(x: Tensor, *how: Any) -> tuple[Any, ...]:
    call = _Call(*how)
    y = _Inject.apply(x, call)
    return y, *call.tables


_LIBRARY.impl("normalize_autograd", _normalize_autograd, "CompositeImplicitAutograd")
_LIBRARY.impl("inject_autograd", _inject_autograd, "CompositeImplicitAutograd")


def _outputs(x: Tensor, *groups: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return groups of tables as outputs of an op, which must not share memory with x or with each other."""
    taken, made = {x.untyped_storage().data_ptr()}, []
    for group in groups:
        tables = []
        for table in group:
            at = table.untyped_storage().data_ptr()
            tables.append(table.clone() if (at in taken and at != 0) or table.storage_offset() else table)
            taken.add(at)
        made.append(tables)
    return made


def _moments(x: Tensor, tables: list[Tensor]) -> Moments:
    """Return the moments in a list that is empty if they were not made."""
    return Moments(*tables) if tables else Moments(x.new_empty(0), x.new_empty(0))


def _parameter_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return the dtype of the gradients of weight and bias."""
    return arithmetic_dtype(x) if weight is None else weight.dtype


def _cast(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else gradient.to(parameter.dtype)
