import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.config import grid, recipe
from ghostnoise.lab.errors import UserError
from support import experiment


def loaded(tmp_path, plan=experiment.THREE, *overrides, **options):
    return grid.load(experiment.write(tmp_path, plan), overrides, **options)


def named(made):
    return [cell.cell for cell in made.cells()]


def test_methods_are_crossed_with_the_axes_but_those_they_go_without(tmp_path):
    made = loaded(tmp_path)
    assert named(made) == ["BN", "GBN ghost_size=4", "GBN ghost_size=16", "GNI ghost_size=4", "GNI ghost_size=16"]
    assert [cell.settings.norm.method for cell in made.cells()] == ["bn", "gbn", "gbn", "gni", "gni"]
    assert [cell.settings.norm.ghost_size for cell in made.cells()] == [None, 4, 16, 4, 16]
    assert made.seeds == [0, 1]
    assert [run.seed for run in made.runs() if run.cell == "GNI ghost_size=4"] == [0, 1]


def test_a_cell_is_the_run_that_the_same_overrides_of_train_make(tmp_path):
    made = loaded(tmp_path)
    for cell in made.cells():
        method = {"BN": "bn", "GBN": "gbn", "GNI": "gni"}[cell.label]
        words = [f"norm.method={method}", *(f"{key}={value}" for key, value in cell.at), "seed=1"]
        alone = recipe.load(experiment.write(tmp_path), words)
        assert recipe.identity(cell.settings.model_copy(update={"seed": 1})) == alone.identity


def test_axes_of_a_method_replace_those_of_the_grid(tmp_path):
    made = loaded(tmp_path, """
[grid]
axes.norm.ghost_size = [4, 8]
axes.optim.lr = [0.1, 0.2]
[[grid.methods]]
label = "A"
axes.norm.ghost_size = [32]
[[grid.methods]]
label = "B"
without = ["optim.lr"]
""")  # fmt: skip
    assert named(made) == ["A ghost_size=32 lr=0.1", "A ghost_size=32 lr=0.2", "B ghost_size=4", "B ghost_size=8"]


ZIPPED = """
[grid]
axes.norm.ghost_size = [4, 8]
[[grid.zip]]
train.batch_size = [32, 64]
optim.lr = [0.1, 0.2]
[[grid.methods]]
label = "A"
"""


def test_zipped_axes_go_together(tmp_path):
    made = loaded(tmp_path, ZIPPED)
    places = [(cell.settings.norm.ghost_size, cell.settings.train.batch_size, cell.settings.optim.lr)
              for cell in made.cells()]  # fmt: skip
    assert places == [(4, 32, 0.1), (4, 64, 0.2), (8, 32, 0.1), (8, 64, 0.2)]


def test_an_override_leaves_one_value_of_an_axis(tmp_path):
    assert named(loaded(tmp_path, experiment.THREE, "norm.ghost_size=8")) == [
        "BN", "GBN ghost_size=8", "GNI ghost_size=8",
    ]  # fmt: skip
    freed = loaded(tmp_path, ZIPPED, "optim.lr=0.5")
    assert [(cell.settings.train.batch_size, cell.settings.optim.lr) for cell in freed.cells()][:2] == [
        (32, 0.5), (64, 0.5),
    ]  # fmt: skip
    plain = loaded(tmp_path, experiment.THREE, "train.epochs=3")
    assert {cell.settings.train.epochs for cell in plain.cells()} == {3}


def test_an_unset_axis_is_none(tmp_path):
    plan = """
[grid]
axes.optim.clip = [1.0, 2.0]
[[grid.methods]]
label = "A"
"""
    (cell,) = loaded(tmp_path, plan, "optim.clip=").cells()
    assert cell.at == ()
    assert cell.settings.optim.clip is None


def test_only_keeps_methods_and_seeds_are_replaced(tmp_path):
    made = loaded(tmp_path, only=["BN"], seeds=[7, 3, 7])
    assert named(made) == ["BN"]
    assert made.seeds == [7, 3]


def test_smoke_keeps_two_seeds_and_the_ends_of_axes(tmp_path):
    plan = """
[grid]
seeds = [5, 6, 7]
axes.norm.ghost_size = [2, 4, 8, 64, 256]
[[grid.zip]]
optim.lr = [0.1, 0.2, 0.1]
optim.weight_decay = [0.1, 0.2, 0.3]
[[grid.methods]]
label = "GBN"
set.norm.method = "gbn"
"""
    base = experiment.BASE.replace("batch_size = 64", "batch_size = 256")
    made = grid.load(experiment.write(tmp_path, plan, base=base), smoke=True)
    assert made.seeds == [5, 6]
    found = [(cell.settings.norm.ghost_size, cell.settings.optim.weight_decay) for cell in made.cells()]
    assert found == [(2, 0.1), (2, 0.3), (32, 0.1), (32, 0.3)]
    assert all(cell.settings.train.smoke for cell in made.cells())


def test_smoke_forgives_cells_that_shrink_to_the_same(tmp_path):
    plan = """
[grid]
axes.train.epochs = [50, 100]
[[grid.methods]]
label = "A"
"""
    assert len(loaded(tmp_path, plan).cells()) == 2
    assert len(loaded(tmp_path, plan, smoke=True).cells()) == 1


def test_with_select_cells_are_tuned_on_validation_images_and_tested_on_the_others(tmp_path):
    plan = experiment.THREE + '[select]\naxes = ["norm.ghost_size"]\n'
    made = grid.load(
        experiment.write(tmp_path, plan, base=experiment.BASE.replace('"digits"\n', '"digits"\nevaluate = "test"\n'))
    )
    assert {cell.settings.data.evaluate for cell in made.cells()} == {"validation"}
    assert {made.tests({"": cell})[0].settings.data.evaluate for cell in made.cells()} == {"test"}
    assert [made.group(cell) for cell in made.cells()] == ["BN", "GBN", "GBN", "GNI", "GNI"]


def test_the_papers_numbers_are_those_of_the_first_axis(tmp_path):
    plan = """
[grid]
axes.norm.ghost_size = [4, 16]
[[grid.methods]]
label = "GNI"
paper = {"16" = "78.84"}
[[grid.methods]]
label = "BN"
set.norm.method = "bn"
without = ["norm.ghost_size"]
paper = "77.10"
"""
    assert [cell.paper for cell in loaded(tmp_path, plan).cells()] == [None, "78.84", "77.10"]


SIZES = ["GNI ghost_size=4", "GNI ghost_size=8"]


@pytest.mark.parametrize(
    ("overrides", "cells", "x"),
    [
        (["norm.ghost_size=4,8"], SIZES, "norm.ghost_size"),
        (["norm.ghost_size=4,8", "optim.lr=0.2"], SIZES, "norm.ghost_size"),
        (["norm.method=gbn", "norm.ghost_size=4, 8"], ["GBN ghost_size=4", "GBN ghost_size=8"], "norm.ghost_size"),
        (["norm.method=bn,gni,dropout", "norm.ghost_size=4,8", "norm.p=0.1"], ["BN", *SIZES, "DROPOUT"],
         "norm.ghost_size"),
        (["model.name=mlp", "model.widths=[8],[16, 16]"], ["GNI widths=[8]", "GNI widths=[16, 16]"], None),
        (["data.evaluate='test',validation"], ["GNI evaluate=test", "GNI evaluate=validation"], None),
        ([], ["GNI"], None),
    ],
)  # fmt: skip
def test_several_values_and_seeds_make_a_grid_of_any_recipe(overrides, cells, x):
    made = grid.load("digits", overrides, seeds=[0, 1])
    assert named(made) == cells
    assert (made.seeds, made.select, made.report.x) == ([0, 1], None, x)
    assert made.recipe.name == "digits"  # its runs are those of `ghostnoise train`


def test_a_point_of_such_a_grid_is_the_run_that_the_same_overrides_of_train_make():
    for size, cell in zip((4, 8), grid.load("digits", ["norm.ghost_size=4,8", "optim.lr=0.2"]).cells(), strict=True):
        alone = recipe.load("digits", [f"norm.ghost_size={size}", "optim.lr=0.2", "seed=3"])
        assert recipe.identity(cell.settings.model_copy(update={"seed": 3})) == alone.identity


def test_several_values_restrict_or_add_an_axis(tmp_path):
    assert named(loaded(tmp_path, experiment.THREE, "norm.ghost_size=8,16", only=["GNI"])) == [
        "GNI ghost_size=8", "GNI ghost_size=16",
    ]  # fmt: skip
    assert named(loaded(tmp_path, experiment.THREE, "optim.lr=0.1,0.2", only=["BN"])) == ["BN lr=0.1", "BN lr=0.2"]


def test_a_grid_of_too_many_runs_is_refused_before_any_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "validated", lambda *given, **more: pytest.fail("a run was made"))
    hundred = ",".join(map(str, range(1, 101)))
    axes = [f"{key}={hundred}" for key in ("optim.lr", "norm.ghost_size", "train.epochs", "optim.clip")]
    with pytest.raises(UserError, match=r"^grid: 200,000,000 runs; must be at most 100,000: give fewer values"):
        grid.load("digits", axes, seeds=[0, 1])
    plan = f"[grid]\nseeds = {[*range(6)]}\naxes.optim.lr = {[*range(1, 20_001)]}\n{A}"
    with pytest.raises(UserError, match=r"^grid: 120,000 runs; must be"):
        loaded(tmp_path, plan)


A = '[[grid.methods]]\nlabel = "A"\n'


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ("", "has no [grid]; `ghostnoise train"),
        ("[grid]\nseeds = [0]\n", "grid.methods: missing"),
        ("[grid]\nmethods = []\n", "grid.methods=[]: must have 1 value or more"),
        (f"[grid]\naxes.optim.lr = []\n{A}", "grid.axes.optim.lr=[]: must have 1 value or more"),
        (f"[grid]\nseeds = []\n{A}", "grid.seeds=[]: must have 1 value or more"),
        (f"[grid]\nseeds = [-1]\n{A}", "grid.seeds[0]=-1: must be 0 or more"),
        (f"[grid]\nseeds = [0.5]\n{A}", "grid.seeds[0]=0.5: must be an integer"),
        (f"[grid]\nseeds = [0, 1, 0]\n{A}", "grid.seeds=[0, 1, 0]: the seed 0 appears twice; remove one"),
        (f"[grid]\n{A}seeds = [3, 3]\n", "grid.methods[0].seeds=[3, 3]: the seed 3 appears twice; remove one"),
        (f"[grid]\nseeds = [{2**63}]\n{A}", f"grid.seeds[0]={2**63}: must be below {2**63}"),
        (f"[grid]\naxis = 1\n{A}", "grid.axis: unknown"),
        ("[grid]\n[[grid.methods]]\nset.optim.lr = 1.0\n", "grid.methods[0].label: missing"),
        (f"[grid]\naxes.norm.ghost_sise = [1]\n{A}", "norm.ghost_sise: unknown; did you mean norm.ghost_size?"),
        (f"[grid]\n{A}set.norm.metod = 'bn'\n", "norm.metod: unknown; did you mean norm.method?"),
        (f"[grid]\naxes.seed = [1]\n{A}", "seed cannot be an axis; give grid.seeds"),
        (f"[grid]\naxes.train.smoke = [true]\n{A}", "train.smoke: set by --smoke"),
        (f"[grid]\n{A}without = ['optim.lr']\n", "A without optim.lr: the grid has no such axis"),
        (f"[grid]\naxes.optim.lr = [1.0]\n{A}set.optim.lr = 0.1\n", "A sets optim.lr, which is an axis"),
        (f"[grid]\n[[grid.zip]]\noptim.lr = [0.1]\ntrain.epochs = [1, 2]\n{A}", "has 1 values and train.epochs has 2"),
        (f"[grid]\naxes.optim.lr=[0.1]\n[[grid.zip]]\noptim.lr = [0.1]\n{A}", "optim.lr is also in grid.axes"),
        (f"[grid]\n{A}{A}", "two methods are called A"),
        (f"[grid]\n{A}[select]\naxes = ['optim.lr']\n", "select.axes: optim.lr is not an axis"),
        (f"[grid]\n{A}[select]\naxes = []\n", "select.axes=[]: must have 1 value or more"),
        (f"[grid]\naxes.optim.lr = [0.1]\n{A}[select]\naxes = ['optim.lr']\nmetric = 'x'\n", "select.metric='x'"),
        (f"[grid]\n{A}[report]\nbaseline = 'B'\n", "no method is called 'B'; there are A"),
        (f"[grid]\n{A}[report]\nclaims = ['A > C']\n", "no method is called 'C'"),
        (f"[grid]\n{A}[report]\nform = 'curves'\n", "curves need an axis of the grid: it has none"),
        (f"[grid]\naxes.optim.lr = [0.1, 0.1]\n{A}", "A lr=0.1 and A lr=0.1 are the same run"),
        (f"[grid]\n{A}[[grid.methods]]\nlabel = 'B'\nset.norm.method = 'gni'\n", "A and B are the same run"),
        (f"[grid]\naxes.train.evaluate_every = [1, 2]\n{A}", "=1 and A evaluate_every=2 are the same run"),
        (f"[grid]\naxes.optim.lr = [-1.0]\n{A}", "A lr=-1.0: optim.lr=-1.0: must be above 0"),
    ],
)  # fmt: skip
def test_mistakes_in_the_recipe_are_a_line_each(tmp_path, plan, line):
    with pytest.raises(UserError) as error:
        loaded(tmp_path, plan).cells()
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "options", "line"),
    [
        (["seed=1"], {}, "give --seeds"),
        (["norm.method=bn"], {}, "norm.method: distinguishes the methods of this experiment"),
        ([], {"only": ["XBN"]}, "--only XBN: no such method; there are BN, GBN, GNI"),
        ([], {"seeds": []}, "--seeds: none given"),
        (["data.evaluate=test"], {}, "[select] tunes on the validation images"),
        (["seed=1,2"], {}, "give --seeds"),
        (["norm.method=bn,gni"], {}, "norm.method: distinguishes the methods of this experiment"),
        (["norm.ghost_size=4,x"], {}, "GBN ghost_size=x: norm.ghost_size='x': must be an integer"),
        (["norm.ghost_sise=4,8"], {}, "norm.ghost_sise: unknown; did you mean norm.ghost_size?"),
    ],
)
def test_mistakes_on_the_command_line_are_a_line_each(tmp_path, overrides, options, line):
    plan = experiment.THREE + '[select]\naxes = ["norm.ghost_size"]\n'
    with pytest.raises(UserError) as error:
        loaded(tmp_path, plan, *overrides, **options).cells()
    assert line in str(error.value)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 3))
def test_there_are_as_many_cells_as_places(tmp_path_factory, lengths, methods):
    keys = ["optim.lr", "optim.weight_decay", "train.label_smoothing"][: len(lengths)]
    values = {key: [(number + 1) / 100 for number in range(length)] for key, length in zip(keys, lengths, strict=True)}
    plan = "[grid]\n" + "".join(f"axes.{key} = {each}\n" for key, each in values.items())
    plan += "".join(f"[[grid.methods]]\nlabel = 'M{n}'\nset.norm.ghost_size = {n + 1}\n" for n in range(methods))
    cells = loaded(tmp_path_factory.mktemp("grid"), plan).cells()
    expected = [(f"M{n}", place) for n in range(methods) for place in itertools.product(*values.values())]
    assert [(cell.label, tuple(value for _, value in cell.at)) for cell in cells] == expected


def test_an_override_of_an_axis_leaves_lines_beside_it_alone():
    cells = grid.load("fig3-gni", ["norm.ghost_size=32"]).cells()
    assert {cell.label: cell.settings.norm.ghost_size for cell in cells} == {"BN": None, "GBN-16": 16, "GNI": 32}
    (cell,) = grid.load("table2-c10", ["norm.ghost_size=48"], only=["GNI"]).cells()
    assert cell.settings.norm.ghost_size == 48
