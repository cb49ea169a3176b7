"""Blocks of Markdown files that are generated from records.

    <!-- generated: KIND ARGUMENTS -->
    replaced by what the arguments render to
    <!-- end generated -->

A block may also lie within a line, such as a cell of a table. Markers in fenced code are left alone.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ghostnoise.lab.errors import UserError

BEGIN = re.compile(r"<!-- generated: ([^\n]*?) -->")
END = "<!-- end generated -->"
FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n.*?^ {0,3}\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block: the arguments in its marker, and where its content starts and ends in the file."""

    arguments: str
    start: int
    end: int
    line: int

    def content(self, text: str) -> str:
        """Return the content, without the line breaks around it."""
        return text[self.start : self.end].strip("\n")


def blocks(text: str, path: object) -> list[Block]:
    """Return the blocks of a file; raises a UserError if a marker has no counterpart."""
    fences = [match.span() for match in FENCE.finditer(text)]

    def fenced(place: int) -> bool:
        return any(start <= place < end for start, end in fences)

    begins = [match for match in BEGIN.finditer(text) if not fenced(match.start())]
    ends = [match.start() for match in re.finditer(END, text) if not fenced(match.start())]
    found = []
    for at, begin in enumerate(begins):
        following = begins[at + 1].start() if at + 1 < len(begins) else len(text)
        line = text.count("\n", 0, begin.start()) + 1
        closing = [end for end in ends if begin.end() <= end < following]
        if not closing:
            raise UserError(f"{path}, line {line}: the block {begin[1]!r} has no end; add {END} after it")
        found.append(Block(begin[1], begin.end(), closing[0], line))
        ends.remove(closing[0])
    if ends:
        line = text.count("\n", 0, ends[0]) + 1
        raise UserError(f"{path}, line {line}: {END} without a block before it; remove it")
    return found


def regenerated(text: str, path: object, render: Callable[[str], str]) -> str:
    """Return a file with the contents of all blocks rendered from their arguments."""
    pieces, last = [], 0
    for block in blocks(text, path):
        try:
            content = render(block.arguments)
        except UserError as error:
            raise UserError(f"{path}, line {block.line}: {error}") from None
        inline = "\n" not in text[block.start : block.end] and "\n" not in content
        pieces += [text[last : block.start], content if inline else f"\n{content}\n"]
        last = block.end
    return "".join([*pieces, text[last:]])


def tables_outside(text: str, path: object) -> Iterator[int]:
    """Yield the lines at which a table starts that is not generated; tables with generated cells are."""
    inside = [match.span() for match in FENCE.finditer(text)]
    inside += [(block.start, block.end) for block in blocks(text, path)]
    for match in re.finditer(r"^[^\n]*\|[^\n]*\n\|?[ :|-]*-[ :|-]*\|[ :|-]*$", text, re.MULTILINE):
        if not any(start <= match.start() < end for start, end in inside):
            yield text.count("\n", 0, match.start()) + 1
