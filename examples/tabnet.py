"""TabNet before and after `ghostnoise.convert`: the loss and the CPU time of a training step, measured in turns.

Needs pytorch-tabnet:
    python examples/tabnet.py [--steps 100] [--batch-size 1024] [--virtual-batch-size 128]
"""

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from pytorch_tabnet.tab_network import TabNet

import ghostnoise

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--virtual-batch-size", type=int, default=128)
options = parser.parse_args()
COLUMNS = 32


def train_step(model, optimizer, table, labels):
    """Return the loss of a training step and its CPU time in milliseconds, to which other programs do not add."""
    start = time.process_time()
    output, sparsity = model(table)
    loss = F.cross_entropy(output, labels) - 1e-3 * sparsity
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), 1000 * (time.process_time() - start)


torch.manual_seed(0)
torch.set_num_threads(1)  # the CPU time of several threads would be their sum
groups = torch.eye(COLUMNS)  # every column is a group of its own
before = TabNet(COLUMNS, 2, virtual_batch_size=options.virtual_batch_size, group_attention_matrix=groups)
networks = {
    "before": before,
    "after": ghostnoise.convert(copy.deepcopy(before), "gbn"),  # with the virtual batch size that TabNet has
    "after, running_var_from='each'": ghostnoise.convert(copy.deepcopy(before), "gbn", running_var_from="each"),
}
optimizers = {name: torch.optim.Adam(model.parameters(), lr=0.02) for name, model in networks.items()}
steps = {name: [] for name in networks}
for _ in range(options.steps):
    table = torch.randn(options.batch_size, COLUMNS)
    labels = (table[:, 0] + table[:, 1] > 0).long()
    for name, model in networks.items():
        steps[name].append(train_step(model, optimizers[name], table, labels))
for name, taken in steps.items():
    losses, times = zip(*taken, strict=True)
    low, middle, high = statistics.quantiles(times, n=4)
    loss = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    print(f"{name:<30} {loss}, {middle:.1f} ms per step (quartiles {low:.1f} and {high:.1f}, n = {len(times)})")
