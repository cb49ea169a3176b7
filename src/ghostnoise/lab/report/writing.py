"""The files of a report: page, tables and figures."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import figures, noise_runs, page, tables
from ghostnoise.lab.report.aggregate import Findings, aggregate
from ghostnoise.lab.report.claims import Judged, judge
from ghostnoise.lab.report.gather import gather
from ghostnoise.lab.report.page import Made

NAMES = ("table.md", "table.csv", "table.tex", "figure.png", "figure.pdf", "index.html")
NOISE = "noise.csv"  # of runs that have recorded any
SERVED = frozenset((*NAMES, NOISE, "data.json"))


class Report:
    """What the run folders show now."""

    def __init__(self, experiment: Experiment, folder: Path, made: Made, warn: Callable[[str], object]) -> None:
        self.made = made
        self.findings: Findings = aggregate(gather(experiment, folder, warn))
        self.findings.noise = noise_runs.measured(self.findings.gathered, warn)
        self.judged: list[Judged] = judge(self.findings)

    def file(self, name: str, tag: str = "") -> bytes:
        """One of `SERVED`; with a tag, as a server has it."""
        findings = self.findings
        match name:
            case "table.md":
                return tables.markdown(findings).encode()
            case "table.csv":
                return tables.comma_separated(findings).encode()
            case "table.tex":
                return tables.latex(findings).encode()
            case "figure.png" | "figure.pdf":
                return figures.draw(findings, name.removeprefix("figure."))
            case "noise.csv":
                return tables.noise(findings).encode()
            case "data.json":
                news = {"main": page.main(findings, self.judged, self.made), "plots": page.plots(findings)}
                return json.dumps(news, allow_nan=False).encode()
        return page.page(findings, self.judged, self.made, tag=tag).encode()

    def write(self, out: Path) -> Path:
        """Write all files into `out`, each wholly or not at all; returns the page's path."""
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name in (*NAMES, NOISE) if self.findings.noise else NAMES:
                _write(out / name, self.file(name))
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror or error}; give another folder with --out") from None
        return out / "index.html"


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink()
