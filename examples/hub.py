"""Weights of a converted network on the Hugging Face Hub, which load into plain batch norm without this library.

Needs huggingface_hub and safetensors, and scikit-learn for the data:
    python examples/hub.py [--steps 60] [--folder DIR] [--push you/name]

Without --push, the files are written to a folder only, and loaded from there.
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from sklearn.datasets import load_digits
from torch import nn

import ghostnoise


class Classifier(nn.Module, PyTorchModelHubMixin):
    """A network that can be stored on the Hub; its arguments are stored in config.json."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--folder")
parser.add_argument("--push", metavar="REPOSITORY")
options = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
data, labels = torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target)
model = ghostnoise.convert(Classifier(width=96), "gni", ghost_size=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for _ in range(options.steps):
    rows = torch.randint(len(data), (128,))
    loss = F.cross_entropy(model(data[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

with tempfile.TemporaryDirectory() as temporary:
    folder = options.folder or temporary
    model.eval().save_pretrained(folder)  # model.safetensors and config.json
    if options.push:
        model.push_to_hub(options.push)
    plain = Classifier.from_pretrained(options.push or folder).eval()  # this line alone is what others need
same = torch.equal(plain(data), model(data))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, loaded into {plain.layers[1]}, same output: {same}")
