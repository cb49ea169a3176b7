"""The pool of rows across ranks: a batch of which each process of a group holds a part, in the order of their ranks.

A batch is small tables to all that decide, a row for each sample, so ranks exchange these tables and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ghostnoise.moments import Moments, spread, total

WORLD = "world"  # the default process group, whichever it is when a layer runs

# None is this process alone; else "world", the name of a process group, or the group itself.
Group: TypeAlias = "str | dist.ProcessGroup | None"


class Extent(NamedTuple):
    """A batch as a whole: its shape, the positions of a sample, and the ranks that share it; None: it is not shared."""

    shape: torch.Size
    spatial: int
    ranks: "Ranks | None" = None


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group that share a batch: `sizes` are their numbers of samples, `rank` is this one's place."""

    group: Any
    rank: int
    sizes: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """The samples of all ranks."""
        return sum(self.sizes)

    def gather(self, moments: Moments) -> Moments:
        """The moments of all samples (B, C), from those of this rank's; one collective."""
        return self._gather(moments, self.sizes)

    def add(self, tables: Moments, rows: int, each: int) -> Moments:
        """Sums over the samples of all ranks that share a pool (R, C), from what each has to add; one collective.

        A rank has a row for each of its samples to add, or a single one where all samples share a single pool.
        """
        sizes = (1,) * len(self.sizes) if rows == 1 else self.sizes
        return Moments(*(total(table, rows, each) for table in self._gather(tables, sizes)))

    def own(self, table: Tensor, each: int) -> Tensor:
        """The rows of this rank's samples in a table of pools (R, C); a single row is everyone's."""
        if table.shape[0] == 1:
            return table
        start = sum(self.sizes[: self.rank])
        return spread(table, self.batch_size, each)[start : start + self.sizes[self.rank]]

    def _gather(self, tables: Moments, sizes: tuple[int, ...]) -> Moments:
        """Tables of all ranks, one below the other; shorter ones travel padded."""
        sent = tables.var.new_zeros(2, max(sizes), tables.var.shape[1])
        for to, table in zip(sent, tables, strict=True):
            to[: table.shape[0]] = table
        received = sent.new_empty(len(sizes), *sent.shape)
        dist.all_gather(list(received), sent, self.group)
        kinds = (zip(parts, sizes, strict=True) for parts in received.unbind(1))
        return Moments(*(torch.cat([part[:size] for part, size in kind]) for kind in kinds))


def meet(x: Tensor, spatial: int, process_group: Group, uneven: bool) -> Extent:
    """The batch that x is a part of, with the other ranks of `process_group`; all of them must come here."""
    ranks = None if process_group is None else uncompiled(_meet, x, spatial, process_group, uneven)
    return Extent(x.shape if ranks is None else torch.Size((ranks.batch_size, *x.shape[1:])), spatial, ranks)


def uncompiled(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run`; under `torch.compile`, outside of its graphs."""
    if not torch.compiler.is_compiling():
        return run(*arguments)
    return torch.compiler.disable(run, reason="ranks exchange tables")(*arguments)


def _meet(x: Tensor, spatial: int, process_group: Group, uneven: bool) -> Ranks | None:
    group = resolve(process_group)
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    if count == 1:
        return None
    if not uneven:
        return Ranks(group, rank, (x.shape[0],) * count)
    received = x.new_empty(count, 2, dtype=torch.int64)
    dist.all_gather(list(received), received.new_tensor([x.shape[0], spatial]), group)
    sizes, positions = received.t().tolist()
    if len(set(positions)) > 1:
        raise ValueError(
            f"ranks with inputs of {', '.join(map(str, positions))} positions: must be the same on all ranks, where an "
            "empty batch has them too; resize or pad the inputs, or take statistics over this process alone"
        )
    return Ranks(group, rank, tuple(sizes))


def named(process_group: Group) -> str | None:
    """A process group as a layer holds it: by its name, since the group itself can be neither copied nor saved."""
    name = process_group if process_group is None else getattr(process_group, "group_name", process_group)
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"process_group={process_group!r}: must be None for this process alone, 'world' for all, or a process "
            "group of torch.distributed that this rank is in; give ranks outside of it a group of their own, or None"
        )
    return name


def resolve(process_group: Group) -> Any:
    """The process group itself."""
    name = named(process_group)
    if not initialized():
        raise ValueError(
            f"process_group={name!r} without ranks: call torch.distributed.init_process_group first, or leave it out"
        )
    if name == WORLD:
        return dist.group.WORLD
    if not isinstance(process_group, str):
        return process_group
    try:
        return dist.distributed_c10d._resolve_process_group(process_group)  # type: ignore[attr-defined, arg-type]
    except RuntimeError:
        raise ValueError(
            f"process_group={name!r}: this process has no group of that name; create the groups that a saved model was "
            "trained with first, in the same order, or convert it again"
        ) from None


def initialized() -> bool:
    """There are ranks."""
    return dist.is_available() and dist.is_initialized()


def described(process_group: Group, uneven: bool) -> list[str]:
    """What the `repr` of a layer says of its ranks: nothing, where it has none."""
    shown = [] if process_group is None else [f"process_group={named(process_group)!r}"]
    return [*shown, "uneven=True"] if uneven else shown
