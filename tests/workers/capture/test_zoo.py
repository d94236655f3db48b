"""Every job of the zoo, taken off and put back at seeded random steps, ends with the same bits.

`benchmarks/preemptions.py` does this a thousand times.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

import pytest

from tests.thoroughness import every_second, rest_long
from tests.workers import warm_zygotes
from tests.workers.journeys import ANIMALS, Animal, Station, points, travelled, undisturbed

STEPS = 12
COMPILED = "compiled aot_eager"  # which takes a second to compile each time it is put back
# Each job in one of the two ways; `make bench` runs all in both.
RESTORED = every_second(ANIMALS, begin=0)
MOVED = [value for value in every_second(ANIMALS, begin=1) if value.values[0].name != COMPILED]


def name_of(animal: Animal) -> str:
    return animal.name


@pytest.fixture(scope="module")
def station() -> Iterator[Station]:
    with Station() as station:
        yield station


@pytest.fixture(scope="module")
def alone(station: Station) -> dict[Animal, object]:
    return {}


@pytest.mark.parametrize("animal", RESTORED, ids=name_of)
def test_job_restored_in_new_processes_computes_the_same_bits(station, alone, animal):
    seed = zlib.crc32(animal.name.encode())
    moves, pauses = points(seed, STEPS, 3), points(seed + 1, STEPS, 3)
    expected = alone[animal] = undisturbed(station, animal, STEPS)
    found = travelled(station, animal, STEPS, moves, pauses)
    assert found["trace"] == expected["trace"], f"moved after {moves}, paused after {pauses}"
    assert found["digest"] == expected["digest"], f"moved after {moves}, paused after {pauses}"
    assert len({str(metrics) for metrics in expected["trace"]}) == STEPS  # it does something


@pytest.mark.parametrize("animal", MOVED, ids=name_of)
def test_ten_moves_in_a_row_lose_nothing(station, alone, animal):
    expected = alone.get(animal) or undisturbed(station, animal, STEPS)
    found = travelled(station, animal, STEPS, range(1, 11))
    assert found["trace"] == expected["trace"]
    assert found["digest"] == expected["digest"]


def test_different_seed_is_noticed(station):
    """The comparison can fail: a job that drew once more is not the same."""
    mlp = ANIMALS[0]
    one = undisturbed(station, mlp, 2)
    other = undisturbed(station, mlp, 3)
    assert one["trace"] == other["trace"][:2]
    assert one["digest"] != other["digest"]


@pytest.mark.parametrize("kind", rest_long(["sharded", "replicated"]))
def test_two_ranks_continue_in_new_processes(tmp_path, kind):
    """Each rank is captured alone, after the same step; the groups are there before it is back."""
    said = warm_zygotes.said_by("tests.workers.two_ranks", str(tmp_path), kind)
    for whole, begun, rest in json.loads(said.splitlines()[-1]):
        assert begun + rest == whole
