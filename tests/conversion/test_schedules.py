import copy
import gc

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise import ConstantSchedule, CosineSchedule, LinearSchedule, OffAfter
from models import convolutional, images, state, transformer


def seen(schedule, steps):
    values = []
    for _ in range(steps):
        values.append(schedule.ghost_size)
        schedule.step()
    return values


def test_sizes_over_steps():
    assert seen(ConstantSchedule(8), 3) == [8, 8, 8]
    assert seen(LinearSchedule(4, 10, steps=4), 6) == [4, 6, 7, 8, 10, 10]
    assert seen(LinearSchedule(10, 1, steps=3), 5) == [10, 7, 4, 1, 1]
    assert seen(CosineSchedule(0 + 1, 101, steps=4), 6) == [1, 16, 51, 86, 101, 101]
    assert seen(OffAfter(16, steps=2), 4) == [16, 16, None, None]


def test_sizes_are_plain_integers_of_one_or_more():
    for schedule in (LinearSchedule(1, 2, steps=7), CosineSchedule(9, 1, steps=5)):
        assert all(type(size) is int and size >= 1 for size in seen(schedule, 9))


def test_steps_set_the_layers():
    schedule = LinearSchedule(4, 8, steps=2)
    model = ghostnoise.convert(convolutional(), "gni", schedule)
    assert [model[1].ghost_size, model[4][1].ghost_size] == [4, 4]
    schedule.step()
    assert [model[1].ghost_size, model[4][1].ghost_size] == [6, 6]
    model(images())
    noise = ghostnoise.convert(transformer(), "gni", schedule, after=nn.LayerNorm)[0].ghost_noise
    assert noise.ghost_size == 6
    schedule.step()
    assert [model[1].ghost_size, noise.ghost_size] == [8, 8]


def test_off_is_plain_batch_norm():
    schedule = OffAfter(4, steps=1)
    model, plain = ghostnoise.convert(convolutional(), "gni", schedule), convolutional()
    schedule.step()
    torch.testing.assert_close(model(images()), plain(images()))


def test_a_schedule_for_each_pattern():
    first, second = LinearSchedule(4, 8, steps=1), OffAfter(16, steps=1)
    model = ghostnoise.convert(convolutional(), "gni", {"1": first, "*": second})
    assert [model[1].ghost_size, model[4][1].ghost_size] == [4, 16]
    first.step()
    second.step()
    assert [model[1].ghost_size, model[4][1].ghost_size] == [8, None]


def test_state_goes_on():
    schedule = LinearSchedule(4, 8, steps=4)
    seen(schedule, 3)
    other = LinearSchedule(4, 8, steps=4)
    model = ghostnoise.convert(convolutional(), "gni", other)
    other.load_state_dict(schedule.state_dict())
    assert other.ghost_size == schedule.ghost_size == 7
    assert model[1].ghost_size == 7
    assert schedule.state_dict() == {"steps_taken": 3}
    with pytest.raises(ValueError, match="steps=-1: must be an integer of 0 or more"):
        schedule.load_state_dict({"steps_taken": -1})


def test_converting_again_takes_the_layers_from_the_schedule():
    old, new = LinearSchedule(4, 8, steps=1), LinearSchedule(16, 32, steps=1)
    model = ghostnoise.convert(convolutional(), "gni", old)
    ghostnoise.convert(model, "gni", {"1": 64, "*": new})
    old.step()
    assert [model[1].ghost_size, model[4][1].ghost_size] == [64, 16]
    new.step()
    assert model[4][1].ghost_size == 32
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
    second.step()
    first.step()
    assert layer.ghost_size == 32


def test_copies_are_on_their_own():
    schedule = LinearSchedule(4, 8, steps=1)
    model = ghostnoise.convert(convolutional(), "gni", schedule)
    twin = copy.deepcopy(model)
    schedule.step()
    assert [model[1].ghost_size, twin[1].ghost_size] == [8, 4]


def test_a_schedule_keeps_no_model_alive():
    schedule = LinearSchedule(4, 8, steps=1)
    ghostnoise.convert(convolutional(), "gni", schedule)
    gc.collect()
    assert len(schedule._layers) == 0


@pytest.mark.parametrize(
    ("method", "schedule", "message"),
    [
        ("xbn", LinearSchedule(8, 1, steps=3), "ghost_size=1: must be an integer of 2 or more"),
        ("en", OffAfter(8, steps=3), "alpha=None with ghost_size=None"),
        ("bn", ConstantSchedule(8), r"ghost_size=ConstantSchedule\(size=8, steps=1, .*\): 'bn' normalizes the whole"),
    ],
)
def test_a_schedule_must_fit_to_its_end(method, schedule, message):
    model = convolutional()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        ghostnoise.convert(model, method, schedule)
    assert state(model) == before


def test_settings_are_checked():
    for build, message in (
        (lambda: LinearSchedule(0, 8, steps=3), "ghost_size=0"),
        (lambda: CosineSchedule(8, None, steps=3), "ghost_size=None"),
        (lambda: LinearSchedule(4, 8, steps=0), "steps=0: must be an integer of 1 or more, the steps of a schedule"),
        (lambda: OffAfter(4, steps=2.5), "steps=2.5"),
        (lambda: ConstantSchedule("8"), "ghost_size='8'"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_a_schedule_of_ones_own():
    class Doubling(ghostnoise.Schedule):
        def at(self, step):
            return 2**step

    schedule = Doubling(steps=3)
    model = ghostnoise.convert(convolutional(), "gni", schedule)
    schedule.step()
    assert model[1].ghost_size == 2
    with pytest.raises(NotImplementedError):
        _ = ghostnoise.Schedule(steps=3).ghost_size
