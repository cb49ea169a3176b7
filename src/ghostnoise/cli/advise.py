"""`ghostnoise advise`: report how strong the noise in a network is, and suggest a ghost size."""

import argparse

from ghostnoise.cli import console, meter
from ghostnoise.lab.errors import UserError

PACKAGES = meter.PACKAGES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    meter.add_target(parser)


def run(options: argparse.Namespace) -> int:
    """Measure the noise, print the advice and return the exit code."""
    from ghostnoise.lab import measure
    from ghostnoise.meter import advise

    terminal = console.output()
    reading = meter.measured(measure.find(meter.request(options)), options, terminal)
    try:
        advice = advise(reading)
    except ValueError as error:
        raise UserError(str(error)) from None
    inside = False
    for line in str(advice).splitlines():
        if (line in advice.code) != inside:  # a blank line before and after the code
            terminal.print()
            inside = not inside
        # Code must be possible to copy.
        terminal.print(line, no_wrap=inside, overflow="ignore" if inside else "fold", crop=not inside)
    return 0
