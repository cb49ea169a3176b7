"""The targets of the meter: a run, a recipe, or a network of the user."""

import shutil
import sys

import pytest
import torch
from torch import nn

from ghostnoise.lab import measure
from ghostnoise.lab.config import recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.measure import Request, call, find, from_folder
from ghostnoise.lab.store import checkpoints
from support.training import trained

SHORT = ["train.epochs=2", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run of digits."""
    path = tmp_path_factory.mktemp("runs")
    return path, trained(recipe.load("digits", SHORT), path, threads=1, keep="checkpoints")


def test_a_run_folder_is_its_network_and_its_batches(runs):
    _, outcome = runs
    found = find(Request(str(outcome.folder), device="cpu"))
    assert found.folder == outcome.folder
    assert "epoch 2 (final-" in found.about
    saved = torch.load(*(outcome.folder / "checkpoints").glob("final-*.pt"), weights_only=True)["model"]
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, saved[name])
    assert found.ghost_size == recipe.load("digits").settings.norm.ghost_size
    batches = list(found.batches)
    assert len(batches) == 3  # as many as there are: 90 % of 256 images
    assert {tuple(images.shape) for images, _ in batches} == {(64, 1, 8, 8)}


def test_an_earlier_epoch_is_found_if_it_is_kept(runs):
    _, outcome = runs
    found = from_folder(outcome.folder, Request(str(outcome.folder), device="cpu"), epoch=1)
    assert "epoch 1 (step-" in found.about
    with pytest.raises(
        UserError, match=r"epoch 7 of .*: has neither a checkpoint .* exist for epochs 2 and 1; train with meter"
    ):
        from_folder(outcome.folder, Request(str(outcome.folder), device="cpu"), epoch=7)


@pytest.mark.parametrize("damage", ["flipped", "folder", "format", "other network"])
def test_a_damaged_checkpoint_is_never_measured(runs, tmp_path, damage):
    folder = shutil.copytree(runs[1].folder, tmp_path / "digits" / runs[1].folder.name)
    for path in checkpoints.saved(folder / "checkpoints", "final"):
        path.unlink()
    last, first = checkpoints.saved(folder / "checkpoints")
    content, state = bytearray(last.read_bytes()), torch.load(last, weights_only=True)
    last.unlink()
    match damage:
        case "flipped":
            content[len(content) // 2] ^= 1
            last.write_bytes(content)
        case "folder":
            last.mkdir()
        case "format":
            last = checkpoints.save(last.parent, 8, state | {"format": 2})
        case _:
            last = checkpoints.save(last.parent, 8, state | {"model": {"weight": torch.zeros(3)}})
    said = []
    request = Request(str(folder), device="cpu", warn=said.append)
    found = find(request)
    assert f"epoch 1 ({first.name})" in found.about
    assert [line.partition(" is damaged (")[0] for line in said] == [str(last)]
    assert last.exists(), "a command that only reads leaves the folder unchanged"
    weights = torch.load(first, weights_only=True)["model"]
    assert all(torch.equal(value, weights[name]) for name, value in found.model.state_dict().items())
    first.unlink()
    with pytest.raises(UserError, match="has no checkpoint that can be read; run `ghostnoise train` again"):
        find(request)


def test_a_recipe_is_its_run_or_else_its_start(runs):
    path, outcome = runs
    trained = find(Request("digits", tuple(SHORT), runs=path, device="cpu"))
    assert trained.folder == outcome.folder
    start = find(Request("digits", (*SHORT, "seed=5"), runs=path, device="cpu"))
    assert start.folder is None
    assert "not trained" in start.about


def test_a_folder_with_the_name_of_a_recipe_is_none_unless_it_is_a_run(runs, tmp_path, monkeypatch):
    path, outcome = runs
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    request_ = Request("digits", tuple(SHORT), runs=path, device="cpu")
    assert find(request_).folder == measure.run_folder(request_) == outcome.folder
    assert measure.run_folder(Request("digits", (*SHORT, "seed=5"), runs=path, device="cpu")) is None
    assert measure.run_folder(Request("torch.nn:Identity", data="digits")) is None


def test_what_is_asked_for_goes_before_what_the_run_has(runs):
    _, outcome = runs
    found = find(Request(str(outcome.folder), device="cpu", ghost_size=3, batches=2, batch_size=16))
    assert found.ghost_size == 3
    assert [tuple(images.shape) for images, _ in found.batches] == [(16, 1, 8, 8)] * 2


def test_a_network_on_signals(tmp_path):
    overrides = ("train.device=cpu", "data.limit=256", "data.test_limit=64", "train.batch_size=64")
    given = {"runs": tmp_path / "runs", "data_folder": tmp_path / "data", "device": "cpu", "batches": 2}
    found = find(Request("demo", overrides, **given))
    assert len(list(found.feed())) == 2
    again = find(Request("demo", overrides, **given))
    assert [tuple(signals.shape) for signals, _ in again.batches] == [(64, 1, 40)] * 2
    alone = find(Request("torch.nn:Identity", data="mnist1d", ghost_size=4, batch_size=8, **given))
    assert [tuple(signals.shape) for signals, _ in alone.batches] == [(8, 1, 40)] * 2


def test_batches_may_be_tensors_pairs_or_mappings():
    seen = []

    class Net(nn.Module):
        def forward(self, x, scale=1.0):
            seen.append(float((x * scale).sum()))
            return x

    one = torch.ones(2, 3)
    found = measure.Target("net", "", "", Net(), [one, (one, 0), [one], {"x": one, "scale": 2.0}], 4)
    assert len(list(found.feed())) == 4
    assert seen == [6, 6, 6, 12]


def test_data_that_do_not_fit_are_a_line():
    found = measure.Target("net", "", "", nn.Linear(4, 2), [torch.ones(2, 3)], 4)
    with pytest.raises(UserError, match=r"net cannot process a batch \(\(2, 3\)\): .*; give data that fit the network"):
        list(found.feed())


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request("torch.nn:Identity"), "without --data: give a name that `ghostnoise data list` shows, or module:f"),
        (Request("torch.nn:Identity", data="cifar"), "--data cifar: must be one of mnist1d, digits, mnist, "),
        (Request("torch.nn:Identity", ("seed=1",), data="digits"), "only recipes have settings; leave them out"),
        (Request("torch:get_rng_state", data="digits"), "returned a Tensor: must be a torch.nn.Module; return the net"),
        (Request("torch.nn:Identity", data="torch.nn:Identity"), "returned a Identity: must be an iterable of batches"),
        (Request("nothing-of-the-kind"), "not found; "),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(request_, line):
    with pytest.raises(UserError, match=line):
        find(request_)


def test_a_folder_that_is_no_run_is_refused(tmp_path, runs):
    with pytest.raises(UserError, match="is not a run folder"):
        find(Request(str(tmp_path)))
    _, outcome = runs
    with pytest.raises(UserError, match="its settings cannot change; leave it out"):
        find(Request(str(outcome.folder), ("seed=1",)))
    folder = tmp_path / outcome.folder.name
    folder.mkdir()
    (folder / "run.json").write_text((outcome.folder / "run.json").read_text())
    with pytest.raises(UserError, match="has no checkpoint; run `ghostnoise train` first"):
        find(Request(str(folder)))


def test_averaged_weights_are_measured_if_they_are_what_the_result_describes(tmp_path):
    """With `train.ema`, the result has the accuracy and the hash of the averaged weights."""
    outcome = trained(recipe.load("digits", [*SHORT, "train.ema=0.9"]), tmp_path, threads=1)
    found = find(Request(str(outcome.folder), device="cpu"))
    assert checkpoints.weights_sha256(found.model.state_dict()) == outcome.result["weights_sha256"]


SOURCE = """
number = 3
def seven():
    return 7
class Nets:
    @staticmethod
    def eight():
        return 8
def needs(argument):
    return argument
def fails():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current folder, with a name that no other test has imported."""
    name = f"user_module_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    yield name
    sys.modules.pop(name, None)


def test_a_function_is_found_in_the_current_folder_and_called(module):
    assert call(f"{module}:seven") == 7
    assert call(f"{module}:Nets.eight") == 8


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("missing", "has no 'missing'; give the name of a function in it"),
        ("number", "has type int: must be a function; give one that returns it"),
        ("needs", r"\(\) raised TypeError: .*; it must run without arguments"),
        ("fails", r"\(\) raised RuntimeError: no weights here; it must run without arguments"),
    ],
)
def test_what_is_not_a_function_is_refused(module, function, line):
    with pytest.raises(UserError, match=line):
        call(f"{module}:{function}")


def test_a_module_that_is_missing_or_raises_is_refused(module, tmp_path):
    with pytest.raises(
        UserError,
        match=r"'nowhere_at_all' cannot be imported .*; run this from the folder that contains it, or set PYTHONPATH",
    ):
        call("nowhere_at_all:f")
    broken = f"{module}_broken"
    (tmp_path / f"{broken}.py").write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        call(f"{broken}:f")
