"""Ghost noise in a training loop of Hugging Face Accelerate, without noise in the last steps.

Needs accelerate, and scikit-learn for the data:
    python examples/accelerate_loop.py [--steps 60]
    accelerate launch examples/accelerate_loop.py  # with your configuration of devices and precision
"""

import argparse
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostnoise

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
steps = parser.parse_args().steps

accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)  # different noise in each process
digits = load_digits()
data = TensorDataset(torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target))
loader = DataLoader(data, batch_size=128, shuffle=True, drop_last=True)

model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
schedule = ghostnoise.OffAfter(ghost_size=16, steps=max(steps * 3 // 4, 1))
model = ghostnoise.convert(model, "gni", ghost_size=schedule)  # before prepare, which may wrap the model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(schedule)  # accelerator.save_state then includes it

losses = []
for images, labels in islice(chain.from_iterable(repeat(loader)), steps):
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())

plain = ghostnoise.revert(accelerator.unwrap_model(model)).eval()
images, labels = (tensor.to(accelerator.device) for tensor in data.tensors)
with torch.no_grad():
    right = (plain(images).argmax(1) == labels).float().mean().item()
accelerator.print(
    f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, training accuracy {right:.1%}, ghost size {schedule.ghost_size}"
)
accelerator.end_training()
