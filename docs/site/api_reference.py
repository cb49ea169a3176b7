"""The API reference: pages with a directive for each public name, and what griffe does not see in source files."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

# Titles of the pages of the API reference for modules outside ghostnoise.methods.
TITLES = {
    "calibration": "Statistics for inference", "conversion.convert": "Converting models",
    "conversion.schedules": "Schedules of the ghost size", "conversion.summary": "Summary of a model",
    "flex": "Any normalization", "history": "Earlier samples", "inference": "Stochastic inference",
    "laws": "Laws of ghost noise", "masking": "Padded batches", "meter": "Measuring noise",
    "tables": "Tables of moments",
}  # fmt: skip


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield the pages of the API reference: place and text."""
    from ghostnoise import methods
    from ghostnoise.methods import registry

    specs: dict[str, list[registry.MethodSpec]] = {}
    for spec in registry.specs().values():
        specs.setdefault(spec.layer.__module__, []).append(spec)
    index = ["# API reference\n", "`import ghostnoise` gives all layers, `convert` and the other names below; the "
             "functions are in `ghostnoise.functional`. These pages are generated from the docstrings.\n",
             "| page | names |", "| --- | --- |"]  # fmt: skip
    found = [f"{methods.__name__}.{each.name}" for each in pkgutil.iter_modules(methods.__path__)]
    for module in dict.fromkeys([*specs, *found]):
        names = getattr(importlib.import_module(module), "__all__", None)
        if names is None:
            continue
        page = module.rpartition(".")[2].replace("_", "-")
        known = specs.get(module, [])
        title = known[0].title if len(known) == 1 else page.replace("-", " ").capitalize()
        cards = [(spec.title, spec.card) for spec in known] or [(title, f"{page}.md")]
        links = " and ".join(f"[{name}](../methods/{card})" for name, card in cards)
        intro = f"Definition, cost and pitfalls are on the card: {links}.\n"
        yield f"api/{page}.md", _reference(title, intro, [_path(module, name) for name in names])
        index.append(f"| [{title}]({page}.md) | {', '.join(f'`{name}`' for name in names)} |")
    for module, names in _other_names().items():
        title = TITLES.get(module, module.rpartition(".")[2].replace("_", " ").capitalize())
        page = title.lower().replace(" ", "-")
        yield (
            f"api/{page}.md",
            _reference(title, "", [_path(f"ghostnoise.{module}", name) for name in names], members=True),
        )
        index.append(f"| [{title}]({page}.md) | {', '.join(f'`{name}`' for name in names)} |")
    yield "api/index.md", "\n".join(index) + "\n"


def _reference(title: str, intro: str, paths: list[str], members: bool = False) -> str:
    options = "    options:\n      members: null\n      filters: ['!^_']\n" if members else ""
    return f"# {title}\n\n{intro}\n" + "".join(f"::: {path}\n{options}\n" for path in paths)


def _other_names() -> dict[str, list[str]]:
    """Return the public names that are not those of methods by module, functions first."""
    import ghostnoise

    found: dict[str, list[str]] = {}
    for name, module in ghostnoise._DEFINED_IN.items():
        found.setdefault(module, []).append(name)
    for home in sorted(set(ghostnoise._MODULES) - {"functional", "meter"}):
        known, public = vars(importlib.import_module(f"ghostnoise.{home}")), ghostnoise.functional
        own = [name for name in known["__all__"] if getattr(public, name, None) is not known[name]]
        found.setdefault(home, []).extend(own)
    return {module: sorted(set(names), key=lambda name: (name[0].isupper(), name)) for module, names in found.items()}


def _path(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    return f"{value.__module__}.{value.__qualname__}"


def runtime_classes() -> dict[str, Any]:
    """Return the docstrings and the parameters of all layers by path, for `runtime_docstrings.py`."""
    from ghostnoise.methods import registry

    return {
        f"{each.__module__}.{each.__qualname__}": {
            "docstring": inspect.getdoc(each),
            "parameters": [_parameter(found) for found in inspect.signature(each).parameters.values()],
        }
        for each in registry.layers().values()
        if inspect.isclass(each)
    }


def _parameter(found: inspect.Parameter) -> tuple[str, str, str | None, str | None]:
    """Return a parameter's name, kind, annotation and default, the last two as text or None."""
    annotation = None
    if found.annotation is not found.empty:
        annotation = re.sub(r"\b(?:typing|torch\._C|torch)\.", "", inspect.formatannotation(found.annotation))
        annotation = annotation.replace("Union[float, Literal['1/N^2'], NoneType]", "float | Literal['1/N^2'] | None")
    return (
        found.name,
        found.kind.name.lower(),
        annotation,
        None if found.default is found.empty else repr(found.default),
    )
