"""A script that moves ten times between two device workers, each of which plays a host."""

from __future__ import annotations

import os
import random

import pytest

from tests.workers.criu.moving import SEED, alone, moved
from tests.workers.criu.programs import PROGRAMS


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")
def test_chain_of_ten_moves_ends_with_the_same_bits(pair):
    source = PROGRAMS[0].source.replace("range(120)", "range(1500)")
    run = moved(pair, "chain", source, random.Random(SEED), 10)
    assert run.begun == ["fresh", *["image"] * 10]
    assert (run.end, run.printed) == ("Finished", alone(source))
