"""A training script with timm's parts, whose ghost size grows from epoch to epoch beside the learning rate.

Needs timm, and scikit-learn for the data:
    python examples/timm_training.py [--epochs 3]

In timm's own train.py, the same three lines go after `create_model`, after `lr_scheduler.step(epoch + 1)`, and into the
dictionary of `CheckpointSaver`.
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

import ghostnoise

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
digits = load_digits()
images = F.interpolate(torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1, size=32)
loader = DataLoader(TensorDataset(images, torch.from_numpy(digits.target)), 128, shuffle=True, drop_last=True)

model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
ghost_size = ghostnoise.LinearSchedule(16, 64, steps=max(epochs - 1, 1))
model = ghostnoise.convert(model, "gni", ghost_size=ghost_size, verbose=True)  # before DDP and torch.compile
ema = ModelEmaV3(model, decay=0.9)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
rates, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs)

losses = []
for epoch in range(epochs):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        losses.append(loss.item())
    print(f"epoch {epoch}: ghost size {ghost_size.ghost_size}")
    rates.step(epoch + 1)
    ghost_size.step()  # once per epoch, so that torch.compile compiles once per size
    checkpoint = {"state_dict": model.state_dict(), "ghost_size": ghost_size.state_dict()}

plain = timm.create_model("test_resnet", in_chans=1, num_classes=10)
plain.load_state_dict(checkpoint["state_dict"])  # ghostnoise is not needed to load it
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
