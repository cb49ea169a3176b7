"""Ghost noise in a plain PyTorch training loop; the plain network is deployed.

Needs scikit-learn for the data:
    python examples/plain_pytorch.py [--steps 100]
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ghostnoise


def network():
    """Return a small network that does not depend on ghostnoise."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps

torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 8 - 1
labels = torch.from_numpy(digits.target)[order]
(images, test_images), (labels, test_labels) = images.split([1000, 797]), labels.split([1000, 797])

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model = ghostnoise.convert(model, "gni", ghost_size=32)  # the optimizer stays valid
print(ghostnoise.summary(model))

losses = []
for _ in range(steps):
    rows = torch.randint(len(images), (128,))
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

plain = network()
plain.load_state_dict(model.state_dict())  # ghostnoise is not needed from here on
with torch.no_grad():
    right = (plain.eval()(test_images).argmax(1) == test_labels).float().mean().item()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, test accuracy {right:.1%}")
