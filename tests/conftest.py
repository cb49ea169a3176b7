import os

import pytest
import torch
from hypothesis import settings

# Two test processes share two cores; more threads only get in each other's way.
torch.set_num_threads(1)
settings.register_profile("ghostnoise", deadline=None, derandomize=True, max_examples=60, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ghostnoise"))


@pytest.fixture
def one_rank(tmp_path):
    """A world of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
