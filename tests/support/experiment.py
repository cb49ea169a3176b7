"""Recipes with a grid, small enough to be run by tests."""

BASE = """
[model]
name = "digits-net"

[norm]
method = "gni"
ghost_size = 16

[data]
name = "digits"
limit = 256

[optim]
lr = 0.1

[train]
epochs = 1
batch_size = 64
"""
THREE = """
[grid]
seeds = [0, 1]
axes.norm.ghost_size = [4, 16]

[[grid.methods]]
label = "BN"
set.norm.method = "bn"
without = ["norm.ghost_size"]

[[grid.methods]]
label = "GBN"
set.norm.method = "gbn"

[[grid.methods]]
label = "GNI"
set.norm.method = "gni"
"""


def write(folder, plan=THREE, name="small", base=BASE):
    """A recipe's file; its path."""
    path = folder / f"{name}.toml"
    path.write_text(base + plan)
    return str(path)
