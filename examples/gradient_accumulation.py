"""Train with micro-batches of 4 samples, with batch norm of each, and with batch norm over micro-batches (MBN).

Prints how far the output of the last micro-batch in training is from that in a batch of 64, relative to it, and the
accuracy. MBN has the statistics of the batch, and a gradient through the micro-batch's share of them only.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ghostnoise

BATCH, MICRO = 64, 4


def network(history: int) -> nn.Module:
    """Return a network whose batch norms keep `history` samples."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()]
    return ghostnoise.convert(nn.Sequential(*layers, nn.Linear(128, 10)), "mbn", history=history)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> tuple[float, float]:
    """Return the distance to the output of the whole batch, and the accuracy on the last 500 digits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(len(x) - 500, (BATCH,))
        before = copy.deepcopy(model)  # with the weights of this step
        optimizer.zero_grad()
        for part in batch.split(MICRO):
            output = model(x[part])
            (nn.functional.cross_entropy(output, y[part]) * MICRO / BATCH).backward()
        output = output.detach()
        optimizer.step()
    with torch.no_grad():
        whole = ghostnoise.revert(before)(x[batch])[-MICRO:]
        right = (model.eval()(x[-500:]).argmax(1) == y[-500:]).float().mean()
    return float((output - whole).norm() / whole.norm()), 100 * float(right)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    alone, together = (train(network(history), x, y, options.steps) for history in (0, BATCH - MICRO))
    print(f"distance to the output of the whole batch {alone[0]:.3f} -> {together[0]:.3f}")
    print(f"accuracy of batch norm of micro-batches {alone[1]:.1f} %, over micro-batches {together[1]:.1f} %")


if __name__ == "__main__":
    main()
