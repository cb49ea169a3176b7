"""A Lightning callback that changes the ghost size during training, for any LightningModule.

Needs lightning, and scikit-learn for the data: python examples/lightning_callback.py [--steps 60]
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostnoise


class GhostSize(lightning.Callback):
    """Converts the module before training, steps the schedule after each batch, and is saved in checkpoints."""

    def __init__(self, schedule, method="gni"):
        self.schedule, self.method, self.losses = schedule, method, []

    def setup(self, trainer, pl_module, stage):
        if stage == "fit":  # before the strategy wraps the module; an optimizer stays valid in any case
            ghostnoise.convert(pl_module, self.method, ghost_size=self.schedule)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.schedule.step()  # in on_train_epoch_end for one step per epoch

    def state_dict(self):
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict):
        self.schedule.load_state_dict(state_dict)


class Classifier(lightning.LightningModule):
    """A module that does not know of ghost noise."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
steps, digits = parser.parse_args().steps, load_digits()
data = TensorDataset(torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target))
classifier, callback = Classifier(), GhostSize(ghostnoise.LinearSchedule(16, 64, steps))
trainer = lightning.Trainer(max_steps=steps, devices=1, callbacks=[callback], logger=False, enable_checkpointing=False)
trainer.fit(classifier, DataLoader(data, batch_size=128, shuffle=True, drop_last=True))
print(f"loss {callback.losses[0]:.3f} -> {callback.losses[-1]:.3f}, ghost size {callback.schedule.ghost_size}")
