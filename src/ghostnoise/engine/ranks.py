"""A batch that is spread over ranks: each process of a group holds a part of it, in the order of their ranks.

A method decides from small tables with one row per sample, so ranks exchange these tables and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ghostnoise.engine.masks import count
from ghostnoise.tables import Moments
from ghostnoise.torch_private import process_group_by_name

WORLD = "world"  # the default process group at the time when a layer runs

# None is this process alone; else "world", the name of a process group, or the group itself.
Group: TypeAlias = "str | dist.ProcessGroup | None"


class Extent(NamedTuple):
    """The shape of the whole batch, the positions of a sample, the ranks that share the batch, and the mask, if any.

    `counts` are the numbers of valid positions of all samples of the batch (B, 1); None without a mask.
    """

    shape: torch.Size
    spatial: int
    ranks: "Ranks | None" = None
    mask: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group that share a batch: `sizes` are their numbers of samples, `rank` is this process."""

    group: Any
    rank: int
    sizes: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """Return the number of samples of all ranks."""
        return sum(self.sizes)

    def gather(self, m: Moments, whole: Tensor | None = None) -> Moments:
        """Gather the moments of all samples from those of each rank, in one collective; differentiable.

        `whole` are the numbers of values of all samples, if they may differ. In the backward pass, gradients are summed
        over ranks, so that the gradient of x is that of the losses of all ranks.
        """
        mean, var = _Gather.apply(self, m.mean, m.var)
        return Moments(mean, var, m.n if whole is None else whole)

    def gather_counts(self, counts: Tensor) -> Tensor:
        """Gather the numbers of valid positions of all samples (B, 1) from those of each rank, in one collective."""
        return self.concatenated([counts])[0]

    def own(self, table: "Tensor | float") -> Any:
        """Return the rows of this rank's samples in a table of all samples (B, C); one row, or a number, serves all.

        A table that has rows for this rank's samples alone, such as that of drawn noise, is returned as it is.
        """
        if not isinstance(table, Tensor) or table.shape[0] != self.batch_size or table.shape[0] == 1:
            return table
        start = sum(self.sizes[: self.rank])
        return table[start : start + self.sizes[self.rank]]

    def concatenated(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate the tables of all ranks; shorter ones are padded for the collective."""
        sent = tables[-1].new_zeros(len(tables), max(self.sizes), tables[-1].shape[1])
        for to, table in zip(sent, tables, strict=True):
            to[: table.shape[0]] = table
        received = sent.new_empty(len(self.sizes), *sent.shape)
        dist.all_gather(list(received), sent, self.group)
        kinds = (zip(parts, self.sizes, strict=True) for parts in received.unbind(1))
        return [torch.cat([part[:size] for part, size in kind]) for kind in kinds]


class _Gather(torch.autograd.Function):
    """The tables of all ranks; the gradient of a rank's rows is the sum of what all ranks contribute."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tables: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        return tuple(ranks.concatenated(tables))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.stack(gradients)
        dist.all_reduce(total, group=ctx.ranks.group)
        return None, *(ctx.ranks.own(table) for table in total)


def meet(x: Tensor, spatial: int, process_group: Group, uneven: bool, mask: Tensor | None = None) -> Extent:
    """Return the extent of the batch that x is a part of. With a process group, all of its ranks must call this."""
    ranks = None if process_group is None else uncompiled(_meet, x, spatial, process_group, uneven, mask is not None)
    shape = x.shape if ranks is None else torch.Size((ranks.batch_size, *x.shape[1:]))
    if mask is None:
        return Extent(shape, spatial, ranks)
    own = count(mask)
    return Extent(shape, spatial, ranks, mask, own if ranks is None else uncompiled(ranks.gather_counts, own))


def uncompiled(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run`, with a graph break under `torch.compile`."""
    if not torch.compiler.is_compiling():
        return run(*arguments)
    return torch.compiler.disable(run, reason="ranks exchange tables")(*arguments)


def _meet(x: Tensor, spatial: int, process_group: Group, uneven: bool, is_masked: bool) -> Ranks | None:
    group = resolve(process_group)
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    if count == 1:
        return None
    if not uneven:
        return Ranks(group, rank, (x.shape[0],) * count)
    received = x.new_empty(count, 3, dtype=torch.int64)
    dist.all_gather(list(received), received.new_tensor([x.shape[0], spatial, is_masked]), group)
    sizes, positions, masked = received.t().tolist()
    if len(set(positions)) > 1:
        raise ValueError(
            f"ranks with inputs of {', '.join(map(str, positions))} positions: must be the same on all ranks, "
            "including those with an empty batch; resize or pad the inputs, or use the statistics of each process alone"
        )
    if len(set(masked)) > 1:
        raise ValueError(
            f"a mask on rank {masked.index(1)} and none on rank {masked.index(0)}: must be given on all ranks or on "
            "none; give the other ranks a mask that is True everywhere"
        )
    return Ranks(group, rank, tuple(sizes))


def named(process_group: Group) -> str | None:
    """Return the name of a process group, which a layer can store: the group itself cannot be copied or saved."""
    name = process_group if process_group is None else getattr(process_group, "group_name", process_group)
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"process_group={process_group!r}: must be None for this process alone, 'world' for all ranks, or a "
            "process group of torch.distributed that contains this rank; give other ranks a group of their own, or None"
        )
    return name


def resolve(process_group: Group) -> Any:
    """Return the process group itself."""
    name = named(process_group)
    if not initialized():
        raise ValueError(
            f"process_group={name!r} without torch.distributed: call torch.distributed.init_process_group first, or "
            "leave process_group out"
        )
    if name == WORLD:
        return dist.group.WORLD
    if not isinstance(process_group, str):
        return process_group
    try:
        return process_group_by_name(process_group)
    except RuntimeError:
        raise ValueError(
            f"process_group={name!r}: this process has no group with this name; create the groups that a saved model "
            "was trained with first, in the same order, or convert it again"
        ) from None


def initialized() -> bool:
    """Return whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()


def described(process_group: Group, uneven: bool) -> list[str]:
    """Return what the `repr` of a layer shows about its ranks; nothing without a process group."""
    shown = [] if process_group is None else [f"process_group={named(process_group)!r}"]
    return [*shown, "uneven=True"] if uneven else shown
