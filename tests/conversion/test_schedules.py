import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import ghostnoise
from ghostnoise import ConstantSchedule, CosineSchedule, LinearSchedule, OffAfter
from ghostnoise.conversion.schedules import schedule_of
from support.models import convolutional, images, state, transformer


def seen(schedule, steps):
    values = []
    for _ in range(steps):
        values.append(schedule.ghost_size)
        schedule.step()
    return values


def sizes(model):
    return [row.ghost_size for row in ghostnoise.summary(model)]


def test_sizes_over_steps():
    assert seen(ConstantSchedule(8), 3) == [8, 8, 8]
    assert seen(LinearSchedule(4, 10, steps=4), 6) == [4, 6, 7, 8, 10, 10]
    assert seen(LinearSchedule(10, 1, steps=3), 5) == [10, 7, 4, 1, 1]
    assert seen(CosineSchedule(1, 101, steps=4), 6) == [1, 16, 51, 86, 101, 101]
    assert seen(OffAfter(16, steps=2), 4) == [16, 16, None, None]
    for schedule in (LinearSchedule(1, 2, steps=7), CosineSchedule(9, 1, steps=5)):
        assert all(type(size) is int and size >= 1 for size in seen(schedule, 9))


def test_steps_set_the_layers():
    schedule = LinearSchedule(4, 8, steps=2)
    model = ghostnoise.convert(convolutional(), "gni", schedule)
    assert sizes(model) == [4, 4]
    schedule.step()
    assert sizes(model) == [6, 6]
    model(images())
    other = ghostnoise.convert(transformer(), "gni", schedule, after=nn.LayerNorm)
    assert sizes(other) == [6, 6]
    schedule.step()
    assert sizes(model) == sizes(other) == [8, 8]


def test_off_is_plain_batch_norm():
    schedule = OffAfter(4, steps=1)
    model, plain = ghostnoise.convert(convolutional(), "gni", schedule), convolutional()
    schedule.step()
    torch.testing.assert_close(model(images()), plain(images()))


def test_a_schedule_for_each_pattern():
    first, second = LinearSchedule(4, 8, steps=1), OffAfter(16, steps=1)
    model = ghostnoise.convert(convolutional(), "gni", {"1": first, "*": second})
    assert sizes(model) == [4, 16]
    first.step(), second.step()
    assert sizes(model) == [8, None]


def test_state_dict_resumes():
    schedule, other = LinearSchedule(4, 8, steps=4), LinearSchedule(4, 8, steps=4)
    seen(schedule, 3)
    model = ghostnoise.convert(convolutional(), "gni", other)
    other.load_state_dict(schedule.state_dict())
    assert other.ghost_size == schedule.ghost_size == model[1].ghost_size == 7
    assert schedule.state_dict() == {"steps_taken": 3}
    with pytest.raises(ValueError, match="steps_taken=-1: must be an integer of 0 or more"):
        schedule.load_state_dict({"steps_taken": -1})


def test_converting_again_takes_the_layers_from_the_schedule():
    old, new = LinearSchedule(4, 8, steps=1), LinearSchedule(16, 32, steps=1)
    model = ghostnoise.convert(convolutional(), "gni", old)
    ghostnoise.convert(model, "gni", {"1": 64, "*": new})
    old.step()
    assert sizes(model) == [64, 16]
    new.step()
    assert sizes(model) == [64, 32]
    ghostnoise.revert(model)
    new.step()
    assert "ghost_size" not in vars(model[4][1])
    model = ghostnoise.convert(transformer(), "gni", old, after=nn.LayerNorm)
    noise = model[0].ghost_noise
    ghostnoise.convert(model, "gni", 2, after=nn.LayerNorm)
    noise.ghost_size = 3
    old.step()
    assert (noise.ghost_size, model[0].ghost_noise.ghost_size) == (3, 2)


def test_a_layer_has_one_schedule():
    first, second = LinearSchedule(4, 8, steps=1), LinearSchedule(16, 32, steps=1)
    layer = ghostnoise.GhostNoise(2)
    first.attach(layer)
    second.attach(layer)
    second.step(), first.step()
    assert layer.ghost_size == 32


# Copies.


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


copies = pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])


@copies
@pytest.mark.parametrize("order", [1, -1], ids=["model first", "schedule first"])
@pytest.mark.parametrize("noise", [False, True], ids=["norm", "noise"])
def test_a_copied_pair_moves_together_and_leaves_the_original_alone(copied, order, noise):
    schedule = LinearSchedule(4, 8, steps=2)
    model = transformer() if noise else convolutional()
    ghostnoise.convert(model, "gni", schedule, **({"after": nn.LayerNorm} if noise else {}))
    schedule.step()
    twin, other = copied((model, schedule)[::order])[::order]
    assert (other.steps_taken, other.ghost_size) == (1, 6)
    other.step()
    assert (sizes(twin), sizes(model), schedule.steps_taken) == ([8, 8], [6, 6], 1)
    schedule.load_state_dict({"steps_taken": 0})
    assert (sizes(twin), sizes(model)) == ([8, 8], [4, 4])
    ghostnoise.revert(twin)
    other.step()
    assert [len(other.layers), len(schedule.layers)] == [0, 2]


@copies
def test_models_and_schedules_that_are_copied_alone(copied):
    """A model has its own schedule then, and a schedule no layers; one that refers to its model takes it along."""
    schedule = LinearSchedule(4, 8, steps=1)
    model = ghostnoise.convert(convolutional(), "gni", schedule)
    twin, alone = copied(model), copied(schedule)
    assert repr(alone) == repr(schedule)
    assert len(alone.layers) == 0
    schedule.step(), alone.step()
    assert (sizes(model), sizes(twin)) == ([8, 8], [4, 4])
    assert ghostnoise.convert(convolutional(), "gni", alone)[1].ghost_size == 8
    assert ghostnoise.summary(twin)[0].notes == "LinearSchedule"
    assert schedule_of(twin[1]) is schedule_of(twin[4][1]) is not schedule
    schedule_of(twin[1]).step()
    assert sizes(twin) == [8, 8]
    schedule = LinearSchedule(4, 8, steps=2)
    schedule.model = ghostnoise.convert(convolutional(), "gni", schedule)
    other = copied(schedule)
    other.step()
    assert [other.model[1].ghost_size, schedule.model[1].ghost_size] == [6, 4]


def test_parametrized_layers_are_copied_with_their_schedule():
    schedule, model = LinearSchedule(4, 8, steps=1), nn.Sequential(nn.BatchNorm2d(3))
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    ghostnoise.convert(model, "gni", schedule)
    twin, other = copy.deepcopy((model, schedule))
    other.step()
    assert [model[0].ghost_size, twin[0].ghost_size] == [4, 8]


def test_a_schedule_does_not_keep_its_model_alive():
    schedule = LinearSchedule(4, 8, steps=1)
    ghostnoise.convert(convolutional(), "gni", schedule)
    gc.collect()
    assert len(schedule.layers) == 0


# Errors.


@pytest.mark.parametrize(
    ("method", "schedule", "message"),
    [
        ("xbn", LinearSchedule(8, 1, steps=3), "ghost_size=1: must be an integer from 2 to 65536"),
        ("en", OffAfter(8, steps=3), "alpha=None with ghost_size=None"),
        ("bn", ConstantSchedule(8), r"ghost_size=ConstantSchedule\(size=8, steps=1, .*\): 'bn' normalizes the whole"),
    ],
)
def test_both_ends_of_a_schedule_are_checked(method, schedule, message):
    model = convolutional()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, method, schedule)
    assert state(model) == before


@pytest.mark.parametrize(
    ("kind", "arguments", "steps", "message"),
    [
        (LinearSchedule, (0, 8), 3, "ghost_size=0"),
        (CosineSchedule, (8, None), 3, "ghost_size=None"),
        (LinearSchedule, (4, 8), 0, "steps=0: must be an integer of 1 or more, a number of steps"),
        (OffAfter, (4,), 2.5, "steps=2.5"),
        (OffAfter, ("8",), 2, "ghost_size='8'"),
    ],
)
def test_settings_are_checked(kind, arguments, steps, message):
    with pytest.raises(ValueError, match=message):
        kind(*arguments, steps=steps)


def test_a_subclass_defines_at():
    class Doubling(ghostnoise.Schedule):
        def at(self, step):
            return 2**step

    schedule = Doubling(steps=3)
    model = ghostnoise.convert(convolutional(), "gni", schedule)
    schedule.step()
    assert sizes(model) == [2, 2]
    with pytest.raises(NotImplementedError):
        _ = ghostnoise.Schedule(steps=3).ghost_size


def test_layers_without_a_ghost_size_are_refused():
    """Whatever attributes they have: theirs would be overwritten at every step."""
    schedule, foreign = OffAfter(4, steps=1), nn.BatchNorm1d(3)
    foreign.ghost_size = 7
    for layer in (foreign, ghostnoise.BatchNorm1d(3), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r"OffAfter\(.*\) for a .*: must be a layer of this library that has a gh"):
            schedule.attach(layer)
    assert foreign.ghost_size == 7
    layers = [ghostnoise.GhostBatchNorm1d(3, ghost_size=8), ghostnoise.GhostNoise(8)]
    for layer in layers:
        schedule.attach(layer)
    schedule.step()
    assert [layer.ghost_size for layer in layers] == [None, None]
