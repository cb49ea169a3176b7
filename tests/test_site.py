"""The documentation site: it builds strictly, its links resolve, and it loads nothing from other hosts."""

import contextlib
import functools
import http.server
import json
import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import api_reference
import build_site
import diagram
import ghostnoise
import staging
from support.browser import browser

ROOT = Path(__file__).parents[1]
OTHER_HOST = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
# The script of the theme names them, for features that these pages do not have: diagrams, code that runs in the page,
# enlarged images and the numbers of a repository.
KNOWN_IN_SCRIPTS = {"unpkg.com", "cdn.jsdelivr.net", "api.github.com", "gitlab.com", "codeberg.org"}


class Page(HTMLParser):
    """The ids, the links, and the files that a page loads."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads, self.text = set(), [], [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href") is not None:
            self.links.append(found["href"])
        elif tag == "link" and "canonical" not in found.get("rel", ""):
            self.loads.append(found["href"])
        self.loads += [found[name] for name in ("src", "srcset", "data", "poster") if found.get(name)]
        self.loads += re.findall(r"url\\(([^)]*)\\)", found.get("style") or "")

    def handle_data(self, data):
        self.text += data


def resolve(site, page, link):
    """Return the file that a link of a page leads to."""
    path = unquote(urlsplit(link).path)
    target = (page.parent / path).resolve() if path else page.resolve()
    assert target.is_relative_to(site.resolve()), f"{page}: {link} leaves the site"
    return target / "index.html" if target.is_dir() else target


def test_the_site_builds_and_every_link_resolves(tmp_path, capfd):
    """If this fails, run `make site`: it reports the file and the line."""
    assert build_site.build(tmp_path) == 0, capfd.readouterr().out
    site = tmp_path / "site"
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 60
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in (each for each in page.links if not OTHER_HOST.match(each) and not each.startswith("mailto:")):
            target = resolve(site, path, link)
            assert target.is_file(), f"{path}: {link}"
            anchor = unquote(urlsplit(link).fragment)
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{path}: {link} has no such anchor"
        for load in page.loads:
            assert not OTHER_HOST.match(load), f"{path} loads {load}"
            assert load.startswith("data:") or resolve(site, path, load).is_file(), f"{path}: {load}"
    loads_nothing_else(site)
    is_searchable(site)
    assert {"default", "slate"} <= set(re.findall(r'data-md-color-scheme="(\w+)"', (site / "index.html").read_text()))
    api = Page(site / "api" / "ghost-noise" / "index.html").text
    for part in ("GhostNoiseBatchNorm2d", "num_features", "the number of channels, C.", "(B, C, H, W); the output has"):
        assert part in api


def loads_nothing_else(site):
    """Style sheets load nothing from other hosts, and scripts name only hosts that are known not to be used."""
    for path in site.rglob("*.css"):
        for address in re.findall(r"url\(([^)]*)\)|@import\s+([^;]*)", path.read_text()):
            assert not OTHER_HOST.match("".join(address).strip("\"'")), f"{path}: {address}"
    for path in site.rglob("*.js"):
        hosts = set(re.findall(r"https?://([\w.-]+)", path.read_text()))
        assert hosts <= KNOWN_IN_SCRIPTS | {"www.w3.org"}, f"{path}: {hosts}"
    for path in site.rglob("*.html"):
        text = path.read_text()
        for feature in ('class="mermaid"', "data-md-exec", "glightbox", "md-source__fact", "fonts.googleapis"):
            assert feature not in text, path


def is_searchable(site):
    index = json.loads((site / "search.json").read_text())
    places = [item["location"] for item in index["items"]]
    assert any(place.startswith("api/ghost-noise/#") for place in places)
    assert any(place.startswith("tutorials/cifar10/") for place in places)
    assert not any(place.startswith("source/") for place in places)


def flat(entries):
    for entry in entries:
        if isinstance(entry, dict):
            for each in entry.values():
                yield from flat(each)
        else:
            yield entry


def test_every_page_is_in_the_navigation_once(tmp_path):
    stage = build_site.staged(tmp_path)
    listed = list(flat(build_site.navigation(stage)))
    assert len(set(listed)) == len(listed)
    pages = {place for place in stage.written if place.endswith(".md") and not place.startswith("source/")}
    assert set(listed) == pages


def test_every_public_name_is_in_the_api_reference():
    found = dict(api_reference.api_pages())
    index = found.pop("api/index.md")
    homes = {ghostnoise: set(ghostnoise._MODULES), ghostnoise.functional: set(), ghostnoise.tables: set()}
    for home, modules in homes.items():
        for name in set(home.__all__) - modules:
            value = getattr(home, name)
            directive = re.compile(rf"^::: {re.escape(value.__module__)}\.{value.__qualname__}$", re.MULTILINE)
            assert f"`{name}`" in index
            assert sum(len(directive.findall(page)) for page in found.values()) == 1, name


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small repository."""
    files = {
        "docs/index.md": "# A\n\n[guide](guides/x.md#part) `[code](nowhere.md)` [`b`](../src/b.py)\n"
        "```\n[code](nowhere.md)\n```\n[out](https://example.org/) [x](#a)\n",
        "docs/guides/README.md": "# Guides\n\np \\< 0.001 `a \\< b`\n",
        "docs/guides/x.md": "# X\n\n## Part\n\n![p](../p.svg) [all](README.md) [e](../../examples) "
        "[r](../../results/)\n",
        "docs/p.svg": "<svg/>",
        "docs/n.ipynb": json.dumps({"cells": [
            {"cell_type": "markdown", "source": ["# N\n", "\n", "[x](guides/x.md)"]},
            {"cell_type": "code", "source": ["1 + 1"]},
        ]}),
        "examples/e.py": "print(1)\n",
        "results/README.md": "<!-- generated: table x -->\n# R\n<!-- end generated -->\n",
        "src/b.py": "b = 1\n",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(staging, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(staging, "OTHERS", {})
    monkeypatch.setattr(build_site, "api_pages", lambda: iter(()))
    return tmp_path / "repository"


def test_links_become_those_of_the_site(tree, tmp_path):
    written = build_site.staged(tmp_path / "out").written
    index, guide = written["index.md"].decode(), written["guides/x.md"].decode()
    assert "[guide](guides/x.md#part) `[code](nowhere.md)` [`b`](source/src/b.py.md)" in index
    assert "```\n[code](nowhere.md)\n```\n[out](https://example.org/) [x](#a)" in index
    assert "![p](../p.svg) [all](index.md) [e](../source/examples/index.md) [r](../results/index.md)" in guide
    assert "- [e.py](e.py.md)" in written["source/examples/index.md"].decode()
    assert "`````python\nb = 1\n`````" in written["source/src/b.py.md"].decode()
    assert "exclude: true" in written["source/src/b.py.md"].decode()
    assert written["guides/index.md"].decode() == "# Guides\n\np &lt; 0.001 `a \\< b`\n"
    assert written["results/index.md"].decode().strip() == "# R"
    notebook = written["n.md"].decode()
    assert notebook.startswith("# N\n\n[Download this notebook](n.ipynb)\n")
    assert notebook.endswith("[x](guides/x.md)\n\n```python\n1 + 1\n```\n")
    assert written["n.ipynb"] == (tree / "docs" / "n.ipynb").read_bytes()


def test_a_broken_link_is_reported_with_its_page(tree, tmp_path):
    (tree / "docs" / "guides" / "x.md").write_text("[x](../missing.md)")
    with pytest.raises(staging.BrokenLinkError, match=r"docs/guides/x.md: \.\./missing.md does not exist"):
        build_site.staged(tmp_path / "out")


def test_pages_that_were_removed_disappear(tree, tmp_path):
    build_site.staged(tmp_path / "out")
    (tree / "docs" / "index.md").write_text("# A\n")
    (tree / "docs" / "n.ipynb").unlink()
    build_site.staged(tmp_path / "out")
    assert not list((tmp_path / "out").rglob("n.*"))
    assert (tmp_path / "out" / "site-source" / "index.md").read_text() == "# A\n"


def test_code_with_prompts():
    assert staging._prompted("```python\n>>> 1\n1\n\n```") == "```pycon\n>>> 1\n1\n\n```"
    assert staging._prompted("```python\n>>> for x in y:\n...     x\n>>> z\n\n```") == (
        "```python\nfor x in y:\n    x\nz\n```"
    )
    assert staging._prompted("```python\nx = 1\n```") == "```python\nx = 1\n```"


def test_the_diagram_is_up_to_date_and_names_what_exists():
    assert (ROOT / "docs" / "walks.svg").read_text(encoding="utf-8") == diagram.svg(), "run python docs/site/diagram.py"
    for walk in diagram.WALKS:
        for box in walk.boxes:
            assert (ROOT / "src" / "ghostnoise" / box.path).exists(), box.path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("docs/index.md", "(performance.md)", "(performance.md#nothing)"),
        ("src/ghostnoise/methods/elementwise.py", "        std: the standard", "        nothing: the standard"),
    ],
)
def test_a_missing_anchor_and_a_wrong_docstring_are_errors(tmp_path, monkeypatch, capfd, path, old, new):
    """The build is as strict as promised."""
    original = Path.read_text

    def changed(self, *args, **kwargs):
        text = original(self, *args, **kwargs)
        return text.replace(old, new) if self == ROOT / path else text

    if path.startswith("docs"):
        assert old in (ROOT / path).read_text()
        monkeypatch.setattr(Path, "read_text", changed)
    else:
        classes = api_reference.runtime_classes()
        found = classes["ghostnoise.methods.elementwise.AdditiveGaussianNoise"]
        found["docstring"] = found["docstring"].replace("std: the", "nothing: the")
        monkeypatch.setattr(build_site, "runtime_classes", lambda: classes)
    assert build_site.build(tmp_path) != 0
    printed = capfd.readouterr().out
    assert "anchor does not exist" in printed or "'nothing' does not appear in the function signature" in printed


# The dialog of the search is in a shadow tree.
DIALOG = "const dialog = [...document.querySelectorAll('div')].find(each => each.shadowRoot)?.shadowRoot;"
FIELD = DIALOG + "const field = dialog?.querySelector('dialog[open] input');"
RESULTS = DIALOG + "return [...dialog.querySelectorAll('a[role=option]')].map(link => link.href)"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve files, and print nothing."""

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder):
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def wait(seconds, condition):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    assert found
    return found


@pytest.mark.slow
def test_in_a_browser(tmp_path):
    """Pages load nothing from other hosts, fit on a phone, follow the colour scheme, and can be searched."""
    assert build_site.build(tmp_path) == 0
    with served(tmp_path / "site") as address:
        for dark in (False, True):
            with browser(tmp_path / f"profile-{dark}", dark=dark) as driver:
                for place in ("", "methods/ghost-noise/", "api/ghost-noise/", "evidence/", "how-it-is-built/"):
                    driver.get(address + place)
                    loaded = "return performance.getEntriesByType('resource').map(entry => entry.name)"
                    assert all(name.startswith((address, "data:")) for name in driver.execute_script(loaded))
                    color = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
                    brightness = sum(map(int, re.findall(r"\d+", color)[:3]))
                    assert brightness < 200 if dark else brightness > 600
                    driver.execute_cdp_cmd(
                        "Emulation.setDeviceMetricsOverride",
                        {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True},
                    )
                    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390, place
                    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        with browser(tmp_path / "profile-search") as driver:
            driver.get(address)
            driver.find_element("css selector", ".md-search__button").click()
            wait(20, lambda: driver.execute_script(FIELD + "return field && !(field.focus())"))
            driver.switch_to.active_element.send_keys("EvalNorm")
            places = wait(20, lambda: driver.execute_script(RESULTS))
            assert places[0].startswith(f"{address}methods/eval-norm/")
            assert any(place.startswith(f"{address}api/eval-norm/") for place in places)


def test_formulas_are_mathml():
    """Every block of math on a page is converted as a whole: no command of LaTeX is left as text."""
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    blocks = [fence[0] for text in texts for fence in staging.FENCE.finditer(text) if fence[0].startswith("```math")]
    assert len(blocks) > 10
    for block in blocks:
        page = staging._shown(block)
        assert page.count("<math") == page.count("</math>") == page.count('<div class="formula">') == 1
        assert "\\" not in re.sub(r"<[^>]+>", "", page), block
