"""The table and the claims about `ghostnoise uncertainty`, from files that are written here."""

import csv

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import uncertainty

KINDS = {
    ("GNI-16", "deterministic"): (3.0, 80.0), ("GNI-16", "ghost noise"): (2.0, 85.0),
    ("dropout-0.1", "MC dropout"): (1.0, 85.0), ("GBN-16", "MC batch norm"): (2.5, 70.0),
}  # fmt: skip


def written(path, kinds=KINDS, seeds=5):
    common = {"test": 10, "shifted": 5, "samples": 4, "keep": 8, "recipe": "demo", "device": "CPU", "threads": 1}
    common |= {"torch": "2", "date": "2026-01-01", "commit": "0123456789abcdef"}
    rows = [
        {
            "method": method,
            "inference": kind,
            "seed": seed,
            "accuracy": 90 + seed,
            "nll": 0.5,
            "ece": ece + seed % 3 / 50,
        }
        | {"auroc a": auroc + seed % 2, "auroc b": auroc - seed % 2 + (kind == "MC dropout") * (-1) ** seed}
        | common
        for (method, kind), (ece, auroc) in kinds.items()
        for seed in range(seeds)
    ]
    # Unequal spreads, so that differences have one.
    for at, row in enumerate(rows):
        row["ece"] += at % 4 / 100
        row["auroc a"] += at % 3 / 10
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_per_method_and_inference(tmp_path):
    text = uncertainty.render(written(tmp_path / "file.csv"))
    assert "| GNI-16 | ghost noise | 5 | 92.00 ± 1.58 | 0.500 ± 0.000 | 2.0" in text
    assert "10 test inputs and 5 of each shift; 4 samples; 8 kept samples; networks of demo; CPU, 1 thread" in text
    assert "commit 0123456789." in text


def test_claims_are_judged_in_both_directions(tmp_path):
    lines = uncertainty.claims(uncertainty.read(written(tmp_path / "file.csv"))).splitlines()
    assert len(set(lines)) == 6
    assert ": supported. -1.0" in next(line for line in lines if "ECE: GNI-16 with sampling against GNI-16" in line)
    assert "refuted. +1.0" in next(line for line in lines if "ECE: GNI-16 with sampling against dropout" in line)
    assert ": supported. +" in next(line for line in lines if "AUROC: GNI-16 with sampling against GBN-16" in line)
    assert "inconclusive" in next(line for line in lines if "AUROC: GNI-16 with sampling against dropout" in line)


def test_a_single_seed_is_inconclusive(tmp_path):
    lines = uncertainty.claims(uncertainty.read(written(tmp_path / "file.csv", seeds=1))).splitlines()
    assert all(line.endswith("inconclusive.") for line in lines)
    kinds = {key: value for key, value in KINDS.items() if key[1] != "ghost noise"}
    assert "No claim" in uncertainty.claims(uncertainty.read(written(tmp_path / "other.csv", kinds)))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty.csv").write_text("method,inference\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for name in ("missing.csv", "empty.csv", "other.csv"):
        with pytest.raises(UserError, match=r"cannot be read as a file of `ghostnoise uncertainty`"):
            uncertainty.read(tmp_path / name)
