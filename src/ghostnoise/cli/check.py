"""`ghostnoise check`: compare operators and layers with float64 on this machine, and time them."""

import argparse
import sys
from pathlib import Path

from ghostnoise.cli.options import device, seconds, usable_device
from ghostnoise.lab.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option = parser.add_argument
    option("--device", type=device, default="auto", help="auto (the default: a GPU if there is one), cpu, cuda or mps")
    option("--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the report (default: out/)")
    option("--seconds", type=seconds, default=2.0, metavar="S", help="time to measure a row (default: 2)")
    option("--no-compile", action="store_true", help="leave out torch.compile, which takes minutes")
    option("--quick", action="store_true", help="use tiny shapes, to check that it works; the times are meaningless")


def run(options: argparse.Namespace) -> int:
    """Print the report, write it as Markdown and JSON, and return 1 if a comparison failed."""
    from ghostnoise.bench import check

    found = check.check(
        usable_device(options.device),
        options.seconds,
        not options.no_compile,
        options.quick,
        lambda line: print(line, file=sys.stderr),
    )
    try:
        saved = check.save(found, options.out)
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot be written ({error.strerror}); give another folder") from None
    print(check.markdown(found))
    print("saved:", " ".join(map(str, saved)), file=sys.stderr)
    return 1 if found.failures else 0
