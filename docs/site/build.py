"""Build or serve the documentation site.

    python docs/site/build.py [--serve]

The pages are the Markdown files of this repository, which can also be read where they are. This script copies them to
build/site-source, changes their links to those of the site, and adds a page for each linked source file, the notebooks
as pages, the API reference and the navigation. Zensical then builds build/site; `--strict` makes every broken link and
every missing anchor an error.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import posixpath
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "docs" / "site"
BUILD = ROOT / "build"
FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n.*?^ {0,3}\1[ \t]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = re.compile(r"<!-- (?:end generated|generated: [^\n]*?|methods: begin|methods: end) -->")
ASSETS = {".svg", ".png", ".pdf", ".csv", ".json", ".jsonl", ".ipynb"}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".cpp": "cpp", ".h": "cpp"}
# Pages outside docs/ that are part of the site, and their places on it.
OTHERS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
# Titles of the pages of the API reference for modules outside ghostnoise.methods.
TITLES = {
    "calibration": "Statistics for inference", "conversion": "Converting models",
    "engine.backends.select": "Choosing a backend", "meter": "Measuring noise",
}  # fmt: skip


class BrokenLink(Exception):
    """A link to something that does not exist."""


def pages() -> dict[str, str]:
    """Return the Markdown files and notebooks of the site: path in the repository, and path on the site."""
    found = {path: place for path, place in OTHERS.items() if path != "README.md"}
    for folder, prefix in (("docs", ""), ("results", "results/")):
        for path in sorted([*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.ipynb")]):
            inside = path.relative_to(ROOT / folder).as_posix()
            found[path.relative_to(ROOT).as_posix()] = prefix + _place(inside)
    return found


def _place(path: str) -> str:
    """Return the place of a page: README.md is the index of its folder."""
    return re.sub(r"(^|/)README\.md$", r"\1index.md", re.sub(r"\.ipynb$", ".md", path))


class Stage:
    """Copies the pages to a folder, with the links of the site."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.pages = pages()
        self.written: dict[str, bytes] = {}

    def run(self) -> None:
        """Write all files that have changed, and remove files that are no longer there."""
        for path, place in self.pages.items():
            text = _text(ROOT / path)
            self._write(place, self._converted(text, path, place))
        self._write("site.css", (HERE / "site.css").read_text(encoding="utf-8"))
        for place, text in api_pages():
            self._write(place, text)
        for path in [path for path in self.target.rglob("*") if path.is_file()]:
            if path.relative_to(self.target).as_posix() not in self.written:
                path.unlink()

    def _write(self, place: str, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        if self.written.get(place) == data:
            return
        self.written[place] = data
        path = self.target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)

    def _converted(self, text: str, path: str, place: str) -> str:
        pieces, last = [], 0
        for fence in FENCE.finditer(text):
            pieces += [self._relinked(text[last : fence.start()], path, place), _prompted(fence[0])]
            last = fence.end()
        return "".join([*pieces, self._relinked(text[last:], path, place)])

    def _relinked(self, text: str, path: str, place: str) -> str:
        def replaced(match: re.Match[str]) -> str:
            return f"]({self._link(match[1], path, place)})"

        # Python-Markdown knows fewer escapes than GitHub.
        text = GENERATED.sub("", text).replace("\\<", "&lt;").replace("\\~", "~")
        return LINK.sub(replaced, text)

    def _link(self, link: str, path: str, place: str) -> str:
        """Return a link of the page `path` as it is on the site, at `place`; stages what it links to."""
        if re.match(r"[a-z]+:|#", link):
            return link
        address, mark, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), address))
        there = self._asset(target) if target == path and path.endswith(".ipynb") else self._staged(target)
        if there is None:
            raise BrokenLink(f"{path}: {link} does not exist")
        return posixpath.relpath(there, posixpath.dirname(place) or ".") + mark + anchor

    def _staged(self, target: str) -> str | None:
        """Return the place of a file or folder of the repository on the site; None if there is no such file."""
        full = ROOT / target
        if full.is_dir():
            index = posixpath.join(target, "README.md")
            return self._staged(index) if (ROOT / index).exists() else self._listing(target)
        if target in self.pages:
            return self.pages[target]
        if target in OTHERS:
            return OTHERS[target]
        if not full.is_file():
            return None
        if full.suffix in ASSETS:
            return self._asset(target)
        place = f"source/{target}.md"
        language = LANGUAGES.get(full.suffix, "text")
        code = full.read_text(encoding="utf-8").rstrip()
        self._write(place, f"{_front(PurePosixPath(target).name)}# {target}\n\n`````{language}\n{code}\n`````\n")
        return place

    def _asset(self, target: str) -> str:
        """Copy a file as it is."""
        place = target.removeprefix("docs/")
        self._write(place, (ROOT / target).read_bytes())
        return place

    def _listing(self, folder: str) -> str:
        """Stage a page that lists the files of a folder without a README."""
        place = f"source/{folder}/index.md"
        names = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
        lines = [f"- [{name}]({posixpath.basename(self._staged(f'{folder}/{name}') or '')})\n" for name in names]
        self._write(place, f"{_front(folder)}# {folder}\n\n{''.join(lines)}")
        return place


def _front(title: str) -> str:
    """Return front matter for a page of source code, which the search does not show."""
    return f"---\ntitle: {json.dumps(title)}\nsearch:\n  exclude: true\n---\n\n"


def _prompted(fence: str) -> str:
    """Mark Python code with prompts as such, for its colours; remove them from code without output, to be copied."""
    if not re.match(r"\s*`+python\n\s*>>> ", fence):
        return fence
    first, *lines, last = fence.split("\n")
    code = [line for line in lines if line.strip()]
    if all(re.match(r"(?:>>>|\.\.\.)(?: |$)", line) for line in code):
        return "\n".join([first, *(line[4:] for line in code), last])
    return "\n".join([first.replace("python", "pycon"), *lines, last])


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = []
    for cell in json.loads(text)["cells"]:
        content = "".join(cell["source"])
        cells.append(content if cell["cell_type"] == "markdown" else f"```python\n{content}\n```")
    title, _, rest = "\n\n".join(cells).partition("\n")
    return f"{title}\n\n[Download this notebook]({path.name})\n{rest}\n"


# The API reference


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
        yield f"api/{page}.md", _reference(title, intro, [f"{module}.{name}" for name in names])
        index.append(f"| [{title}]({page}.md) | {', '.join(f'`{name}`' for name in names)} |")
    for module, names in _other_names().items():
        title = TITLES.get(module, module.rpartition(".")[2].replace("_", " ").capitalize())
        page = title.lower().replace(" ", "-")
        yield f"api/{page}.md", _reference(title, "", [_path(module, name) for name in names], members=True)
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
    for module in set(ghostnoise._MODULES) & set(found):
        found[module] += importlib.import_module(f"ghostnoise.{module}").__all__
    return {module: sorted(set(names), key=lambda name: (name[0].isupper(), name)) for module, names in found.items()}


def _path(module: str, name: str) -> str:
    value = getattr(importlib.import_module(f"ghostnoise.{module}"), name)
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


# The configuration


def navigation(stage: Stage) -> list[object]:
    """Return the navigation: the order of the tables in the index pages, then what they do not list."""
    guides = _listed(stage, "docs/guides/README.md")
    experiments = _listed(stage, "docs/guides/README.md", "Experiments")
    results = sorted(place for place in stage.written if place.startswith("results/") and place.endswith("/index.md"))
    results.remove("results/index.md")
    notebooks = sorted(place for place in stage.written if re.fullmatch(r"notebooks/.*\.md", place))
    api = ["api/index.md", *_places(stage.written["api/index.md"].decode(), "api/x.md")]
    return [
        {"Start here": ["index.md"]},
        {"Tutorials": [*_with_rest(stage, "tutorials", _listed(stage, "docs/tutorials/README.md")), *notebooks]},
        {"Guides": ["guides/index.md", *(each for each in guides if each not in experiments)]},
        {"Experiments": _with_rest(stage, "guides", experiments, guides)},
        {"Methods": _with_rest(stage, "methods", _listed(stage, "docs/methods/README.md"))},
        {"Results": ["evidence.md", "performance.md", "fidelity.md", {"Experiments": ["results/index.md", *results]}]},
        {"API reference": api},
        {"Development": ["how-it-is-built.md", "adding-a-method.md", "contributing.md", "changelog.md"]},
    ]


def _listed(stage: Stage, path: str, heading: str | None = None) -> list[str]:
    """Return the pages of its own folder that an index page links to, in order; those after a heading if given."""
    text = _text(ROOT / path)
    if heading is not None:
        text = text.split(f"## {heading}\n")[1]
    places = _places(text, stage.pages[path])
    return [place for place in places if posixpath.dirname(place) == posixpath.dirname(stage.pages[path])]


def _places(text: str, place: str) -> list[str]:
    links = (link.partition("#")[0] for link in LINK.findall(text))
    found = [posixpath.normpath(posixpath.join(posixpath.dirname(place), link)) for link in links if "://" not in link]
    return list(dict.fromkeys(each for each in found if each.endswith(".md")))


def _with_rest(stage: Stage, folder: str, listed: list[str], elsewhere: list[str] | None = None) -> list[str]:
    """Return the index of a folder if nothing of it is elsewhere, the listed pages, and then all others."""
    index = [f"{folder}/index.md"]
    known = {*listed, *(elsewhere or []), *index}
    others = sorted(place for place in stage.written if re.fullmatch(rf"{folder}/[^/]+\.md", place))
    return [*(index if elsewhere is None else []), *listed, *(place for place in others if place not in known)]


def configure(stage: Stage) -> Path:
    """Write the configuration of zensical, and return its path."""
    folder = stage.target.parent
    (folder / "classes.json").write_text(json.dumps(runtime_classes()), encoding="utf-8")
    head, mark, rest = (HERE / "zensical.toml").read_text(encoding="utf-8").partition("[project]\n")
    extension = {"file": str(folder / "classes.json")}
    added = [
        f"docs_dir = {json.dumps(stage.target.name)}",
        'site_dir = "site"',
        f"nav = {_toml(navigation(stage))}",
    ]
    handler = [
        "[project.plugins.mkdocstrings.handlers.python]", f"paths = [{json.dumps(str(ROOT / 'src'))}]",
        "[[project.plugins.mkdocstrings.handlers.python.options.extensions]]",
        f"{json.dumps(str(HERE / 'runtime_docstrings.py'))} = {_toml(extension)}",
    ]  # fmt: skip
    path = folder / "zensical.toml"
    path.write_text(f"{head}{mark}{chr(10).join(added)}\n{rest}\n{chr(10).join(handler)}\n", encoding="utf-8")
    return path


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def build(folder: Path = BUILD) -> int:
    """Build the site in `folder/site`, and return 0 if there is nothing to report."""
    stage = staged(folder)
    shutil.rmtree(folder / "site", ignore_errors=True)
    process = _zensical("build", "--clean", "--strict", config=configure(stage), stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT)  # fmt: skip
    printed = process.communicate()[0].decode()
    print(printed, end="")
    docstrings = [line for line in printed.splitlines() if line.startswith("griffe: ")]  # not errors for zensical
    return process.returncode or int(bool(docstrings))


def staged(folder: Path) -> Stage:
    """Stage all pages in `folder/site-source`."""
    target = folder / "site-source"
    target.mkdir(parents=True, exist_ok=True)
    stage = Stage(target)
    stage.run()
    return stage


def serve() -> int:
    """Serve the site, and copy pages again when they change."""
    server = _zensical("serve", config=configure(staged(BUILD)))
    try:
        while server.poll() is None:
            time.sleep(1)
            try:
                staged(BUILD)
            except (BrokenLink, OSError, ValueError) as error:
                print(f"{error}; correct it and save", file=sys.stderr)
    except KeyboardInterrupt:
        server.terminate()
    return server.wait()


def _zensical(*words: str, config: Path, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "zensical", *words, "--config-file", str(config)]
    return subprocess.Popen(command, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation site in build/site, or serve it.")
    parser.add_argument("--serve", action="store_true", help="serve it on this machine, and renew it on changes")
    options = parser.parse_args()
    try:
        sys.exit(serve() if options.serve else build())
    except BrokenLink as error:
        sys.exit(f"{error}; correct the link")
