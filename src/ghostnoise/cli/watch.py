"""`ghostnoise watch`: serve the HTML page of an experiment on this machine while it runs."""

import argparse
from datetime import datetime
from typing import Any

from ghostnoise.cli import report
from ghostnoise.cli.options import port

PACKAGES = report.PACKAGES
PORT = 8765


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    report.add_experiment(parser)
    parser.add_argument("--port", type=port, default=PORT, help=f"TCP port; 0 chooses a free one (default: {PORT})")


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C and return the exit code."""
    experiment = report.load(options)
    from ghostnoise.lab.report.files import SERVED, ExperimentReport
    from ghostnoise.lab.report.page import Provenance
    from ghostnoise.lab.report.server import CachedFiles, Server

    folder, command = options.runs / experiment.recipe.name, report.command_line(options)

    def make() -> Any:
        provenance = Provenance(command, datetime.now().astimezone())
        return ExperimentReport(experiment, folder, provenance, lambda line: None).file

    with Server(options.port, CachedFiles(folder, SERVED, make)) as server:
        print(f"{server.url} shows the runs in {folder} and updates itself; press Ctrl-C to stop serving", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped serving; runs in progress are not affected")
    return 0
