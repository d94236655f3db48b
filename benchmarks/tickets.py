"""Play a million interleavings of gangs on devices: does anything ever deadlock?

    python -m benchmarks.tickets [--quick]

Each seed makes a scene: one to three islands with two or three devices each, three or four runs of
several tenants, each with one to three gangs in a row, of one to all devices. Some gangs span
several islands, some are too large to fit beside what others left in memory. Then one interleaving
is drawn: at each step any of the possible next events happens (a desk is asked, holds or issues, a
message arrives, a device enters a gang, a gang ends, a block is offloaded).

With tickets every gang has to end and no device may take a gang before one with an earlier ticket.
Peers on the same scenes: devices that take gangs as messages come, desks that do not hold while a
gang takes its tickets on several islands, and tickets without offloading.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from benchmarks import Target, quick, report
from tests.oracles.ticket import TICKETS, UNHELD, UNSYNCHRONISED, Gang, Outcome, Scene, play

PLAYED, QUICK = 1_000_000, 20_000
PEERS_EVERY = 50  # one in this many scenes is played without tickets too
CHUNK = 500
ROOM = 4  # bytes of a device; small numbers are as good as large ones


def scene(seed: int) -> Scene:
    draw = random.Random(seed)
    islands = {
        name: {f"{name}{n}": ROOM for n in range(draw.randint(2, 3))}
        for name in "abc"[: draw.randint(1, 3)]
    }
    devices = [device for memory in islands.values() for device in memory]
    runs = []
    for run in range(draw.randint(3, 4)):
        gangs = list[Gang]()
        for n in range(draw.randint(1, 3)):
            members = draw.sample(devices, draw.randint(1, min(4, len(devices))))
            gangs.append(
                Gang(
                    id=f"{run}.{n}",
                    run=run,
                    needs={device: draw.randint(1, ROOM) for device in members},
                    stays=dict.fromkeys(members, 1),
                    after=(gangs[-1].id,) if gangs else (),
                )
            )
        runs.append(gangs)
    return Scene(islands=islands, runs=runs)


def interleave(seed: int, by: str = TICKETS, *, put_aside: bool = True) -> Outcome:
    draw = random.Random(seed).random
    return play(scene(seed), lambda n: int(draw() * n), by=by, put_aside=put_aside)


def _play_many(first: int) -> Counter[str]:
    count = Counter[str]()
    for seed in range(first, first + CHUNK):
        outcome = interleave(seed)
        count["played"] += 1
        count["gangs"] += len(outcome.ended)
        count["steps"] += outcome.steps
        count["stuck"] += bool(outcome.stuck)
        count["disorders"] += outcome.disorders
        if seed % PEERS_EVERY == 0:
            count["peers"] += 1
            count["unsynchronised"] += bool(interleave(seed, UNSYNCHRONISED).stuck)
            count["unheld"] += bool(interleave(seed, UNHELD).stuck)
            count["kept"] += bool(interleave(seed, put_aside=False).stuck)
    return count


def main() -> int:
    wanted = QUICK if quick() else PLAYED
    began_s, count = time.perf_counter(), Counter[str]()
    with ProcessPoolExecutor(2) as pool:
        for done in pool.map(_play_many, range(0, wanted, CHUNK)):
            count += done
    targets = [
        Target(name="interleavings", value=count["played"], unit="", op=">=", bound=wanted),
        Target(
            name="interleavings that got stuck", value=count["stuck"], unit="", op="<=", bound=0
        ),
        Target(name="gangs out of order", value=count["disorders"], unit="", op="<=", bound=0),
        Target(
            name="of the unsynchronised ones, stuck",
            value=round(count["unsynchronised"] / count["peers"], 3),
            unit="share",
            op=">=",
            bound=0.01,
        ),
    ]
    peers = {
        "gangs": count["gangs"],
        "steps": count["steps"],
        "scenes for peers": count["peers"],
        "stuck: unsynchronised": count["unsynchronised"],
        "stuck: tickets on several islands without holding": count["unheld"],
        "stuck: tickets, nothing put aside": count["kept"],
        "seconds": round(time.perf_counter() - began_s, 1),
    }
    return report("tickets", targets, peers)


if __name__ == "__main__":
    sys.exit(main())
