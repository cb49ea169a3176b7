import os

import torch
from hypothesis import settings

# Two test processes share two cores; more threads only get in each other's way.
torch.set_num_threads(1)
settings.register_profile("ghostnoise", deadline=None, derandomize=True, max_examples=60, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ghostnoise"))
