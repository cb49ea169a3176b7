"""An extension of griffe: classes get the docstrings and constructors that they have at run time.

Griffe reads source files and does not import them, so it sees neither the text that is added to docstrings nor the
constructors that layers inherit from torch.
"""

import json
from pathlib import Path
from typing import Any

import griffe


class RuntimeDocstrings(griffe.Extension):
    """Replace docstrings by those in a JSON file, and add missing constructors.

    Args:
        file: maps the paths of classes to their docstrings and to their parameters: name, kind, annotation and default.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.classes: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Set the docstring of a class, and its constructor if it has none of its own."""
        found = self.classes.get(cls.path)
        if not found or not cls.docstring:
            return
        cls.docstring.value = found["docstring"]
        if "__init__" not in cls.members:
            parameters = [
                griffe.Parameter(name, kind=griffe.ParameterKind[kind], annotation=annotation, default=default)
                for name, kind, annotation, default in found["parameters"]
            ]
            cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))
