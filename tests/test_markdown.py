"""The Markdown files as GitHub shows them, and the code of the README as a reader pastes it."""

import html
import re
import subprocess
import sys
from pathlib import Path

import cmarkgfm
import pytest
from cmarkgfm.cmark import Options

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(ROOT)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")]
)


def shown(text: str) -> str:
    """The text that GitHub shows, apart from code."""
    page = cmarkgfm.github_flavored_markdown_to_html(text, Options.CMARK_OPT_UNSAFE)
    page = re.sub(r"<!--.*?-->|<(pre|code)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_markup_is_shown_as_text(path):
    found = re.search(r"[^\n]*(\]\(|\\\[|\\<|^\s*\|.*\|\s*$)[^\n]*", shown((ROOT / path).read_text()), re.MULTILINE)
    assert found is None, f"{path} shows {found[0].strip()[:200]!r}; begin the line with a word, not with a comment"


def test_markup_that_follows_a_comment_is_found():
    """A list item that begins with a comment is HTML, in which links and escapes are not replaced."""
    assert "](" in shown("- <!-- generated -->BN in [x](x.md): \\[1, 2\\]")
    assert "](" not in shown("- In [x](x.md): `a](b)` <!-- generated -->\\[1, 2\\]<!-- end -->")


def test_the_readme_is_short():
    assert len(shown((ROOT / "README.md").read_text()).split()) <= 900


@pytest.mark.parametrize("name", ["performance", "fidelity", "methods/ghost-noise", "index"])
def test_pages_for_readers_are_short(name):
    assert len(shown((ROOT / f"docs/{name}.md").read_text()).split()) <= 1500


def test_the_rule_of_the_readme_is_that_of_the_guide():
    """One rule when to use ghost noise, and with which ghost size, in the same words."""
    rule = (
        "use GNI if your network fits its training data and loses on test data. Start with `ghost_size=32`, and try "
        "half and double.",
        "o not use it if the network does not fit its training data",
        "if batches have fewer than about 16 samples",
    )
    for path in ("README.md", "docs/guides/choosing.md"):
        text = " ".join((ROOT / path).read_text().split())
        assert [part for part in rule if part not in text] == []


def test_the_code_of_the_readme_runs_as_it_is_pasted(tmp_path):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    assert ">>>" not in text
    code = "\n".join([*blocks, "assert type(model[1]) is nn.BatchNorm2d", "assert y.shape == x.shape"])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
