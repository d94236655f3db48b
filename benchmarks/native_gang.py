"""Compare ranks with native collectives with plain gloo, and bring them to their common point.

    python -m benchmarks.native_gang [--quick]

The same DDP training of a small transformer runs with 4 ranks over torch's own gloo, and over the
groups that hand their calls to it (`workers.ranks.native`). Processor time of a step counts, summed
over all processes; both share one core and alternate every fifth of a second, as in
`benchmarks.splice`.

Then orders come at random moments, while all calls of the feature matrix run: how long until all
ranks have let go of their groups, and how many runs end with other bits than stock gloo's. The
longest order is compared with a step of the training above, as a rank that computes is waited for.

At last four ranks of some 200 MB each, torch included, move from one device worker to another, as
one command does in `benchmarks.command_migration`: the downtime, and whether the last line is that
of stock gloo.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Target, quick, report
from benchmarks.command_migration import MB, STEPS, Run, moved, working_prefix
from benchmarks.splice import Pair, WarmProcess
from tests.workers.stock_gloo import output_of_ranks

JSON = dict[str, Any]

RANKS, WARM_STEPS, BATCH = 4, 5, 4
ROWS = "features:every"
#: Rows that stock gloo cannot run, with the reason in tests/workers/ranks/test_process_group.py.
LACKS = {"reductions", "coalesced", "as_under_torchrun", "asynchronous"}
MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)


def measure_steps(*, steps: int, repeats: int) -> JSON:
    """Return the processor time of a step in milliseconds by way, and the ratio to gloo's."""
    pair = Pair()
    gang = {
        "ranks": RANKS,
        "seats": RANKS,
        "steps": WARM_STEPS + steps,
        "measure_from": WARM_STEPS + 1,
        "params": {"batch": BATCH},
    }
    ratios, took_ms = [], dict[str, list[float]](native=[], gloo=[])
    same = True
    try:
        for turn in range(repeats):
            ways = [{**gang, "native": True}, {**gang, "peers": True}]
            ways = ways if turn % 2 else ways[::-1]
            found = pair.run(*ways)
            native, gloo = found if turn % 2 else found[::-1]
            one, other = (_step_ms(stories, steps) for stories in (native, gloo))
            took_ms["native"].append(one)
            took_ms["gloo"].append(other)
            ratios.append(one / other)
            same &= [s["hash"] for s in native] == [s["hash"] for s in gloo]
    finally:
        pair.close()
    return {
        "ms": {way: round(statistics.median(each), 1) for way, each in took_ms.items()},
        "over": round(statistics.median(ratios) - 1, 4),
        "between": [round(min(ratios) - 1, 4), round(max(ratios) - 1, 4)],
        "same_bits": same,
    }


def _step_ms(stories: list[JSON], steps: int) -> float:
    return float(sum(story["cpu_s"] for story in stories) / steps * 1000)


def measure_orders(*, runs: int) -> JSON:
    """Return how long orders took, and how many runs had other bits than stock gloo's."""
    from tests.workers.ddp import features

    names = [row.__name__ for row in features.ROWS if row.__name__ not in LACKS]
    gang: JSON = {
        "ranks": RANKS,
        "seats": RANKS,
        "params": {"names": names},
        "path": "tests/workers/ddp",
    }
    host = WarmProcess(warm=MODULES)
    held_s, differ = list[float](), 0
    try:
        expected = _rows(host.run(ROWS, **gang, peers=True))
        for seed in range(1, runs + 1):
            stories = host.run(ROWS, **gang, native=True, holds=seed)
            differ += _rows(stories) != expected
            held_s += stories[0].get("held_s", [])
    finally:
        host.close()
    return {
        "runs": runs,
        "orders": len(held_s),
        "differ": differ,
        "median_s": round(statistics.median(held_s), 3),
        "most_s": round(max(held_s), 3),
    }


# --- a move ---------------------------------------------------------------------------------------

GANG = """
import hashlib, sys, time, torch, torch.distributed as dist
size, steps = map(int, sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
parts = [torch.randint(0, 255, (1 << 20,), dtype=torch.uint8) for _ in range(size >> 20)]
total = torch.zeros(1 << 16)
for step in range(1, steps + 1):
    found = torch.full((1 << 16,), 0.1 * step * (rank + 1))
    dist.all_reduce(found)
    total += found
    for part in parts[::20]:
        part[step % 4096 :: 4096] = step % 251
    if rank == 0:
        print("step", step, time.time_ns(), flush=True)
    time.sleep(0.01)
digests = [None] * dist.get_world_size()
own = hashlib.sha256(b"".join(part.numpy().tobytes() for part in [*parts, total]))
dist.all_gather_object(digests, own.hexdigest())
if rank == 0:
    print("sum", hashlib.sha256("".join(digests).encode()).hexdigest(), flush=True)
dist.barrier()
"""
SIZE = 50 * MB  # of data of each rank; with torch a rank takes some 200 MB
ARGV = ["python", "-c", GANG, str(SIZE), str(STEPS)]


def measure_move() -> JSON:
    """Return the downtime of a gang that moves, and whether its bits differ."""
    with (
        tempfile.TemporaryDirectory(prefix="gang-") as folder,
        working_prefix(Path(folder)) as criu,
    ):
        expected = output_of_ranks(ARGV[1:], RANKS, Path(folder))[-1]
        run = Run(ARGV, world_size=RANKS, collectives="native", seats=[RANKS])
        row = moved(Path(folder) / "move", run, criu, expected)
    return {
        name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()
    }


def _rows(stories: list[JSON]) -> list[Any]:
    return [story.get("losses", story) for story in stories]


def main() -> int:
    short = quick()
    steps = measure_steps(steps=6, repeats=2 if short else 6)
    orders = measure_orders(runs=3 if short else 40)
    move = measure_move()
    step_s = steps["ms"]["gloo"] / 1000
    targets = [
        Target(name="DDP step over stock torch", value=steps["over"], unit="", op="<=", bound=0.02),
        Target(name="same bits", value=int(steps["same_bits"]), unit="", op=">=", bound=1),
        Target(
            name="order to standstill, s",
            value=orders["most_s"],
            unit="s",
            op="<=",
            bound=round(step_s + 0.2, 3),
        ),
        Target(
            name="move of a gang, downtime s",
            value=move["downtime_s"],
            unit="s",
            op="<=",
            bound=3.0,
        ),
        Target(
            name="bits differ, runs",
            value=orders["differ"] + move["differs"],
            unit="",
            op="<=",
            bound=0,
        ),
    ]
    peers = {"steps": steps, "orders": orders, "move": move}
    return report("native_gang", targets, peers=peers)


if __name__ == "__main__":
    sys.exit(main())
