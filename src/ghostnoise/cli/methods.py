"""`ghostnoise methods`: list the methods of the registry with their options, or write their table to a document."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from ghostnoise.methods.registry import MethodSpec

BEGIN, END = "<!-- methods: begin -->\n", "<!-- methods: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="replace the table of methods in this Markdown file, between its markers",
    )


def run(options: argparse.Namespace) -> int:
    """Print the methods, or write their table, and return the exit code."""
    from ghostnoise.methods import registry

    specs = registry.specs().values()
    if options.write is None:
        print("\n\n".join(described(spec) for spec in specs))
        return 0
    text = options.write.read_text()
    if BEGIN not in text or END not in text:
        raise UserError(f"{options.write}: must contain the markers {BEGIN.strip()} and {END}; add them")
    before, _, rest = text.partition(BEGIN)
    options.write.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
    return 0


def described(spec: "MethodSpec") -> str:
    """Describe a method in a few lines of text."""
    names = ", ".join([spec.name, *spec.shorthands])
    given = [each for each in ("ghost_size",) if spec.ghost_size != "none"]
    given += [each.name for each in spec.options]
    lines = [f"{names}: {spec.title} ({spec.label})", f"    {spec.equation}"]
    layers = [each.__name__ for each in (*(spec.norms or ()), spec.noise) if each is not None]
    return "\n".join([*lines, f"    layers: {', '.join(layers)}", f"    options: {', '.join(given) or 'none'}"])


def table() -> str:
    """Return the table of methods in Markdown, for docs/methods/README.md."""
    from ghostnoise.methods import registry

    rows = ["| name | method | definition | ghost size | inference |", "| --- | --- | --- | --- | --- |"]
    for spec in registry.specs().values():
        inference = "as batch norm" if spec.norm is not None else "returns its input"
        inference = "depends on the sample" if spec.changes_inference else inference
        link = f"[{spec.title}]({spec.card})"
        rows.append(f"| `{spec.name}` | {link} | {spec.equation} | {spec.ghost_size} | {inference} |")
    return "\n".join(rows) + "\n"
