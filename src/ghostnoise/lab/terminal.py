"""The consoles of the command line: text is printed literally, whatever the names of runs and settings contain."""

from typing import IO, Any

from rich.console import Console
from rich.text import Text

from ghostnoise.text import printable


class LiteralConsole(Console):
    """A console without markup and highlighting, which escapes control characters other than line breaks."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(stderr=stderr, file=file, width=width, markup=False, highlight=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text, of a line or of a cell of a table, as it is shown."""
        shown = "\n".join(printable(line) for line in text.replace("\t", "    ").split("\n"))
        return super().render_str(shown, **options | {"markup": False, "emoji": False})
