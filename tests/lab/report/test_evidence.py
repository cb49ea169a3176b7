"""The table of the paper's claims: verdicts from records and files, when they were stated, and mistakes in the file."""

import json
import math

import pytest
from scipy import stats

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import evidence
from ghostnoise.lab.report.published import Publisher
from support.run_folders import experiment, fill, findings

CLAIMS = """
[[claim]]
text = "A helps"
paper = "table 1"
stated = "before"
tests = ["A > BN in tiny", { test = "A < B in tiny", stated = "post hoc" }, "A gains twice B over BN in tiny",
         "A ~ BN in tiny", "A > B in other"]

[[claim]]
text = "more without augmentation"
paper = "table 3"
verdict = "untested"
note = "`ghostnoise sweep table3-vit`"
"""
SEEDS = range(12)
METHODS = "".join(
    f'[[grid.methods]]\nlabel = "{label}"\nset = {{ norm.method = "gbn", norm.ghost_size = {size} }}\n'
    for label, size in (("A", 4), ("B", 8))
)
GOOD = {"BN": 90, "A": 92, "B": 91}


def rows(text):
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in text.splitlines()[2:]]


def noisy(mean, scale=0.1):
    return {seed: mean + scale * math.sin(3 * seed + mean) for seed in SEEDS}


@pytest.fixture
def claims(tmp_path):
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "claims.toml"
    path.write_text(CLAIMS)
    return path


def table(claims, accuracies, render=evidence.table, also=None):
    folder = claims.parents[1] / str(len(list(claims.parents[1].iterdir())))
    folder.mkdir()
    recipe = experiment(folder, seeds=str(list(SEEDS)), claims=["A > BN", "B > BN"], more=METHODS)
    fill(folder, recipe, accuracies)
    further = {test: late for test, where, late in evidence.tests_of(claims) if where.startswith("tiny")}
    made = findings(folder, recipe, further=further)
    return rows(render(claims, {"tiny": made, also: made}.get))


def filled(**means):
    return {name: noisy(mean) for name, mean in (GOOD | means).items()}


def test_each_test_has_its_numbers_its_verdict_and_when_it_was_stated(claims):
    first, second, ratio, similar, other, last = table(claims, filled())
    assert first[:2] == ["A helps", "table 1"]
    assert first[2] == "[tiny](../results/tiny/README.md): A > BN"
    assert first[3:5] == ["before", "12"]
    assert first[5].startswith("+1.99 [")
    assert (first[-1], second[-1], similar[-1]) == ("supported", "refuted", "refuted")
    assert (second[0], second[3]) == ("", "post hoc")
    assert ratio[5].startswith("ratio 2.0")
    assert ratio[-1] == "supported"
    assert similar[2].endswith("A ≈ BN")
    assert other[2:] == ["`other`: A > B", "before", "0", "–", "–", "untested: no runs yet"]
    assert last == [
        "more without augmentation",
        "table 3",
        "`ghostnoise sweep table3-vit`",
        "–",
        "–",
        "–",
        "–",
        "untested",
    ]


def test_later_tests_do_not_weaken_earlier_ones(claims):
    """The same test has the same interval with and without tests of the same experiment that were stated later."""
    several, *_ = table(claims, filled())
    alone = CLAIMS.replace('{ test = "A < B in tiny", stated = "post hoc" }, ', "")
    claims.write_text(alone)
    assert table(claims, filled())[0] == several
    claims.write_text(alone.replace('"A > BN in tiny", ', '"A > BN in tiny", "A > B in tiny", "B > A in tiny", '))
    assert table(claims, filled())[0] != several


def test_which_side_refutes_about_twice(claims):
    assert table(claims, filled(A=95))[2][-1] == "refuted: more"
    assert table(claims, filled(A=91))[2][-1] == "refuted: less"


def test_an_experiment_may_have_options(claims):
    claims.write_text(CLAIMS.replace("A > B in other", "A > BN in tiny --only A x.y=1"))
    made = table(claims, filled(), also="tiny --only A x.y=1")
    assert made[4][2:] == made[0][2:]


def test_the_short_table_counts_verdicts(claims):
    assert table(claims, filled(A=95), render=evidence.summary) == [
        ["A helps", "table 1", "1 supported, 3 refuted, 1 untested"],
        ["more without augmentation", "table 3", "untested"],
    ]


def test_a_method_without_runs_is_untested(claims):
    first, second, ratio, *_ = table(claims, {"BN": noisy(90), "A": noisy(91)})
    assert first[-1] == "supported"
    assert second[4:] == ["0", "–", "–", "untested: no runs yet"]
    assert ratio[4:] == second[4:]


@pytest.mark.parametrize("lacking", ["A", "B", "BN"])
def test_verdicts_without_some_runs_are_preliminary(claims, lacking):
    accuracies = filled()
    accuracies[lacking] = {seed: value for seed, value in accuracies[lacking].items() if seed < 8}
    first, second, ratio, *_ = table(claims, accuracies)
    for row, methods, verdict in (
        (first, {"A", "BN"}, "supported"), (second, {"A", "B"}, "refuted"), (ratio, {"A", "B", "BN"}, "supported"),
    ):  # fmt: skip
        assert row[-1] == (f"{verdict} (preliminary)" if lacking in methods else verdict)
    assert ratio[4] == "8"


@pytest.mark.parametrize(
    ("limit", "sign", "verdict"),
    [(0.5, "<", "supported"), (0.5, ">", "refuted"), (0.1, "<", "refuted"), (0.1, ">", "supported"),
     (0.25, "<", "inconclusive")],
)  # fmt: skip
def test_files_are_compared_with_limits(claims, limit, sign, verdict):
    head = '[[claim]]\ntext = "x"\npaper = "y"\nstated = "post hoc"\n'
    (claims.parent / "noise.csv").write_text("layer,ks\na,0.2\nb,0.3\n")
    records = [
        {"contender": "A", "ratio_low": 0.2, "ratio_high": 0.3},
        {"contender": "B", "ratio_low": 9, "ratio_high": 9},
    ]
    (claims.parent / "bench.json").write_text(json.dumps({"records": records}))
    tests = [f"ks {sign} {limit} in results/noise.csv", f"ratio_paired of A {sign} {limit} in results/bench.json"]
    claims.write_text(f"{head}tests = {tests}\n")
    layers, ratio = table(claims, filled())
    assert layers[2].startswith("[noise.csv](../results/noise.csv): ks")
    assert layers[4:] == ["2", "0.2 to 0.3", "–", verdict]
    assert ratio[4:] == ["1", "0.2 to 0.3", "–", verdict]


def test_methods_in_a_file_are_paired_by_seed(claims):
    """The tests of a file are a family, in which those that were stated later do not count for the others."""
    values = {name: noisy(mean, 0.3) for name, mean in {"A": 90.5, "B": 90.2, "C": 90}.items()}
    lines = [f"{name},{seed},{value}" for name, each in values.items() for seed, value in each.items()]
    (claims.parent / "a.csv").write_text("\n".join(["method,seed,accuracy", *reversed(lines), ""]))
    tests = ["A > C in results/a.csv", "B < C in results/a.csv"]
    claims.write_text(
        f'[[claim]]\ntext = "x"\npaper = "y"\nstated = "before"\ntests = {tests}\n'
        '[[claim]]\ntext = "x"\npaper = "y"\nstated = "post hoc"\ntests = ["A ~ B in results/a.csv"]\n'
    )
    first, second, third = table(claims, filled())
    p = {
        pair: stats.ttest_rel(*([values[name][seed] for seed in SEEDS] for name in pair)).pvalue
        for pair in ("AC", "BC", "AB")
    }
    assert first[2] == "[a.csv](../results/a.csv): A > C"
    worst, best = sorted([p["AC"], p["BC"]], reverse=True)
    naive = {p["AB"]: p["AB"], best: 2 * best, worst: max(2 * best, worst)}
    for row, pair in ((first, "AC"), (second, "BC"), (third, "AB")):
        assert row[4] == str(len(SEEDS))
        assert row[6] == ("< 0.001" if naive[p[pair]] < 0.001 else f"{naive[p[pair]]:.2g}")
    claims.write_text('[[claim]]\ntext = "x"\npaper = "y"\nstated = "before"\ntests = ["A > D in results/a.csv"]\n')
    with pytest.raises(UserError, match="D is unknown; there are C, B, A"):
        table(claims, filled())
    claims.write_text('[[claim]]\ntext = "x"\npaper = "y"\nstated = "before"\ntests = ["A > D in results/b.csv"]\n')
    with pytest.raises(UserError, match=r"results/b\.csv: cannot be tested"):
        table(claims, filled())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[claim]]\ntext = 'x'\npaper = 'y'\n", "must have either tests or a verdict"),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\nverdict = 'true'\n", "verdict"),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\ntests = ['A > B in tiny']\n", "stated: missing"),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\nstated = 'before'\ntests = ['A beats B']\n", "must be a test and where"),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\nstated = 'before'\ntests = ['A beats B in tiny']\n", "must be 'A > B'"),
        (
            "[[claim]]\ntext = 'x'\npaper = 'y'\nstated = 'before'\ntests = ['A > C in tiny']\n",
            "C is no method or cell",
        ),
        (
            "[[claim]]\ntext = 'x'\npaper = 'y'\nstated = 'before'\ntests = ['x in a.json']\n",
            "must be 'COLUMN < NUMBER'",
        ),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\nstated = 'before'\ntests = ['x < 1 in a.csv']\n", "cannot be tested"),
        ("claim = 3\n", "cannot be read as a file of claims"),
        ("[[claim\n", "cannot be read as a file of claims"),
    ],
)
def test_mistakes_in_the_file(claims, text, message):
    claims.write_text(text)
    with pytest.raises(UserError, match="(?s)" + message.replace("(", r"\(")):
        table(claims, filled())


def test_the_block_names_its_file(tmp_path):
    (tmp_path / "README.md").write_text("<!-- generated: evidence -->\n<!-- end generated -->\n")
    with pytest.raises(UserError, match="needs exactly one file"):
        Publisher(tmp_path, lambda words: None).changes()
