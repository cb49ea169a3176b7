"""Start several processes that hold parts of a batch."""

import multiprocessing
import sys
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

ROOT = str(Path(__file__).parents[2])
BATCH = 12
SPLITS = {2: [(6, 6), (9, 3), (0, 12)], 3: [(4, 4, 4), (7, 1, 4), (5, 0, 7)]}


def launch(count, run, folder):
    """Call `run(rank, count)` in `count` processes, and raise the error of any of them."""
    # Processes are forked from a server that has imported torch once.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["ghostnoise.methods.registry", "torch.nn.parallel"]
    )
    start = torch.multiprocessing.start_processes
    sys.path.insert(0, ROOT)  # processes get this path, and find `run` in a module of tests with it
    try:
        start(_enter, (count, run, str(folder)), nprocs=count, start_method="forkserver")
    finally:
        sys.path.remove(ROOT)


def _enter(rank, count, run, folder):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    # With a timeout, so that other ranks do not wait forever for one that failed.
    settings = {"init_method": f"file://{folder}/ranks-{run.__name__}-{count}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=count, **settings)
    run(rank, count)
    dist.barrier()
    dist.destroy_process_group()


def values(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.7


def own_rows(rank, split):
    start = sum(split[:rank])
    return slice(start, start + split[rank])


@contextmanager
def collectives():
    """Record the names and the shapes of the tensors that this rank exchanges with all others."""
    sent, gather, reduce = [], dist.all_gather, dist.all_reduce

    def gathered(received, tensor, *arguments):
        sent.append(("gather", *tensor.shape))
        return gather(received, tensor, *arguments)

    def reduced(tensor, *arguments, **options):
        sent.append(("reduce", *tensor.shape))
        return reduce(tensor, *arguments, **options)

    dist.all_gather, dist.all_reduce = gathered, reduced
    yield sent
    dist.all_gather, dist.all_reduce = gather, reduce
