"""Measure how long it takes until another process sees a block of 64 MiB, beside the peers.

    python -m benchmarks.handover [--quick]

Two executors of a graph are processes, each on a slot of its own. One makes a block; the other
sleeps until it has the block. The time runs from the last byte written to the first byte read, and
to the last byte read. It includes the table of blocks, the turn, the eventfd and the mapping.

*Placed*: the block is in memory that both share, as if a node had asked for it there. *Written*:
the same, just after writing, so that no cache holds a line of the code that runs next. *Copied*:
the block was made in ordinary memory, and is copied once to where both see it.

The peers do the same in their own way, see benchmarks/peers/handover.py. Ray and Dask need an
environment of their own (benchmarks/peers/requirements.txt). Each peer is measured in turn with
ours. Figures are medians of all calls, because other processes use the cores too. The processes of
Ray and Dask use them even while they are not measured, so ours is also measured alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import IO, Any

from benchmarks import Target, quick, report
from benchmarks.graph_dispatch import PEERS_PYTHON, ROOT, share_torch
from benchmarks.peers import handover
from benchmarks.peers.handover import COUNT, WAYS, stamp, took_us

PEERS = ROOT / "benchmarks" / "peers" / "handover.py"
OURS, ALONE = "ours", "ours, no peer's processes beside it"
IN_OUR_PYTHON = ("torch.multiprocessing", "gloo")
MOST_BLOCKS = 4096
BOUND_US = 100


def main() -> int:
    if "--ours" in sys.argv:
        return serve()
    rounds, calls = (3, 3) if quick() else (9, 5)
    told, missing = defaultdict[tuple[str, str], list[float]](list), dict[str, str]()
    with running(OURS) as ours:
        for _ in range(rounds):
            told[ALONE, "placed"] += ours.ask("placed", calls)
        for name, kind in handover.PEERS.items():
            if name not in IN_OUR_PYTHON and not PEERS_PYTHON.exists():
                missing[name] = "not installed: see benchmarks/peers/requirements.txt"
                continue
            with running(name) as peer:
                for _ in range(rounds):
                    for way in WAYS:
                        told[OURS, way] += ours.ask(way, calls)
                        told[name, way] += peer.ask(way, calls) if way in kind.ways else []
    return report("handover", targets(told), shown(told) | versions(missing))


def targets(told: dict[tuple[str, str], list[float]]) -> list[Target]:
    ours_us = {way: statistics.median(told[OURS, way]) for way in WAYS}
    found = [
        Target(
            name="64 MiB that lie where both see them, median",
            value=round(statistics.median(told[ALONE, "placed"]), 1),
            unit="us",
            op="<=",
            bound=BOUND_US,
        )
    ]
    for way in WAYS:
        peers = {name: statistics.median(us) for (name, w), us in told.items() if w == way and us}
        peers = {name: us for name, us in peers.items() if name not in (OURS, ALONE)}
        quickest = min(peers, key=peers.__getitem__)
        found.append(
            Target(
                name=f"{way}, to the quickest peer ({quickest})",
                value=round(ours_us[way] / peers[quickest], 3),
                unit="x",
                op="<=",
                bound=1,
            )
        )
    return found


def shown(told: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (name, way), us in sorted(told.items()):
        if not us:
            continue
        low, middle, high = statistics.quantiles(us, n=4)
        ours = statistics.median(told[OURS, way])
        found[f"{name}, {way}"] = {
            "median, us": round(middle, 1),
            "quarters, us": [round(low, 1), round(high, 1)],
            "quickest, us": round(min(us), 1),
            "calls": len(us),
            "times ours": round(middle / ours, 2),
        }
    return {**found, "bytes": 8 * COUNT, "load average": round(os.getloadavg()[0], 1)}


def versions(missing: dict[str, str]) -> dict[str, str]:
    if not PEERS_PYTHON.exists():
        return missing
    lines = (PEERS.parent / "requirements.txt").read_text().splitlines()
    return missing | dict(line.split("==") for line in lines if "==" in line)


# --- the processes that are measured --------------------------------------------------------------


class Asked:
    def __init__(self, name: str, process: subprocess.Popen[str], said: IO[str]) -> None:
        self.name, self.process, self.said = name, process, said

    def ask(self, way: str, calls: int) -> list[float]:
        """Return the microseconds of each call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"way": way, "calls": calls}) + "\n")
        self.process.stdin.flush()
        if answer := self.process.stdout.readline():
            found: list[float] = json.loads(answer)
            return found
        self.said.seek(0)
        raise RuntimeError(f"{self.name} ended: {self.said.read()[-2000:]}")


@contextlib.contextmanager
def running(name: str) -> Iterator[Asked]:
    from workers.process.isolation.sandbox import ENVIRONMENT

    if name == OURS:
        command = [sys.executable, "-m", "benchmarks.handover", "--ours"]
    elif name in IN_OUR_PYTHON:
        command = [sys.executable, str(PEERS), name]
    else:
        share_torch()
        command = [str(PEERS_PYTHON), str(PEERS), name]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        try:
            yield Asked(name, process, said)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)


# --- ours, in two processes -----------------------------------------------------------------------


class Ours:
    """Runs two executors of a graph; this process is the first, and makes the blocks."""

    ways = WAYS

    def __init__(self) -> None:
        from workers.ranks import shared_memory, turns

        handles = shared_memory.make(2)
        turns.seat_all(shared_memory.Arena(handles), 2)
        self.reader = os.fork()
        if not self.reader:
            read(passing(handles, 1))
            os._exit(0)
        self.passing = passing(handles, 0)

    def call(self, way: str, number: int) -> float:
        import torch

        mine, (there, answer) = self.passing, blocks_of(number)
        copied = way == "copied"
        block = handover.ordinary() if copied else mine.empty((COUNT,), torch.int64)
        if way == "written":
            block.fill_(1)
        stamp(block, number)
        mine.post(there, block, (1,))
        mine.drop((there, 0))
        mine.wait((answer, 1), lambda: mine.is_there((answer, 1)), "the reader")
        took: float = mine.take((answer, 1)).item()
        mine.drop((answer, 1))
        return took

    def close(self) -> None:
        self.passing.end()
        self.passing.turns.finish()
        os.waitpid(self.reader, 0)


def passing(handles: Any, rank: int) -> Any:
    from workers.capture.capture import Surroundings
    from workers.graph.shared_blocks import BlockTable
    from workers.hardware.accelerator import Accelerator
    from workers.ranks.shared_memory import Arena
    from workers.ranks.turns import Turns

    mine = Turns(Arena(handles), rank)
    mine.join()
    return BlockTable(mine, MOST_BLOCKS, Surroundings(), Accelerator("cpu"))


def read(mine: Any) -> None:
    """Run the other executor, which reads the blocks."""
    import torch

    for number in range(MOST_BLOCKS // 2):
        there, answer = blocks_of(number)
        mine.wait((there, 0), lambda n=there: mine.is_there((n, 0)) or mine.is_over, "the maker")
        if mine.is_over:
            break
        took = took_us(mine.take((there, 0)), number)
        mine.drop((there, 0))
        mine.post(answer, torch.tensor(took, dtype=torch.float64), (0,))
        mine.drop((answer, 1))
    mine.turns.finish()


def blocks_of(number: int) -> tuple[int, int]:
    """Return the numbers of a call's block and of the block that answers it."""
    return 2 * number, 2 * number + 1


def serve() -> int:
    import torch

    torch.set_num_threads(1)
    ours = Ours()
    try:
        handover.serve(ours)
    finally:
        ours.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
