"""The figures of `ghostnoise uncertainty`, against naive loops; and the inputs that they are measured on."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.lab import uncertainty
from ghostnoise.lab.config.schema import DataSettings
from ghostnoise.lab.data import signals
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.measure import Request


def random_probabilities(rows, classes=4, seed=0):
    values = np.random.default_rng(seed).random((rows, classes)) ** 3
    return values / values.sum(1, keepdims=True)


def test_calibration_error_equals_a_loop_over_bins():
    probabilities, labels = random_probabilities(500), np.random.default_rng(1).integers(0, 4, 500)
    total = 0.0
    for at in range(15):
        inside = [row for row in range(500) if at / 15 < probabilities[row].max() <= (at + 1) / 15]
        if inside:
            accuracy = sum(probabilities[row].argmax() == labels[row] for row in inside) / len(inside)
            confidence = sum(probabilities[row].max() for row in inside) / len(inside)
            total += len(inside) / 500 * abs(accuracy - confidence)
    assert math.isclose(uncertainty.ece(probabilities, labels), total, rel_tol=1e-12)
    certain = np.eye(4)[labels]
    assert uncertainty.ece(certain, labels) == 0
    assert uncertainty.ece(certain, (labels + 1) % 4) == 1


def test_likelihood_and_entropy_equal_loops():
    probabilities, labels = random_probabilities(50), np.random.default_rng(1).integers(0, 4, 50)
    expected = -sum(math.log(row[label]) for row, label in zip(probabilities, labels, strict=True)) / 50
    assert math.isclose(uncertainty.nll(probabilities, labels), expected, rel_tol=1e-12)
    for row, found in zip(probabilities, uncertainty.entropy(probabilities), strict=True):
        assert math.isclose(found, -sum(p * math.log(p) for p in row), rel_tol=1e-12)
    assert uncertainty.entropy(np.eye(3)).tolist() == [0, 0, 0]


def test_area_under_the_curve_counts_pairs():
    random = np.random.default_rng(0)
    inside, outside = random.integers(0, 9, 40).astype(float), random.integers(3, 12, 25).astype(float)
    pairs = [(a < b) + 0.5 * (a == b) for a in inside for b in outside]
    assert math.isclose(uncertainty.auroc(inside, outside), sum(pairs) / len(pairs), rel_tol=1e-12)


def test_translated_signals_are_beyond_the_range_of_the_data_set(monkeypatch):
    seen = []
    original = np.random.RandomState

    class Recording(original):
        def randint(self, *bounds):
            seen.append(super().randint(*bounds))
            return seen[-1]

    monkeypatch.setattr(np.random, "RandomState", Recording)
    signals.data_set(500, 44, (signals.MOST_SHIFT, signals.WINDOW))
    assert set(seen) == set(range(48, 72))
    seen.clear()
    signals.data_set(500, 44)
    assert set(seen) == set(range(48))


def loaded(tmp_path, name, **options):
    given = SimpleNamespace(
        data=DataSettings(name=name, evaluate="test", **options), train=SimpleNamespace(batch_size=32)
    )
    return uncertainty.load(given, Request("", data_folder=tmp_path), 40, 30)


def test_shifted_signals(tmp_path):
    sets = loaded(tmp_path, "mnist1d")
    expected = signals.load(tmp_path, "test")
    assert np.array_equal(sets.test.numpy(), expected.pixels[:40])
    assert np.array_equal(sets.labels, expected.labels[:40])
    assert list(sets.shifted) == ["translated", "noisy", "reversed"]
    assert {tuple(inputs.shape) for inputs in sets.shifted.values()} == {(30, 1, 40)}
    assert np.array_equal(sets.shifted["reversed"].numpy(), expected.pixels[:30, :, ::-1])
    noise = sets.shifted["noisy"] - sets.test[:30]
    assert abs(float(noise.std()) - 0.5) < 5 * 0.5 / math.sqrt(2 * noise.numel())  # five standard errors


def test_the_images_of_another_data_set_get_the_normalization_of_the_first(tmp_path):
    sets = loaded(tmp_path, "cifar10", stand_in=True)
    assert list(sets.shifted) == ["CIFAR-100"]
    images = sets.shifted["CIFAR-100"]
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))
    pixels = (images * std + mean) * 255
    assert (pixels - pixels.round()).abs().max() < 1e-2  # as the files have them
    assert pixels.min() >= -1e-2
    assert pixels.max() <= 255 + 1e-2


def test_inputs_that_a_data_set_does_not_have(tmp_path):
    with pytest.raises(UserError, match="digits has no shifted inputs"):
        loaded(tmp_path, "digits")


def test_each_kind_of_inference(tmp_path):
    torch.manual_seed(0)
    dropout = nn.Sequential(nn.Flatten(), nn.Linear(40, 10), ghostnoise.NoisyDropout(0.5))
    x = torch.randn(20, 1, 40)
    plain = dropout.eval()(x).double().softmax(-1).detach().numpy()
    np.testing.assert_allclose(uncertainty.predictor(dropout, "deterministic", 8, 0)(x), plain, rtol=1e-12)
    sampled = uncertainty.predictor(dropout, "MC dropout", 8, 0)(x)
    assert not dropout[2].training
    torch.manual_seed(0)
    dropout[2].train()
    expected = dropout(x.repeat(8, 1, 1)).double().softmax(-1).unflatten(0, (8, 20)).mean(0).detach().numpy()
    np.testing.assert_allclose(sampled, expected, rtol=1e-12)
    noise = nn.Sequential(nn.Flatten(), nn.Linear(40, 10), ghostnoise.GhostNoise(4)).eval()
    ghostnoise.calibrate(noise, [x], keep=16)
    found = uncertainty.predictor(noise, "ghost noise", 8, 3)(x)
    generator = torch.Generator().manual_seed(3)
    predicted = ghostnoise.predict(noise, x, 8, transform=lambda y: y.double().softmax(-1), generator=generator).mean
    assert np.array_equal(found, predicted.numpy())
    assert np.array_equal(found, uncertainty.predictor(noise, "ghost noise", 8, 3)(x))
