"""The numbers on the pages of this repository are those of the records and files in results/."""

import csv
import re
import statistics
from pathlib import Path

from ghostnoise.cli import results
from ghostnoise.lab.report import blocks, published
from ghostnoise.lab.store import records

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results"


def test_every_generated_block_is_what_the_records_give():
    """If this fails, run `ghostnoise results` and commit what it writes."""
    publisher = published.Publisher(ROOT, results.load, results.bench_renderers(ROOT))
    assert [str(change.path) for change in publisher.changes()] == []


def test_every_table_in_results_is_generated():
    for path in FOLDER.rglob("*.md"):
        lines = list(blocks.tables_outside(path.read_text(encoding="utf-8"), path))
        assert not lines, f"{path}, lines {lines}: put the table into a generated block"


def test_every_folder_of_records_has_a_page_and_valid_records():
    for path in FOLDER.glob("*/records.jsonl"):
        assert records.load(path).recipe == path.parent.name
        assert path.with_name("README.md").exists()


def test_figure_6():
    rows = list(csv.DictReader((FOLDER / "fig6" / "noise.csv").read_text().splitlines()))
    page = (FOLDER / "fig6" / "README.md").read_text()
    for row in rows:  # the exact law is the nearer one
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
        return min(float(row["ks_scale_conv"]), float(row["ks_scale_conv-exact"]))

    for epoch in (1, 30):
        median = statistics.median(float(row["effective_size_shift"]) for row in after(epoch))
        assert f"{median:.0f} after epoch {epoch}" in page
        least, most = min(map(nearer, after(epoch))), max(map(nearer, after(epoch)))
        assert f"{least:.2f} to {most:.2f} after epoch {epoch}" in page
    assert max(float(row["ks_shift_conv"]) for row in rows) <= 0.01  # equation 15 fits
    assert sum(int(row["channels"]) for row in after(1)) == 336
    assert {row["ghost_size"] for row in rows} == {"32"}
