"""Evaluate trained networks with other weights of EvalNorm: `python tools/evalnorm.py runs/RECIPE OUT.csv`.

EvalNorm changes inference only, so each network of a run with `norm.method = "en"` on MNIST-1D is evaluated as it is:
with the running statistics alone, as after training with GBN (α = 0), with α = 1/N² and 1/N, and with the α of a grid
that has the smallest loss on the validation signals. Accuracies are those of the test signals; the validation signals
have no part in training.
"""

import csv
import sys
from pathlib import Path

import torch
from torch import nn

import ghostnoise
from ghostnoise.lab import data
from ghostnoise.lab.measure import Request, from_folder, settings_of
from ghostnoise.lab.store.folder import read

GRID = [0.0, *(2.0**-k for k in range(12, 1, -1))]
FIELDS = ("method", "seed", "accuracy", "ghost_size", "identity", "weights_sha256")


@torch.no_grad()
def evaluated(model: nn.Module, batches: list, alpha: float) -> tuple[float, float]:
    """Return accuracy and mean loss with the weight `alpha` of the sample itself."""
    for layer in model.modules():
        if isinstance(layer, ghostnoise.EvalNorm):
            layer.alpha = alpha
    model.eval()
    outputs, labels = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    accuracy = 100 * (outputs.argmax(1) == labels).double().mean().item()
    return accuracy, nn.functional.cross_entropy(outputs, labels).item()


def rows_of(folder: Path) -> list[dict]:
    """Return a row for each weight of the network in a run folder."""
    settings, result = settings_of(folder), read(folder).result or {}
    size, model = settings.norm.ghost_size, from_folder(folder, Request(str(folder))).model
    parts = {
        split: list(data.open_source(
            settings.data.model_copy(update={"evaluate": split}), data.data_folder(None),
            batch_size=settings.train.batch_size, seed=settings.seed, device=torch.device("cpu"),
        ).evaluation())
        for split in ("validation", "test")
    }  # fmt: skip
    fitted = min(GRID, key=lambda alpha: evaluated(model, parts["validation"], alpha)[1])
    weights = {
        f"GBN-{size}": 0.0,
        f"EN-{size} 1/N²": 1 / size**2,
        f"EN-{size} 1/N": 1 / size,
        f"EN-{size} fitted": fitted,
    }
    rows = []
    for method, alpha in weights.items():
        accuracy, _ = evaluated(model, parts["test"], alpha)
        if method.endswith("1/N²") and settings.norm.alpha == "1/N^2":
            assert abs(accuracy - result["accuracy"]) < 1e-9, f"{folder}: {accuracy} instead of {result['accuracy']}"
        figures = (method, settings.seed, accuracy, size, folder.name, result["weights_sha256"])
        rows.append(dict(zip(FIELDS, figures, strict=True)))
    return rows


def main() -> None:
    """Write the file."""
    runs, out = map(Path, sys.argv[1:])
    made: list[dict] = []
    for folder in sorted(runs.iterdir()):
        if (folder / "checkpoints").is_dir() and settings_of(folder).norm.method == "en":
            made += rows_of(folder)
            print(folder.name, [f"{row['method']} {row['accuracy']:.2f}" for row in made[-4:]], flush=True)
    made.sort(key=lambda row: (row["ghost_size"], row["method"], row["seed"]))
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)


if __name__ == "__main__":
    main()
