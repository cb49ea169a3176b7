"""Ghost noise in a LightningModule, with a ghost size that grows during training.

Needs lightning, and scikit-learn for the data:
    python examples/lightning_module.py [--steps 60]
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostnoise


class Classifier(lightning.LightningModule):
    """A module that converts its network in the constructor, so checkpoints, precision and devices work as usual."""

    def __init__(self, steps):
        super().__init__()
        network = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
        self.schedule = ghostnoise.LinearSchedule(16, 64, steps)
        self.model = ghostnoise.convert(network, "gni", ghost_size=self.schedule)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_):
        self.schedule.step()  # one step per batch; call it in on_train_epoch_end for one step per epoch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    # The state_dict is that of the plain network and does not contain the schedule.
    def on_save_checkpoint(self, checkpoint):
        checkpoint["schedule"] = self.schedule.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.schedule.load_state_dict(checkpoint["schedule"])


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
steps = parser.parse_args().steps

lightning.seed_everything(0)
digits = load_digits()
data = TensorDataset(torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target))
classifier = Classifier(steps)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_steps=steps, devices=1, **quiet)
trainer.fit(classifier, DataLoader(data, batch_size=128, shuffle=True, drop_last=True))
print(f"loss {classifier.losses[0]:.3f} -> {classifier.losses[-1]:.3f}, ghost size {classifier.schedule.ghost_size}")
