import pytest
import torch

from ghostnoise.lab.store import checkpoints


def state(number):
    return {"model": {"weight": torch.full((100,), float(number))}, "step": number, "name": "a", "none": None}


def test_the_last_two_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        checkpoints.save(tmp_path, step, state(step))
    assert [path.name[:13] for path in checkpoints.saved(tmp_path)] == ["step-00000010", "step-00000003"]


def test_a_state_is_restored(tmp_path):
    checkpoints.save(tmp_path, 7, state(7))
    found = checkpoints.read(checkpoints.latest(tmp_path, warn=pytest.fail))
    assert found["step"] == 7
    assert torch.equal(found["model"]["weight"], torch.full((100,), 7.0))


def test_a_checkpoint_can_be_loaded_with_torch(tmp_path):
    path = checkpoints.save(tmp_path, 7, state(7))
    assert torch.load(path, weights_only=True)["step"] == 7


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, damage):
    checkpoints.save(tmp_path, 1, state(1))
    path = checkpoints.save(tmp_path, 2, state(2))
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[:-1] if damage == "truncated" else b"" if damage == "empty" else content)
    warnings = []
    assert checkpoints.read(checkpoints.latest(tmp_path, warnings.append))["step"] == 1
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert path.with_suffix(".damaged").exists()
    assert checkpoints.latest(tmp_path, pytest.fail) is not None, "warned only once"


def test_no_intact_checkpoint(tmp_path):
    assert checkpoints.latest(tmp_path / "nothing", pytest.fail) is None
    checkpoints.save(tmp_path, 2, state(2)).write_bytes(b"")
    assert checkpoints.latest(tmp_path, lambda text: None) is None


def test_the_newer_of_two_after_the_same_step(tmp_path):
    import os

    old = checkpoints.save(tmp_path, 5, state(1))
    os.utime(old, ns=(1, 1))
    checkpoints.save(tmp_path, 5, state(2))
    assert checkpoints.read(checkpoints.latest(tmp_path, pytest.fail))["step"] == 2


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("executed",))

    path = checkpoints.save(tmp_path, 1, {"evil": Evil()})
    with pytest.raises(Exception, match="weights_only"):
        checkpoints.read(path.read_bytes())
