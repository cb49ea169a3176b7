"""The report as one HTML file that loads nothing over the network."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from string import Template

import ghostnoise
from ghostnoise.lab.report import charts, measures, noise_tables, page_figures, page_tables
from ghostnoise.lab.report.claims import Claim, Verdict
from ghostnoise.lab.report.markup import items, json_in_html, label, section, text
from ghostnoise.lab.report.noise import NoiseRun
from ghostnoise.lab.report.notes import claim_reason, notes
from ghostnoise.lab.report.statistics import Findings
from ghostnoise.lab.report.tables import (
    counted,
    numerics_notice,
)

ASSETS = resources.files("ghostnoise.lab.report") / "assets"
SCRIPTS = ("plot.js", "charts.js", "noise.js", "page.js")
VERDICT_CLASSES: dict[Verdict, str] = {
    "supported": "good", "equivalent": "fair", "refuted": "bad", "inconclusive": "open",
}  # fmt: skip
ENVIRONMENT = (
    "ghostnoise", "commit", "numerics", "python", "torch", "numpy", "system", "machine", "device", "device_name",
    "threads", "processes", "backend", "malloc",
)  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """The command that made a report, and when it was made."""

    command: str
    when: datetime


def page(findings: Findings, noise: Sequence[NoiseRun], provenance: Provenance, *, tag: str = "") -> str:
    """Return the whole file; a page with a `tag`, which names a state of the runs, asks its server for newer ones."""
    name = findings.collected.experiment.recipe.name
    return Template(asset("page.html")).substitute(
        policy=text(policy(script(), live=bool(tag))),
        title=text(f"{name}: report"),
        style=asset("style.css"),
        heading=text(name),
        tag=text(tag),
        main=main(findings, noise, provenance),
        data=json_in_html(page_figures.plots(findings, noise)),
        script=script(),
    )


def main(findings: Findings, noise: Sequence[NoiseRun], provenance: Provenance) -> str:
    """Return the part of the page that changes while runs continue."""
    noise_section = noise_tables.section(noise)
    noise_first = findings.collected.experiment.report.form == "noise"
    return "".join(
        [
            _summary(findings, noise),
            noise_section if noise_first else "",
            _figure(findings),
            page_tables.results(findings),
            _comparisons(findings),
            _training(),
            "" if noise_first else noise_section,
            page_tables.problems(findings),
            page_tables.runs(findings),
            _environment(findings),
            _origin(provenance),
        ]
    )


def policy(script: str, *, live: bool) -> str:
    """Return a content security policy that runs only this script; a live page may also ask its own server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = "connect-src 'self'; img-src 'self' data:" if live else "img-src data:"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; {own}; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def script() -> str:
    """Return the script of the page."""
    return "".join(map(asset, SCRIPTS))


@cache
def served_policy() -> str:
    """Return the content security policy of the page for an HTTP header, which can also forbid frames."""
    return f"{policy(script(), live=True)}; frame-ancestors 'none'"


@cache
def asset(name: str) -> str:
    """Read a file of the folder `assets`."""
    return (ASSETS / name).read_text(encoding="utf-8")


# Sections, in their order


def _summary(findings: Findings, noise: Sequence[NoiseRun]) -> str:
    """Return the claims, their verdicts, and what is known about the runs."""
    claim = findings.collected.experiment.recipe.claim
    notice = numerics_notice(findings)
    cards = "".join(_card(findings, each) for each in findings.claims)
    none = "<p>The recipe names no comparison, so there is no verdict; see the table for the results.</p>"
    return section(
        "summary", "Summary",
        f'<p class="lead">The recipe’s claim: {text(claim or "none given")}</p>',
        f'<p class="warning">{text(notice)}</p>' if notice else "",
        f'<ul class="cards">{cards}</ul>' if cards else none,
        items(note for note in notes(findings, noise) if note != notice),
    )  # fmt: skip


def _card(findings: Findings, claim: Claim) -> str:
    reason = claim_reason(findings, claim)
    return (
        f'<li class="card"><p class="claim">{text(claim.text)} '
        f"{label(claim.verdict.capitalize(), VERDICT_CLASSES[claim.verdict])}</p>"
        f"<p>{text(reason[:1].upper() + reason[1:])}</p></li>"
    )


def _figure(findings: Findings) -> str:
    views = charts.views(findings)
    choice = '<div class="controls"><label for="view">Show</label> <select id="view"></select></div>'
    return section(
        "figure", views[0].measure[:1].upper() + views[0].measure[1:],
        choice if len(views) > 1 else "",
        '<div class="plot" id="plot-main"></div>',
        '<p class="files" id="main-note"></p>',
    )  # fmt: skip


def _comparisons(findings: Findings) -> str:
    """Return the figures of the accuracy against the cost, and of the train-test gap."""
    parts = []
    if page_figures.cost(findings):
        words = (
            f"Training time per image of the median run, without evaluations, relative to {findings.baseline}; "
            "horizontal lines reach from the fastest to the slowest run, vertical ones are 95 % intervals of the mean."
        )
        parts.append(_part("cost", "Accuracy against cost", words, measures.cost_notes(findings)))
    gap = charts.gaps(findings)
    if gap.points():
        words = (
            "Accuracy in the last training epoch, in training mode with noise and augmentation, minus the accuracy of "
            f"the results. {page_figures.note(gap)}"
        )
        parts.append(_part("gap", "Train–test gap", words))
    return (
        section("comparisons", "Cost and generalization", f'<div class="pair">{"".join(parts)}</div>') if parts else ""
    )


def _part(name: str, heading: str, words: str, warnings: Sequence[str] = ()) -> str:
    warned = f'<p class="files warning">{text(" ".join(warnings))}</p>' if warnings else ""
    return (
        f'<div><h3>{text(heading)}</h3><div class="plot" id="plot-{name}"></div>{warned}'
        f'<p class="files">{text(words)}</p></div>'
    )


def _training() -> str:
    return section(
        "training",
        "Training curves",
        '<div class="controls"><label for="measure">Show</label> <select id="measure"></select> '
        '<label><input type="checkbox" id="seeds"> seeds</label> '
        '<label><input type="checkbox" id="whole"> whole range</label> '
        '<button type="button" id="all">All</button> <button type="button" id="none">None</button></div>'
        '<fieldset class="series"><legend>Cells</legend><div class="lines" id="series"></div></fieldset>'
        '<div class="plot" id="plot-training"></div>'
        '<p class="files">Thick lines are means over the runs that reached the epoch; bands are 95 % intervals of the '
        "mean, drawn for three runs and more; faint lines are seeds. The axis shows the values after the first 15 % "
        "of the training unless “whole range” is selected. Drag over the figure to zoom, and double-click to reset "
        "it.</p>",
    )


def _environment(findings: Findings) -> str:
    """Return the environment metadata of the runs, and warn where it differs among them."""
    known: dict[str, dict[str, int]] = {}
    for run in findings.collected.runs:
        own = {**run.environment, "numerics": run.numerics.number} if run.environment else {}
        for key in ENVIRONMENT:
            if key in own:
                values, value = known.setdefault(key, {}), _shortened(key, str(own[key]))
                values[value] = values.get(value, 0) + 1
    expected = set() if findings.collected.mixed else {"numerics"}  # methods may have different current numbers
    differing = [key for key, values in known.items() if len(values) > 1 and key not in expected]
    warning = f"The runs differ in {', '.join(differing)}: compare their numbers with caution." if differing else ""
    entries = "".join(
        f"<div{' class=differs' if key in differing else ''}><dt>{text(key.replace('_', ' '))}</dt><dd>"
        + "<br>".join(
            text(value if len(values) == 1 else f"{value} ({counted(n, 'run')})") for value, n in values.items()
        )
        + "</dd></div>"
        for key, values in known.items()
    )
    content = f"<dl>{entries}</dl>" if entries else "<p>No run has recorded its environment.</p>"
    return section("environment", "Environment", f'<p class="warning">{text(warning)}</p>' if warning else "", content)


def _shortened(key: str, value: str) -> str:
    """Shorten a commit to its first digits, and keep the "+" of a modified checkout."""
    return value[:10] + ("+" if value.endswith("+") else "") if key == "commit" and len(value) > 10 else value


def _origin(provenance: Provenance) -> str:
    when = provenance.when.strftime("%Y-%m-%d %H:%M %Z").strip()
    return section(
        "origin",
        "How this report was made",
        f"<p>On {text(when)} with ghostnoise {text(ghostnoise.__version__)}:</p>"
        f'<pre tabindex="0"><code>{text(provenance.command)}</code></pre>'
        "<p>Differences are paired over common seeds of runs with equal numerics; intervals and p-values are those of "
        "a paired t-test, and “Holm” corrects the p-values of the claims for their number. Other differences are no "
        "tests.</p>",
    )
