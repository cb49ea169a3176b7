"""Ghost noise in timm networks: with batch norm, with layer norm on tokens, with layer norm on images.

Needs timm, and scikit-learn for the data:
    python examples/timm_models.py [--steps 12]
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ghostnoise


def resnet():
    """Return a ResNet whose batch norms are converted in place."""
    model = timm.create_model("resnet18", in_chans=1, num_classes=10)
    return ghostnoise.convert(model, "gni", ghost_size=16)


def vit():
    """Return a ViT with noise after every layer norm, as in the paper. Tokens are (B, T, C): channels come last."""
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, global_pool="avg", in_chans=1, num_classes=10)
    return ghostnoise.convert(model, "gni", ghost_size=12, after=nn.LayerNorm)


def convnext():
    """Return a ConvNeXt, with two layouts: (B, H, W, C) inside the blocks, (B, C, H, W) between the stages."""
    sizes = {"depths": (1, 1, 1, 1), "dims": (32, 64, 128, 256)}
    model = timm.create_model("convnext_tiny", **sizes, in_chans=1, num_classes=10)
    return ghostnoise.convert(model, "gni", ghost_size=32, after=nn.LayerNorm)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
steps = parser.parse_args().steps

digits = load_digits()
images = F.interpolate(torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1, size=32)
labels = torch.from_numpy(digits.target)

for build in (resnet, vit, convnext):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{build.__name__}, {len(ghostnoise.summary(model))} layers: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
