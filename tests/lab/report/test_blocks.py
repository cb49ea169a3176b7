"""Generated blocks: their contents are replaced, and nothing else of a file changes."""

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.blocks import END, blocks, regenerated, tables_outside

TEXT = f"""\
# Title

Text <!-- generated: value a -->old{END} text, and | no table.

<!-- generated: table b "c d" -->
| old |
| --- |
{END}

```
<!-- generated: table fenced -->
```

Last.
"""


def test_only_the_contents_of_blocks_change():
    seen = []

    def render(arguments):
        seen.append(arguments)
        return "new" if arguments.startswith("value") else "| x | y |\n| --- | --- |\n| 1 | 2 |"

    made = regenerated(TEXT, "page.md", render)
    assert seen == ["value a", 'table b "c d"']
    assert f"Text <!-- generated: value a -->new{END} text" in made
    assert f'"c d" -->\n| x | y |\n| --- | --- |\n| 1 | 2 |\n{END}\n\n```' in made
    assert made.endswith("<!-- generated: table fenced -->\n```\n\nLast.\n")
    assert regenerated(made, "page.md", render) == made
    assert blocks(made, "")[0].content(made) == "new"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n<!-- generated: table x -->\n", "page.md, line 2: the block 'table x' has no end"),
        (f"<!-- generated: a -->\n<!-- generated: b -->\n{END}\n", "line 1: the block 'a' has no end"),
        (f"a\n\n{END}\n", "line 3: .* without a block before it"),
    ],
)
def test_a_marker_without_its_counterpart_is_an_error(text, message):
    with pytest.raises(UserError, match=message):
        regenerated(text, "page.md", lambda arguments: "")


def test_an_error_names_the_file_and_the_line():
    def fail(arguments):
        raise UserError("no records")

    with pytest.raises(UserError, match=r"^page.md, line 3: no records$"):
        regenerated(TEXT, "page.md", fail)


def test_tables_outside_of_blocks_are_found():
    assert list(tables_outside(TEXT, "")) == []
    assert list(tables_outside(TEXT + "\n| a | b |\n|---|:-:|\n| 1 | 2 |\n", "")) == [16]
    assert list(tables_outside(TEXT + "\na | b\n--- | ---\n1 | 2\n", "")) == [16]
    assert list(tables_outside("```\n| a |\n| --- |\n```\n", "")) == []
