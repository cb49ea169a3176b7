"""What `ghostnoise uncertainty` measures: calibration and the detection of shifted inputs, with and without sampling.

Each trained network is calibrated on its training batches (`ghostnoise.calibrate`, which keeps samples), and then
predicts test data and shifted data twice: once deterministically, and once as the mean of several outputs with the
noise that it was trained with.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ghostnoise import calibration, doctor, inference
from ghostnoise.lab import data
from ghostnoise.lab.config.schema import DataSettings, Settings
from ghostnoise.lab.data import catalog, signals
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.measure import Request, from_folder, settings_of
from ghostnoise.lab.train import machine
from ghostnoise.methods.elementwise import NoisyDropout

SAMPLES, KEEP, BATCH_SIZE = 32, 1024, 256
TEST, SHIFTED = 4_000, 2_000  # inputs
BINS = 15
DROPOUT_LAYERS = (NoisyDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
SHIFT_SEED, NOISE = 44, 0.5
DETERMINISTIC, GHOST_NOISE, DROPOUT, BATCH_NORM = "deterministic", "ghost noise", "MC dropout", "MC batch norm"
# The noise that a network was trained with, by its method; others are deterministic only.
SAMPLED = {
    "gni": GHOST_NOISE, "agni": GHOST_NOISE, "dropout": DROPOUT, "gbn": BATCH_NORM, "xbn": BATCH_NORM,
    "en": BATCH_NORM,
}  # fmt: skip

Inputs = dict[str, Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sets:
    """Test inputs with their labels, and shifted inputs by the name of the shift."""

    test: Tensor
    labels: NDArray[np.int64]
    shifted: Inputs


def evaluate(folder: Path, request: Request, samples: int, test: int, shifted: int) -> Iterator[Row]:
    """Yield a row of figures for each kind of inference that the network in a run folder has."""
    settings = settings_of(folder)
    sets = load(settings, request, test, shifted)
    target = from_folder(folder, replace(request, batches=2**31))
    model = target.model
    sampled = SAMPLED.get(settings.norm.method)
    keep = KEEP if sampled in (GHOST_NOISE, BATCH_NORM) else 0
    calibration.calibrate(model, target.batches, keep=keep)
    for kind in filter(None, (DETERMINISTIC, sampled)):
        start = time.perf_counter()
        run = predictor(model, kind, samples, settings.seed)
        probabilities = run(sets.test)
        surprise = entropy(probabilities)
        row: Row = {"inference": kind, "samples": 1 if kind == DETERMINISTIC else samples, "keep": keep}
        row |= {
            "test": test,
            "shifted": shifted,
            "accuracy": 100 * float((probabilities.argmax(1) == sets.labels).mean()),
        }
        row |= {"nll": nll(probabilities, sets.labels), "ece": 100 * ece(probabilities, sets.labels)}
        for name, inputs in sets.shifted.items():
            row[f"auroc {name}"] = 100 * auroc(surprise, entropy(run(inputs)))
        device = next(model.parameters()).device
        row |= {"seconds": round(time.perf_counter() - start, 1), "date": datetime.now(UTC).date().isoformat()}
        row |= {"device": doctor.device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
        yield row | {"commit": machine.commit()}


def load(settings: Settings, request: Request, test: int, shifted: int) -> Sets:
    """Return the first `test` inputs of the test set, and `shifted` inputs of each shift.

    MNIST-1D is shifted in three ways: new signals whose cyclic translation is beyond the range of the data set
    ("translated"), test signals with additional white noise of standard deviation 0.5 ("noisy"), and test signals in
    reverse order ("reversed"). The shifted inputs of CIFAR-10 are the test images of CIFAR-100, normalized as those of
    CIFAR-10.
    """
    given = settings.data.model_copy(update={"evaluate": "test"})
    size = settings.train.batch_size  # of the batches that are read
    inputs, labels = _held_out(given, request, size, test)
    if given.name == "mnist1d":
        translated, _ = signals.data_set(shifted, SHIFT_SEED, (signals.MOST_SHIFT, signals.WINDOW))
        noise = torch.randn(inputs[:shifted].shape, generator=torch.Generator().manual_seed(SHIFT_SEED))
        made = {
            "translated": torch.from_numpy(translated), "noisy": inputs[:shifted] + NOISE * noise,
            "reversed": inputs[:shifted].flip(-1),
        }  # fmt: skip
    elif given.name == "cifar10":
        other = DataSettings(name="cifar100", evaluate="test", stand_in=given.stand_in)
        others, _ = _held_out(other, request, size, shifted)
        made = {"CIFAR-100": _renormalized(others, "cifar100", "cifar10")}
    else:
        raise UserError(f"{given.name} has no shifted inputs: give a recipe with mnist1d or cifar10")
    return Sets(inputs, labels.numpy(), made)


def _held_out(settings: DataSettings, request: Request, size: int, count: int) -> tuple[Tensor, Tensor]:
    source = data.open_source(
        settings, data.data_folder(request.data_folder), batch_size=size, seed=0, device=torch.device("cpu")
    )
    batches = list(islice(source.evaluation(), -(-count // size)))
    inputs, labels = (torch.cat(parts)[:count] for parts in zip(*batches, strict=True))
    if len(inputs) < count:
        raise UserError(
            f"{count} inputs of {settings.name}: must be at most {len(inputs)}, its test set; ask for fewer"
        )
    return inputs, labels


def _renormalized(images: Tensor, by: str, wanted: str) -> Tensor:
    """Undo the normalization of one data set, and apply that of another one."""
    (mean, std), (new_mean, new_std) = (
        [torch.tensor(values)[:, None, None] for values in (entry.mean, entry.std)]
        for entry in map(catalog.find, (by, wanted))
    )
    return (images * std + mean - new_mean) / new_std


def predictor(model: nn.Module, kind: str, samples: int, seed: int) -> Callable[[Tensor], NDArray[np.float64]]:
    """Return a function that returns the probabilities (n, classes) of inputs."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def probabilities(x: Tensor) -> Tensor:
        if kind in (GHOST_NOISE, BATCH_NORM):
            return inference.predict(model, x, samples, transform=_softmax, generator=generator).mean
        passes = samples if kind == DROPOUT else 1
        each = [_softmax(model(x.repeat(count, *(1 for _ in x.shape[1:])))) for count in _chunks(passes, len(x))]
        mean: Tensor = torch.cat(each).unflatten(0, (passes, len(x))).mean(0)
        return mean

    @torch.no_grad()
    def run(inputs: Tensor) -> NDArray[np.float64]:
        with _mode(model, dropout=kind == DROPOUT):
            torch.manual_seed(seed)  # dropout draws from the default generator
            made = torch.cat([probabilities(x.to(device)) for x in inputs.split(BATCH_SIZE)])
        return made.double().cpu().numpy()

    return run


def _softmax(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)


def _chunks(passes: int, batch_size: int) -> Iterator[int]:
    most = max(inference.ROWS // batch_size, 1)
    return (min(most, passes - start) for start in range(0, passes, most))


@contextmanager
def _mode(model: nn.Module, dropout: bool) -> Iterator[None]:
    """Set eval mode, with dropout on or off, and restore the modes at the end."""
    with inference.restored_modes(model):
        model.eval()
        for module in model.modules():
            if dropout and isinstance(module, DROPOUT_LAYERS):
                module.train()
        yield


def nll(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return the mean negative logarithm of the probability of the label."""
    return float(-np.log(np.maximum(probabilities[np.arange(len(labels)), labels], 1e-300)).mean())


def ece(probabilities: NDArray[np.float64], labels: NDArray[np.int64], bins: int = BINS) -> float:
    """Return the expected calibration error (Guo et al., 2017): the mean |accuracy - confidence| of bins of confidence.

    The bins have equal width, and weigh by their numbers of inputs.
    """
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    at = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    sums = np.bincount(at, correct - confidence, bins)
    return float(np.abs(sums).sum() / len(labels))


def entropy(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the entropy of each predictive distribution."""
    made: NDArray[np.float64] = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1)
    return made


def auroc(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> float:
    """Return the probability that an outside score is above an inside one; equal scores count half."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([inside, outside]))[len(inside) :]
    return float((ranks.sum() / len(outside) - (len(outside) + 1) / 2) / len(inside))
