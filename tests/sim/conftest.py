"""Runs each test in the modes of the simulated accelerator that it names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sim import orders


@pytest.fixture(params=["eager", "lazy"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once in each mode; the default of the suite comes back afterwards."""
    torch.sim.set_mode(request.param)
    yield request.param
    orders.choose()


@pytest.fixture
def lazy() -> Iterator[None]:
    torch.sim.set_mode("lazy")
    yield
    orders.choose()
