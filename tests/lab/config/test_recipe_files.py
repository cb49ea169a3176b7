"""The recipes of the package: their headers, and their settings compared with those of the paper."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ghostnoise.lab import models
from ghostnoise.lab.config import grid, recipe
from ghostnoise.lab.config.overrides import validated

ROOT = Path(__file__).parents[3]

# ResNet-18 on CIFAR-100, the setup that the others vary.
BASE = {
    "model": {"name": "resnet18"},
    "norm": {"method": "gni", "ghost_size": 16, "placement": "inside"},
    "data": {"name": "cifar100", "evaluate": "validation", "augment": "flip-crop", "padding": 2},
    "optim": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "warmup_epochs": 5},
    "train": {"epochs": 200, "batch_size": 256},
}
TEST = {"evaluate": "test"}
CIFAR10 = {"name": "cifar10", "evaluate": "test", "padding": 4}
ADAMW = {"name": "adamw", "momentum": None, "betas": [0.9, 0.999]}
PLAIN = {"augment": "none", "padding": None}
MLP = {"name": "mlp", "widths": [1024, 1024, 1024]}
NO_NOISE = {"placement": None}
NO_SIZE = {"ghost_size": None}
VALIDATION = {"evaluate": "validation"}
PAPER = {
    "fig1": {"norm": {"method": "gbn", **NO_NOISE}, "data": TEST},
    "fig3-gbn": {"norm": {"method": "gbn", **NO_NOISE}},
    "fig3-xbn-en": {"norm": {"method": "xbn", "ghost_size": 32, **NO_NOISE}},
    "fig3-agni": {"norm": {"method": "agni", "ghost_size": 256, "law": "fc", "dof": "paper", "components": "both"}},
    "fig3-gni": {},
    "fig3-gni-parts": {"norm": {"components": "shift"}},
    "fig3-dropout": {
        "norm": {"method": "dropout", "ghost_size": None, "p": 0.1, "distribution": "bernoulli", "per": "element",
                 "placement": "branch"},
    },
    "table1": {"data": TEST},
    "fig4": {"norm": {"ghost_size": 32}, "data": TEST, "meter": {"every": 100}},
    "fig5": {"model": {"name": "wsln-resnet18"}},
    "table2-c10": {
        "model": {"name": "resnet20"},
        "data": {"name": "cifar10", **TEST},
        "optim": {"lr": 0.2, "weight_decay": 2e-4},
    },
    "table2-i1k": {
        "model": {"name": "resnet50"},
        "norm": {"ghost_size": 64},
        "data": {"name": "imagefolder", "folder": "imagenet", "augment": "resized-crop", "padding": None,
                 "image_size": 224, "resize": 256, **TEST},
        "optim": {"lr": 0.1, "weight_decay": 1e-4, "warmup_epochs": 1},
        "train": {"epochs": 90, "amp": "fp16"},
    },
    "table3-nfresnet": {
        "model": {"name": "nf-resnet26"},
        "norm": {"ghost_size": 32, "placement": "activation"},
        "data": CIFAR10,
        "optim": {"lr": 0.2, "weight_decay": 5e-5, "warmup_epochs": 20},
        "train": {"amp": "fp16"},
    },
    "table3-vit": {
        "model": {"name": "simple-vit"},
        "norm": {"ghost_size": 12, "placement": "after"},
        "data": CIFAR10,
        "optim": {**ADAMW, "lr": 1e-3, "weight_decay": 1e-4, "eps": 1e-8, "warmup_epochs": 40},
        "train": {"amp": "fp16"},
    },
    "table3-convmixer": {
        "model": {"name": "convmixer"},
        "norm": {"ghost_size": 128},
        "data": CIFAR10,
        "optim": {**ADAMW, "lr": 2e-2, "weight_decay": 5e-2, "eps": 1e-3},
        "train": {"amp": "fp16"},
    },
    "fig6": {
        "model": {"name": "mlp", "widths": [512, 300]},
        "norm": {"ghost_size": 32},
        "data": {"name": "mnist", **TEST, **PLAIN},
        "optim": {"lr": 0.1},
        "train": {"epochs": 100},
        "meter": {"every": 100},
    },
    "fig7": {"norm": {"method": "eagn", "ghost_size": None, "std": 0.1}},
    "table4": {"model": MLP, "train": {"batch_size": 1024}},
}  # fmt: skip
OURS = {
    "digits": {
        "model": {"name": "digits-net"},
        "data": {"name": "digits", **PLAIN},
        "optim": {"lr": 0.1, "warmup_epochs": 2},
        "train": {"epochs": 20, "batch_size": 128},
    },
    "demo": {
        "model": {"name": "conv1d"},
        "data": {"name": "mnist1d", **TEST, **PLAIN},
        "optim": {"lr": 0.1, "warmup_epochs": 3},
        "train": {"epochs": 60, "evaluate_every": 60},
    },
    "cpu-resnet": {
        "model": {"name": "resnet8"},
        "data": {"name": "cifar10", "limit": 10_000, **TEST, **PLAIN},
        "optim": {"lr": 0.2, "warmup_epochs": 3},
        "train": {"epochs": 30, "amp": "bf16", "channels_last": True},
    },
    "cpu-resnet-evalnorm": {
        "model": {"name": "resnet8"},
        "norm": {"method": "gbn", **NO_NOISE},
        "data": {"name": "cifar10", "limit": 10_000, **TEST, **PLAIN},
        "optim": {"lr": 0.2, "warmup_epochs": 3},
        "train": {"epochs": 30, "amp": "bf16", "channels_last": True},
    },
    "cpu-resnet-augment": {
        "model": {"name": "resnet8"},
        "data": {"name": "cifar10", "limit": 10_000, **TEST, **PLAIN},
        "optim": {"lr": 0.2, "warmup_epochs": 3},
        "train": {"epochs": 30, "amp": "bf16", "channels_last": True},
    },
    "cpu-resnet-c100-sizes": {
        "model": {"name": "resnet8"},
        "norm": {"ghost_size": 32},
        "data": {"name": "cifar100", "limit": 10_000, **VALIDATION, **PLAIN},
        "optim": {"lr": 0.2, "warmup_epochs": 3},
        "train": {"epochs": 30, "amp": "bf16", "channels_last": True},
    },
    "resnet8-table2": {
        "model": {"name": "resnet8"},
        "data": {"name": "cifar10", **TEST},
        "optim": {"lr": 0.2, "warmup_epochs": 3},
        "train": {"epochs": 30, "amp": "bf16", "channels_last": True},
    },
    "cpu-resnet-c100": {
        "model": {"name": "resnet8"},
        "data": {"name": "cifar100", "limit": 10_000, **TEST, **PLAIN},
        "optim": {"lr": 0.2, "warmup_epochs": 3},
        "train": {"epochs": 30, "amp": "bf16", "channels_last": True},
    },
    "cpu-mlp": {
        "model": MLP,
        "data": {"name": "cifar10", "limit": 20_000, **TEST, **PLAIN},
        "optim": {"lr": 0.1, "warmup_epochs": 2},
        "train": {"epochs": 20, "batch_size": 1024},
    },
}
# On MNIST-1D; recipes that are not listed here are only compared with `demo`.
SIGNALS = {
    "mnist1d-table1": {},
    "mnist1d-fig3": {"data": VALIDATION},
    "mnist1d-fig3-agni": {"data": VALIDATION, "norm": {"method": "agni", "ghost_size": 64}},
    "mnist1d-fig3-dropout": {
        "data": VALIDATION, "norm": {"method": "dropout", "p": 0.1, "placement": "branch", **NO_SIZE},
    },
    "mnist1d-fig5": {"data": VALIDATION, "model": {"name": "wsln-conv1d"}},
    "mnist1d-fig7": {"data": VALIDATION, "norm": {"method": "eagn", "std": 0.3, **NO_SIZE}},
    "mnist1d-stable-xbn": {
        "data": VALIDATION, "norm": {"method": "xbn", "ghost_size": 4, "self_weight": 0.2, **NO_NOISE},
    },
    "mnist1d-history": {
        "data": {"limit": 1000}, "model": {"name": "wsln-conv1d"}, "norm": {"ghost_size": 8},
        "optim": {"lr": 0.05, "warmup_epochs": 1}, "train": {"epochs": 12, "batch_size": 32, "evaluate_every": 12},
    },
    "mnist1d-gap": {"meter": {"every": 60, "batches": 7}},
    "mnist1d-evalnorm": {"data": VALIDATION, "norm": {"method": "en", "ghost_size": 8, **NO_NOISE}},
    "mnist1d-evalnorm-table1": {"norm": {"method": "en", **NO_NOISE}},
    "mnist1d-adaptivity": {"data": VALIDATION, "norm": {"method": "agni"}},
    "mnist1d-equal-time": {},
    "mnist1d-wsln": {"data": VALIDATION, "model": {"name": "wsln-conv1d"}},
    "mnist1d-equal-noise": {"meter": {"every": 60, "batches": 7}, "norm": {"ghost_size": 32}},
    "mnist1d-table3-nfresnet": {
        "model": {"name": "nf-resnet1d"}, "norm": {"ghost_size": 64, "placement": "activation"},
        "optim": {"lr": 0.3, "warmup_epochs": 6},
    },
    "mnist1d-table3-vit": {
        "model": {"name": "vit1d"}, "norm": {"placement": "after"},
        "optim": {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4, "warmup_epochs": 12},
    },
    "mnist1d-table3-convmixer": {
        "model": {"name": "convmixer1d"}, "norm": {"ghost_size": 256},
        "optim": {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 5e-2, "warmup_epochs": 3},
    },
    "mnist1d-table4": {"model": {"name": "mlp", "widths": [256, 256, 256]}},
}  # fmt: skip
ON_SIGNALS = [name for name in recipe.names() if name.startswith("mnist1d-")]
# Settings that the paper does not state, by recipe.
OPEN = {
    "fig1": {"data.evaluate"},
    "fig3-xbn-en": {"norm.ghost_size"},
    "fig3-agni": {"norm.ghost_size", "grid.axes.norm.ghost_size"},
    "fig3-dropout": {"norm.p", "grid.axes.norm.p"},
    "fig4": {"data.evaluate", "meter.every"},
    "fig5": {"norm.ghost_size", "grid.seeds"},
    "fig6": {
        "data.evaluate", "data.augment", "train.batch_size",
        *(f"optim.{name}" for name in ("name", "lr", "momentum", "weight_decay", "warmup_epochs")),
    },
    "fig7": {"norm.std", "grid.axes.norm.std"},
    "table1": {"variants.released.grid.seeds"},
    "table4": {"optim.lr", "grid.seeds", "grid.axes.optim.lr"},
}  # fmt: skip
SCORES = {
    "table1": "78.84 ± 0.09", "table2-c10": "93.01 ± 0.28", "table2-i1k": "77.98", "table3-nfresnet": "94.19 ± 0.24",
    "table3-vit": "89.55 ± 0.05", "table3-convmixer": "93.66 ± 0.12", "table4": "41.3 ± 0.9",
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", recipe.names())


def test_there_is_a_recipe_for_every_experiment():
    assert recipe.names() == sorted([*PAPER, *OURS, *ON_SIGNALS])
    assert set(SIGNALS) <= set(ON_SIGNALS)


@EVERY
def test_a_file_begins_with_its_header(name):
    lines = recipe.read(name).splitlines()
    keys = [line.removeprefix("# ").partition(": ")[0] for line in lines[:4]]
    assert keys == ["Claim", "Command", "Time", "Score"]
    assert lines[4] == ""
    assert max(map(len, lines)) <= 80
    made = recipe.load(name)
    assert made.command == f"ghostnoise {'sweep' if made.plan else 'train'} {name}"
    rest = " ".join(line.removeprefix("# ") for line in lines[5:] if line.startswith("#"))
    assert (f"`ghostnoise train {name}` trains only " in rest) == (
        len(made.plan.get("grid", {}).get("methods", [])) > 1
    )
    assert re.search(r"\(.+\)$", made.time)  # the hardware
    assert made.claim
    assert SCORES.get(name, "") in made.score
    if name in PAPER:
        assert "in the paper" in made.score
    elif name in ON_SIGNALS:
        assert made.score == f"see results/{name}"
    else:
        assert made.score.startswith(("ours: ", "see results/"))


@pytest.mark.parametrize("name", [*PAPER, *OURS])
def test_settings_are_those_of_the_experiment(name):
    differences = {**PAPER, **OURS}[name]
    assert recipe.load(name).settings == validated(
        {name: BASE.get(name, {}) | differences.get(name, {}) for name in dict.fromkeys([*BASE, *differences])}
    )


@pytest.mark.parametrize("name", SIGNALS)
def test_settings_on_signals(name):
    made, trees = recipe.load(name).settings, (BASE, OURS["demo"], SIGNALS[name])
    expected = {
        section: {key: value for tree in trees for key, value in tree.get(section, {}).items()}
        for section in {*BASE, *SIGNALS[name]}
    }
    if expected["optim"]["name"] == "adamw":
        del expected["optim"]["momentum"]
    assert made == validated(expected)


@pytest.mark.parametrize("name", ON_SIGNALS)
def test_settings_that_are_those_of_the_demo(name):
    demo, made = recipe.load("demo").settings, recipe.load(name).settings
    assert made.data.name == demo.data.name == "mnist1d"
    if "Settings are those of `demo`" in recipe.read(name).replace("\n# ", " "):
        assert (made.optim, made.train) == (demo.optim, demo.train)


@EVERY
def test_what_the_paper_leaves_open_is_marked(name):
    marked, section = set(), ""
    for line in recipe.read(name).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line.endswith("# ours"):
            marked.add(f"{section}.{line.partition(' = ')[0]}")
    assert marked == OPEN.get(name, set())
    assert ("All settings are ours." in re.sub(r"\s+#?\s*", " ", recipe.read(name))) == (name in OURS)


@EVERY
def test_settings_that_matter_are_written_out(name):
    """A reader should not need to know the defaults of what the paper states; a recipe may extend one that has them."""
    tree = recipe.load(name).tree
    for key in ("data.evaluate", "optim.name", "optim.lr", "optim.weight_decay", "optim.warmup_epochs"):
        section, _, field = key.partition(".")
        assert field in tree[section]


def shown(name):
    """Return the overrides in the comments of a recipe."""
    for line in recipe.read(name).splitlines():
        if line.startswith("#   "):
            words = re.match(r"#   ((?:[a-z_.]+=\S+ ?)+)", line)
            assert words, line
            yield words[1].split()


@EVERY
def test_overrides_that_are_shown_lead_to_other_runs(name):
    seen = {recipe.load(name).identity}
    for overrides in shown(name):
        made = recipe.load(name, overrides)
        assert made.identity not in seen
        seen.add(made.identity)
        if made.plan:
            before, after = grid.load(name).cells(), grid.load(name, overrides).cells()
            assert len(before) == len(after)
            assert any(old.settings != new.settings for old, new in zip(before, after, strict=True))


SHAPES = {
    "mnist1d": (1, 40),
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
}


@EVERY
def test_the_network_of_a_smoke_run_learns_from_a_batch(name):
    settings = recipe.load(name, smoke=True).settings
    shape = SHAPES.get(settings.data.name) or (3, settings.data.image_size, settings.data.image_size)
    torch.manual_seed(0)
    network = models.build(settings.model, settings.norm, shape, 10)
    out = network(torch.randn(settings.train.batch_size, *shape))
    assert out.shape == (settings.train.batch_size, 10)
    out.logsumexp(1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def test_an_installed_package_has_the_recipes(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib"]
    subprocess.run([*command, str(tmp_path / "lib")], cwd=ROOT, check=True, capture_output=True)
    built = tmp_path / "lib" / "ghostnoise" / "lab" / "recipes"
    assert sorted(path.stem for path in built.glob("*.toml")) == recipe.names()
