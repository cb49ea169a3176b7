"""What is measured: a run, a recipe, or anybody's network."""

import pytest
import torch
from torch import nn

from ghostnoise.lab.config import recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.measuring import target
from ghostnoise.lab.measuring.target import Wanted, find, of_folder
from ghostnoise.lab.train import Options, train

SHORT = ["train.epochs=2", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run of digits."""
    path = tmp_path_factory.mktemp("runs")
    outcome = train(recipe.load("digits", SHORT), Options(runs=path, thresholds=False, quiet=True, threads=1))
    return path, outcome


def test_a_run_folder_is_its_network_and_its_batches(runs):
    _, outcome = runs
    found = find(Wanted(str(outcome.folder), device="cpu"))
    assert found.folder == outcome.folder
    assert "epoch 2 (step-" in found.about
    saved = torch.load(max((outcome.folder / "checkpoints").glob("*.pt")), weights_only=True)["model"]
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, saved[name])
    assert found.ghost_size == recipe.load("digits").settings.norm.ghost_size
    batches = list(found.batches)
    assert len(batches) == 3  # as many as there are: 90 % of 256 images
    assert {tuple(images.shape) for images, _ in batches} == {(64, 1, 8, 8)}


def test_an_earlier_epoch_is_found_if_it_is_kept(runs):
    _, outcome = runs
    found = of_folder(outcome.folder, Wanted(str(outcome.folder), device="cpu"), epoch=1)
    assert "epoch 1 (step-" in found.about
    with pytest.raises(UserError, match=r"epoch 7 of .*: no checkpoint, .* kept of epochs 2 and 1; train with meter"):
        of_folder(outcome.folder, Wanted(str(outcome.folder), device="cpu"), epoch=7)


def test_a_recipe_is_its_run_or_else_its_start(runs):
    path, outcome = runs
    trained = find(Wanted("digits", tuple(SHORT), runs=path, device="cpu"))
    assert trained.folder == outcome.folder
    start = find(Wanted("digits", (*SHORT, "seed=5"), runs=path, device="cpu"))
    assert start.folder is None
    assert "not trained" in start.about


def test_a_folder_with_the_name_of_a_recipe_is_none_unless_it_is_a_run(runs, tmp_path, monkeypatch):
    path, outcome = runs
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    wanted = Wanted("digits", tuple(SHORT), runs=path, device="cpu")
    assert find(wanted).folder == target.run_folder(wanted) == outcome.folder
    assert target.run_folder(Wanted("digits", (*SHORT, "seed=5"), runs=path, device="cpu")) is None
    assert target.run_folder(Wanted("torch.nn:Identity", data="digits")) is None


def test_what_is_asked_for_goes_before_what_the_run_has(runs):
    _, outcome = runs
    found = find(Wanted(str(outcome.folder), device="cpu", ghost_size=3, batches=2, batch_size=16))
    assert found.ghost_size == 3
    assert [tuple(images.shape) for images, _ in found.batches] == [(16, 1, 8, 8)] * 2


def test_batches_may_be_tensors_pairs_or_mappings():
    seen = []

    class Net(nn.Module):
        def forward(self, x, scale=1.0):
            seen.append(float((x * scale).sum()))
            return x

    one = torch.ones(2, 3)
    found = target.Target("net", "", Net(), [one, (one, 0), [one], {"x": one, "scale": 2.0}], 4)
    assert len(list(found.feed())) == 4
    assert seen == [6, 6, 6, 12]


def test_data_that_do_not_fit_are_a_line():
    found = target.Target("net", "", nn.Linear(4, 2), [torch.ones(2, 3)], 4)
    with pytest.raises(UserError, match=r"net refused a batch \(\(2, 3\)\): .*; give data that fit the network"):
        list(found.feed())


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted("torch.nn:Identity"), "without --data: give a set of `ghostnoise data list`, or module:function"),
        (Wanted("torch.nn:Identity", data="cifar"), "--data cifar: must be one of digits, mnist, "),
        (Wanted("torch.nn:Identity", ("seed=1",), data="digits"), "settings are for recipes; leave them out"),
        (Wanted("torch:get_rng_state", data="digits"), "made a Tensor: must be a torch.nn.Module; return the network"),
        (Wanted("torch.nn:Identity", data="torch.nn:Identity"), "made a Identity: must give batches; return a Data"),
        (Wanted("nothing-of-the-kind"), "not found; "),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(wanted, said):
    with pytest.raises(UserError, match=said):
        find(wanted)


def test_a_folder_that_is_no_run_is_refused(tmp_path, runs):
    with pytest.raises(UserError, match="is no run folder"):
        find(Wanted(str(tmp_path)))
    _, outcome = runs
    with pytest.raises(UserError, match="its settings are fixed; leave it out"):
        find(Wanted(str(outcome.folder), ("seed=1",)))
    (tmp_path / "settings.json").write_text((outcome.folder / "settings.json").read_text())
    with pytest.raises(UserError, match="has no checkpoint; run `ghostnoise train` first"):
        find(Wanted(str(tmp_path)))
