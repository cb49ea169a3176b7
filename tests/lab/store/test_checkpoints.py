import os

import pytest
import torch

from ghostnoise.lab.store import checkpoints
from support.checkpoints import put, saved, state


def test_the_last_two_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        checkpoints.save(tmp_path, step, state(step))
    assert [path.name[:13] for path in checkpoints.saved(tmp_path)] == ["step-00000010", "step-00000003"]


def test_a_state_is_restored(tmp_path):
    checkpoints.save(tmp_path, 7, state(7))
    found = checkpoints.latest(tmp_path, warn=pytest.fail).state
    assert found["step"] == 7
    assert torch.equal(found["model"]["weight"], torch.full((100,), 7.0))


def test_a_checkpoint_can_be_loaded_with_torch(tmp_path):
    path = checkpoints.save(tmp_path, 7, state(7))
    assert torch.load(path, weights_only=True)["step"] == 7


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replaced(path, make):
    path.unlink()
    make(path)


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "folder": lambda path: replaced(path, os.mkdir),
    "full folder": lambda path: replaced(path, lambda path: (path / "more").mkdir(parents=True)),
    "symlink loop": lambda path: replaced(path, lambda path: path.symlink_to(path.name)),
    "pipe": lambda path: replaced(path, os.mkfifo),
}


@pytest.mark.parametrize("rename", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, damage, rename):
    checkpoints.save(tmp_path, 1, state(1))
    path = checkpoints.save(tmp_path, 2, state(2))
    DAMAGE[damage](path)
    path.with_suffix(".damaged").mkdir()  # a name that is taken
    said = []
    found = next(checkpoints.readable(tmp_path, said.append, rename=rename))
    assert found.state["step"] == 1
    assert [line.partition(" is damaged (")[0] for line in said] == [str(path)]
    assert os.path.lexists(path) != rename, "a command that only reads changes nothing"
    assert os.path.lexists(path.with_suffix(".damaged-2")) == rename


WRONG = {
    "no zip": (b"not a checkpoint", ""),
    "number": (saved(3), "it contains a int, not a checkpoint"),
    "format": (saved(state(1) | {"format": 2}), "format 2: this version reads format 1"),
    "no format": (saved({"model": {}}), "format None: this version reads format 1"),
    "model": (saved(state(1) | {"model": {"weight": 3}}), "model is missing or not a state_dict"),
    "epoch": (saved(state(1) | {"epoch": "1"}), "epoch is missing or not a count"),
    "seconds": (saved(state(1) | {"seconds": float("nan")}), "seconds is missing or not a time"),
    "short history": (saved(state(1) | {"epoch": 1}), "epoch 1 with the metrics of 0 epochs"),
    "history": (saved(state(1) | {"history": '[{"epoch": 1, "loss": "x"}]'}), "metrics.1.loss: must be a number"),
    "deep history": (saved(state(1) | {"history": "[" * 10**5}), ""),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_right_checksum_of_wrong_content_is_not_enough(tmp_path, wrong):
    content, reason = WRONG[wrong]
    checkpoints.save(tmp_path, 1, state(1))
    path, said = put(tmp_path, 2, content), []
    assert checkpoints.latest(tmp_path, said.append).state["step"] == 1
    assert len(said) == 1
    assert "\n" not in said[0]
    assert said[0].startswith(f"{path} is damaged ({reason}")
    assert path.with_suffix(".damaged").read_bytes() == content


def test_a_name_must_have_the_checksum_of_the_content(tmp_path):
    for name in ("step-00000001-0123456789abcdef.pt", "../step-00000001-0123456789abcdef.pt", "other.pt"):
        with pytest.raises(ValueError, match=r"checksum|not the name of a checkpoint"):
            checkpoints.keep(tmp_path, name, b"content")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damage_is_reported_once(tmp_path, damage):
    checkpoints.save(tmp_path, 1, state(1))
    path = checkpoints.save(tmp_path, 2, state(2))
    DAMAGE[damage](path)
    warnings = []
    assert checkpoints.latest(tmp_path, warnings.append).state["step"] == 1
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert path.with_suffix(".damaged").exists()
    assert checkpoints.latest(tmp_path, pytest.fail) is not None, "warned only once"


def test_no_intact_checkpoint(tmp_path):
    assert checkpoints.latest(tmp_path / "nothing", pytest.fail) is None
    checkpoints.save(tmp_path, 2, state(2)).write_bytes(b"")
    assert checkpoints.latest(tmp_path, lambda text: None) is None


def test_the_newer_of_two_after_the_same_step(tmp_path):
    old = checkpoints.save(tmp_path, 5, state(1))
    os.utime(old, ns=(1, 1))
    checkpoints.save(tmp_path, 5, state(2))
    assert checkpoints.latest(tmp_path, pytest.fail).state["step"] == 2


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("executed",))

    path = checkpoints.save(tmp_path, 1, {"evil": Evil()})
    with pytest.raises(Exception, match="weights_only"):
        checkpoints.read(path.read_bytes())
