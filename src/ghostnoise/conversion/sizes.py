"""What `ghost_size` may be: a number, a schedule, None, or a mapping from patterns of names to these."""

import inspect
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, TypeAlias

from ghostnoise.conversion.schedules import Schedule
from ghostnoise.conversion.selection import Found, listing
from ghostnoise.conversion.table import Method

Size: TypeAlias = int | Schedule | None
Sizes: TypeAlias = Size | EllipsisType | Mapping[str, Size]


def each(sizes: Sizes, found: Sequence[Found], method: Method, name: str) -> list[Any]:
    """The size of each of these modules; Ellipsis where the method has none."""
    default = method.default_size
    if default is ...:
        if sizes is not ...:
            raise ValueError(f"ghost_size={sizes!r}: {name!r} normalizes the whole batch; leave it out, or take 'gbn'")
        return [...] * len(found)
    if sizes is ...:
        if default is inspect.Parameter.empty:
            raise ValueError(
                f"ghost_size is missing: {name!r} needs the number of samples in a ghost batch; give ghost_size=32, "
                "say, or None for no ghosts"
            )
        return [default] * len(found)
    return _matched(sizes, found) if isinstance(sizes, Mapping) else [sizes] * len(found)


def range_of(size: Size) -> list[int | None]:
    """The sizes that a layer must be able to have: now, and at both ends of a schedule."""
    return [size.ghost_size, size.at(0), size.at(size.steps)] if isinstance(size, Schedule) else [size]


def _matched(sizes: Mapping[str, Size], found: Sequence[Found]) -> list[Size]:
    fitting = [[pattern for pattern in sizes if _matches(pattern, each)] for each in found]
    without = [each for each, patterns in zip(found, fitting, strict=True) if not patterns]
    if without:
        raise ValueError(
            f"ghost_size has no pattern for {listing(without)}: every layer to convert must match one of "
            f"{', '.join(map(repr, sizes))}; add '*' as the last one, or leave layers out with where="
        )
    idle = [pattern for pattern in sizes if not any(pattern in patterns for patterns in fitting)]
    if idle:
        raise ValueError(
            f"ghost_size has {', '.join(map(repr, idle))}, which no layer to convert matches: they are "
            f"{listing(found, most=5)}; mend the pattern or drop it"
        )
    return [sizes[patterns[0]] for patterns in fitting]


def _matches(pattern: object, found: Found) -> bool:
    if not isinstance(pattern, str):
        raise ValueError(f"ghost_size has the key {pattern!r}: must be a pattern of module names, such as 'layer1.*'")
    return any(fnmatchcase(name, pattern) for name in found.names)
