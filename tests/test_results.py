"""What the pages in results/ say is what their files have."""

import csv
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "results"


def test_figure_6():
    rows = list(csv.DictReader((FOLDER / "fig6" / "noise.csv").read_text().splitlines()))
    page = (FOLDER / "fig6" / "README.md").read_text()
    said = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d", line)]
    measured = [
        [
            row["epoch"],
            f"{row['layer']} ({row['channels']} channels)",
            *(f"{float(row[name]):.3f}" for name in ("ks_shift_fc", "ks_scale_fc", "ks_scale_fc-exact")),
            *(f"{float(row[f'effective_size_{part}']):.1f}" for part in ("shift", "scale")),
        ]
        for row in rows
    ]
    assert said == measured
    for row in rows:  # the laws' order, and that the exact one is near
        assert float(row["ks_scale_fc-exact"]) * 3 < float(row["ks_scale_fc"])
        assert float(row["ks_shift_fc"]) < 0.02
    assert {row["ghost_size"] for row in rows} == {"32"}
    for name in re.findall(r"\]\(([a-z0-9.]+)\)", page):
        assert (FOLDER / "fig6" / name).stat().st_size > 0
