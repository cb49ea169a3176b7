"""Recording noise during training does not affect the training."""

import copy
import json

import numpy as np
import pytest
import torch

from ghostnoise.lab.config import recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store.folder import read
from ghostnoise.lab.train import metering
from ghostnoise.meter import Reading
from support.training import trained

SHORT = ["train.epochs=3", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]
METER = ["meter.every=2", "meter.batches=2", "meter.draws=16"]


pytestmark = pytest.mark.usefixtures("one_thread")


def run(path, *overrides, **more):
    return trained(recipe.load("digits", [*SHORT, *overrides]), path, **more)


def recorded(outcome):
    return sorted(path.name for path in outcome.folder.glob("noise/*"))


@pytest.mark.parametrize(
    ("every", "epochs", "expected"),
    [(2, 5, [1, 2, 4, 5]), (1, 3, [1, 2, 3]), (9, 3, [1, 3]), (1, 1, [1])],
)
def test_measured_epochs(tmp_path, every, epochs, expected):
    """The record has the rows of each reading, without the distributions."""
    small = ["meter.batches=1", "meter.draws=4", f"meter.every={every}", f"train.epochs={epochs}"]
    outcome = run(tmp_path, *small)
    assert recorded(outcome) == [f"epoch-{epoch:04d}.npz" for epoch in expected]
    stored = read(outcome.folder)
    assert [each["epoch"] for each in stored.noise] == expected
    rows = Reading.load(outcome.folder / "noise" / recorded(outcome)[-1]).rows()
    assert stored.noise[-1]["layers"]["layer"] == [row["layer"] for row in rows]


@pytest.mark.parametrize("method", [["norm.method=gni", "norm.ghost_size=8"], ["norm.method=dropout", "norm.p=0.2"]])
def test_a_metered_run_learns_the_same_weights(tmp_path, method):
    plain, metered = run(tmp_path, *method), run(tmp_path, *method, *METER)
    assert plain.folder != metered.folder
    for name in ("weights_sha256", "accuracy", "train_loss"):
        assert plain.result[name] == metered.result[name]
    assert recorded(plain) == []
    assert recorded(metered) == ["epoch-0001.npz", "epoch-0002.npz", "epoch-0003.npz"]
    reading = Reading.load(metered.folder / "noise" / "epoch-0003.npz")
    assert {layer.batches for layer in reading.layers} == {2}
    assert {layer.samples for layer in reading.layers} == {128}


def test_the_ghost_size_is_the_norms_unless_given(tmp_path):
    sizes = {}
    for given in ([], ["meter.ghost_size=4"]):
        for method in (["norm.method=gni", "norm.ghost_size=8"], ["norm.method=bn"]):
            outcome = run(tmp_path, "train.epochs=1", *method, *METER, *given)
            reading = Reading.load(outcome.folder / "noise" / "epoch-0001.npz")
            sizes[method[0], bool(given)] = {layer.ghost_size for layer in reading.layers}
    assert sizes == {
        ("norm.method=gni", False): {8}, ("norm.method=bn", False): {32}, ("norm.method=gni", True): {4},
        ("norm.method=bn", True): {4},
    }  # fmt: skip


def test_a_resumed_run_records_the_same(tmp_path):
    """A run that is stopped in the second epoch has the first reading, and records the others after resuming."""
    from ghostnoise.lab.train.machine import Stop

    whole = run(tmp_path / "whole", *METER)
    stop, saves = Stop(), []

    def saved(folder):
        saves.append(folder)
        if len(saves) == 2:
            stop.signal = 15

    first = run(tmp_path / "cut", *METER, stop=stop, saved=saved, checkpoint_seconds=0.0)
    assert first.result is None
    second = run(tmp_path / "cut", *METER)
    assert recorded(second) == recorded(whole)
    for name in recorded(whole):
        ours, theirs = (Reading.load(outcome.folder / "noise" / name) for outcome in (second, whole))
        assert json.dumps(ours.rows()) == json.dumps(theirs.rows())


def test_the_measured_network_is_a_copy_in_training_mode(tmp_path):
    """The reading matches a naive pass over the same batches, and the network is not modified."""
    from ghostnoise.lab import data, models
    from ghostnoise.lab.train.machine import Machine
    from ghostnoise.lab.train.session import Session

    settings = recipe.load("digits", [*SHORT, "norm.method=bn", *METER]).settings
    here = Machine(torch.device("cpu"))
    source = data.open_source(settings.data, tmp_path, batch_size=64, seed=0, device=here.device)
    model = models.build(settings.model, settings.norm, source.info.shape, source.info.classes)
    session = Session(model, settings, here)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    (tmp_path / "read.npz").write_bytes(metering.measure(session, source, 1))
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    reading = Reading.load(tmp_path / "read.npz")
    first = reading.layers[0]
    seen = []
    module = dict(model.named_modules())[first.name]
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[0].double()))
    with torch.no_grad():
        for number, (images, _) in enumerate(source.batches(1)):
            if number < 2:
                model(images)
    handle.remove()
    dims = [dim for dim in range(seen[0].ndim) if dim != 1]
    np.testing.assert_allclose(first.mean, torch.stack([x.mean(dims) for x in seen]).mean(0), atol=1e-6)


def test_a_network_without_norms_raises_before_anything_is_written(tmp_path, monkeypatch):
    from ghostnoise.lab import models

    monkeypatch.setattr(models, "build", lambda *args: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    with pytest.raises(UserError, match=r"meter: no normalization layer .* leave the section \[meter\] out"):
        run(tmp_path, *METER)
    assert list(tmp_path.iterdir()) == []


def test_batches_of_one_sample_raise_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"meter: nothing was measured .* leave the section \[meter\] out"):
        run(tmp_path, "norm.method=bn", "train.batch_size=1", "data.limit=20", *METER)
    assert list(tmp_path.iterdir()) == []
