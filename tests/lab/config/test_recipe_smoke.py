import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.overrides import changed, check, validated
from ghostnoise.lab.config.recipe import shrink
from ghostnoise.lab.errors import UserError

TREE = {
    "model": {"name": "resnet18"},
    "norm": {"method": "gbn", "ghost_size": 128},
    "data": {"name": "cifar10"},
    "optim": {"lr": 0.1, "warmup_epochs": 5},
    "train": {"epochs": 100, "batch_size": 256},
}


@pytest.mark.parametrize("name", recipe.names())
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_recipe_gets_small(name, processes):
    made = recipe.load(name, smoke=True).settings
    assert made.train.smoke
    made = recipe.resolve(made, device="cpu", processes=processes, stand_in=True)
    check(made, processes)
    assert made.train.epochs == 2
    assert made.train.batch_size <= 32
    assert made.train.batch_size % processes == 0
    assert made.optim.warmup_epochs < 2
    assert made.data.limit <= 5 * 32
    assert made.data.test_limit <= 2 * 32
    assert getattr(made.data, "image_size", 0) <= 64
    assert max(made.model.widths) <= 64 if made.model.name == "mlp" else made.model.width <= 16
    assert made.train.amp != "fp16"


@pytest.mark.parametrize("name", recipe.names())
def test_it_is_still_the_same_experiment(name):
    full, small = recipe.load(name).settings, recipe.load(name, smoke=True).settings
    assert small.norm == changed(full, norm={"ghost_size": small.norm.ghost_size}).norm
    for section, changing in {
        "model": {"width", "widths"},
        "data": {"limit", "test_limit", "image_size", "resize"},
        "optim": {"warmup_epochs"},
        "train": {"epochs", "batch_size", "smoke"},
    }.items():
        before, after = getattr(full, section).model_dump(), getattr(small, section).model_dump()
        assert {key for key in before if before[key] != after[key]} <= changing


def test_what_becomes_of_the_numbers():
    made = shrink(validated(TREE))
    assert (made.train.epochs, made.train.batch_size, made.norm.ghost_size, made.model.width) == (2, 32, 32, 16)
    assert made.optim.warmup_epochs == pytest.approx(0.1)
    assert (made.data.limit, made.data.test_limit) == (160, 64)


@pytest.mark.parametrize(("steps", "ghost_size"), [(1, 32), (2, 16), (16, 16)])
def test_micro_batches_are_at_most_two(steps, ghost_size):
    made = shrink(validated({**TREE, "train": {**TREE["train"], "accumulation_steps": steps}}))
    assert (made.train.batch_size, made.train.accumulation_steps or 1) == (32, min(steps, 2))
    assert made.norm.ghost_size == ghost_size
    check(made)


def test_draws_keep_their_ghost_size():
    assert shrink(validated({**TREE, "norm": {"method": "gni", "ghost_size": 128}})).norm.ghost_size == 128


def test_what_is_small_stays():
    small = {
        "model": {"name": "resnet18", "width": 4},
        "norm": {"method": "gbn", "ghost_size": 2},
        "data": {"name": "imagefolder", "folder": "x", "limit": 9, "test_limit": 6, "image_size": 16, "resize": 20},
        "optim": {"lr": 0.1, "warmup_epochs": 0.5},
        "train": {"epochs": 1, "batch_size": 3},
    }
    assert shrink(validated(small)) == changed(validated(small), train={"smoke": True})


def test_timm_keeps_its_sizes():
    made = shrink(validated({**TREE, "model": {"name": "timm:vit_tiny_patch16_224"},
                             "data": {"name": "imagefolder", "folder": "x"}}))  # fmt: skip
    assert (made.model.width, made.data.image_size, made.train.batch_size) == (None, 224, 8)


@pytest.mark.parametrize(
    ("sizes", "small"),
    [({}, {"width": 64}), ({"width": 8}, {"width": 8}), ({"widths": [512, 32]}, {"widths": [64, 32]})],
)
def test_an_mlp_has_widths_or_a_width(sizes, small):
    made = shrink(validated({**TREE, "model": {"name": "mlp", **sizes}}))
    assert made.model.model_dump(exclude_none=True) == {"name": "mlp", **small}


def test_compilation_takes_longer_than_seconds():
    assert not shrink(validated({**TREE, "train": {**TREE["train"], "compile": True}})).train.compile


def test_half_precision_on_a_cpu_is_bfloat16():
    assert recipe.load("table3-vit", ["train.device=cpu"], smoke=True).settings.train.amp == "bf16"
    made = recipe.load("table3-vit", smoke=True).settings
    assert made.train.amp == "fp16"
    assert recipe.resolve(made, device="cpu", processes=1).train.amp == "bf16"
    assert recipe.resolve(made, device="cuda", processes=1).train.amp == "fp16"


def test_shrinking_does_not_hide_a_mistake():
    with pytest.raises(UserError, match=r"norm\.ghost_size=512: larger than the batch"):
        recipe.load("fig3-gbn", ["norm.ghost_size=512"], smoke=True)


@given(
    method=st.sampled_from(["gbn", "xbn", "en", "gni"]),
    ghost_size=st.integers(2, 600),
    batch_size=st.integers(1, 600),
    epochs=st.integers(1, 300),
    warmup=st.floats(0, 300),
    processes=st.integers(1, 9),
    limit=st.none() | st.integers(1, 10_000),
    micro=st.integers(1, 4),
)
def test_anything_shrinks_to_what_fits_and_only_once(
    method, ghost_size, batch_size, epochs, warmup, processes, limit, micro
):
    batch_size = micro * batch_size
    tree = {
        **TREE,
        "norm": {"method": method, "ghost_size": ghost_size},
        "data": {"name": "cifar10", "limit": limit},
        "optim": {"lr": 0.1, "warmup_epochs": min(warmup, epochs)},
        "train": {
            "epochs": epochs,
            "batch_size": batch_size,
            "processes": processes,
            "accumulation_steps": micro,
        },
    }
    made = shrink(validated(tree))
    assert shrink(made) == made
    if batch_size > processes * micro:  # else exclusive batch norm has no others
        check(made)
    assert made.train.batch_size <= max(32, 4 * processes)
    assert made.train.epochs <= 2
    assert made.data.limit <= min(limit or 10_000, 5 * made.train.batch_size)
