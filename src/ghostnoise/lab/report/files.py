"""The files of a report: page, tables and figures."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import figures, noise_figures, noise_tables, page, page_figures, paper, tables
from ghostnoise.lab.report.claims import judge
from ghostnoise.lab.report.collect import collect
from ghostnoise.lab.report.noise import noise_runs
from ghostnoise.lab.report.notes import claim_line, notes
from ghostnoise.lab.report.page import Provenance
from ghostnoise.lab.report.statistics import Findings, aggregate
from ghostnoise.lab.run import Run
from ghostnoise.lab.store import atomic

NAMES = ("table.md", "table.csv", "table.tex", "figure.png", "figure.pdf", "index.html")
NOISE = "noise.csv"  # only if a run has recorded noise
SERVED = frozenset((*NAMES, NOISE, "data.json"))


class ExperimentReport:
    """A report of the run folders as they are now.

    Args:
        experiment: The experiment that defines the runs.
        folder: The folder that contains the run folders, `runs/<recipe>`.
        provenance: The command and time to print on the page.
        warn: Called with a line for every damaged file.
        found: Runs that were read from records; the run folders if None.
    """

    def __init__(
        self, experiment: Experiment, folder: Path, provenance: Provenance, warn: Callable[[str], object],
        found: Mapping[str, Run] | None = None,
    ) -> None:  # fmt: skip
        self.provenance = provenance
        self.findings = judge(aggregate(collect(experiment, folder, warn, found)))
        self.noise = noise_runs(self.findings.collected, warn)

    def file(self, name: str, tag: str = "") -> bytes:
        """Return the contents of one of `SERVED`; the page of a server has the `tag` of the runs' state."""
        findings = self.findings
        match name:
            case "table.md":
                return tables.markdown(findings).encode()
            case "table.csv":
                return tables.comma_separated(findings).encode()
            case "table.tex":
                return tables.latex(findings).encode()
            case "figure.png" | "figure.pdf":
                return self._figure(name.removeprefix("figure."))
            case "noise.csv":
                return noise_tables.comma_separated(self.noise).encode()
            case "data.json":
                main = page.main(findings, self.noise, self.provenance)
                plots = page_figures.plots(findings, self.noise)
                return json.dumps({"main": main, "plots": plots}, allow_nan=False).encode()
        return page.page(findings, self.noise, self.provenance, tag=tag).encode()

    def write(self, out: Path) -> Path:
        """Write all files into `out`, each atomically, and return the path of the page."""
        _write(out, {name: self.file(name) for name in ((*NAMES, NOISE) if self.noise else NAMES)})
        if not self.noise:
            (out / NOISE).unlink(missing_ok=True)  # of an earlier report, of other runs
        return out / "index.html"

    def write_paper(self, out: Path, others: Sequence[Findings]) -> list[Path]:
        """Write the figure and the table as the paper has them, also of other experiments; return their paths."""
        found = [self.findings, *others]
        contents = {f"paper.{kind}": paper.draw(found, kind) for kind in ("png", "pdf")}
        contents["paper.md"] = paper.table(found).encode()
        _write(out, contents)
        return [out / name for name in contents]

    def table(self) -> Table:
        """Return the table for a terminal."""
        return tables.terminal(self.findings)

    def lines(self) -> list[str]:
        """Return the verdicts and notes to print below the table."""
        verdicts = [claim_line(self.findings, claim) for claim in self.findings.claims]
        return [*verdicts, *notes(self.findings, self.noise)]

    def _figure(self, kind: str) -> bytes:
        settings = self.findings.collected.experiment.report
        if settings.form == "noise" and self.noise:
            return noise_figures.draw_run(self.noise[0], settings.law_size, kind)
        return figures.draw(self.findings, kind)


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        atomic.remove_abandoned_parts(out)
        for name, content in contents.items():
            atomic.write(out / name, content)
    except (OSError, UserError) as error:  # the remedy of `atomic` is for run folders
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = getattr(cause, "strerror", None) or cause
        raise UserError(f"cannot write {out}: {reason}; give another folder with --out") from None
