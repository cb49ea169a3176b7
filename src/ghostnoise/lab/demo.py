"""A first look: one small network, four normalizations, a few hundred real digits, several seeds.

    python -m ghostnoise.lab.demo [--seeds 5] [--epochs 40] [--out out]

Trains on 360 of scikit-learn's 1,797 handwritten digits, so that there is something to regularize, and tests on the
rest. Prints test accuracy as mean ± standard deviation over seeds, and saves a figure.
"""

import argparse
import math
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import ghostnoise

Norm = Callable[[int], nn.Module]
Accuracies = dict[str, list[float]]

TRAIN_IMAGES = 360
BATCH_SIZE = 120
METHODS: dict[str, Norm] = {
    "BN": nn.BatchNorm2d,
    "GBN-12": lambda channels: ghostnoise.GhostBatchNorm2d(channels, ghost_size=12),
    "XBN-12": lambda channels: ghostnoise.ExclusiveBatchNorm2d(channels, ghost_size=12),
    "GNI-12": lambda channels: ghostnoise.GhostNoiseBatchNorm2d(channels, ghost_size=12),
}


def network(norm: Norm, width: int = 16) -> nn.Sequential:
    """Three convolutions with `norm` after each, and a linear classifier: 24,000 weights at width 16."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The digits as (images, labels) for training and for testing, in an order given by `seed`."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(data.images).float().unsqueeze(1)[order] / 8 - 1
    labels = torch.from_numpy(data.target)[order]
    return (images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES]), (images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])


def train(norm: Norm, seed: int, epochs: int, on_epoch: Callable[[], object]) -> float:
    """Train one network; returns its accuracy on the test images, in percent."""
    (images, labels), (test_images, test_labels) = digits(seed)
    torch.manual_seed(seed)
    model = network(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * math.ceil(len(images) / BATCH_SIZE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH_SIZE):
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        on_epoch()
    model.eval()
    with torch.no_grad():
        right = int((model(test_images).argmax(1) == test_labels).sum())
    return 100 * right / len(test_labels)


def table(accuracies: Accuracies) -> Table:
    """Mean ± standard deviation for each method, and the mean difference to the first one over the same seeds."""
    made = Table()
    for heading in ("method", "test accuracy, %", "over BN"):
        made.add_column(heading, justify="left" if heading == "method" else "right")
    baseline = next(iter(accuracies.values()))
    for name, values in accuracies.items():
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        gain = statistics.fmean(ours - theirs for ours, theirs in zip(values, baseline, strict=True))
        made.add_row(name, f"{statistics.fmean(values):.2f}{spread}", "" if values is baseline else f"{gain:+.2f}")
    return made


def figure(accuracies: Accuracies, path: Path) -> None:
    """Save a dot per seed and a bar at the mean, for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for at, values in enumerate(accuracies.values()):
        spots = [at + 0.09 * (k - (len(values) - 1) / 2) for k in range(len(values))]
        axes.hlines(statistics.fmean(values), at - 0.32, at + 0.32, color="black", linewidth=2, zorder=3)
        axes.scatter(spots, values, s=36, alpha=0.75, zorder=2, edgecolors="white", linewidths=0.5)
    axes.set_xticks(range(len(accuracies)), list(accuracies))
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"digits, {TRAIN_IMAGES} training images; a dot is a seed, the bar their mean", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="python -m ghostnoise.lab.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=_positive, default=5, help="runs per method (default 5)")
    parser.add_argument("--epochs", type=_positive, default=40, help="passes over the training images (default 40)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the figure (default out/)")
    options = parser.parse_args(arguments)
    console = Console()
    accuracies: Accuracies = {name: [] for name in METHODS}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=options.seeds * len(METHODS) * options.epochs)
        for seed in range(options.seeds):
            for name, norm in METHODS.items():
                progress.update(task, description=f"{name:6} seed {seed}")
                accuracies[name].append(train(norm, seed, options.epochs, lambda: progress.advance(task)))
    console.print(
        f"digits, {TRAIN_IMAGES} training images, {options.epochs} epochs, mean ± std of n = {options.seeds} seeds"
    )
    console.print(table(accuracies))
    console.print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {date.today()}")
    path = options.out / "demo.png"
    figure(accuracies, path)
    console.print(f"figure: {path}")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
