"""What graphs compute in the process of a test has the bits that it has in a resident."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute by one thread, as residents do.

    On some processors a product of matrices has other bits with two threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
