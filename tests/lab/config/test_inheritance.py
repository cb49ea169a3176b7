"""Variants of recipes: how they are read, and that "released" has the settings of the authors' scripts."""

import hashlib
import json

import pytest

from ghostnoise.lab.config import grid, recipe
from ghostnoise.lab.config.overrides import check
from ghostnoise.lab.errors import UserError
from support import experiment
from support.training import trained

# recipe -> its base settings, its smoke run, and all cells of its grid, in the variant "released".
PINNED = {
    "fig1": ("0e1095a4a2bd", "02d3577bc707", "2782c7c74017"),
    "fig3-agni": ("5ad0a3a215da", "2c5b9ca6adcd", "7dfa446ce8f1"),
    "fig3-dropout": ("33762fc90af2", "3b90e13826c8", "29d0dbb2707d"),
    "fig3-gbn": ("0e1095a4a2bd", "02d3577bc707", "2782c7c74017"),
    "fig3-gni": ("1355688629c0", "854ad944b059", "98a5aed78613"),
    "fig3-gni-parts": ("b6216362a1f6", "dd809314a3b2", "114179af120a"),
    "fig3-xbn-en": ("c9639e9e123c", "6f78ed1f563e", "7e7b713c1c37"),
    "fig5": ("a65f74211afc", "44c009b4120f", "2915d7fa6035"),
    "table1": ("8057d416ff71", "c8e98755c1a4", "36f4ea8db655"),
    "table2-c10": ("2f81d5763e6a", "076e82dde2bc", "20785a8c1cc3"),
    "table2-i1k": ("0162c763bf79", "bbbc765b3e27", "9e34e8f8c8a2"),
    "table3-convmixer": ("c55119f9cc4e", "1cb262d89554", "1641d4c4bbde"),
    "table3-nfresnet": ("c67365326ca0", "c954a44850ee", "198bd87d7300"),
    "table3-vit": ("0aca26a84c6d", "e7eba0bcb3d6", "c1e5cee3b187"),
    "table4": ("6a6df9cd8b56", "274728c87f22", "e6036b18116c"),
}

# Settings of the released scripts: lr, warm-up epochs and weight decay are those of the recipe.
SGD = {
    "optim.nesterov": True, "optim.momentum": 0.9, "optim.warmup_lr": 1e-6, "optim.warmup_prefix": False,
    "optim.min_lr": 1e-5,
}  # fmt: skip
ADAMW = {"optim.warmup_lr": 1e-6, "optim.warmup_prefix": False, "optim.min_lr": 1e-5}
C100 = SGD | {"data.padding": 4, "data.name": "cifar100", "train.batch_size": 256, "train.label_smoothing": 0.0}
RN18 = C100 | {"model.name": "preact-resnet18"}
SWEEP = RN18 | {"data.evaluate": "validation", "data.split_seed": "run"}
SCRIPTS = {
    "fig1": SWEEP,
    "fig3-agni": SWEEP | {"norm.dof": "exact", "norm.noise_eps": 0.0, "norm.law": "fc"},
    "fig3-dropout": SWEEP | {"norm.placement": "branch"},
    "fig3-gbn": SWEEP,
    "fig3-gni": SWEEP | {"norm.noise_eps": 1e-3, "norm.placement": "inside"},
    "fig3-gni-parts": SWEEP | {"norm.noise_eps": 1e-3},
    "fig3-xbn-en": SWEEP,
    "fig5": SWEEP | {"model.name": "preact-wsln-resnet18", "norm.placement": "inside"},
    "table1": RN18 | {"data.evaluate": "test"},
    "table2-c10": SGD | {"data.padding": 4, "data.evaluate": "test", "model.name": "resnet20"},
    "table2-i1k": SGD | {
        "model.name": "resnet50", "model.zero_init_last": True, "train.label_smoothing": 0.1, "train.batch_size": 256,
        "train.amp": "fp16", "train.channels_last": False,
    },
    "table3-convmixer": {
        "optim.warmup_lr": 1e-5, "optim.warmup_prefix": False, "optim.min_lr": None, "optim.eps": 1e-3,
        "train.amp": "none", "train.batch_size": 256, "data.evaluate": "test", "data.padding": 4,
    },
    "table3-nfresnet": SGD | {"train.amp": "fp16", "train.batch_size": 256, "data.evaluate": "test", "data.padding": 4},
    "table3-vit": ADAMW | {
        "train.batch_size": 1024, "train.amp": "fp16", "optim.warmup_epochs": 40.0, "data.evaluate": "test",
    },
    "table4": SGD | {"data.padding": 4, "data.split_seed": "run", "data.evaluate": "validation",
                     "train.batch_size": 1024, "model.name": "mlp"},
}  # fmt: skip
RELEASED = pytest.mark.parametrize("name", SCRIPTS)


def value(settings, key):
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def refusal(function, *given, **options):
    with pytest.raises(UserError) as error:
        function(*given, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_recipes_with_scripts_have_the_variant():
    assert recipe.having_variant("released") == sorted(SCRIPTS)
    assert recipe.having_variant("another") == []


@RELEASED
def test_base_settings_are_those_of_the_scripts(name):
    base, variant = recipe.load(name), recipe.load(name, variant="released")
    assert {key: value(variant.settings, key) for key in SCRIPTS[name]} == SCRIPTS[name]
    assert (variant.name, variant.words) == (f"{name}-released", f"{name} --variant released")
    assert variant.command == f"{base.command} --variant released"
    assert (base.name, base.words, base.variant) == (name, name, None)
    assert variant.identity != base.identity


def runs(name, **options):
    """The seeds of each cell."""
    made = grid.load(name, variant="released", **options)
    return {cell.cell: made.seeds_of(cell.label) for cell in made.cells()}


SWEPT, FEW, TESTED = [20, 21, 22, 23, 24], [20, 21, 22], [42, 43, 44]


def test_cells_and_seeds_are_those_of_the_scripts():
    cells = ("BN", "GBN ghost_size=16", "GNI ghost_size=16", "XBN ghost_size=32", "EN ghost_size=8")
    assert runs("table1") == {cell: [42, 33, 43] for cell in cells}
    for name in ("fig1", "fig3-gbn", "fig3-gni-parts", "fig3-agni", "fig3-xbn-en", "fig5"):
        assert set(map(tuple, runs(name).values())) == {tuple(SWEPT)}
        assert list(runs(name)) == [cell.cell for cell in grid.load(name).cells()]
    base, sizes = [cell.cell for cell in grid.load("fig3-gni").cells()], (2, 4, 8, 16, 32, 64, 128, 256)
    after_xbn = [f"XBN GNI ghost_size={size}" for size in sizes]
    assert runs("fig3-gni") == dict.fromkeys(base, SWEPT) | dict.fromkeys(after_xbn, FEW)
    for name, seeds in runs("fig3-dropout").items():
        assert seeds == (FEW if "Bernoulli" in name else SWEPT)
    assert runs("table2-c10") == {cell.cell: TESTED for cell in grid.load("table2-c10").cells()}
    for name, sizes in {"nfresnet": (32, 32), "vit": (4, 12), "convmixer": (192, 128)}.items():
        cells = ("baseline", f"GNI ghost_size={sizes[0]}", "baseline, aug", f"GNI, aug ghost_size={sizes[1]}")
        assert runs(f"table3-{name}") == dict.fromkeys(cells, TESTED)


def test_imagenet_has_batch_norm_at_the_size_of_a_micro_batch_in_place_of_gbn():
    cells = {cell.cell: cell for cell in grid.load("table2-i1k", variant="released").cells()}
    assert runs("table2-i1k") == {name: [0, 1, 2] if name == "BN" else [0] for name in cells}
    assert list(cells)[:4] == ["BN", "GBN-16", "GBN-32", "GBN-64"]
    sizes = {}
    for name, cell in cells.items():
        train, norm = cell.settings.train, cell.settings.norm
        if norm.method == "bn":
            sizes[name] = (train.batch_size, train.batch_size // (train.accumulation_steps or 1))
        assert train.channels_last == (norm.method == "bn")
    assert sizes == {"BN": (256, 256), "GBN-16": (512, 32), "GBN-32": (256, 32), "GBN-64": (256, 64)}
    assert [cells[name].paper for name in ("BN", "GBN-16", "GBN-32", "GBN-64")] == ["77.43", "76.90", "77.14", "77.48"]


def test_options_of_the_methods_are_those_of_the_released_code():
    def options(name, method):
        return [
            cell.settings.norm.options
            for cell in grid.load(name, variant="released").cells()
            if cell.settings.norm.method == method
        ]

    assert {each["alpha"] for name in ("table1", "fig3-xbn-en") for each in options(name, "en")} == {"1/N^2"}
    assert {(each["dof"], each["noise_eps"], each["law"]) for each in options("fig3-agni", "agni")} == {
        ("exact", 0.0, "fc")
    }
    assert {(each["distribution"], each["p_sets"]) for each in options("fig3-dropout", "dropout")} == {
        ("bernoulli", "variance"), ("gaussian", "std"),
    }  # fmt: skip


@RELEASED
def test_the_results_of_the_paper_stay(name):
    papers = [
        sorted(str(cell.paper) for cell in grid.load(name, variant=variant).cells() if cell.paper)
        for variant in (None, "released")
    ]
    assert set(papers[1]) == set(papers[0])


@RELEASED
def test_identities(name):
    base, smoke, cells = PINNED[name]
    assert recipe.load(name, variant="released").identity == base
    assert recipe.load(name, variant="released", smoke=True).identity == smoke
    identities = " ".join(recipe.identity(cell.settings) for cell in grid.load(name, variant="released").cells())
    assert hashlib.sha256(identities.encode()).hexdigest()[:12] == cells


@RELEASED
def test_stored_settings_are_read_back(name):
    for cell in grid.load(name, variant="released").cells():
        record = json.loads(json.dumps(cell.settings.model_dump(exclude_none=True)))
        assert recipe.stored(record) == cell.settings


@RELEASED
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_smoke_runs_fit(name, processes):
    for cell in grid.load(name, variant="released", smoke=True).cells():
        made = recipe.resolve(cell.settings, device="cpu", processes=processes, stand_in=True)
        check(made, processes)
        assert made.train.batch_size <= 32


@pytest.mark.slow
@RELEASED
def test_every_variant_runs(name, tmp_path, monkeypatch):
    """The last cell and one with gradient accumulation, shrunk, on random images."""
    monkeypatch.setenv("GHOSTNOISE_DATA", str(tmp_path / "data"))
    made = grid.load(name, ["train.device=cpu"], variant="released", smoke=True)
    last = {bool(cell.settings.train.accumulation_steps): cell for cell in made.cells()}
    for cell in last.values():
        outcome = trained(cell, tmp_path, workers=0)
        assert outcome.result["status"] == "finished", cell.cell
        assert outcome.folder.parent == tmp_path / f"{name}-released"


# The format


VARIANTS = """
[variants.shifted]
set.norm.components = "shift"
set.optim.lr = 0.2

[variants.shifted.grid]
seeds = [5]

[[variants.shifted.grid.methods]]
label = "GNI"
set.train.epochs = 2
axes.norm.ghost_size = [8]

[[variants.shifted.grid.methods]]
label = "XBN"
set.norm.method = "xbn"
seeds = [6, 7]

[variants.shifted.report]
baseline = "XBN"

[variants.plain]
set.norm.method = "bn"
"""


@pytest.fixture
def path(tmp_path):
    return experiment.write(tmp_path, experiment.THREE + VARIANTS)


def test_a_variant_changes_settings_grid_and_report(path):
    made = grid.load(path, variant="shifted")
    assert (made.recipe.name, made.recipe.words) == ("small-shifted", "small --variant shifted")
    assert made.recipe.settings.norm.components == "shift"
    cells = {cell.cell: cell for cell in made.cells()}
    assert list(cells) == ["GNI ghost_size=8", "XBN ghost_size=4", "XBN ghost_size=16"]
    assert [made.seeds_of(cell.label) for cell in cells.values()] == [[5], [6, 7], [6, 7]]
    assert {cell.settings.optim.lr for cell in cells.values()} == {0.2}
    own = cells["GNI ghost_size=8"].settings
    assert (own.norm.method, own.norm.components, own.train.epochs) == ("gni", "shift", 2)  # "set" is completed
    assert made.report.baseline == "XBN"
    points = made.runs()
    assert [point.seed for point in points] == [5, 6, 7, 6, 7]


def test_the_recipe_without_its_variants_is_the_same(path, tmp_path):
    other = experiment.write(tmp_path, name="other")
    assert recipe.load(path).identity == recipe.load(other).identity
    assert [cell.settings for cell in grid.load(path).cells()] == [cell.settings for cell in grid.load(other).cells()]
    assert grid.load(path).seeds == [0, 1]


def test_a_variant_removes_settings_that_do_not_belong_to_its_method(path):
    norm = recipe.load(path, variant="plain").settings.norm
    assert (norm.method, norm.ghost_size) == ("bn", None)


def test_overrides_and_seeds_change_a_variant_further(path):
    made = grid.load(path, ["optim.lr=0.3", "norm.ghost_size=4"], variant="shifted", seeds=[1, 2, 3], only=["XBN"])
    (cell,) = made.cells()
    assert (cell.settings.optim.lr, cell.settings.norm.ghost_size, made.seeds_of(cell.label)) == (0.3, 4, [1, 2, 3])
    small = grid.load(path, variant="shifted", smoke=True, seeds=[1, 2, 3])
    assert [small.seeds_of(cell.label) for cell in small.cells()] == 3 * [[1, 2]]


def test_a_recipe_without_the_variant_is_refused():
    said = refusal(recipe.load, "fig4", variant="released")
    assert said == (
        f"--variant released: fig4 has no variants; the recipes that have this one are {', '.join(sorted(SCRIPTS))}"
    )
    for name in ("fig6", "fig7", "digits"):
        assert refusal(grid.load, name, variant="released").startswith(f"--variant released: {name} has no variants; ")
    assert refusal(recipe.load, "fig4", variant="x") == "--variant x: fig4 has no variants; leave --variant out"


def test_an_unknown_variant_or_recipe_is_refused(path):
    assert refusal(recipe.load, "table1", variant="relased") == (
        "--variant relased: table1 has no such variant; it has released"
    )
    assert refusal(grid.load, path, variant="x") == f"--variant x: {path} has no such variant; it has shifted, plain"
    assert refusal(recipe.load, "table5", variant="released").startswith("recipe 'table5': not found; did you mean")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[variants]\na = 1", "variants.a: must be a section, [variants.a]"),
        ("[variants.a]\nsets.seed = 1", "variants.a.sets: unknown; a variant has set, grid, report"),
        ("[variants.a]\nset = 1", "variants.a.set: must be a table, such as variants.a.set.seed = 1"),
        ("[variants.a]\nset.optim.rate = 1", "optim.rate: unknown; did you mean"),
        ("[variants.a]\nset.optim.lr = 0", "optim.lr=0: must be above 0"),
        ("[variants.a]\ngrid.seeds = []", "grid.seeds=[]: must have 1 value or more"),
        ("[variants.a]\ngrid.methods = 1", "grid.methods=1: "),
        ("[variants.a]\ngrid.methods = [1]", "grid.methods[0]=1: "),
        ("[variants.a]\ngrid.methods = [{set.norm.method = 'bn'}]", "grid.methods[0].label: missing"),
        ("[variants.a]\nreport.baseline = 'X'", "report: no method is called 'X'; there are BN, GBN, GNI"),
    ],
)
def test_mistakes_in_a_variant_are_one_line(tmp_path, text, line):
    path = experiment.write(tmp_path, f"{experiment.THREE}\n{text}\n")
    assert refusal(grid.load, path, variant="a").startswith(line)


# Recipes that extend others


def child(tmp_path, text, base="small.toml", name="child"):
    path = tmp_path / f"{name}.toml"
    path.write_text(f'extends = "{base}"\n{text}')
    return str(path)


def test_a_recipe_inherits_settings_and_the_grid(path, tmp_path):
    made = grid.load(child(tmp_path, """
[optim]
lr = 0.3
[grid]
seeds = [4]
[[grid.methods]]
label = "GNI"
set.norm.components = "shift"
"""))  # fmt: skip
    cells = {cell.cell: cell.settings for cell in made.cells()}
    assert list(cells) == ["GNI ghost_size=4", "GNI ghost_size=16"]  # the axes of the recipe below, and its method
    assert {(each.optim.lr, each.norm.components) for each in cells.values()} == {(0.3, "shift")}
    assert (made.seeds, made.recipe.name, made.report.baseline) == ([4], "child", None)
    base = recipe.load(path).settings
    assert made.recipe.settings == base.model_copy(update={"optim": base.optim.model_copy(update={"lr": 0.3})})


def test_a_recipe_without_changes_is_the_same(path, tmp_path):
    for base in ("small.toml", "./small.toml"):
        again = grid.load(child(tmp_path, "", base))
        assert [cell.settings for cell in again.cells()] == [cell.settings for cell in grid.load(path).cells()]
    assert recipe.load(child(tmp_path, "", "digits")).identity == recipe.load("digits").identity


def test_a_new_method_drops_settings_of_the_other(path, tmp_path):
    norm = recipe.load(child(tmp_path, '[norm]\nmethod = "dropout"\np = 0.1')).settings.norm
    assert (norm.method, norm.p, norm.ghost_size) == ("dropout", 0.1, None)


def test_selection_report_and_variants_are_not_inherited(tmp_path):
    plan = experiment.THREE + '[select]\naxes = ["norm.ghost_size"]\n[report]\nbaseline = "GBN"\n' + VARIANTS
    experiment.write(tmp_path, plan)
    made = grid.load(child(tmp_path, ""))
    assert (made.select, made.report.baseline) == (None, None)
    assert refusal(recipe.load, child(tmp_path, ""), variant="shifted").endswith("has no variants; leave --variant out")


def test_a_variant_starts_from_the_settings_of_the_same_variant(path, tmp_path):
    text = "[variants.shifted]\nset.optim.weight_decay = 0.5\n[variants.shifted.grid]\nseeds = [9]\n"
    made = grid.load(child(tmp_path, text), variant="shifted")
    settings = made.recipe.settings
    assert (settings.norm.components, settings.optim.lr, settings.optim.weight_decay) == ("shift", 0.2, 0.5)
    assert (made.recipe.name, made.seeds) == ("child-shifted", [9])
    assert {cell.label for cell in made.cells()} == {"BN", "GBN", "GNI"}  # the grid is that of the recipe


def test_recipes_extend_one_another(path, tmp_path):
    child(tmp_path, "[optim]\nlr = 0.4\n[train]\nepochs = 2", name="first")
    made = recipe.load(child(tmp_path, "[train]\nepochs = 3", "first.toml")).settings
    assert (made.optim.lr, made.train.epochs) == (0.4, 3)


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ("tabel1", "recipe 'tabel1': not found; did you mean table1"),
        ("absent.toml", "absent.toml: cannot be read (No such file or directory)"),
        ("child.toml", "and so on, more than 8 times; remove one"),
    ],
)
def test_what_cannot_be_extended(tmp_path, base, line):
    assert line in refusal(recipe.load, child(tmp_path, "", base))


def test_extends_must_be_a_name(tmp_path):
    (tmp_path / "child.toml").write_text("extends = 3")
    assert refusal(recipe.load, str(tmp_path / "child.toml")).endswith(
        "extends=3: must be the name or the path of a recipe, in quotes"
    )
