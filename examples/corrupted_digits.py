"""Adapt a trained network to corrupted digits at test time, with the statistics of the test batches.

Prints the accuracy with the running statistics and with those of the test batches.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import ghostnoise


def corrupted(images: torch.Tensor) -> torch.Tensor:
    """Lower the contrast, add a background, and add noise."""
    generator = torch.Generator().manual_seed(0)
    return 0.4 * images + 0.7 + 0.15 * torch.randn(images.shape, generator=generator)


def network() -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy in batches of 64, in percent."""
    model.eval()
    right = sum((model(x).argmax(1) == y).sum() for x, y in zip(images.split(64), labels.split(64), strict=True))
    return 100 * float(right) / len(labels)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    train, test, model = slice(0, 1200), slice(1200, None), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(parser.parse_args().epochs):
        for index in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[train][index]), labels[train][index]).backward()
            optimizer.step()
    shifted = corrupted(images[test])
    print(f"clean digits: {accuracy(model, images[test], labels[test]):.1f} %")
    before = accuracy(model, shifted, labels[test])
    after = accuracy(ghostnoise.convert(model, "ptbn", prior_samples=16), shifted, labels[test])
    print(f"corrupted digits: accuracy {before:.1f} -> {after:.1f} %")


if __name__ == "__main__":
    main()
