"""Fixtures for tests of training."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Torch with one thread, whose results do not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
