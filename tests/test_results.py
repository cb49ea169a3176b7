"""What the pages in results/ say is what their files have."""

import csv
import re
import statistics
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


def test_the_noise_of_a_resnet():
    rows = list(csv.DictReader((FOLDER / "resnet8-noise" / "noise.csv").read_text().splitlines()))
    page = re.sub(r"\s+", " ", (FOLDER / "resnet8-noise" / "README.md").read_text())

    def after(epoch):
        return [row for row in rows if row["when"] == f"epoch {epoch}"]

    def nearer(row):
        scale = min(float(row["ks_scale_conv"]), float(row["ks_scale_conv-exact"]))
        return max(float(row["ks_shift_conv"]), scale)

    for epoch in (1, 30):
        median = statistics.median(float(row["effective_size_shift"]) for row in after(epoch))
        assert f"{median:.0f} after epoch {epoch}" in page
        least, most = min(map(nearer, after(epoch))), max(map(nearer, after(epoch)))
        assert f"{least:.2f} to {most:.2f} after epoch {epoch}" in page
    assert sum(int(row["channels"]) for row in after(1)) == 336
    assert {row["ghost_size"] for row in rows} == {"32"}
