"""Ghost batch norms of other libraries: modules that divide the batch and call a batch norm for each part.

`convert` keeps such a wrapper, its attributes and the names of its parameters. It converts the batch norm inside, and
the wrapper then calls it once with the whole batch, which the converted layer divides itself.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ghostnoise.conversion.swap import Swap
from ghostnoise.conversion.targets import Found, everything


class Kind(NamedTuple):
    """The attributes of a wrapper: the name of its batch norm, and that of the size of its ghost batches."""

    norm: str
    size: str


# By the full name of the class, so that no library needs to be installed or imported.
KINDS = {
    "pytorch_tabnet.tab_network.GBN": Kind("bn", "virtual_batch_size"),
    "pytorch_tabular.models.common.layers.batch_norm.GBN": Kind("bn", "virtual_batch_size"),
    "composer.algorithms.ghost_batchnorm.ghost_batchnorm._GhostBatchNorm": Kind("batchnorm", "ghost_batch_size"),
}


class Wrapper(NamedTuple):
    """A wrapper in a model, and the class that the other library defines."""

    found: Found
    kind: Kind
    defined: Any

    @property
    def norm(self) -> Any:
        """Return the batch norm inside, if there is one."""
        return getattr(self.found.module, self.kind.norm, None)

    @property
    def size(self) -> Any:
        """Return the size of the ghost batches of the other library."""
        return getattr(self.found.module, self.kind.size)


class Undivided(nn.Module):
    """A wrapper that calls its batch norm once with the whole batch."""

    wrapped: str

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the whole batch."""
        y: Tensor = getattr(self, self.wrapped)(input)
        return y

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refer to the class of the other library, since this one is created here and cannot be found by its name."""
        made: Any = super().__reduce_ex__(protocol)
        return _empty, (type(self).__bases__[1],), made[2]


@functools.cache
def undivided(theirs: Any) -> type[Any]:
    """Return the variant of a wrapper class that calls its batch norm once with the whole batch."""
    known = defined_in(theirs)
    assert known is not None
    doc = f"`{theirs.__module__}.{theirs.__qualname__}`, which calls its batch norm once with the whole batch."
    attributes = {"__module__": theirs.__module__, "__doc__": doc, "wrapped": known[0].norm}
    return type(theirs.__name__, (Undivided, theirs), attributes)


def _empty(theirs: Any) -> Any:
    kind: Any = undivided(theirs)
    return kind.__new__(kind)


def defined_in(layer: type[nn.Module]) -> tuple[Kind, Any] | None:
    """Return the entry of a class in `KINDS`, and which of its bases has it; None if it is no wrapper."""
    for base in layer.__mro__:
        kind = KINDS.get(f"{base.__module__}.{base.__qualname__}")
        if kind is not None and not issubclass(base, Undivided):
            return kind, base
    return None


def wrappers(model: nn.Module) -> list[Wrapper]:
    """Return the wrappers in a model that have a batch norm."""
    found = [(each, defined_in(type(each.module))) for each in everything(model)]
    known = [Wrapper(each, *entry) for each, entry in found if entry is not None]
    return [wrapper for wrapper in known if isinstance(wrapper.norm, nn.Module)]


def plan(wrapper: Wrapper) -> list[Swap]:
    """Plan that a wrapper calls its batch norm once with the whole batch; raises if it is not possible."""
    found = wrapper.found
    theirs: Any = type(found.module)
    if issubclass(theirs, Undivided):
        return []
    if theirs.forward is not wrapper.defined.forward or "forward" in vars(found.module):
        raise ValueError(
            f"{found} is a {wrapper.defined.__module__}.{wrapper.defined.__qualname__} with a forward of its own, "
            "which conversion would lose: exclude the batch norm inside it with where="
        )
    if parametrize.is_parametrized(found.module):
        raise ValueError(f"{found} is parametrized, and its class cannot be changed: remove the parametrizations first")
    return [Swap(found.module, undivided(theirs), {}, None)]


def plan_back(found: Sequence[Found], plain: bool) -> list[Swap]:
    """Plan that wrappers divide the batch again; or if `plain`, that they become an `nn.Sequential` of the batch norm.

    The name of the batch norm inside, and so the keys of the state_dict, stay.
    """
    ours: list[Any] = [each.module for each in found if isinstance(each.module, Undivided)]
    return [Swap(module, nn.Sequential if plain else type(module).__bases__[1], {}, None) for module in ours]
