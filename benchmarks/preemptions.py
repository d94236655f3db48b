"""Preempt every job of the zoo at random, a thousand times, and check that no bit is lost.

    python -m benchmarks.preemptions [--quick]

The jobs are those of tests/workers/zoo, written as a tenant would write them. On each journey a job
is paused at random steps: it is captured, and goes on as the same objects. At other steps it is
moved: it is captured, and restored in a fresh process, which has run none of its set-up code. At
its end the metrics of every step, a hash of all its memory and files, and the next random numbers
are compared with those of the same job in a process where nothing of this happened.

tests/workers/capture/test_zoo.py makes a few of the same journeys.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import Target, quick, report
from tests.workers.journeys import ANIMALS, SLOW, Animal, Station, points, travelled, undisturbed

STATIONS = 2
STEPS, QUICK_STEPS = 24, 8
MOVES, QUICK_MOVES = 8, 3
PAUSES, QUICK_PAUSES = 8, 2
JOURNEYS = 6  # per job; a single one for jobs that are slow to restore
SLOW_MOVES = 3


class Tally:
    """Counts the results of the journeys of one job of the zoo."""

    def __init__(self) -> None:
        self.points: Counter[str] = Counter()
        self.broken: list[str] = []
        self.capture_ms: list[float] = []
        self.restore_ms: list[float] = []


def journey(station: Station, tally: Tally, animal: Animal, seed: int) -> None:
    steps = QUICK_STEPS if quick() else STEPS
    few = SLOW_MOVES if animal in SLOW else QUICK_MOVES if quick() else MOVES
    moves = points(seed, steps, few)
    pauses = points(seed + 1, steps, QUICK_PAUSES if quick() else PAUSES)
    expected = undisturbed(station, animal, steps)
    found = travelled(station, animal, steps, moves, pauses)
    tally.points[animal.name] += len(moves) + len(pauses)
    for times in found["times_ms"]:
        tally.capture_ms += times["capture"]
        tally.restore_ms += times["restore"]
    wrong = [name for name in ("trace", "digest") if found[name] != expected[name]]
    if wrong:
        tally.broken.append(f"{animal.name}: {wrong} differ, moved {moves}, paused {pauses}")


def _journeys() -> list[tuple[Animal, int]]:
    if quick():
        return [(animal, number) for number, animal in enumerate(ANIMALS)]
    often = [(animal, 100 * n + k) for n, animal in enumerate(ANIMALS) for k in range(JOURNEYS)]
    return [*often, *((animal, 7) for animal in SLOW)]


def _travel(journeys: list[tuple[Animal, int]]) -> Tally:
    tally = Tally()
    with Station() as station:
        for animal, seed in journeys:
            try:
                journey(station, tally, animal, seed)
            except AssertionError as error:
                tally.broken.append(str(error)[-2000:])
    return tally


def main() -> int:
    began_s, journeys = time.perf_counter(), _journeys()
    with ThreadPoolExecutor(STATIONS) as pool:
        tallies = list(pool.map(_travel, (journeys[n::STATIONS] for n in range(STATIONS))))
    count: Counter[str] = sum((tally.points for tally in tallies), Counter())
    broken = [what for tally in tallies for what in tally.broken]
    peers: dict[str, Any] = {
        "points": dict(count),
        "median_capture_ms": _median([ms for tally in tallies for ms in tally.capture_ms]),
        "median_restore_ms": _median([ms for tally in tallies for ms in tally.restore_ms]),
        "seconds": round(time.perf_counter() - began_s, 1),
        "broken": broken[:20],
    }
    least = 50 if quick() else 1000
    targets = [
        Target(name="preemptions", value=count.total(), unit="", op=">=", bound=least),
        Target(name="journeys that lost a bit", value=len(broken), unit="", op="<=", bound=0),
    ]
    return report("preemptions", targets, peers)


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


if __name__ == "__main__":
    sys.exit(main())
