"""Loss, ghost size and the strength of the noise in each layer on Weights & Biases.

Needs wandb, and scikit-learn for the data:
    python examples/wandb_logging.py [--steps 60] [--mode online]

By default the run is written to a temporary folder only; `--mode online` sends it to your account.
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
import wandb
from sklearn.datasets import load_digits
from torch import nn

import ghostnoise

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--mode", choices=["offline", "online", "disabled"], default="offline")
options = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
data, labels = torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target)
schedule = ghostnoise.LinearSchedule(8, 32, options.steps)
model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
model = ghostnoise.convert(model, "gni", ghost_size=schedule)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

losses = []
with tempfile.TemporaryDirectory() as folder:
    settings = {
        "method": "gni",
        "schedule": repr(schedule),
        "layers": [row._asdict() for row in ghostnoise.summary(model)],
    }
    with wandb.init(project="ghostnoise", dir=folder, mode=options.mode, config=settings) as run:
        for step in range(options.steps):
            rows = torch.randint(len(data), (128,))
            loss = F.cross_entropy(model(data[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            found = {"loss": losses[-1], "ghost_size": schedule.ghost_size}
            if step % 20 == 0:  # the noise of the present weights, with the present ghost size
                with torch.no_grad(), ghostnoise.Meter(model, schedule.ghost_size, gap=False) as meter:
                    model(data[rows])
                for name, layer in meter.result().items():
                    noise = layer.noise["gni"]
                    found |= {
                        f"shift/{name}": float(noise.shift.std.mean()),
                        f"scale/{name}": float(noise.scale.std.mean()),
                    }
            run.log(found, step=step)
            schedule.step()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ghost size {schedule.ghost_size}")
