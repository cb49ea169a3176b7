"""Pages of the site: the Markdown files and notebooks of this repository, with the links of the site."""

import json
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert as mathml

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n.*?^ {0,3}\1[ \t]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = re.compile(r"<!-- (?:end generated|generated: [^\n]*?|methods: begin|methods: end) -->")
ASSETS = {".svg", ".png", ".pdf", ".csv", ".json", ".jsonl", ".ipynb"}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".cpp": "cpp", ".h": "cpp"}
# Pages outside docs/ that are part of the site, and their places on it.
OTHERS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}


class BrokenLinkError(Exception):
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

    def run(self, others: Iterable[tuple[str, str]]) -> None:
        """Write all pages and the `others`, if they have changed, and remove files that are no longer there."""
        for path, place in self.pages.items():
            self._write(place, self._converted(page_text(ROOT / path), path, place))
        for place, text in others:
            self._write(place, text)
        for file in [file for file in self.target.rglob("*") if file.is_file()]:
            if file.relative_to(self.target).as_posix() not in self.written:
                file.unlink()

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
            pieces += [self._relinked(text[last : fence.start()], path, place), _shown(fence[0])]
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
            raise BrokenLinkError(f"{path}: {link} does not exist")
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


def _shown(fence: str) -> str:
    """Return a block of code as the site shows it: formulas as MathML, which browsers draw without a script."""
    formula = re.fullmatch(r"```math\n(.*)\n```", fence, re.DOTALL)
    return f'<div class="formula">{mathml(formula[1], display="block")}</div>' if formula else _prompted(fence)


def _prompted(fence: str) -> str:
    """Mark Python code with prompts as such, for its colours; remove them from code without output, to be copied."""
    if not re.match(r"\s*`+python\n\s*>>> ", fence):
        return fence
    first, *lines, last = fence.split("\n")
    code = [line for line in lines if line.strip()]
    if all(re.match(r"(?:>>>|\.\.\.)(?: |$)", line) for line in code):
        return "\n".join([first, *(line[4:] for line in code), last])
    return "\n".join([first.replace("python", "pycon"), *lines, last])


def page_text(path: Path) -> str:
    """Return the Markdown of a page; a notebook becomes its text and code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = []
    for cell in json.loads(text)["cells"]:
        content = "".join(cell["source"])
        cells.append(content if cell["cell_type"] == "markdown" else f"```python\n{content}\n```")
    title, _, rest = "\n\n".join(cells).partition("\n")
    return f"{title}\n\n[Download this notebook]({path.name})\n{rest}\n"
