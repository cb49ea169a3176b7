"""The table of the paper's claims: verdicts from records, and mistakes in the file of claims."""

import math

import numpy as np
import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import evidence, fragments
from ghostnoise.lab.report.published import Publisher
from support.run_folders import experiment, fill, findings

CLAIMS = """
[[claim]]
text = "A helps"
paper = "table 1"
tests = ["A > BN in tiny", "B > BN in tiny", "ratio A : B over BN in tiny", "gap A < BN in tiny",
         "A below the baseline in tiny", "A above the baseline in tiny", "A > B in other"]

[[claim]]
text = "more without augmentation"
paper = "table 3"
verdict = "needs a GPU"
note = "`ghostnoise sweep table3-vit`"
"""
SEEDS = range(12)
METHODS = "".join(
    f'[[grid.methods]]\nlabel = "{label}"\nset = {{ norm.method = "gbn", norm.ghost_size = {size} }}\n'
    for label, size in (("A", 4), ("B", 8))
)


def rows(text):
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in text.splitlines()[2:]]


def noisy(mean, scale=0.1):
    return {seed: mean + scale * math.sin(3 * seed + mean) for seed in SEEDS}


@pytest.fixture
def claims(tmp_path):
    path = tmp_path / "claims.toml"
    path.write_text(CLAIMS)
    return path


def table(claims, accuracies, gaps=None, render=evidence.table, also=None):
    folder = claims.parent / str(len(list(claims.parent.iterdir())))
    folder.mkdir()
    recipe = experiment(folder, seeds=str(list(SEEDS)), claims=["A > BN", "B > BN"], more=METHODS)
    fill(folder, recipe, accuracies)
    made = findings(folder, recipe)
    gaps = gaps or {"BN": noisy(3), "A": noisy(1)}
    by_measure = gaps if "relative" in gaps else {"relative": gaps}
    with pytest.MonkeyPatch.context() as patch:

        def own(row, measure):
            found = by_measure.get(measure, {}).get(row.name, {})
            return {seed: value / 100 for seed, value in found.items()}

        patch.setattr(fragments, "_own", own)
        return rows(render(claims, {"tiny": made, also: made}.get))


def test_verdicts(claims):
    first, second, ratio, gap, cell, above, other, last = table(
        claims, {"BN": noisy(90), "A": noisy(92), "B": noisy(91)}
    )
    assert first[:2] == ["A helps", "table 1"]
    assert first[2] == "[tiny](../results/tiny/README.md): A > BN"
    assert (first[3], first[-1], second[-1]) == ("12", "supported", "supported")
    assert ratio[4].startswith("ratio 2.0 [")
    assert ratio[-1] == "supported"
    assert gap[4] == "-1.99 [-2.05, -1.93] of the gap"
    assert gap[-1] == "supported"
    assert (cell[4], cell[-1]) == (first[4], "not supported")
    assert (above[4], above[-1]) == (first[4], "supported")
    assert other[2:] == ["`other`: A > B", "0", "–", "–", "not run yet"]
    assert last[0] == "more without augmentation"
    assert last[-1] == "needs a GPU"


def test_the_systematic_part_of_the_gap_has_a_test_of_its_own(claims):
    """In the Holm correction, it counts beside the gap: the smaller of the two p-values is doubled."""
    claims.write_text(CLAIMS.replace('"gap A < BN in tiny"', '"gap A < BN in tiny", "systematic gap A < BN in tiny"'))
    smaller, larger = {"BN": noisy(2.1, 2), "A": noisy(1.5, 2)}, {"BN": noisy(1, 3), "A": noisy(1.5, 3)}
    accuracies = {"BN": noisy(90), "A": noisy(92), "B": noisy(91)}
    _, _, _, gap, systematic, *_ = table(claims, accuracies, {"relative": larger, "systematic": smaller})
    assert (gap[4][0], systematic[4][0]) == ("+", "-")
    assert systematic[4].endswith(" of the systematic gap")
    _, _, _, missing, alone, *_ = table(claims, accuracies, {"relative": {}, "systematic": smaller})
    assert float(systematic[5]) == pytest.approx(2 * float(alone[5]), rel=0.1)
    assert float(systematic[5]) < float(gap[5])
    assert missing[3:] == ["0", "–", "–", "not run yet"]


def test_an_experiment_may_have_options(claims):
    claims.write_text(CLAIMS.replace("A > B in other", "A > BN in tiny --only A x.y=1"))
    accuracies = {"BN": noisy(90), "A": noisy(92), "B": noisy(91)}
    rows = table(claims, accuracies, also="tiny --only A x.y=1")
    assert rows[6][2:] == rows[0][2:]


def test_the_short_table_counts_verdicts(claims):
    short = table(claims, {"BN": noisy(90), "A": noisy(92), "B": noisy(91)}, render=evidence.summary)
    assert short == [
        ["A helps", "table 1", "5 supported, 1 not supported, 1 not run yet"],
        ["more without augmentation", "table 3", "needs a GPU"],
    ]


def test_a_significant_loss_is_not_supported_and_noise_is_inconclusive(claims):
    first, second, ratio, gap, cell, above, *_ = table(
        claims, {"BN": noisy(90), "A": noisy(88), "B": noisy(90, 2)}, {"BN": noisy(1), "A": noisy(3)}
    )
    assert (first[-1], second[-1], gap[-1], cell[-1]) == ("not supported", "inconclusive", "not supported", "supported")
    assert above[-1] == "not supported"
    assert ratio[-1] != "supported"


def test_ratios_that_are_clearly_not_two(claims):
    for own, verdict in ((95, "not supported"), (91.02, "not supported")):
        *_, ratio = table(claims, {"BN": noisy(90), "A": noisy(own), "B": noisy(91)})[:3]
        assert ratio[-1] == verdict, own


def test_the_interval_of_a_ratio_covers_it_about_as_often_as_it_should():
    random, covered, repeats = np.random.default_rng(0), 0, 200
    for _ in range(repeats):
        low, high = evidence._bootstrap(2 + random.normal(0, 0.5, 20), 1 + random.normal(0, 0.2, 20))
        covered += low <= 2 <= high
    # 95 % in theory; the percentile interval of 20 seeds covers a little less. 5 standard deviations of a count.
    assert covered / repeats > 0.92 - 5 * math.sqrt(0.92 * 0.08 / repeats)


def test_a_method_without_runs(claims):
    first, second, ratio, gap, *_ = table(claims, {"BN": noisy(90), "A": noisy(91)}, {"A": noisy(1)})
    assert first[-1] == "supported"
    assert (second[3], second[-1], ratio[-1], gap[-1]) == ("0", "not run yet", "not run yet", "not run yet")


@pytest.mark.parametrize("lacking", ["A", "B", "BN"])
def test_verdicts_without_some_runs_are_preliminary(claims, lacking):
    accuracies = {"BN": noisy(90), "A": noisy(92), "B": noisy(91)}
    accuracies[lacking] = {seed: value for seed, value in accuracies[lacking].items() if seed < 8}
    first, second, ratio, gap, below, above, *_ = table(claims, accuracies)
    for row, methods, verdict in (
        (first, {"A", "BN"}, "supported"), (second, {"B", "BN"}, "supported"), (ratio, {"A", "B", "BN"}, "supported"),
        (gap, {"A", "BN"}, "supported"), (below, {"A", "BN"}, "not supported"), (above, {"A", "BN"}, "supported"),
    ):  # fmt: skip
        assert row[-1] == (f"{verdict} (preliminary)" if lacking in methods else verdict)
    assert ratio[3] == "8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[claim]]\ntext = 'x'\npaper = 'y'\n", "must have either tests or a verdict"),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\nverdict = 'true'\n", "verdict"),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\ntests = ['A beats B']\n", "'A beats B': must be 'A > B in EXPERIMENT'"),
        ("[[claim]]\ntext = 'x'\npaper = 'y'\ntests = ['A > C in tiny']\n", "'A > C': must be a claim of the recipe"),
        (
            "[[claim]]\ntext = 'x'\npaper = 'y'\ntests = ['gap A < B in tiny']\n",
            "must be a method among .* and the baseline, BN",
        ),
        (
            "[[claim]]\ntext = 'x'\npaper = 'y'\ntests = ['C below the baseline in tiny']\n",
            "'C': must be a cell of the",
        ),
        ("claim = 3\n", "cannot be read as a file of claims"),
        ("[[claim\n", "cannot be read as a file of claims"),
    ],
)
def test_mistakes_in_the_file(claims, text, message):
    claims.write_text(text)
    with pytest.raises(UserError, match="(?s)" + message.replace("(", r"\(")):
        table(claims, {"BN": noisy(90), "A": noisy(92), "B": noisy(91)})


def test_the_block_names_its_file(tmp_path):
    (tmp_path / "README.md").write_text("<!-- generated: evidence -->\n<!-- end generated -->\n")
    with pytest.raises(UserError, match="needs exactly one file"):
        Publisher(tmp_path, lambda words: None).changes()
