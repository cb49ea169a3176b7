"""The steps of the engine as `torch.library` ops, which `torch.compile` and dispatch modes see as single operators.

There is one op per direction, for every device, with a fake implementation and its autograd formula. A plan crosses the
boundary as names, numbers and lists of tensors (`Plan.encode`). An op returns all of its tables; a table that does not
exist is a tensor without elements. An op with an autograd formula cannot write to its arguments, so it returns the
updated running statistics, which are then copied to the buffers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ghostnoise.engine import composite, steps
from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends.base import NoiseTables, Saved
from ghostnoise.engine.backends.select import select
from ghostnoise.engine.masks import Valid
from ghostnoise.engine.plan import Correction, DrawnWithHistory, Noise, Normalizer, Plan, decode, positions
from ghostnoise.engine.running import Population, Running, Update
from ghostnoise.statistics.moments import Moments, arithmetic_dtype, table_dtype
from ghostnoise.statistics.samples import SampleItself


NO_UPDATE = Update(Running(None, None), Population())


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> tuple[Tensor, Moments, Moments]:
    """Return y, the moments of the samples and the pooled statistics, and update the running statistics.

    Of the moments and the pooled statistics, those that neither the backward pass nor a history needs have no rows.
    """
    running, population = plan.update or NO_UPDATE
    given = (*plan.tensors(), *plan.encode(), *running, *population)
    y, *tables = torch.ops.ghostnoise.normalize(x, weight, bias, *given)
    for buffer, updated in zip(running[:3], tables[8:], strict=True):
        if buffer is not None:
            buffer.copy_(updated)
    moments = Moments(*tables[2:4])
    return y, steps.sample_moments(x, moments) if _keeps_moments(plan) else moments, Moments(*tables[:2])


def inject(x: Tensor, noise: Noise, valid: Valid | None = None) -> tuple[Tensor, Moments | None]:
    """Return x with the noise, and the moments of the samples if they are kept for a history."""
    plan = Plan(Normalizer(SampleItself(), 0.0), noise, valid=valid)
    drawn, _, masked = plan.tensors()
    y, _, *moments = torch.ops.ghostnoise.inject(x, drawn, masked, *plan.encode())
    return y, Moments(*moments) if isinstance(noise, DrawnWithHistory) else None


_LIBRARY = torch.library.Library("ghostnoise", "DEF")
# Inductor runs convolutions on CPUs in channels_last. The ops take that as it is, rather than copies in the strides that
# the tensors had in eager mode.
_TAGS = (torch.Tag.flexible_layout,)
_HOW = "Tensor[] valid, str names, int[] integers, float[] floats"
_UPDATE = (
    "Tensor? running_mean, Tensor? running_var, Tensor? num_batches_tracked, float? momentum, "
    "bool ghosts, bool unbiased"
)
_LIBRARY.define(
    f"normalize(Tensor x, Tensor? weight, Tensor? bias, Tensor[] drawn, Tensor[] reference, {_HOW}, {_UPDATE}) -> "
    f"({', '.join(['Tensor'] * 12)})",
    tags=_TAGS,
)
_LIBRARY.define(
    "normalize_backward(Tensor dy, Tensor x, Tensor? weight, Tensor[] kept, Tensor[] noise, Tensor[] correction, "
    f"Tensor[] reference, {_HOW}, bool needs_x) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(f"inject(Tensor x, Tensor[] drawn, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define("inject_backward(Tensor dy, Tensor scale) -> Tensor", tags=_TAGS)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, drawn: list[Tensor], reference: list[Tensor], *how: Any
) -> tuple[Tensor, ...]:
    """Return y, pooled mean and variance, the samples' mean and variance, m, k, r, d, and the updated buffers."""
    asked, backend = _decoded(drawn, reference, *how), select(x)
    contributors, update = asked.normalizer.contributors, asked.update
    made = steps.forward(backend, x, weight, bias, asked, None)
    if update is not None and not made.updated:
        measured = (contributors, made.moments, made.pooled, x.shape[0], positions(x))
        backend.update_running(*update.running, update.population.moments(*measured, backend.pool, asked.counts))
    moments = made.moments if _returns_moments(x, asked) else (None, None)
    pooled = (None, None) if contributors.keeps_moments else made.pooled
    tables = (None if table is None else table.to(table_dtype(x.device)).contiguous() for table in (*pooled, *moments))
    buffers = (update or NO_UPDATE).running[:3]
    return made.y, *_outputs(x, *tables, *made.noise, *(made.correction or (None, None)), *buffers)


def _fake_normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, drawn: list[Tensor], reference: list[Tensor], *how: Any
) -> tuple[Tensor, ...]:
    asked, (batch_size, channels) = _decoded(drawn, reference, *how), x.shape[:2]
    contributors, noise = asked.normalizer.contributors, asked.noise
    wide, dtype = table_dtype(x.device), arithmetic_dtype(x)

    def table(exists: bool, *shape: int, dtype: torch.dtype) -> Tensor:
        return x.new_empty(shape, dtype=dtype) if exists else x.new_empty(0)

    pooled = (not contributors.keeps_moments, contributors.pools(batch_size), channels)
    moments = (_returns_moments(x, asked), batch_size, channels)
    components = (noise is not None and noise.shifts, noise is not None and noise.scales)
    return (
        torch.empty_like(x),
        *(table(*shape, dtype=wide) for shape in (pooled, pooled, moments, moments)),
        *(table(injected, batch_size, channels, dtype=dtype) for injected in components),
        *(table(asked.corrects, channels, dtype=dtype) for _ in range(2)),
        *(x.new_empty(0) if buffer is None else buffer for buffer in (asked.update or NO_UPDATE).running[:3]),
    )


def _decoded(drawn: list[Tensor], reference: list[Tensor], *how: Any) -> Plan:
    """Return the plan of the arguments of `normalize`, which updates copies of the running statistics."""
    mean, var, count, momentum, *population = how[4:]
    plan = decode(drawn, reference, *how[:4])
    if mean is var is count is None:
        return plan
    buffers = (None if buffer is None else buffer.clone() for buffer in (mean, var, count))
    return plan._replace(update=Update(Running(*buffers, momentum), Population(*population)))


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
    tables = NoiseTables(*(table if table.numel() else None for table in noise))
    saved = Saved(Moments(*kept), tables, Correction(*correction) if correction[0].numel() else None)
    dx, *gradients = steps.backward(select(x), dy, x, weight, asked, saved, None, needs_x)
    return _outputs(x, dx, *(gradient.to(_parameter_dtype(x, weight)) for gradient in gradients))


def _fake_normalize_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, *rest: Any, needs_x: bool | None = None
) -> tuple[Tensor, ...]:
    gradients = [x.new_empty(x.shape[1], dtype=_parameter_dtype(x, weight)) for _ in range(2)]
    wanted = rest[-1] if needs_x is None else needs_x
    return torch.empty_like(x) if wanted else x.new_empty(0), *gradients


def _inject_op(x: Tensor, drawn: list[Tensor], *how: Any) -> tuple[Tensor, ...]:
    """Return y, the scale, and the samples' mean and variance."""
    asked, backend = decode(drawn, [], *how), select(x)
    assert asked.noise is not None
    affine, moments = steps.inject_tables(backend, x, asked.noise, None, asked.valid)
    kept: tuple[Tensor | None, ...] = (None, None)
    if isinstance(asked.noise, DrawnWithHistory) and moments is not None:
        kept = tuple(table.to(table_dtype(x.device)).contiguous() for table in moments)
    return backend.transform(x, affine), affine.scale, *_outputs(x, *kept)


def _fake_inject(x: Tensor, drawn: list[Tensor], *how: Any) -> tuple[Tensor, ...]:
    noise = decode(drawn, [], *how).noise
    assert noise is not None
    rows = x.shape[0] if noise.scales else 1
    kept = [x.new_empty(x.shape[:2], dtype=table_dtype(x.device)) for _ in range(2)]
    kept = kept if isinstance(noise, DrawnWithHistory) else [x.new_empty(0) for _ in range(2)]
    return torch.empty_like(x), x.new_empty((rows, x.shape[1]), dtype=arithmetic_dtype(x)), *kept


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
    torch.library.register_fake(f"ghostnoise::{_name}", _fake, lib=_LIBRARY)


def _setup_normalize(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, drawn, reference, valid, *how = inputs
    ctx.how = how[:3]
    _, *tables = output
    ctx.lists = [None] * len(drawn), [None] * len(reference), [None] * len(valid)
    ctx.mark_non_differentiable(*tables)
    ctx.set_materialize_grads(False)
    ctx.keeps_moments = decode(drawn, reference, valid, *ctx.how).normalizer.contributors.keeps_moments
    kept = tables[2:4] if ctx.keeps_moments else tables[:2]
    ctx.save_for_backward(x, weight, bias, *kept, *tables[4:8], *drawn, *reference, *valid)


def _backward_of_normalize(ctx: Any, dy: Tensor | None, *tables: Any) -> tuple[Any, ...]:
    x, weight, bias, mean, var, m, k, r, d, *given = ctx.saved_tensors
    others = (*ctx.lists, *_no_gradients(ctx.how), *[None] * 6)
    if dy is None:
        return None, None, None, *others
    left = iter(given)
    drawn, reference, valid = ([next(left) for _ in each] for each in ctx.lists)
    if torch.is_grad_enabled():  # for a second derivative, which the op of the backward pass does not have
        plan = decode(drawn, reference, valid, *ctx.how)
        return *composite.gradient(plan, x, weight, bias, dy), *others
    needs_x = ctx.needs_input_grad[0]
    arguments = (dy, x, weight, [mean, var], [m, k], [r, d], reference, valid, *ctx.how, needs_x)
    dx, g_weight, g_bias = torch.ops.ghostnoise.normalize_backward(*arguments)
    return dx if needs_x else None, _cast(g_weight, weight), _cast(g_bias, bias), *others


def _setup_inject(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.lists, ctx.how = [[None] * len(each) for each in inputs[1:3]], inputs[3:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _backward_of_inject(ctx: Any, dy: Tensor | None, *tables: Any) -> tuple[Any, ...]:
    (scale,) = ctx.saved_tensors
    if dy is None:
        return None, *ctx.lists, *_no_gradients(ctx.how)
    if torch.is_grad_enabled():
        return aten.rescale(dy, scale).to(dy.dtype), *ctx.lists, *_no_gradients(ctx.how)
    return torch.ops.ghostnoise.inject_backward(dy, scale), *ctx.lists, *_no_gradients(ctx.how)


torch.library.register_autograd(
    "ghostnoise::normalize", _backward_of_normalize, setup_context=_setup_normalize, lib=_LIBRARY
)
torch.library.register_autograd("ghostnoise::inject", _backward_of_inject, setup_context=_setup_inject, lib=_LIBRARY)


def _no_gradients(how: Sequence[Any]) -> list[Any]:
    """Return the gradients of the names and numbers of a plan in the structure that torch expects: [] for []."""
    return [[] if each == [] else None for each in how]


def _outputs(x: Tensor, *tables: Tensor | None) -> tuple[Tensor, ...]:
    """Return tables as outputs of an op, which must not share memory with x or with each other."""
    made: list[Tensor] = []
    taken = {x.untyped_storage().data_ptr()}
    for table in tables:
        given = x.new_empty(0) if table is None else table
        at = given.untyped_storage().data_ptr()
        if (at in taken and at != 0) or given.storage_offset():
            given = given.clone()
        taken.add(at)
        made.append(given)
    return tuple(made)


def _keeps_moments(plan: Plan) -> bool:
    """Whether the samples' moments are needed after the forward pass."""
    return plan.normalizer.contributors.keeps_moments or isinstance(plan.noise, DrawnWithHistory)


def _returns_moments(x: Tensor, plan: Plan) -> bool:
    """Whether the op returns the samples' moments: those of a single position are x itself."""
    return _keeps_moments(plan) and positions(x) > 1


def _parameter_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return the dtype of the gradients of weight and bias."""
    return arithmetic_dtype(x) if weight is None else weight.dtype


def _cast(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else gradient.to(parameter.dtype)
