import os
import signal

import pytest
import torch
from hypothesis import settings

# Programs that type checkers read; the second does not run.
collect_ignore = ["clients"]

# Two test processes share two cores; more threads only get in each other's way.
torch.set_num_threads(1)
settings.register_profile("ghostnoise", deadline=None, derandomize=True, max_examples=60, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ghostnoise"))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Shell scripts ignore Ctrl-C in what they run in the background; the commands of the tests would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_rank(tmp_path):
    """A world of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
