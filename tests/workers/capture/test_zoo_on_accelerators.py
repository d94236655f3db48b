"""Every job of the zoo on a simulated accelerator, moved and offloaded, ends with the same bits.

The device's streams run as late as they may.  The reference is the same job on the same kind of
device, in a process where nothing happens to it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.thoroughness import every_second
from tests.workers.journeys import CLEAN, Animal, Station, evicted, points, travelled, undisturbed

pytestmark = pytest.mark.sim

STEPS = 8


@pytest.fixture(scope="module")
def station() -> Iterator[Station]:
    with Station("sim") as station:
        yield station


@pytest.fixture(scope="module")
def alone(station: Station) -> Callable[[Animal], Any]:
    """Run a job undisturbed, once for all tests."""
    return functools.cache(lambda animal: undisturbed(station, animal, STEPS))


def animals(begin: int) -> pytest.MarkDecorator:
    """Take each job in one of the two ways; `make bench` runs all in both."""
    values = every_second(CLEAN, begin=begin)
    return pytest.mark.parametrize("animal", values, ids=lambda animal: animal.name)


@animals(begin=0)
def test_job_restored_in_new_processes_computes_the_same_bits(station, alone, animal):
    seed = zlib.crc32(animal.name.encode())
    moves = points(seed, STEPS, 1 if animal.module == "compiled" else 3)  # it takes a second each
    pauses = points(seed + 1, STEPS, 3)
    expected, found = alone(animal), travelled(station, animal, STEPS, moves, pauses)
    assert found["trace"] == expected["trace"], f"moved after {moves}, paused after {pauses}"
    assert found["digest"] == expected["digest"], f"moved after {moves}, paused after {pauses}"
    assert len({str(metrics) for metrics in expected["trace"]}) == STEPS  # it does something


@animals(begin=1)
def test_job_that_left_the_device_computes_the_same_bits(station, alone, animal):
    leaves = points(zlib.crc32(animal.name.encode()), STEPS, 5)
    expected, found = alone(animal), evicted(station, animal, STEPS, leaves)
    assert found["trace"] == expected["trace"], f"away after {leaves}"
    assert found["digest"] == expected["digest"], f"away after {leaves}"
    assert len(found["away_bytes"]) == 5
    assert min(found["away_bytes"]) > 0


def test_job_that_drew_once_more_on_the_device_is_not_the_same(station):
    one, other = (undisturbed(station, CLEAN[0], steps) for steps in (2, 3))
    assert one["trace"] == other["trace"][:2]
    assert one["digest"] != other["digest"]
