"""Build or serve the documentation site.

    python docs/site/build_site.py [--serve]

The pages are the Markdown files of this repository, which can also be read where they are. This script copies them to
build/site-source, changes their links to those of the site, and adds a page for each linked source file, the notebooks
as pages, the API reference and the navigation. Zensical then builds build/site; `--strict` makes every broken link and
every missing anchor an error.
"""

import argparse
import json
import posixpath
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from api_reference import api_pages, runtime_classes
from staging import LINK, ROOT, BrokenLinkError, Stage, page_text

HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build"
# Pages at the top of the site, by section; those that are not listed here are guides.
RESULTS = ("evidence.md", "performance.md", "fidelity.md", "other-papers.md", "released-settings.md")
DEVELOPMENT = ("how-it-is-built.md", "adding-a-method.md", "contributing.md", "changelog.md")


def navigation(stage: Stage) -> list[object]:
    """Return the navigation: the order of the tables in the index pages, then what they do not list."""
    guides = _listed(stage, "docs/guides/README.md")
    experiments = _listed(stage, "docs/guides/README.md", "Experiments")
    results = sorted(place for place in stage.written if place.startswith("results/") and place.endswith("/index.md"))
    results.remove("results/index.md")
    notebooks = sorted(place for place in stage.written if re.fullmatch(r"notebooks/.*\.md", place))
    others = sorted(
        place for place in stage.written if re.fullmatch(r"[^/]+\.md", place)
        and place not in ("index.md", *RESULTS, *DEVELOPMENT)
    )  # fmt: skip
    api = ["api/index.md", *_places(stage.written["api/index.md"].decode(), "api/x.md")]
    return [
        {"Start here": ["index.md"]},
        {"Tutorials": [*_with_rest(stage, "tutorials", _listed(stage, "docs/tutorials/README.md")), *notebooks]},
        {"Guides": ["guides/index.md", *(each for each in guides if each not in experiments), *others]},
        {"Experiments": _with_rest(stage, "guides", experiments, guides)},
        {"Methods": _with_rest(stage, "methods", _listed(stage, "docs/methods/README.md"))},
        {"Results": [*RESULTS, {"Experiments": ["results/index.md", *results]}]},
        {"API reference": api},
        {"Development": list(DEVELOPMENT)},
    ]


def _listed(stage: Stage, path: str, heading: str | None = None) -> list[str]:
    """Return the pages of its own folder that an index page links to, in order; those after a heading if given."""
    text = page_text(ROOT / path)
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
    stage.run([("site.css", (HERE / "site.css").read_text(encoding="utf-8")), *api_pages()])
    return stage


def serve() -> int:
    """Serve the site, and copy pages again when they change."""
    server = _zensical("serve", config=configure(staged(BUILD)))
    try:
        while server.poll() is None:
            time.sleep(1)
            try:
                staged(BUILD)
            except (BrokenLinkError, OSError, ValueError) as error:
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
    except BrokenLinkError as error:
        sys.exit(f"{error}; correct the link")
