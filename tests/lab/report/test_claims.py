"""Declared tests: choices on one half of the seeds, families, verdicts and margins, against scipy and plain loops."""

import math

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import claims as judging
from ghostnoise.lab.report import measures
from ghostnoise.lab.report.claims import Claim, halves
from ghostnoise.lab.report.statistics import Corrected, Score, fieller, paired
from ghostnoise.lab.run import Run
from support.run_folders import experiment, fill, findings, points, write

BN, FOUR, SIXTEEN = "BN", "GNI ghost_size=4", "GNI ghost_size=16"
SEEDS = range(8)
METHODS = "".join(
    f'[[grid.methods]]\nlabel = "{label}"\nset = {{ norm.method = "gbn", norm.ghost_size = {size} }}\n'
    for label, size in (("A", 4), ("B", 8))
)


def noisy(mean, scale=0.1, seeds=SEEDS):
    return {seed: mean + scale * math.sin(3 * seed + mean) for seed in seeds}


def judged(tmp_path, accuracies, further=None, claims=(), **options):
    made = experiment(tmp_path, seeds=str(list(SEEDS)), claims=list(claims), more=METHODS, **options)
    fill(tmp_path, made, accuracies)
    return findings(tmp_path, made, further=further)


def differences(ours, theirs, seeds=SEEDS):
    return [ours[seed] - theirs[seed] for seed in seeds]


def test_a_cell_is_compared_over_all_seeds(tmp_path):
    bn, a = noisy(90), noisy(91)
    (claim,) = judged(tmp_path, {BN: bn, "A": a}, claims=["A > BN"]).claims
    expected = stats.ttest_1samp(differences(a, bn), 0)
    assert (claim.paired.n, claim.verdict, claim.chosen) == (8, "supported", "")
    assert claim.paired.p == pytest.approx(expected.pvalue)
    assert claim.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_the_best_cell_is_chosen_by_the_first_half_of_the_seeds_and_tested_on_the_other(tmp_path):
    """The cell with the best mean over all seeds is not the one that the first half chooses."""
    bn, four, sixteen = noisy(90), noisy(92), noisy(91)
    four |= {seed: 90.5 + 0.01 * seed for seed in range(4)}
    found = judged(tmp_path, {BN: bn, FOUR: four, SIXTEEN: sixteen}, claims=["GNI > BN"])
    (claim,) = found.claims
    assert found.best("GNI").cell == FOUR
    assert claim.difference.ours.cell == SIXTEEN
    assert claim.paired.mean == pytest.approx(numpy.mean(differences(sixteen, bn, range(4, 8))))
    assert claim.paired.n == 4
    assert claim.chosen == "cells chosen by seeds 0 to 3, tested on seeds 4 to 7"


def test_no_seed_is_in_both_halves(tmp_path):
    found = judged(tmp_path, {BN: noisy(90)})
    first, other = halves(found)
    assert not first & other
    assert first | other == set(SEEDS)


def test_what_is_tested_does_not_choose(tmp_path):
    """Any change of the second half leaves the chosen cell as it is."""
    bn, four, sixteen = noisy(90), noisy(91), noisy(92)
    for at, value in enumerate((10.0, 99.0)):
        folder = tmp_path / str(at)
        folder.mkdir()
        changed = four | {seed: value + 0.1 * seed for seed in range(4, 8)}
        (claim,) = judged(folder, {BN: bn, FOUR: changed, SIXTEEN: sixteen}, claims=["GNI > BN"]).claims
        assert claim.difference.ours.cell == SIXTEEN


def test_a_cell_that_diverged_is_not_chosen(tmp_path):
    made = experiment(tmp_path, seeds=str(list(SEEDS)), claims=["GNI > BN"])
    fill(tmp_path, made, {BN: noisy(90), FOUR: noisy(91), SIXTEEN: {s: v for s, v in noisy(95).items() if s != 1}})
    write(tmp_path, next(point for point in points(made, [SIXTEEN]) if point.seed == 1), status="diverged")
    (claim,) = findings(tmp_path, made).claims
    assert claim.difference.ours.cell == FOUR


def test_a_tuned_cell_is_tested_on_seeds_that_did_not_select_it(tmp_path):
    tuned = '[select]\naxes = ["norm.ghost_size"]\n'
    made = experiment(tmp_path, seeds=str(list(SEEDS)), more=tuned)
    fill(tmp_path, made, {BN: noisy(90), FOUR: noisy(91), SIXTEEN: noisy(92)})
    found = findings(tmp_path, made)
    for run in found.collected.runs:
        if run.stage == "test" and run.status == "missing":
            write(tmp_path, run, 93 + 0.1 * run.seed)
    (claim,) = findings(tmp_path, made).claims
    assert claim.paired.n == 4
    expected = [93 + 0.1 * seed - noisy(90)[seed] for seed in range(4, 8)]
    assert claim.paired.mean == pytest.approx(numpy.mean(expected))


def test_a_tuned_cell_that_half_of_the_seeds_would_not_select_is_not_tested(tmp_path):
    tuned = '[select]\naxes = ["norm.ghost_size"]\n'
    made = experiment(tmp_path, seeds=str(list(SEEDS)), more=tuned)
    four = noisy(91) | {seed: 95.0 + 0.1 * seed for seed in range(4, 8)}
    fill(tmp_path, made, {BN: noisy(90), FOUR: four, SIXTEEN: noisy(92)})
    found = findings(tmp_path, made)
    assert [score.cell for score in found.tuning if score.chosen] == [FOUR]
    for run in found.collected.runs:
        if run.stage == "test" and run.status == "missing":
            write(tmp_path, run, 93 + 0.1 * run.seed)
    (claim,) = findings(tmp_path, made).claims
    assert (claim.paired, claim.verdict) == (None, "inconclusive")


def test_families_are_the_declared_tests(tmp_path):
    """Neither rows of the table nor tests that were stated later count for those that were stated before."""
    bn, a, b = noisy(90), noisy(90.2, 0.3), noisy(90.1, 0.5)
    further = {"A > B": True, "B < BN": True, "BN > A": False}
    accuracies = {BN: bn, "A": a, "B": b, FOUR: noisy(89), SIXTEEN: noisy(91)}
    found = judged(tmp_path, accuracies, further, claims=["A > BN", "B > BN"])
    by_text = {claim.text: claim for claim in found.claims}
    p = {
        text: stats.ttest_1samp(differences(*values), 0).pvalue
        for text, values in {"A > BN": (a, bn), "B > BN": (b, bn), "BN > A": (bn, a)}.items()
    }
    ordered = sorted(p, key=p.get)
    naive = {text: max((3 - at) * p[text] for at, text in enumerate(ordered[: ordered.index(text) + 1])) for text in p}
    for text, value in naive.items():
        assert by_text[text].corrected.p == pytest.approx(min(1, value))
        assert by_text[text].corrected.tests == 3
    assert {text for text, claim in by_text.items() if claim.late} == {"A > B", "B < BN"}
    assert by_text["A > B"].corrected.tests == 2
    rows = {row.name: row for row in found.rows}
    assert rows["A"].difference.corrected is by_text["A > BN"].corrected
    assert rows[FOUR].difference.paired.p is not None
    assert rows[FOUR].difference.corrected is None  # it is shown, but it is no test


def claim(values, sign=1, tests=1):
    made = Claim(
        "A > B", ("A", "B"), sign, paired=paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0))
    )
    made.corrected = Corrected(made.paired.p, 1.0, tests) if made.paired.p is not None else None
    return made


@pytest.mark.parametrize(
    ("values", "sign", "tests", "verdict"),
    [
        ([1.0, 1.1, 0.9, 1.2], 1, 1, "supported"),
        ([1.0, 1.1, 0.9, 1.2], -1, 1, "refuted"),
        ([-1.0, -1.1, -0.9, -1.2], 1, 1, "refuted"),
        ([-1.0, -1.1, -0.9, -1.2], -1, 1, "supported"),
        ([1.0, -1.1, 0.9, -1.2], 1, 1, "inconclusive"),
        ([0.1, 0.11, 0.09, 0.12], 1, 1, "equivalent"),  # significant, and smaller than what matters
        ([0.02, -0.01, 0.01, -0.03], 1, 1, "equivalent"),
        ([0.02, -0.01, 0.01, -0.03], 0, 1, "supported"),
        ([1.0, 1.1, 0.9, 1.2], 0, 1, "refuted"),
        ([1.0, -1.1, 0.9, -1.2], 0, 1, "inconclusive"),
        ([0.1, -0.1, 0.12, -0.12], 1, 1, "equivalent"),
        ([0.1, -0.1, 0.12, -0.12], 1, 50, "inconclusive"),  # one of 50 tests: the interval is wider
        ([1.0, 1.0, 1.0, 1.0], 1, 1, "inconclusive"),  # no spread, no test
    ],
)
def test_verdicts(values, sign, tests, verdict):
    assert claim(values, sign, tests).verdict == verdict


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=8), st.integers(1, 20))
def test_equivalence_is_two_one_sided_tests_at_the_level_of_the_family(values, tests):
    """Both t-tests against the ends of the margin reject at 2.5 % / m, m being the number of tests of the family."""
    assume(numpy.std(values) > 1e-3)
    made = claim(values, tests=tests)
    above = stats.ttest_1samp(values, -0.3, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.3, alternative="less").pvalue
    worst = max(above, below)
    assume(abs(worst * tests - 0.025) > 1e-6)
    assert made.equivalent == (worst < 0.025 / tests)


def test_the_rate_of_false_equivalence():
    """With a true difference of exactly the margin, equivalence is declared in at most 2.5 % of the experiments."""
    random, repeats = numpy.random.default_rng(0), 2000
    wrong = sum(claim(random.normal(0.3, 0.1, 10)).equivalent for _ in range(repeats))
    assert wrong / repeats < 0.025 + 5 * math.sqrt(0.025 * 0.975 / repeats)


gains = st.lists(st.tuples(st.floats(-3, 6), st.floats(-3, 3)), min_size=3, max_size=8)


@given(gains)
def test_fiellers_set_has_the_ratios_that_a_paired_test_does_not_reject(pairs):
    x, y = (numpy.array(each) for each in zip(*pairs, strict=True))
    assume(numpy.std(x) > 0.01 and numpy.std(y) > 0.01 and abs(y.mean()) > 1e-3)
    made = fieller(x.tolist(), y.tolist())
    assert made.value == pytest.approx(x.mean() / y.mean())
    for r in (*numpy.linspace(-20, 20, 81), made.low - 0.01, made.low + 0.01, made.high - 0.01, made.high + 0.01):
        if not numpy.isfinite(r) or numpy.std(x - r * y) < 1e-6:
            continue
        p = stats.ttest_1samp(x - r * y, 0).pvalue
        inside = (r <= made.low or r >= made.high) if made.outside else made.low <= r <= made.high
        if abs(p - 0.05) > 1e-6:
            assert inside == (p > 0.05), (r, p, made)


def test_fiellers_set_by_hand():
    """A denominator without spread leaves the t interval of the numerator, divided by it."""
    made = fieller([2.0, 4.0, 6.0], [2.0, 2.0, 2.0])
    low, high = stats.ttest_1samp([1.0, 2.0, 3.0], 0).confidence_interval(0.95)
    assert (made.value, made.low, made.high, made.outside) == (2.0, pytest.approx(low), pytest.approx(high), False)
    unbounded = fieller([5.0, 5.2, 5.1], [1.0, -1.0, 0.1])
    assert unbounded.outside
    anything = fieller([1.0, -1.0, 0.1], [1.0, -1.1, 0.2])
    assert (anything.low, anything.high) == (-math.inf, math.inf)


def test_fiellers_set_covers_the_ratio_as_often_as_it_should():
    random, covered, repeats = numpy.random.default_rng(0), 0, 1000
    for _ in range(repeats):
        made = fieller((2 + random.normal(0, 0.5, 5)).tolist(), (1 + random.normal(0, 0.4, 5)).tolist())
        inside = made.low <= 2 <= made.high
        covered += not (made.low < 2 < made.high) if made.outside else inside
    assert abs(covered / repeats - 0.95) < 5 * math.sqrt(0.95 * 0.05 / repeats)


@pytest.mark.parametrize(
    ("a", "verdict", "side"),
    [(92, "supported", ""), (91.58, "supported", ""), (95, "refuted", "more"), (91, "refuted", "less"),
     (89, "refuted", "less")],
)  # fmt: skip
def test_about_twice(tmp_path, a, verdict, side):
    bn, ours, theirs = noisy(90, 0.02), noisy(a, 0.02), noisy(91, 0.02)
    found = judged(tmp_path, {BN: bn, "A": ours, "B": theirs}, {"A gains twice B over BN": False})
    (claim,) = found.claims
    assert (claim.verdict, claim.side) == (verdict, side)
    x, y = numpy.array(differences(ours, bn)), numpy.array(differences(theirs, bn))
    assert claim.paired.p == pytest.approx(stats.ttest_1samp(x - 2 * y, 0).pvalue)
    assert claim.ratio.value == pytest.approx(x.mean() / y.mean())


@pytest.mark.parametrize(("sign", "verdict"), [(">", "supported"), ("<", "refuted"), ("~", "refuted")])
def test_gains_are_compared_seed_by_seed(tmp_path, sign, verdict):
    """A difference of two differences: (A - BN) - (B - GNI)."""
    values = {BN: noisy(90), "A": noisy(92), "B": noisy(91.5), FOUR: noisy(91)}
    (claim,) = judged(tmp_path, values, {f"A over {BN} {sign} B over {FOUR}": False}).claims
    expected = numpy.array(differences(values["A"], values[BN])) - differences(values["B"], values[FOUR])
    assert claim.paired.mean == pytest.approx(expected.mean())
    assert claim.paired.p == pytest.approx(stats.ttest_1samp(expected, 0).pvalue)
    assert claim.verdict == verdict


def test_about_twice_is_inconclusive_if_the_interval_has_an_end_of_the_margin(tmp_path):
    found = judged(tmp_path, {BN: noisy(90), "A": noisy(91.5), "B": noisy(91)}, {"A gains twice B over BN": False})
    (claim,) = found.claims
    assert claim.ratio.low < 1.5 < claim.ratio.high
    assert claim.verdict == "inconclusive"


@pytest.fixture
def metered(tmp_path, monkeypatch):
    """An experiment whose noise meter has given columns by cell."""
    columns = {
        ("A", "gbn_systematic"): noisy(0.03, 0.001), ("B", "gbn_systematic"): noisy(0.02, 0.001),
        ("A", "xbn_random"): noisy(0.112, 0.0001), ("A", "gbn_random"): noisy(0.1, 0.0001),
        ("A", "ks_shift_conv"): noisy(0.02, 0.001),
    }  # fmt: skip
    monkeypatch.setattr(judging, "of_network", lambda score, column: columns.get((score.cell, column), {}))
    return (
        columns,
        lambda *texts: judged(tmp_path, {"A": noisy(90), "B": noisy(91)}, dict.fromkeys(texts, False)).claims,
    )


def test_measures_of_the_noise_meter(metered):
    columns, claims = metered
    gap, same, limit, above = claims(
        "systematic gap B < A",
        "random noise of xbn ~ gbn on A",
        "ks_shift_conv < 0.05 on A",
        "ks_shift_conv > 0.05 on A",
    )
    expected = numpy.array(differences(columns["B", "gbn_systematic"], columns["A", "gbn_systematic"]))
    assert (gap.paired.mean, gap.verdict) == (pytest.approx(100 * expected.mean()), "supported")
    relative = [100 * (columns["A", "xbn_random"][s] / columns["A", "gbn_random"][s] - 1) for s in SEEDS]
    assert (same.paired.mean, same.verdict) == (pytest.approx(numpy.mean(relative)), "refuted")  # beyond 10 %
    assert (limit.verdict, above.verdict) == ("supported", "refuted")
    assert limit.paired.p == pytest.approx(stats.ttest_1samp(list(columns["A", "ks_shift_conv"].values()), 0.05).pvalue)


def test_a_column_of_the_meter_is_the_mean_over_layers_after_the_last_epoch():
    def run(seed, *columns):
        noise = [{"epoch": 1, "layers": {"layer": list("abc"[: len(column)]), "x": column}} for column in columns]
        return Run("tiny", str(seed), {"seed": seed}, noise=noise)

    score = Score((run(0, [9.0], [1.0, 2.0, None]), run(1), run(2, [None])))
    assert measures.of_network(score, "x") == {0: 1.5}
    assert measures.of_network(score, "y") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A beats B", "must be 'A > B'"),
        ("A > C", "C is no method or cell; there are A, B, BN, GNI, GNI ghost_size=16"),
        ("gap GNI < A", "GNI: has several cells"),
    ],
)
def test_mistakes(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        judged(tmp_path, {"A": noisy(90)}, {text: False})


def test_a_chain_is_several_claims_and_a_single_label_none(tmp_path):
    found = judged(tmp_path, {"A": noisy(92), "B": noisy(90)}, claims=["A > B > A"])
    assert [claim.verdict for claim in found.claims] == ["supported", "refuted"]
    with pytest.raises(UserError, match="A > B"):
        findings(tmp_path, experiment(tmp_path, claims=["GNI"]))


def test_a_claim_about_a_method_that_is_not_included_or_has_no_runs_is_inconclusive(tmp_path):
    assert [each.verdict for each in judged(tmp_path, {BN: noisy(90)}, claims=["GNI > BN"], only=["GNI"]).claims] == [
        "inconclusive"
    ]
    assert [each.verdict for each in judged(tmp_path, {}, claims=["A > BN"]).claims] == ["inconclusive"]
