"""Ghost noise in data-parallel training.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py [--steps 60] [--scope global]

In local scope, each process computes statistics and draws ghost batches from its own part of the batch, as
nn.BatchNorm2d does; in global scope, from the samples of all processes, as nn.SyncBatchNorm does. Needs scikit-learn.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ghostnoise

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--scope", choices=["local", "global"], default="local")
options = parser.parse_args()

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(dist.get_rank())  # different noise and data on each rank; DDP broadcasts the weights of rank 0

digits = load_digits()
images = torch.from_numpy(digits.images).float().unsqueeze(1).to(device) / 8 - 1
labels = torch.from_numpy(digits.target).to(device)

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
).to(device)
model = ghostnoise.convert(model, "gni", ghost_size=16, scope=options.scope)  # before DDP wraps it
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

losses = []
for _ in range(options.steps):
    rows = torch.randint(len(images), (64,))
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

plain = ghostnoise.revert(model.module).eval()
with torch.no_grad():
    right = (plain(images).argmax(1) == labels).float().mean().item()
if dist.get_rank() == 0:
    result = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, training accuracy {right:.1%}"
    print(f"{dist.get_world_size()} processes, {options.scope} scope: {result}")
dist.destroy_process_group()
