"""`flex_norm`: any normalization, as a differentiable function from per-sample moments to an affine map."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine import general
from ghostnoise.engine.general import Decide
from ghostnoise.engine.ranks import Extent, Group, meet
from ghostnoise.tables import Affine, Moments

__all__ = ["flex_norm"]


def flex_norm(
    input: Tensor,
    decide: Decide,
    *parameters: Tensor | None,
    channel_dim: int = 1,
    mask: Tensor | None = None,
    process_group: Group = None,
) -> Tensor:
    """Normalize each sample's channels with the affine map that `decide` returns for the moments of the samples.

        y = scale · (x - center) + shift        Affine(center, scale, shift) = decide(moments, *parameters)

    Args:
        decide: a function of the `Moments` of all samples (`mean` and `var` (B, C), in float64 where the device has it,
            and `n`, the number of values of each) and the parameters in the same dtype. It returns an `Affine` of
            tables (B, C), or broadcastable to it, written in differentiable PyTorch; gradients flow through everything
            that it does not detach. It must take from its arguments all that needs a gradient, and draw nothing: it may
            run again. `ghostnoise.tables` has pools of samples and of channels, maps, and noise.
        parameters: tensors that `decide` takes, such as weight and bias (C,); None is passed on.
        channel_dim: the dimension of the channels: 1, or -1 for tokens (B, T, C).
        mask: the valid positions (B, *positions) of a padded batch; only these contribute, and the output is 0 at the
            others. `n` is then a tensor (B, 1), by which the pools weigh samples.
        process_group: the ranks that share the batch: `decide` gets the moments of all samples of all ranks.

    Shape:
        (B, C, *spatial) with 2 to 5 dimensions, or with the channels in `channel_dim`, in any memory format.

    Examples:
        >>> from ghostnoise.tables import normalize, whole_batch
        >>> def batch_norm(m, weight, bias):
        ...     return normalize(whole_batch(m)).then(weight, bias)
        >>> x, weight, bias = torch.randn(8, 3, 5, 5), torch.rand(3), torch.rand(3)
        >>> y = flex_norm(x, batch_norm, weight, bias)
        >>> torch.allclose(y, torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True), atol=1e-5)
        True
    """
    _, spatial = checks.layout(input, "flex_norm", channel_dim)
    checks.trainable(input.shape, "flex_norm")
    if not callable(decide):
        raise TypeError(f"decide of type {type(decide).__name__}: must be a function of moments that returns an Affine")
    extent = Extent(input.shape, spatial)
    if mask is not None or process_group is not None:
        if mask is not None:
            checks.mask(mask, input, "flex_norm", channel_dim)
        extent = meet(input, spatial, process_group, False, mask)
        if extent.counts is not None:
            checks.some_valid(extent.counts, "flex_norm")
    return general.run(input, _Checked(decide), parameters, extent, channel_dim)[0]


class _Checked:
    """A `decide` of a user, whose result is checked."""

    def __init__(self, decide: Decide) -> None:
        self.decide = decide

    def __call__(self, m: Moments, *parameters: Tensor | None) -> Affine:
        affine = self.decide(m, *parameters)
        if not isinstance(affine, tuple) or isinstance(affine, Moments) or len(affine) != 3:
            raise TypeError(
                f"decide returned a {type(affine).__name__}: must return an Affine of three tables, center, scale and "
                "shift; use ghostnoise.tables.Affine or normalize"
            )
        tables = [_table(name, table, m) for name, table in zip(Affine._fields, affine, strict=True)]
        if not torch.compiler.is_compiling():
            _check_values(tables, m)
            if torch.is_grad_enabled():
                _check_sources(tables, [m.mean, m.var, *(each for each in parameters if each is not None)])
        return Affine(*tables)


def _table(name: str, table: object, m: Moments) -> Tensor | float:
    """Return a table of the affine map with two dimensions, or a number, checked."""
    if isinstance(table, float | int):
        return float(table)
    (batch_size, channels), dtype = m.mean.shape, m.mean.dtype
    if not isinstance(table, Tensor):
        raise TypeError(
            f"decide returned a {type(table).__name__} as {name}: must be a tensor or a number; compute it from m.mean "
            "and m.var"
        )
    if table.dtype != dtype:
        raise TypeError(
            f"decide returned a {name} of dtype {table.dtype}: must be {dtype}, that of the moments; compute it from "
            f"m.mean and m.var, or convert with {name}.to(m.mean.dtype)"
        )
    shape = tuple(table.shape)
    rows, columns = shape if len(shape) == 2 else (1, *shape) if len(shape) == 1 else (1, 1) if not shape else (0, 0)
    if rows not in (1, batch_size) or columns not in (1, channels):
        raise ValueError(
            f"decide returned a {name} of shape {shape}: must be (B, C) = ({batch_size}, {channels}), or "
            "broadcastable to it; x itself must not enter the map, only its moments"
        )
    return table if shape == (rows, channels) else table.expand(rows, channels)


def _check_values(tables: list[Tensor | float], m: Moments) -> None:
    """Check that tables are finite where the moments are. A sum is finite if its terms are, unless it overflows."""
    for name, table in zip(Affine._fields, tables, strict=True):
        if isinstance(table, Tensor):
            if not checks.readable(table) or isfinite(table.detach().sum()):
                continue
            if table.detach().isfinite().all() or not m.mean.isfinite().all():
                continue
        elif isfinite(table):
            continue
        raise ValueError(
            f"decide returned a {name} that is not finite for finite moments: must be finite; add a small eps before "
            "dividing or taking a root of m.var, which is 0 for samples with a single position"
        )


def _check_sources(tables: list[Tensor | float], leaves: list[Tensor]) -> None:
    """Check that tables depend on the arguments of `decide` alone: the gradient of anything else would be lost."""
    known = {id(leaf) for leaf in leaves}
    seen: set[Any] = {None, *(leaf.grad_fn for leaf in leaves)}
    for name, table in zip(Affine._fields, tables, strict=True):
        waiting: list[Any] = [table.grad_fn] if isinstance(table, Tensor) else []
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            before = node.next_functions
            variable = None if before else getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                raise ValueError(
                    f"decide returned a {name} that depends on a tensor of shape {tuple(variable.shape)} that needs a "
                    "gradient and is not an argument of decide, which would lose this gradient: pass it as a parameter "
                    "of flex_norm, use the moments instead of x, or detach it"
                )
            waiting += [each for each, _ in before]
