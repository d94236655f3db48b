"""A skipped test of the sandbox fails unless a setting names the layer that the machine lacks."""

from __future__ import annotations

import pytest

from tests.missing_layers import failure_of_skip

REASON = "Skipped: this machine does not give the layers files, processes"


@pytest.mark.parametrize("named", ["", " , ", "network", "memory,network"])
def test_skip_whose_layer_is_not_named_fails(named):
    failure = failure_of_skip(REASON, named)
    assert failure
    assert REASON in failure


@pytest.mark.parametrize("named", ["files", "Memory, Processes", "network,files"])
def test_skip_whose_layer_is_named_is_allowed(named):
    assert failure_of_skip(REASON, named) is None
