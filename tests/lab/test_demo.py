import pytest
import torch
from torch import nn

from ghostnoise.lab import demo


def test_demo_prints_a_table_and_saves_a_figure(tmp_path, capsys):
    assert demo.main(["--seeds", "2", "--epochs", "1", "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    for method in demo.METHODS:
        assert method in printed
    assert "n = 2 seeds" in printed
    assert "±" in printed
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_training_learns_and_is_reproducible():
    first, second = (demo.train(nn.BatchNorm2d, seed=0, epochs=8, on_epoch=lambda: None) for _ in range(2))
    assert first == second
    assert first > 50  # chance is 10


def test_splits_do_not_overlap():
    (train, labels), (test, test_labels) = demo.digits(seed=1)
    assert len(train) == len(labels) == demo.TRAIN_IMAGES
    assert len(train) + len(test) == 1797
    assert len(test) == len(test_labels)
    assert not torch.equal(train, demo.digits(seed=2)[0][0])


def test_bad_arguments_exit_with_2(capsys):
    for arguments in (["--seeds", "0"], ["--epochs", "x"], ["--nothing"]):
        with pytest.raises(SystemExit) as exit_:
            demo.main(arguments)
        assert exit_.value.code == 2
    assert "must be 1 or more" in capsys.readouterr().err
