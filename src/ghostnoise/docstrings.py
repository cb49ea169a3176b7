"""Complete docstrings of layers: every constructor argument in `Args`, and the shapes of input and output in `Shape`.

A layer documents what is its own; the text of arguments that many layers share is here.
"""

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WIDTH = 100
BATCH_NORM = {
    "num_features": "the number of channels, C.",
    "eps": "added to the variance before its square root is taken.",
    "momentum": "the weight of a batch in the running statistics; None averages over all batches.",
    "affine": "whether the layer has a learnable `weight`, and a `bias` unless `bias=False`.",
    "track_running_stats": "whether the layer has running statistics. Without them, the statistics of the batch are "
    "used in eval mode too.",
    "device": "where parameters and buffers are created.",
    "dtype": "the dtype of the parameters and of the running statistics.",
    "process_group": 'the ranks that share a batch in training: None is this process alone, "world" is all ranks, and '
    "a process group of `torch.distributed` is its ranks.",
    "uneven": "if True, ranks may hold different numbers of samples, or none, and exchange these numbers first. If "
    "False, unequal batch sizes are not detected and may hang or crash.",
    "bias": "if False, the affine layer has a `weight` only.",
}
SHAPES = {2: "(B, C)", 3: "(B, C, L)", 4: "(B, C, H, W)", 5: "(B, C, D, H, W)"}
SECTION = re.compile(r"^(Args|Shape|Examples):[ \n]", re.MULTILINE)
ARGUMENT = re.compile(r"^ {4}(\w+): ", re.MULTILINE)


@dataclass
class Docstring:
    """The parts of a docstring: text, the descriptions of arguments by name, shapes, and examples."""

    text: str
    arguments: dict[str, str] = field(default_factory=dict)
    shape: str = ""
    examples: str = ""

    @classmethod
    def parse(cls, docstring: str) -> "Docstring":
        """Split a docstring into its parts."""
        text, *rest = SECTION.split(inspect.cleandoc(docstring))
        sections = dict(zip(rest[::2], rest[1::2], strict=True))
        _, *pairs = ARGUMENT.split("\n" + sections.get("Args", ""))
        return cls(
            text.strip(),
            {name: _flat(described) for name, described in zip(pairs[::2], pairs[1::2], strict=True)},
            _flat(sections.get("Shape", "")),
            textwrap.dedent(sections.get("Examples", "")).strip(),
        )

    def __str__(self) -> str:
        """Join the parts; every section is indented as in Google's style."""
        entries = [
            textwrap.fill(f"{name}: {text}", WIDTH, initial_indent="    ", subsequent_indent="        ",
                          break_long_words=False, break_on_hyphens=False)
            for name, text in self.arguments.items()
        ]  # fmt: skip
        shape = textwrap.fill(self.shape, WIDTH, initial_indent="    ", subsequent_indent="    ")
        parts = [
            self.text, "Args:\n" + "\n".join(entries) if entries else "", f"Shape:\n{shape}" if self.shape else "",
            f"Examples:\n{textwrap.indent(self.examples, '    ')}" if self.examples else "",
        ]  # fmt: skip
        return "\n\n".join(part for part in parts if part) + "\n"


def complete(layer: type, shared: Mapping[str, str], ndims: Sequence[int] = ()) -> None:
    """Add the missing arguments to a layer's docstring, and the shapes for inputs of `ndims` dimensions.

    A layer whose docstring has no `Args`, such as the 2d layer of a method, takes text and arguments from its first
    base class, if that has `Args`.
    """
    if not (layer.__doc__ and "__doc__" in vars(layer)):  # python -OO removes docstrings
        return
    own = Docstring.parse(layer.__doc__)
    base = Docstring.parse(layer.__bases__[0].__doc__ or "")
    if base.arguments and not own.arguments:
        _, _, rest = base.text.partition("\n\n")
        own.text, own.arguments = "\n\n".join(filter(None, [own.text, rest])), base.arguments
    names = list(inspect.signature(layer).parameters)
    described = {**shared, **own.arguments}
    own.arguments = {name: described[name] for name in names if name in described}
    if ndims:
        own.shape = f"{' or '.join(SHAPES[ndim] for ndim in ndims)}; the output has the same shape."
    layer.__doc__ = str(own)


def _flat(text: str) -> str:
    return " ".join(text.split())
