"""`ghostnoise doctor`: print versions, the CPU, and what runs the operators."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    from ghostnoise import doctor

    print(doctor.report())
    return 0
