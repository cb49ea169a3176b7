"""Write what type checkers and editors read of the registry: imports of public names, and the options of `convert`.

    python tools/exports.py            # after adding a method, or an option of one

At run time, the registry is the only list of methods, and the names are looked up in it. Type checkers and editors do
not run code, so the same names are also written as imports that they alone see. A test fails if they are out of date.
"""

import inspect
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import ghostnoise
from ghostnoise.conversion.swap import Method
from ghostnoise.methods import registry

PACKAGE = Path(ghostnoise.__file__).parent
BEGIN, END = "# exports: begin, written by tools/exports.py\n", "# exports: end"


def files() -> dict[Path, str]:
    """Return the generated files by path, with the text that each must have."""
    layers, functions = registry.layers(), registry.functions()
    methods = _imports(layers | {name: functions[name] for name in ghostnoise._FUNCTIONS})
    others = [f"from ghostnoise.{home} import {name} as {name}" for name, home in ghostnoise._DEFINED_IN.items()]
    modules = [f"from ghostnoise import {name} as {name}" for name in ghostnoise._MODULES]
    blocks = {
        PACKAGE / "__init__.py": modules + sorted(others + methods, key=lambda line: line.split()[1]),
        PACKAGE / "functional.py": _imports(functions),
        PACKAGE / "conversion" / "convert.py": _options(),
    }
    return {path: _replaced(path.read_text(), block) for path, block in blocks.items()}


def _imports(names: Iterable[str]) -> list[str]:
    """Return an import of each name from the module that defines it, which also exports it again."""
    values = registry.exports()
    order = sorted(names, key=lambda name: (values[name].__module__, not isinstance(values[name], type), name.lower()))
    return [f"from {values[name].__module__} import {name} as {name}" for name in order]


def _options() -> list[str]:
    """Return a line for each option of `convert`: its name, and the types that it has in the methods that take it."""
    found: dict[str, list[str]] = {}
    for name, (spec, _) in registry.names().items():
        method = Method(name, spec, {})
        for layer in (spec.norm, spec.noise):
            for option in method.options(layer) if layer is not None else ():
                known = found.setdefault(option, [])
                members = _text(inspect.signature(layer).parameters[option].annotation)
                known += [each for each in members if each not in known]
    return [f"{name}: {' | '.join(sorted(kinds, key='None'.__eq__))}" for name, kinds in sorted(found.items())]


def _text(annotation: Any) -> list[str]:
    """Return the members of a type as they are written in code."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [text for member in members for text in _text(member)]
    if origin is Literal:
        return [f"Literal[{', '.join(map(_quoted, members))}]"]
    return ["None" if annotation is type(None) else annotation.__name__]


def _quoted(value: object) -> str:
    return repr(value).replace("'", '"')


def _replaced(text: str, lines: list[str]) -> str:
    """Return a file with other lines between its markers, which give them their indentation."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{BEGIN.strip()!r} or {END!r} is missing: add these markers around the generated lines")
    indent = before.rpartition("\n")[2]
    return before + begin + "".join(f"{indent}{line}\n" for line in lines) + indent + end + after


def main() -> None:
    """Write the files that are out of date."""
    for path, text in files().items():
        if path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(PACKAGE.parent.parent))


if __name__ == "__main__":
    main()
