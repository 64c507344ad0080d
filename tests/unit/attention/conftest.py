"""Small tensors: one thread."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """A second thread only costs here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
