import math

import pytest

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.methods import methods
from ghostnoise.lab.config.overrides import SECTIONS, changed, check, keys, unknown, validated
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.errors import UserError

TREE = {
    "model": {"name": "resnet18"},
    "norm": {"method": "gni", "ghost_size": 16},
    "data": {"name": "cifar10"},
    "optim": {"lr": 0.1},
    "train": {"epochs": 10, "batch_size": 64},
}


def tree(**sections):
    """`TREE` with other settings in some sections; a value that is no section replaces it."""
    made = {name: dict(values) for name, values in TREE.items()}
    for name, values in sections.items():
        made[name] = made[name] | values if isinstance(values, dict) and name in made else values
    return made


def refusal(function, *arguments, **named):
    with pytest.raises(UserError) as error:
        function(*arguments, **named)
    return str(error.value)


def test_sections_become_settings():
    settings = validated(TREE)
    assert isinstance(settings, Settings)
    assert settings.norm.ghost_size == 16
    assert settings.seed == 0


METHODS = " or ".join(", ".join(map(repr, methods())).rsplit(", ", 1))


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"norm": {"ghost_sise": 4}}, "norm.ghost_sise: unknown; did you mean norm.ghost_size?"),
        ({"train": {"momentum": 0.5}}, "train.momentum: unknown; did you mean norm.momentum or optim.momentum?"),
        ({"model": {"xyzzy": 1}}, "model.xyzzy: unknown; model has name, width, widths, zero_init_last, args, init"),
        ({"nrom": {"method": "bn"}}, "nrom: unknown; did you mean norm?"),
        ({"xyzzy": 1}, "xyzzy: unknown; a recipe has model, norm, data, optim, train, meter, seed"),
        ({"norm": {"method": "gnj"}}, f"norm.method='gnj': must be {METHODS}; did you mean 'gni'?"),
        ({"train": {"amp": 3}}, "train.amp=3: must be 'none', 'bf16' or 'fp16'"),
        ({"norm": {"ghost_size": "many"}}, "norm.ghost_size='many': must be an integer"),
        ({"norm": {"ghost_size": 0}}, "norm.ghost_size=0: must be 1 or more"),
        ({"train": {"epochs": True}}, "train.epochs=true: must be an integer"),
        ({"train": {"compile": "yes"}}, "train.compile='yes': must be true or false"),
        ({"train": {"ema": 0}}, "train.ema=0: must be above 0"),
        ({"train": {"label_smoothing": 1}}, "train.label_smoothing=1: must be below 1"),
        ({"norm": {"momentum": 2}}, "norm.momentum=2: must be 1 or less"),
        ({"optim": {"lr": "fast"}}, "optim.lr='fast': must be a number"),
        ({"optim": {"lr": math.inf}}, "optim.lr=inf: must be a finite number"),
        ({"optim": {"name": "adamw", "betas": [0.9]}}, "optim.betas=[0.9]: must have more values"),
        ({"optim": {"name": "adamw", "betas": [0.9, 0.9, 0.9]}},
         "optim.betas=[0.9, 0.9, 0.9]: must have 2 values, not 3"),
        ({"optim": {"name": "adamw", "betas": 0.9}}, "optim.betas=0.9: must be a list, such as [0.9, 0.999]"),
        ({"model": {"widths": 512}}, "model.widths=512: must be a list, such as [512, 300]"),
        ({"model": {"widths": []}}, "model.widths=[]: must have 1 value or more"),
        ({"model": {"widths": [512, 0]}}, "model.widths[1]=0: must be 1 or more"),
        ({"model": {"name": 18}}, "model.name=18: must be a string, in quotes"),
        ({"seed": -1}, "seed=-1: must be 0 or more"),
        ({"seed": 2**63}, f"seed={2**63}: must be below {2**63}"),
        ({"norm": 3}, "norm=3: must be a section, [norm]"),
        ({"norm": {"method": "bn"}}, "norm.ghost_size=16: a setting of gbn, xbn, en, gni, agni, sgbn, and method is "
         "'bn'; leave ghost_size out"),
        ({"norm": {"method": "eagn", "ghost_size": None}},
         "norm.std: missing; eagn has no default for it, give one"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(sections, line):
    assert refusal(validated, tree(**sections)) == line


def test_what_is_missing_is_named():
    lines = refusal(validated, {"norm": {}, "model": {"name": "mlp"}, "optim": {"lr": 1}, "train": {"epochs": 1}})
    assert lines.splitlines() == [
        "norm.method: missing; it has no default, give one",
        "data: missing; add a section [data]",
        "train.batch_size: missing; it has no default, give one",
    ]


def test_all_mistakes_are_in_one_error():
    lines = refusal(validated, tree(norm={"ghost_size": "x", "epz": 1}, train={"epochs": 0}, seed=1.5)).splitlines()
    assert lines == [
        "norm.ghost_size='x': must be an integer",
        "norm.epz: unknown; did you mean norm.eps?",
        "train.epochs=0: must be 1 or more",
        "seed=1.5: must be an integer",
    ]


def test_keys_are_all_settings():
    dumped = validated(tree(norm={"placement": "inside"}) | {"meter": {"every": 1}}).model_dump()
    nested = {f"{section}.{name}" for section in (*TREE, "meter") for name in dumped[section]}
    kinds = {f"{name}.{key}" for name, section in SECTIONS.items() for kind in section.kinds().values()
             for key in kind.model_fields}  # fmt: skip
    assert set(keys()) == nested | kinds | {"seed"}
    assert len(keys()) == len(set(keys()))


@pytest.mark.parametrize("key", keys())
def test_a_typing_error_finds_its_key(key):
    assert unknown(f"{key}x") == f"{key}x: unknown; did you mean {key}?"


def test_changes_are_checked_again():
    settings = validated(TREE)
    assert changed(settings, norm={"ghost_size": 4}, train={"epochs": 3}) == validated(
        tree(norm={"ghost_size": 4}, train={"epochs": 3})
    )
    unset = dict.fromkeys(["ghost_size", *settings.norm.options])
    assert changed(settings, norm={"method": "bn"} | unset) == (
        validated(tree(norm={"method": "bn", "ghost_size": None}))
    )
    assert refusal(changed, settings, train={"epochs": 0}) == "train.epochs=0: must be 1 or more"
    assert settings.train.epochs == 10


def test_check_is_the_recipes():
    assert recipe.check is check


@pytest.mark.parametrize("method", ["gbn", "xbn", "en"])
def test_ghost_batches_must_fit(method):
    """64 samples in a step, shared by 1, 2 and 4 processes."""
    for processes, largest in ((1, 64), (2, 32), (4, 16)):
        check(validated(tree(norm={"method": method, "ghost_size": largest})), processes)
        line = refusal(check, validated(tree(norm={"method": method, "ghost_size": largest + 1})), processes)
        whose = "train.batch_size=64" if processes == 1 else f"a process, 64 / {processes} = {largest}"
        assert line == (
            f"norm.ghost_size={largest + 1}: larger than the batch of {whose}; take {largest} or less, "
            "or raise train.batch_size"
        )
    everyone = validated(tree(norm={"method": method, "ghost_size": 64, "scope": "global"}))
    check(everyone, 4)
    check(everyone, 1)


@pytest.mark.parametrize("method", ["gni", "agni"])
def test_draws_always_fit(method):
    check(validated(tree(norm={"method": method, "ghost_size": 1024})), 4)


def test_exclusive_batch_norm_needs_others():
    assert refusal(check, validated(tree(norm={"method": "xbn", "ghost_size": 1}))) == (
        "norm.ghost_size=1: xbn needs 2 or more; raise it"
    )
    alone = validated(tree(norm={"method": "xbn", "ghost_size": None}, train={"batch_size": 4}))
    check(alone, 2)
    assert refusal(check, alone, 4) == (
        "norm.method='xbn' with a batch of 1: needs 2 samples or more; raise train.batch_size"
    )


def test_processes_share_the_batch_evenly():
    line = "train.batch_size=64: must be a multiple of the 3 processes that share it, such as 66"
    assert refusal(check, validated(TREE), 3) == line
    assert refusal(check, validated(tree(train={"processes": 3}))) == line
    check(validated(tree(train={"batch_size": 66})), 3)


def test_warm_up_ends_with_training():
    check(validated(tree(optim={"warmup_epochs": 10})))
    assert refusal(check, validated(tree(optim={"warmup_epochs": 10.5}))) == (
        "optim.warmup_epochs=10.5: longer than the training of train.epochs=10; lower it or raise train.epochs"
    )


def test_half_precision_needs_a_gpu():
    for device in ("auto", "cuda", "mps"):
        check(validated(tree(train={"amp": "fp16", "device": device})))
    check(validated(tree(train={"amp": "bf16", "device": "cpu"})))
    assert refusal(check, validated(tree(train={"amp": "fp16", "device": "cpu"}))) == (
        "train.amp='fp16': needs a GPU, and the device is 'cpu'; set train.amp=bf16 or train.amp=none"
    )


def test_random_images_are_for_smoke_runs():
    check(validated(tree(data={"stand_in": True}, train={"smoke": True})))
    assert refusal(check, validated(tree(data={"stand_in": True}))) == (
        "data.stand_in=true: random images are only for --smoke; leave it out"
    )


def test_check_says_all_that_is_wrong():
    settings = validated(tree(norm={"method": "gbn", "ghost_size": 99}, optim={"warmup_epochs": 99}))
    assert len(refusal(check, settings, 3).splitlines()) == 3


def test_micro_batches_must_be_equal_and_hold_a_ghost_batch():
    settings = validated(tree(norm={"method": "gbn", "ghost_size": 8}, train={"accumulation_steps": 4}))
    check(settings)
    check(settings, 2)
    assert refusal(check, settings, 4) == (
        "norm.ghost_size=8: larger than the batch of train.accumulation_steps=4, 4 samples; take 4 or less, or raise "
        "train.batch_size"
    )
    assert refusal(check, validated(tree(train={"accumulation_steps": 3})), 2) == (
        "train.accumulation_steps=3 with train.batch_size=64: the batch must be a multiple of 6, so that all "
        "micro-batches are equal; take a batch such as 66"
    )
