"""Every public layer documents every argument of its constructor, and the shapes of its input and output."""

import inspect
import re

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.docstrings import Docstring, complete
from ghostnoise.methods import registry

LAYERS = {name: layer for name, layer in registry.layers().items() if issubclass(layer, nn.Module)}
every_layer = pytest.mark.parametrize("name", LAYERS)
ABSTRACT = {"WeightStandardized"}  # takes the arguments of the layer that it is combined with


def sections(docstring):
    """Return the lines of each section of a docstring, read as Google's style defines it."""
    found, current = {}, None
    for line in inspect.cleandoc(docstring).splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            current = found.setdefault(heading[1], [])
        elif current is not None and line.startswith(" "):
            current.append(line)
        elif line:
            current = None
    return found


@every_layer
def test_every_argument_of_the_constructor_is_documented(name):
    layer = LAYERS[name]
    parameters = inspect.signature(layer).parameters.values()
    wanted = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    lines = sections(layer.__doc__).get("Args", [])
    described = [match[1] for line in lines if (match := re.match(r"    (\w+): \S", line))]
    assert described == wanted
    assert bool(wanted) == (name not in ABSTRACT)


@every_layer
def test_every_layer_documents_its_shape(name):
    if name not in ABSTRACT:
        assert sections(LAYERS[name].__doc__)["Shape"]


@pytest.mark.parametrize(("name", "shape"), [("2d", "(B, C, H, W)"), ("3d", "(B, C, D, H, W)"), ("1d", "(B, C)")])
def test_the_shape_of_a_norm_is_one_that_it_accepts(name, shape):
    for layer in [each for full, each in LAYERS.items() if full.endswith(f"Norm{name}")]:
        assert shape in " ".join(sections(layer.__doc__)["Shape"])
        sizes = dict(zip("BCDHW", (6, 3, 2, 2, 2), strict=True))
        x = torch.randn([sizes[letter] for letter in re.findall("[A-Z]", shape)])
        options = {"ghost_size": 3} if "ghost_size" in inspect.signature(layer).parameters else {}
        assert layer(3, **options)(x).shape == x.shape


def test_layers_of_one_rank_take_the_text_of_their_method():
    docstring = inspect.getdoc(ghostnoise.GhostNoiseBatchNorm2d)
    assert docstring.startswith("Batch norm with ghost noise of (B, C, H, W).\n\nEach sample gets the noise of")
    assert "    ghost_size: the number of samples in a ghost batch, N; smaller is stronger noise" in docstring
    assert ">>>" not in docstring  # the example is that of the base class


def test_parts_of_a_docstring():
    parts = Docstring.parse("""Do it.

        More:

            y = x

        Args:
            a: the first, which is
                long: very.
            b: second.

        Shape: any.

        Examples:
            >>> 1
            1
        """)
    assert parts.text == "Do it.\n\nMore:\n\n    y = x"
    assert parts.arguments == {"a": "the first, which is long: very.", "b": "second."}
    assert (parts.shape, parts.examples) == ("any.", ">>> 1\n1")
    assert Docstring.parse(str(parts)).arguments == parts.arguments
    assert "Args:\n    a: the first, which is long: very.\n    b: second.\n\nShape:\n    any.\n\n" in str(parts)


def test_own_descriptions_precede_shared_ones():
    class Layer:
        """Do it.

        Args:
            b: own.
        """

        def __init__(self, a, b, c): ...

    complete(Layer, {"a": "shared.", "b": "shared."})
    assert Layer.__doc__ == "Do it.\n\nArgs:\n    a: shared.\n    b: own.\n"


def test_a_class_without_a_docstring_stays_without():
    layer = type("Layer", (), {})
    complete(layer, {})
    assert layer.__doc__ is None
