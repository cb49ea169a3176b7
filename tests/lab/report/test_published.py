"""Tables, figures and numbers of results in a repository are rebuilt from records, and differences are found."""

import json

import pytest

from ghostnoise.lab.config import grid
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.published import Publisher
from ghostnoise.lab.store import records
from support.records import experiment_with_runs

PAGE = """\
# Tiny

<!-- generated: report tiny -->
<!-- end generated -->

Interpretation.
"""


@pytest.fixture
def root(tmp_path):
    """A folder with the records of an experiment and pages with blocks."""
    experiment_with_runs(tmp_path)
    folder = tmp_path / "results" / "tiny"
    records.export(tmp_path / "runs" / "tiny", folder / "records.jsonl", pytest.fail)
    (folder / "README.md").write_text(PAGE)
    return tmp_path


def publisher(root):
    return Publisher(root, lambda words: grid.load(str(root / f"{words[0]}.toml"), [w for w in words[1:] if "=" in w]))


def rebuilt(root):
    made = publisher(root)
    changes = made.changes()
    made.write(changes)
    return sorted(str(change.path.relative_to(root)) for change in changes)


def test_a_page_is_built_once_and_is_then_up_to_date(root):
    folder = root / "results" / "tiny"
    assert rebuilt(root) == [f"results/tiny/{name}" for name in ("README.md", "figure.csv", "figure.svg")]
    page = (folder / "README.md").read_text()
    assert "| BN | – | 90.14 ± 0.14 (3) | 89.79 to 90.50 | 90.1 ± 0.2 | – |" in page
    assert "![test accuracy of tiny](figure.svg)" in page
    assert (
        "9 runs on AMD EPYC; 1 thread each; torch 2.8.0+cpu; 2026-01-31, 1.5 min of training in all; numerics 1; "
        in page
    )
    assert "commit 0123456789." in page
    assert "- GNI \\> BN: inconclusive. " in page
    assert page.endswith("<!-- end generated -->\n\nInterpretation.\n")
    assert (folder / "figure.svg").read_bytes().startswith(b"<?xml")
    assert rebuilt(root) == []


def test_every_difference_is_found(root):
    rebuilt(root)
    folder = root / "results" / "tiny"
    for name, old, new in (
        ("README.md", "90.14", "90.15"), ("figure.csv", "90.1428", "90.1429"), ("figure.svg", "<path", "<Path"),
    ):  # fmt: skip
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new, 1))
        assert rebuilt(root) == [f"results/tiny/{name}"]
        assert (folder / name).read_text() == before
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:-1]))
    assert rebuilt(root) == [f"results/tiny/{name}" for name in ("README.md", "figure.csv", "figure.svg")]
    assert "1 missing" in (folder / "README.md").read_text()


def test_figures_of_another_matplotlib_and_last_digits_are_not_compared(root):
    rebuilt(root)
    figure, table = (root / "results" / "tiny" / f"figure.{suffix}" for suffix in ("svg", "csv"))
    figure.write_text(figure.read_text().replace("Matplotlib v", "Matplotlib v9.").replace("<path", "<Path"))
    table.write_text(table.read_text().replace("90.14285714285714", "90.14285714285717"))
    assert publisher(root).changes() == []


def test_records_without_a_page_get_one(root):
    (root / "results" / "tiny" / "README.md").unlink()
    rebuilt(root)
    page = (root / "results" / "tiny" / "README.md").read_text()
    assert page.startswith("# tiny\n\nnoise helps\n")
    assert "ghostnoise report tiny --records results/tiny/records.jsonl" in page
    assert "90.14 ± 0.14 (3)" in page
    assert rebuilt(root) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("accuracy BN tiny", "90.14 ± 0.14"),
        ("mean 'GNI ghost_size=16' tiny", "91.00"),
        ("n BN tiny", "3"),
        ("interval BN tiny", "89.79 to 90.50"),
        ("difference 'GNI ghost_size=4' tiny", "+0.43 (no spread)"),
        ("p BN tiny", "–"),
        ("seconds BN tiny", "10.2 s"),
        ("verdict 'GNI > BN' tiny", "inconclusive"),
        ("difference 'GNI > BN' tiny", "+0.86 (no spread)"),
        ("n 'GNI > BN' tiny", "2"),
    ],
)
def test_numbers_within_a_line(root, arguments, text):
    (root / "README.md").write_text(f"It is <!-- generated: value {arguments} --><!-- end generated --> now.\n")
    rebuilt(root)
    assert f"-->{text}<!--" in (root / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing tiny", "nothing: no kind of generated block; use one of report, table"),
        ("table 'tiny", "No closing quotation"),
        ("value accuracy BN", "needs a field, a cell or claim, and a recipe"),
        ("value accuracy GNI tiny", "must be one cell or claim of BN, GNI ghost_size=4"),
        ("value size BN tiny", "no such field; use one of accuracy"),
        ("value size 'GNI > BN' tiny", "no such field of a claim; use one of verdict"),
        ("figure tiny --as ../x", "must be a name of lower-case letters"),
        ("noise results/none.csv", "cannot be read as a report's noise.csv"),
    ],
)
def test_a_mistake_in_a_marker_is_one_line_with_its_place(root, arguments, message):
    (root / "README.md").write_text(f"\n<!-- generated: {arguments} -->\n<!-- end generated -->\n")
    with pytest.raises(UserError) as caught:
        publisher(root).changes()
    assert str(caught.value).startswith(f"{root / 'README.md'}, line 2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_records_and_missing_records_are_errors(root):
    path = root / "results" / "tiny" / "records.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with pytest.raises(UserError, match="line 10: not complete JSON"):
        publisher(root).changes()
    path.write_bytes(content.replace(b'"recipe":"tiny"', b'"recipe":"other"', 1))
    with pytest.raises(UserError, match="has the records of other, not of tiny"):
        publisher(root).changes()
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        publisher(root).changes()


@pytest.mark.parametrize("parts", [(), ("systematic", "random")])
def test_the_gap_between_training_and_inference_is_in_the_records(root, parts):
    path = root / "results" / "tiny" / "records.jsonl"
    header, *lines = path.read_text().splitlines()
    made = []
    for at, line in enumerate(map(json.loads, lines)):
        method = line["settings"]["norm"]["method"]
        layers = {"layer": ["a", "b"], f"{method}_relative": [0.01 * at, 0.03 * at + 0.01], "odd": [None, 1]}
        layers |= {f"{method}_{part}": [0.005 * at, 0.005 * at] for part in parts}
        made.append(line | {"noise": [{"epoch": 3, "layers": layers}]})
    path.write_text("\n".join([header, *(json.dumps(line, separators=(",", ":")) for line in made), ""]))
    (root / "README.md").write_text("<!-- generated: gap tiny -->\n<!-- end generated -->\n")
    rebuilt(root)
    page = (root / "README.md").read_text()
    heading, _, base, *_ = page.splitlines()[1:]
    if parts:
        assert " | systematic gap, % ± std | difference to BN" in heading
        assert heading.endswith(" | random, % ± std |")
        assert base == "| BN | 3 | 14.50 ± 2.00 | – | 3.50 ± 0.50 | – | 3.50 ± 0.50 |"
    else:
        assert base == "| BN | 3 | 14.50 ± 2.00 | – |"
    assert "| GNI ghost\\_size=4 | 3 | " in page
    records.import_records([(path, records.load(path))], root / "imported")
    records.export(root / "imported" / "tiny", root / "again.jsonl", pytest.fail)
    assert (root / "again.jsonl").read_bytes() == path.read_bytes()


COST = {
    "n": 400, "clock": "CPU time", "device_name": "AMD EPYC", "threads": 1, "torch": "2.8.0+cpu", "date": "2026-01-31",
}  # fmt: skip


def test_a_table_with_the_cost_of_each_method(root):
    (root / "README.md").write_text("<!-- generated: table tiny --cost cost.json -->\n<!-- end generated -->\n")
    rows = [
        COST | {"contender": name, "ratio_paired": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.1}
        for name, ratio in {"BN": 1.0, "GNI ghost_size=4": 1.234}.items()
    ]
    (root / "cost.json").write_text(json.dumps({"records": rows}))
    rebuilt(root)
    lines = (root / "README.md").read_text().splitlines()
    assert lines[1].endswith(" | time per training step, relative to BN \\[95 % interval\\] |")
    assert lines[3].startswith("| BN |")
    assert lines[3].endswith(" | – |")
    assert lines[4].endswith(" | 1.23 \\[1.13, 1.33\\] |")
    assert lines[5].endswith(" | – |")  # not measured
    assert (
        "Training steps: medians of the ratios in n = 400 interleaved rounds, CPU time, AMD EPYC, 1 thread, torch "
        "2.8.0+cpu, 2026-01-31."
    ) in lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("table tiny --cost", "--cost: needs a file"),
        ("table tiny --cost cost.json", "cost.json: cannot be read"),
        ("table tiny --cost results/tiny/records.jsonl", "records.jsonl: cannot be read"),
    ],
)
def test_a_cost_that_cannot_be_read(root, arguments, line):
    (root / "README.md").write_text(f"<!-- generated: {arguments} -->\n<!-- end generated -->\n")
    with pytest.raises(UserError) as caught:
        publisher(root).changes()
    assert line in str(caught.value)


def test_the_result_of_a_cell(root):
    (root / "docs").mkdir()
    (root / "docs" / "card.md").write_text(
        "- <!-- generated: result BN tiny --><!-- end generated -->\n"
        '- <!-- generated: result "GNI ghost_size=4" tiny --><!-- end generated -->\n'
    )
    rebuilt(root)
    first, second = (root / "docs" / "card.md").read_text().splitlines()
    link = "in [tiny](../results/tiny/README.md)"
    assert f"-->BN {link}: test accuracy 90.14 ± 0.14 % (n = 3, 95 % interval 89.79 to 90.50).<!--" in first
    assert f"-->GNI ghost\\_size=4 {link}: test accuracy " in second
    assert ", difference to BN " in second
    assert second.count(" points") == 1
    assert "Holm" not in second  # it is no test


@pytest.mark.parametrize(
    ("arguments", "line"), [("result BN", "needs a cell and a recipe"), ("result XX tiny", "must be one cell or claim")]
)
def test_a_result_that_does_not_exist(root, arguments, line):
    (root / "README.md").write_text(f"- <!-- generated: {arguments} --><!-- end generated -->\n")
    with pytest.raises(UserError, match=line):
        publisher(root).changes()
