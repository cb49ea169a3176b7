"""The runs of the package's recipes: the rows, seeds and numbers of the paper's tables and figures."""

import re
from pathlib import Path

import pytest

from ghostnoise.lab.config import grid, recipe
from ghostnoise.lab.errors import UserError

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")

SIZES = [2, 4, 8, 16, 32, 64, 128, 256]
MORE_SIZES = [*SIZES, 512, 1024]
WITH_HALVES = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
N, RATE, STD, LR = "norm.ghost_size", "norm.p", "norm.std", "optim.lr"
BN = {"BN": ("norm.method=bn",)}
LINES = {**BN, "GBN-16": ("norm.method=gbn norm.ghost_size=16",)}


def cut(*methods, sizes=SIZES):
    return {method.upper(): (f"norm.method={method}", N, sizes) for method in methods}


def parts(method, sizes):
    overrides = {part: f"norm.method={method} norm.components={part}" for part in ("both", "shift", "scale")}
    labels = {"both": "", "shift": " shift", "scale": " scale"}
    return {method.upper() + labels[part]: (words, N, sizes) for part, words in overrides.items()}


def dropout(kind, per):
    words = f"norm.distribution={kind} norm.per={per}"
    return {f"DO {kind.capitalize()} {per}": (words, RATE, [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7])}


def extension(baseline):
    """Table 3."""
    return {
        "baseline": (f"norm.method={baseline} data.augment=none",),
        "GNI": ("norm.method=gni data.augment=none", N, WITH_HALVES),
        "baseline, aug": (f"norm.method={baseline}",),
        "GNI, aug": ("norm.method=gni", N, WITH_HALVES),
    }


def fixed(*sized):
    """Rows such as GNI-16."""
    return {f"{method.upper()}-{size}": (f"norm.method={method} norm.ghost_size={size}",) for method, size in sized}


TABLE1 = {
    **BN, **fixed(("gbn", 16), ("xbn", 32), ("en", 16), ("gni", 16), ("agni", 128)),
    "dropout-0.1": ("norm.method=dropout norm.p=0.1",),
}  # fmt: skip
TUNED_SIZES = [16, 64, 256]

# recipe -> how many seeds, and by label the overrides that lead from its base row to a method, its axis and values.
ROWS = {
    "fig1": (3, {**BN, **cut("gbn")}),
    "fig3-gbn": (5, {**BN, **cut("gbn")}),
    "fig3-xbn-en": (5, {**LINES, **cut("xbn", "en")}),
    "fig3-agni": (5, {**LINES, **parts("agni", [*SIZES, 512, 1024])}),
    "fig3-gni": (5, {**LINES, **cut("gni")}),
    "fig3-gni-parts": (5, {**LINES, **parts("gni", SIZES)}),
    "fig3-dropout": (
        5,
        {**LINES, **dropout("bernoulli", "element"), **dropout("bernoulli", "channel"),
         **dropout("gaussian", "element"), **dropout("gaussian", "channel")},
    ),
    "table1": (3, {**BN, **cut("gbn", "gni", "xbn", "en")}),
    "fig4": (1, {"GNI-32": ("",)}),
    "fig5": (
        5,
        {"WSLN": ("norm.method=none",), "WSLN GNI": ("", N, SIZES),
         **{label: (f"model.name=resnet18 {words}",) for label, (words,) in LINES.items()}},
    ),
    "table2-c10": (3, {**BN, **cut("gbn", "gni", sizes=[16, 32, 64])}),
    "table2-i1k": (1, {**BN, **cut("gbn", "gni", sizes=[16, 32, 64])}),
    "table3-nfresnet": (3, extension("none")),
    "table3-vit": (3, extension("none")),
    "table3-convmixer": (3, extension("bn")),
    "fig6": (1, {"GNI-32": ("",)}),
    "fig7": (
        5,
        {**BN, **fixed(("gni", 16)),
         "EAGN before affine": ("norm.placement=inside", STD, [0.05, 0.1, 0.2, 0.3, 0.5]),
         "EAGN after affine": ("norm.placement=after", STD, [0.05, 0.1, 0.2, 0.3, 0.5])},
    ),
    "table4": (
        3,
        {label: (words, LR, [0.03, 0.1, 0.3])
         for label, (words,) in {"baseline": BN["BN"], **fixed(("gni", 16), ("gni", 32))}.items()},
    ),
    "cpu-mlp": (5, {**BN, **fixed(("gni", 16), ("gni", 32))}),
    "cpu-resnet": (
        5,
        {**BN, **fixed(("gbn", 16), ("xbn", 32), ("en", 16), ("gni", 16), ("gni", 32), ("agni", 128)),
         "dropout-0.1": ("norm.method=dropout norm.p=0.1",)},
    ),
    "cpu-resnet-c100": (5, {**BN, **fixed(("gbn", 16), ("xbn", 32), ("gni", 16))}),
    "cpu-resnet-evalnorm": (
        5,
        {**fixed(("gbn", 16)), "EN-16 1/N²": ("norm.method=en norm.alpha=1/N^2",),
         "EN-8 1/N²": ("norm.method=en norm.ghost_size=8 norm.alpha=1/N^2",)},
    ),
    "cpu-resnet-augment": (
        5,
        {f"{label}{suffix}": (f"{words} {more}",)
         for suffix, more in (("", ""), (", aug", "data.augment=flip-crop data.padding=2"))
         for label, (words,) in {**BN, **fixed(("gni", 16), ("gni", 32))}.items()},
    ),
    "cpu-resnet-c100-sizes": (
        4,
        {**BN, "GNI": ("", N, SIZES[3:]), "BN, 90 epochs": ("norm.method=bn train.epochs=90",),
         "GNI, 90 epochs": ("train.epochs=90", N, SIZES[3:])},
    ),
    "resnet8-table2": (
        3, {**BN, **fixed(*((method, size) for method in ("gbn", "gni") for size in (16, 32, 64)))},
    ),
    "demo": (6, TABLE1),
    "mnist1d-table1": (
        20,
        {**TABLE1, "BRN": ("norm.method=brn norm.warmup_steps=42 norm.transition_steps=168",),
         "XBN+GNI-16": ("norm.normalizer=exclusive",)},
    ),
    "mnist1d-evalnorm": (
        10,
        {**BN, **cut("gbn"), "EN 1/N": ("norm.method=en", N, SIZES),
         "EN 1/N²": ("norm.method=en norm.alpha=1/N^2", N, SIZES)},
    ),
    "mnist1d-evalnorm-table1": (
        20,
        {**BN, **fixed(("gbn", 16)), "EN-16 1/N": ("",),
         "EN-16 1/N²": ("norm.alpha=1/N^2",), "EN-8 1/N²": ("norm.ghost_size=8 norm.alpha=1/N^2",)},
    ),
    "mnist1d-adaptivity": (
        10,
        {**BN, "GNI": ("norm.method=gni", N, MORE_SIZES), "AGNI fc": ("", N, MORE_SIZES),
         "AGNI conv": ("norm.law=conv", N, MORE_SIZES)},
    ),
    "mnist1d-equal-time": (
        20,
        {"BN 60": BN["BN"], "BN 68": ("norm.method=bn train.epochs=68",), "GNI-16 60": ("",),
         "GNI-16 67": ("train.epochs=67",), "dropout 60": ("norm.method=dropout norm.p=0.1",)},
    ),
    "mnist1d-wsln": (
        10,
        {"WSLN": ("norm.method=none",), "BN": ("model.name=conv1d norm.method=bn",),
         "GBN": ("model.name=conv1d norm.method=gbn", N, SIZES), "WSLN + GNI": ("", N, SIZES)},
    ),
    "mnist1d-equal-noise": (10, fixed(("gbn", 16), ("gni", 24), ("gni", 32))),
    "mnist1d-gap": (10, {**BN, **fixed(("gbn", 16), ("xbn", 16), ("gni", 16))}),
    "mnist1d-table3-nfresnet": (10, {"baseline": ("norm.method=none",), "GNI": ("", N, TUNED_SIZES)}),
    "mnist1d-table3-vit": (10, {"baseline": ("norm.method=none",), "GNI": ("", N, TUNED_SIZES)}),
    "mnist1d-table3-convmixer": (10, {"baseline": ("norm.method=bn",), "GNI": ("", N, TUNED_SIZES)}),
    "mnist1d-table4": (
        10, {"baseline": BN["BN"], **fixed(("gni", 16), ("gni", 32))},
    ),
    "mnist1d-fig3": (10, {**BN, **cut("gbn", "xbn", "en"), **parts("gni", SIZES)}),
    "mnist1d-fig3-agni": (10, {**LINES, **fixed(("gni", 16)), **parts("agni", [*SIZES, 512, 1024])}),
    "mnist1d-fig3-dropout": (
        10,
        {**LINES, **fixed(("gni", 16)), **dropout("bernoulli", "element"), **dropout("bernoulli", "channel"),
         **dropout("gaussian", "element"), **dropout("gaussian", "channel")},
    ),
    "mnist1d-fig5": (10, {"baseline": ("norm.method=none",), "GNI": ("", N, SIZES)}),
    "mnist1d-stable-xbn": (
        10,
        {**BN, **cut("gbn", sizes=SIZES[:5]),
         **{label: (f"norm.self_weight=0 {words}", N, SIZES[:5])
            for label, words in (("XBN", ""), ("XBN min_std 0.3", "norm.min_std=0.3"),
                                 ("XBN clamp 4", "norm.clamp_output=4"))},
         **{f"XBN self {share}": (f"norm.self_weight={share}", N, SIZES[:5]) for share in (0.05, 0.2)}},
    ),
    "mnist1d-history": (
        10,
        {"LN 32": ("norm.method=none",), "GNI 32": ("",),
         **{f"GNI {history}{size}x{32 // size}": (f"norm.history={kept} train.accumulation_steps={32 // size}",)
            for size in (2, 4, 8) for history, kept in (("", 0), ("history ", 32))},
         **{f"{label} {size}": (f"{words} train.batch_size={size} optim.lr={0.05 * size / 32}",)
            for size in (2, 4, 8)
            for label, words in (("LN", "norm.method=none"), ("GNI", ""), ("GNI history", "norm.history=32"))}},
    ),
    "mnist1d-fig7": (
        10,
        {**BN, **fixed(("gni", 16)),
         "EAGN before affine": ("norm.placement=inside", STD, [0.05, 0.1, 0.2, 0.3, 0.5]),
         "EAGN after affine": ("norm.placement=after", STD, [0.05, 0.1, 0.2, 0.3, 0.5])},
    ),
}  # fmt: skip
ON_SIGNALS = [name for name in ROWS if name.startswith("mnist1d-")]
# recipe -> cells, and the runs of a sweep.
COUNTS = {
    "fig1": (9, 27), "fig3-gbn": (9, 45), "fig3-xbn-en": (18, 90), "fig3-agni": (32, 160), "fig3-gni": (10, 50),
    "fig3-gni-parts": (26, 130), "fig3-dropout": (30, 150), "table1": (33, 111), "fig4": (1, 1), "fig5": (11, 55),
    "table2-c10": (7, 21), "table2-i1k": (7, 7), "table3-nfresnet": (32, 102), "table3-vit": (32, 102),
    "table3-convmixer": (32, 102), "fig6": (1, 1), "fig7": (12, 60), "table4": (9, 27), "cpu-mlp": (3, 15),
    "cpu-resnet": (8, 55), "cpu-resnet-c100": (4, 20), "mnist1d-table1": (9, 180), "mnist1d-gap": (4, 40),
    "mnist1d-table3-nfresnet": (4, 50), "mnist1d-table3-vit": (4, 50), "mnist1d-table3-convmixer": (4, 50),
    "mnist1d-table4": (3, 30), "demo": (7, 42), "mnist1d-fig3": (49, 490), "mnist1d-fig3-agni": (33, 330),
    "mnist1d-fig3-dropout": (31, 310), "mnist1d-fig5": (9, 90), "mnist1d-fig7": (12, 120),
    "mnist1d-stable-xbn": (31, 310), "mnist1d-history": (17, 170), "mnist1d-equal-noise": (3, 30),
    "mnist1d-evalnorm": (25, 250), "mnist1d-evalnorm-table1": (5, 100), "mnist1d-adaptivity": (31, 310),
    "cpu-resnet-evalnorm": (3, 15), "cpu-resnet-augment": (6, 30), "cpu-resnet-c100-sizes": (12, 48),
    "resnet8-table2": (7, 21), "mnist1d-wsln": (18, 180), "mnist1d-equal-time": (5, 100),
}  # fmt: skip
# Smoke runs have at most two micro-batches, and batches of 32.
SAME_IN_SMOKE_RUNS = {
    "mnist1d-history": {"GNI 4x8", "GNI 8x4", "GNI history 4x8", "GNI history 8x4"},
    "resnet8-table2": {"GBN-64"},
}  # fmt: skip
PAPER = {
    "table1": {
        "BN": "77.10 ± 0.26", "GBN": "78.20 ± 0.10", "GNI": "78.84 ± 0.09", "XBN": "78.33 ± 0.40", "EN": "78.33 ± 0.27",
    },
    "table2-c10": {
        "BN": "92.22 ± 0.05",
        "GBN": {16: "92.65 ± 0.07", 32: "92.53 ± 0.33", 64: "92.50 ± 0.13"},
        "GNI": {16: "93.01 ± 0.28", 32: "92.76 ± 0.11", 64: "92.56 ± 0.12"},
    },
    "table2-i1k": {
        "BN": "77.43",
        "GBN": {16: "76.90", 32: "77.14", 64: "77.48"},
        "GNI": {16: "77.62", 32: "77.70", 64: "77.98"},
    },
    "table3-nfresnet": {
        "baseline": "84.31 ± 0.86", "GNI": "86.18 ± 0.58", "baseline, aug": "93.60 ± 0.21", "GNI, aug": "94.19 ± 0.24",
    },
    "table3-vit": {
        "baseline": "71.45 ± 0.12", "GNI": "74.36 ± 0.27", "baseline, aug": "88.19 ± 0.08", "GNI, aug": "89.55 ± 0.05",
    },
    "table3-convmixer": {
        "baseline": "91.18 ± 0.24", "GNI": "91.57 ± 0.08", "baseline, aug": "93.29 ± 0.17", "GNI, aug": "93.66 ± 0.12",
    },
    "table4": {
        "baseline": "38.0 ± 0.7 (validation)", "GNI-16": "41.3 ± 0.9 (validation)", "GNI-32": "40.7 ± 0.7 (validation)",
    },
}  # fmt: skip
TUNED = {
    "table1", "table3-nfresnet", "table3-vit", "table3-convmixer", "mnist1d-table3-nfresnet", "mnist1d-table3-vit",
    "mnist1d-table3-convmixer",
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", ROWS)


def test_every_recipe_has_a_grid_but_the_first_to_run():
    assert sorted([*ROWS, "digits"]) == recipe.names()
    with pytest.raises(UserError, match=r"has no \[grid\]; `ghostnoise train digits`"):
        grid.load("digits")


@EVERY
def test_cells_are_the_runs_that_overrides_lead_to(name):
    seeds, rows = ROWS[name]
    split = ["data.evaluate=validation"] if name in TUNED else []
    expected = [
        (label, recipe.load(name, [*words.split(), *split, *more]).settings)
        for label, (words, *axis) in rows.items()
        for more in ([[f"{axis[0]}={value}"] for value in axis[1]] if axis else [[]])
    ]
    made = grid.load(name)
    assert made.seeds == list(range(seeds))
    assert [(cell.label, cell.settings) for cell in made.cells()] == expected


@EVERY
def test_how_many_runs_a_sweep_is(name):
    made = grid.load(name)
    tuned = {cell.label for cell in made.cells() if cell.at} if made.select else set()
    cells, runs = COUNTS[name]
    assert len(made.cells()) == cells
    points = [(cell, seed) for cell in made.cells() for seed in made.seeds_of(cell.label)]
    assert len(points) + len(tuned) * len(made.seeds) == runs
    assert documented(name) == runs
    assert len({recipe.identity(cell.settings.model_copy(update={"seed": seed})) for cell, seed in points}) == len(
        points
    )


def test_three_methods_of_cpu_resnet_have_more_seeds():
    made = grid.load("cpu-resnet")
    more = {cell.label for cell in made.cells() if made.seeds_of(cell.label) == list(range(10))}
    assert more == {"BN", "GBN-16", "GNI-16"}


def documented(name):
    """Return the number of runs in the guide."""
    line = next(line for line in GUIDE.splitlines() if line.startswith(f"| `{name}` |"))
    return int(re.search(r"\| (\d+) \|[^|]*\|$", line)[1])


SIZED = re.compile(r"(GBN|XBN|EN|GNI|AGNI)-(\d+)$")


@pytest.mark.parametrize("name", ["demo", *ON_SIGNALS])
def test_labels_are_those_of_the_settings(name):
    """A label such as GNI-16 is a method and a ghost size, and dropout-0.1 a probability."""
    made = grid.load(name)
    for cell in made.cells():
        norm = cell.settings.norm
        if found := SIZED.match(cell.label):
            assert (norm.method.upper(), norm.ghost_size) == (found[1], int(found[2]))
        elif cell.label.startswith("dropout-"):
            assert (norm.method, norm.p) == ("dropout", float(cell.label.removeprefix("dropout-")))
        elif cell.label in ("BN", "BRN"):
            assert norm.method.upper() == cell.label
        assert cell.settings.data.name == "mnist1d"
    assert len(made.seeds) >= 6
    assert made.seeds == list(range(len(made.seeds)))
    assert made.report.claims, "stated before the runs"


@pytest.mark.parametrize("name", ON_SIGNALS)
def test_a_smoke_sweep_on_signals_has_every_method(name):
    made, small = grid.load(name), grid.load(name, smoke=True)
    same = SAME_IN_SMOKE_RUNS.get(name, set())
    assert {cell.label for cell in small.cells()} == {cell.label for cell in made.cells()} - same
    assert all(cell.settings.train.smoke for cell in small.cells())


@EVERY
def test_the_papers_numbers(name):
    def number(cell):
        of_method = PAPER.get(name, {}).get(cell.label)
        return of_method[cell.settings.norm.ghost_size] if isinstance(of_method, dict) else of_method

    for cell in grid.load(name).cells():
        assert cell.paper == number(cell), cell.cell


@EVERY
def test_what_train_runs_is_one_of_the_rows(name):
    made = grid.load(name)
    cells = [made.tests({"": cell})[0] if made.select else cell for cell in made.cells()]
    base = [cell for cell in cells if cell.settings == made.recipe.settings]
    assert len(base) == 1
    if scored := re.match(r"[\d.]+( ± [\d.]+)?(?= %)", made.recipe.score):
        assert base[0].paper.removesuffix(" (validation)") == scored[0]


@EVERY
def test_tables_are_tuned_on_validation_images_and_tested_on_others(name):
    made = grid.load(name)
    assert (made.select is not None) == (name in TUNED)
    if made.select:
        assert (made.select.axes, made.select.metric) == ([N], "accuracy")
        assert {cell.settings.data.evaluate for cell in made.cells()} == {"validation"}
        assert {made.tests({"": cell})[0].settings.data.evaluate for cell in made.cells()} == {"test"}


@EVERY
def test_a_smoke_sweep_has_every_method(name):
    made = grid.load(name, smoke=True)
    assert {cell.label for cell in made.cells()} == set(ROWS[name][1]) - SAME_IN_SMOKE_RUNS.get(name, set())
    assert all(cell.settings.train.smoke for cell in made.cells())
    assert len(made.seeds) <= 2


@EVERY
def test_the_report(name):
    made, axes = grid.load(name), {axis[1] for axis in ROWS[name][1].values() if axis[1:]}
    figures = ("fig1", "fig3", "fig5", "fig7", "mnist1d-fig", "mnist1d-stable", "mnist1d-adaptivity", "mnist1d-wsln",
               "cpu-resnet-c100-sizes")  # fmt: skip
    curves = name.startswith(figures) or name in ("table4", "mnist1d-evalnorm")
    form = "noise" if name in ("fig4", "fig6") else "curves" if curves else "bars"
    assert made.report.form == form
    assert made.report.x == (axes.pop() if curves else None)
    for claim in made.report.claims:
        better, worse = claim.split(" > ")
        assert better != worse
        if name in PAPER:  # and the paper's numbers bear it out
            assert best(PAPER[name][better]) > best(PAPER[name][worse])
    if form != "noise":
        baseline = next(cell for cell in made.cells() if cell.label == made.report.baseline)
        known = {
            "mnist1d-gap": ("gbn",), "mnist1d-equal-noise": ("gbn",), "mnist1d-stable-xbn": ("xbn",),
            "mnist1d-evalnorm-table1": ("gbn",), "cpu-resnet-evalnorm": ("gbn",),
        }  # fmt: skip
        assert baseline.settings.norm.method in known.get(name, ("bn", "none"))


def best(number):
    return max(float(each.split()[0]) for each in (number.values() if isinstance(number, dict) else [number]))


def test_recipes_share_runs():
    """Table 1 is tuned by runs of figure 3, and the lines of its panels are the same runs."""
    made = {name: {recipe.identity(cell.settings) for cell in grid.load(name).cells()} for name in ROWS}
    assert made["table1"] <= made["fig3-gbn"] | made["fig3-xbn-en"] | made["fig3-gni"]
    assert made["fig3-gni"] <= made["fig3-gni-parts"]
    for name in ("fig3-xbn-en", "fig3-agni", "fig3-gni", "fig3-dropout", "fig5"):
        assert len(made[name] & made["fig3-gbn"]) == 2
    lines = made["mnist1d-fig3-agni"] & made["mnist1d-fig3-dropout"]
    assert len(lines) == 3, "BN, GBN-16 and GNI-16"
    assert lines < made["mnist1d-fig3"]
    assert made["mnist1d-fig7"] & made["mnist1d-fig3"] < lines
    assert len(made["mnist1d-stable-xbn"] & made["mnist1d-fig3"]) == 11, "BN, and GBN and XBN of five sizes"
    assert len(made["mnist1d-evalnorm"] & made["mnist1d-fig3"]) == 17, "BN, and GBN and EN of all sizes"
    assert len(made["mnist1d-evalnorm-table1"] & made["mnist1d-table1"]) == 3, "BN, GBN-16 and EN-16"
    assert len(made["mnist1d-adaptivity"] & (made["mnist1d-fig3"] | made["mnist1d-fig3-agni"])) == 19
    assert made["mnist1d-wsln"] < made["mnist1d-fig3"] | made["mnist1d-fig5"]
    assert not made["demo"] & made["mnist1d-fig3"], "test and validation signals"
