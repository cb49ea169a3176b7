"""The numbers on the pages of this repository are those of the records and files in results/."""

import csv
import json
import re
import statistics
from pathlib import Path

from scipy import stats

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
    """The page of the benchmarks also has tables that are no results: what a step launches, and a predicted cost."""
    for path in FOLDER.rglob("*.md"):
        if path.parent.name == "bench":
            continue
        lines = list(blocks.tables_outside(path.read_text(encoding="utf-8"), path))
        assert not lines, f"{path}, lines {lines}: put the table into a generated block"


def test_every_folder_of_records_has_a_page_and_valid_records():
    for path in FOLDER.glob("*/records.jsonl"):
        assert records.load(path).recipe == path.parent.name
        assert path.with_name("README.md").exists()


def test_every_uncertainty_was_measured_of_a_published_run():
    for path in FOLDER.glob("uncertainty/*.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            run = records.load(FOLDER / row["recipe"] / "records.jsonl").runs[row["identity"]]
            assert str(run.seed) == row["seed"]


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


# Verdicts, computed again from the lines of the records with nothing of this library.


def lines_of(name):
    return [json.loads(line) for line in (FOLDER / name / "records.jsonl").read_text().splitlines()[1:]]


def accuracies(name, **norm):
    """The accuracies by seed of the runs whose normalization has these settings."""
    return {
        line["settings"]["seed"]: line["result"]["accuracy"]
        for line in lines_of(name)
        if all(line["settings"]["norm"].get(key) == value for key, value in norm.items())
    }


def evidence_row(test, experiment):
    page = (ROOT / "docs" / "evidence.md").read_text().splitlines()
    shown = test.replace("~", "≈").replace("_", "\\_")
    (row,) = [line for line in page if f"[{experiment}](" in line and f"): {shown} |" in line]
    return dict(zip(("stated", "n", "effect", "p", "verdict"), row.strip("| ").split(" | ")[-5:], strict=True))


def corrected(p_values):
    """Holm's correction by its definition: the largest of (m - j) p_j over the p-values that are not larger."""
    ordered = sorted(p_values.values())
    return {
        name: min(1.0, max((len(ordered) - j) * q for j, q in enumerate(ordered) if q <= p))
        for name, p in p_values.items()
    }


def same_p(shown, p):
    return shown == "< 0.001" if p < 0.001 else shown == f"{p:.2g}"


def verdict_of(values, p, tests, sign):
    interval = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / tests)
    if interval.low > -0.3 and interval.high < 0.3:
        return "equivalent"
    return "inconclusive" if p >= 0.05 else "supported" if sign * statistics.fmean(values) > 0 else "refuted"


def test_the_verdicts_on_table_1():
    name = "mnist1d-table1"
    methods = {
        "BN": {"method": "bn"}, "GBN-16": {"method": "gbn"}, "XBN-32": {"method": "xbn"}, "EN-16": {"method": "en"},
        "GNI-16": {"method": "gni", "normalizer": "batch"}, "AGNI-128": {"method": "agni"}, "BRN": {"method": "brn"},
        "dropout-0.1": {"method": "dropout"}, "XBN+GNI-16": {"method": "gni", "normalizer": "exclusive"},
    }  # fmt: skip
    values = {label: accuracies(name, **norm) for label, norm in methods.items()}
    assert all(set(each) == set(range(20)) for each in values.values())
    before = (
        "GBN-16 > BN", "XBN-32 > BN", "EN-16 > BN", "GNI-16 > BN", "GNI-16 > GBN-16", "XBN-32 > GBN-16",
        "EN-16 > GBN-16", "GNI-16 > AGNI-128", "GNI-16 > dropout-0.1", "GNI-16 > BRN", "XBN+GNI-16 > GNI-16",
    )  # fmt: skip
    found = {
        test: [values[test.split(" > ")[0]][seed] - values[test.split(" > ")[1]][seed] for seed in range(20)]
        for test in before
    }
    gains = [[values[label][seed] - values["BN"][seed] for seed in range(20)] for label in ("GNI-16", "GBN-16")]
    found["twice"] = [ours - 2 * theirs for ours, theirs in zip(*gains, strict=True)]
    p_values = corrected({test: stats.ttest_1samp(each, 0).pvalue for test, each in found.items()})
    in_evidence = [test for test in before if test not in ("XBN-32 > BN", "EN-16 > BN", "GNI-16 > BRN", before[-1])]
    for test in in_evidence:
        row = evidence_row(test, name)
        assert row["n"] == "20"
        assert row["effect"].startswith(f"{statistics.fmean(found[test]):+.2f} [")
        assert same_p(row["p"], p_values[test])
        assert row["verdict"] == verdict_of(found[test], p_values[test], len(found), 1)
    row = evidence_row("GNI-16 gains twice GBN-16 over BN", name)
    assert row["effect"].startswith(f"ratio {statistics.fmean(gains[0]) / statistics.fmean(gains[1]):.2f} [")
    assert same_p(row["p"], p_values["twice"])


def test_the_verdict_on_the_best_sizes_of_figure_3():
    """Sizes are chosen by seeds 0 to 4, and compared on seeds 5 to 9."""
    name, sizes = "mnist1d-fig3", (2, 4, 8, 16, 32, 64, 128, 256)
    part = {"GNI": {"components": "both"}, "GNI shift": {"components": "shift"}, "GNI scale": {"components": "scale"}}

    def chosen(label):
        norm = {"method": label.split()[0].lower(), **part.get(label, {})}
        cells = [accuracies(name, **norm, **({} if label == "BN" else {"ghost_size": size})) for size in sizes]
        best = max(cells, key=lambda cell: statistics.fmean(cell[seed] for seed in range(5)))
        return [best[seed] for seed in range(5, 10)]

    tests = (
        "GBN > BN", "GNI > BN", "GNI > GBN", "XBN > GBN", "EN > GBN", "GNI shift > BN", "GNI scale > BN",
        "GNI > GNI shift", "GNI > GNI scale",
    )  # fmt: skip
    found = {
        test: [ours - theirs for ours, theirs in zip(*map(chosen, test.split(" > ")), strict=True)] for test in tests
    }
    p_values = corrected({test: stats.ttest_1samp(each, 0).pvalue for test, each in found.items()})
    for test in tests:
        row = evidence_row(test, name)
        assert (row["stated"], row["n"]) == ("before", "5")
        assert row["effect"].startswith(f"{statistics.fmean(found[test]):+.2f} [")
        assert same_p(row["p"], p_values[test])
        assert row["verdict"] == verdict_of(found[test], p_values[test], len(tests), 1)


def test_the_verdicts_at_equal_noise():
    name, measured = "mnist1d-equal-noise", {}
    for line in lines_of(name):
        norm, layers = line["settings"]["norm"], line["noise"][-1]["layers"]
        column = layers[f"{norm['method']}_systematic"]
        label = f"{norm['method'].upper()}-{norm['ghost_size']}"
        measured.setdefault(label, {})[line["settings"]["seed"]] = 100 * statistics.fmean(column)
    for ours in ("GNI-24", "GNI-32"):
        values = [measured[ours][seed] - measured["GBN-16"][seed] for seed in range(10)]
        row = evidence_row(f"systematic gap {ours} < GBN-16", name)
        assert row["effect"].startswith(f"{statistics.fmean(values):+.2f} [")
        assert row["effect"].endswith("% of the output")
        assert (row["p"], row["verdict"]) == ("< 0.001", "supported")
        assert stats.ttest_1samp(values, 0).pvalue * 4 < 0.001  # the family has two claims on accuracy as well
