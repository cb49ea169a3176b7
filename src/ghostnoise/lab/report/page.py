"""The report as one HTML file that loads nothing from anywhere."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from string import Template
from typing import Any

import ghostnoise
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import noise_page, sections
from ghostnoise.lab.report.aggregate import Findings
from ghostnoise.lab.report.claims import Judged
from ghostnoise.lab.report.curves import MEASURES, Picture, history, picture
from ghostnoise.lab.report.markup import json_in_html, section, text

ASSETS = resources.files("ghostnoise.lab.report") / "assets"


@dataclass(frozen=True)
class Made:
    """How a report came to be."""

    command: str
    when: datetime


def page(findings: Findings, judged: list[Judged], made: Made, *, tag: str = "") -> str:
    """The whole file; one with the `tag` of a state asks where it comes from for a newer one."""
    script, plotly = asset("noise.js") + asset("page.js"), plotly_script()
    name = findings.gathered.experiment.recipe.name
    return Template(asset("page.html")).substitute(
        policy=text(policy(script, plotly, live=bool(tag))),
        title=text(f"{name}: report"),
        style=asset("style.css"),
        heading=text(name),
        tag=text(tag),
        main=main(findings, judged, made),
        data=json_in_html(plots(findings)),
        plotly=plotly,
        script=script,
    )


def main(findings: Findings, judged: list[Judged], made: Made) -> str:
    """What changes when runs go on."""
    noise = noise_page.content(findings.noise)
    first = findings.gathered.experiment.report.form == "noise"
    return "".join(
        [
            sections.summary(findings, judged),
            noise if first else "",
            _figure(picture(findings)),
            sections.results(findings),
            _training(),
            "" if first else noise,
            sections.problems(findings),
            sections.runs(findings),
            sections.environment(findings),
            _origin(made),
        ]
    )


def plots(findings: Findings) -> dict[str, Any]:
    """What the interactive figures show."""
    return {
        "main": _picture(picture(findings)),
        "training": _histories(findings),
        "measures": _measures(findings),
        "noise": noise_page.plots(findings.noise, findings.gathered.experiment.report.law_size),
    }


def policy(*scripts: str, live: bool) -> str:
    """A policy that lets these scripts run, and nothing be loaded but, for a live page, news from its own server."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    own = "connect-src 'self'; img-src 'self' data: blob:" if live else "img-src data: blob:"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; {own}; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def plotly_script() -> str:
    """Plotly's own script, out of the installed package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly missing; pip install 'ghostnoise[lab]'") from None
    script = str(get_plotlyjs())
    return script.replace("</script", "<\\/script")


@cache
def asset(name: str) -> str:
    """A file of the page."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _picture(shown: Picture) -> dict[str, Any]:
    curves = [
        {
            "label": curve.label,
            "method": curve.spots[0].score.cell.method,
            "flat": curve.flat,
            "spots": [
                {
                    "x": spot.x,
                    "mean": spot.score.mean,
                    "std": spot.score.std,
                    "n": spot.score.n,
                    "seeds": list(spot.score.values.values()),
                    "paper": spot.paper,
                }
                for spot in curve.spots
            ],
        }
        for curve in shown.curves
    ]
    return {"form": shown.form, "x": shown.x, "y": shown.y, "log": shown.log, "curves": curves}


def _histories(findings: Findings) -> list[dict[str, Any]]:
    """A group for each cell; those that lead their method are shown first."""
    leading = {id(findings.best(row.method)) for row in findings.rows}
    scores = [*(row.score for row in findings.rows if row.score), *findings.tuning]
    groups: list[Mapping[str, Any]] = []
    for score in scores:
        pasts = [{"seed": run.point.seed, "status": run.status, **history(run)} for run in score.runs]
        pasts = [past for past in pasts if past["epoch"]]
        tuning = " (tuning)" if score.stage == "tune" else ""
        if pasts:
            shown = len(scores) <= 6 or id(score) in leading or score.chosen
            groups.append(
                {"label": score.cell.name + tuning, "method": score.cell.method, "shown": shown, "runs": pasts}
            )
    if groups and not any(group["shown"] for group in groups):
        groups = [{**group, "shown": at < 6} for at, group in enumerate(groups)]
    return [dict(group) for group in groups]


def _measures(findings: Findings) -> dict[str, str]:
    splits = {run.point.settings.data.evaluate for run in findings.gathered.runs}
    split = " or ".join(sorted(splits)) or "test"
    return {name: shown.format(split=split) for name, shown in MEASURES.items()}


def _figure(shown: Picture) -> str:
    words = "Lines are means, bands ± the standard deviation; dotted are methods without this axis."
    if shown.form == "bars":
        words = "A dot is a seed; below, their mean ± standard deviation; ◇ is the paper’s number."
    return section(
        "figure", shown.y.capitalize(), '<div class="plot" id="plot-main"></div>', f'<p class="files">{words}</p>'
    )


def _training() -> str:
    return section(
        "training",
        "Training curves",
        '<div class="controls"><label for="measure">Show</label> <select id="measure"></select> '
        '<button type="button" id="all">All</button> <button type="button" id="none">None</button></div>'
        '<fieldset class="series"><legend>Lines, one for each seed</legend>'
        '<div class="lines" id="series"></div></fieldset>'
        '<div class="plot" id="plot-training"></div>',
    )


def _origin(made: Made) -> str:
    when = made.when.strftime("%Y-%m-%d %H:%M %Z").strip()
    return section(
        "origin",
        "How this was made",
        f"<p>On {text(when)} with ghostnoise {text(ghostnoise.__version__)}:</p>"
        f'<pre tabindex="0"><code>{text(made.command)}</code></pre>'
        "<p>Differences are paired over common seeds; intervals and p-values are those of a paired t-test, and “Holm” "
        "corrects them for the number of this report’s comparisons.</p>",
    )
