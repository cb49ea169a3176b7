"""Tables of the page: what is missing is explained, and runs without a result are listed."""

from ghostnoise.lab.report import page_tables
from support.html_page import read
from support.run_folders import experiment, fill, findings, points, write


def shown(html):
    return " ".join("".join(read(html).texts).split())


def test_missing_intervals_are_explained(tmp_path):
    made = experiment(tmp_path)
    fill(
        tmp_path, made, {"BN": {0: 90.0, 1: 90.4}, "GNI ghost_size=4": {0: 91.0}, "GNI ghost_size=16": {0: 91, 1: 91.4}}
    )
    text = shown(page_tables.results(findings(tmp_path, made)))
    assert "n = 1: a single seed has no standard deviation, no interval and no test." in text
    assert "No spread: the difference is the same for every seed" in text
    assert "Rows without numbers" not in text


def test_cells_without_runs_are_explained_and_empty_columns_are_left_out(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {"BN": {0: 90.0, 1: 90.4, 2: 90.2}})
    html = page_tables.results(findings(tmp_path, made))
    assert "Rows without numbers: no run of the cell has finished." in shown(html)
    assert "difference to BN<" not in html
    assert "p (Holm)" not in html
    assert "1.00 ×" in html  # the cost of the baseline


def test_runs_without_a_result_are_listed_with_the_reason(tmp_path):
    made = experiment(tmp_path)
    assert page_tables.problems(findings(tmp_path, made)).count("<tr>") == 1 + 9
    first, *others = points(made)
    write(tmp_path, first, status="failed", failure="RuntimeError: no luck")
    for point in others:
        write(tmp_path, point)
    html = page_tables.problems(findings(tmp_path, made))
    assert html.count("<tr>") == 1 + 1
    assert "RuntimeError: no luck" in html


def test_all_runs_are_listed_with_the_settings_that_differ(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, {"BN": {0: 90.0}})
    html = page_tables.runs(findings(tmp_path, made))
    assert html.count("<tr>") == 1 + 9
    assert "norm.ghost_size" in html
    assert "optim.lr" not in html
