"""Replay a list like that of the Helios clusters on 256 devices, at three loads.

    python -m benchmarks.helios [--quick] [--load LOAD]

`benchmarks.traces.helios` generates the list: 14 days of jobs of 12 tenants, 0.7, 0.95 and 1.2
times as much as the devices can do. Weights are equal, durations are known, a pause and a resume
cost 60 s each, and slices are 6,000 s, as in `benchmarks.philly`. A wait is all the time that a job
lost: end minus submission minus run time.

The peers are fair share with EASY and FIFO with EASY; neither pauses jobs. Each target compares a
mean or a p95 of one width with that of fair share with EASY; below a minute the two count as equal.
`--quick` replays three days. `--load` replays one load alone.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

from app.core.simulation.simulator import Report
from app.core.simulation.trace import Trace
from app.core.simulation.what_if import quantile, run
from benchmarks import Target, quick, report
from benchmarks.philly import setup
from benchmarks.traces.helios import helios, shape

DEVICES = 256
LOADS = (0.7, 0.95, 1.2)
OURS, FAIR_EASY, FIFO_EASY = "fair", "fair-easy", "fifo-easy"
CLASSES = (1, 2, 4, 8, 16)  # least width of each class
WORSE = 1.05  # most that a figure may be above that of fair share with EASY
LEAST_H = 1 / 60

Figures = dict[str, dict[str, float]]


def main() -> int:
    days = 3.0 if quick() else 14.0
    targets, peers = list[Target](), dict[str, Any]()
    for load in _loads():
        trace = helios(load=load, devices=DEVICES, days=days)
        found = {named: replay(trace, named) for named in (OURS, FAIR_EASY, FIFO_EASY)}
        peers[f"load {load:g}"] = {"list": shape(trace), **found}
        targets += compare(load, found[OURS], found[FAIR_EASY])
    return report("helios", targets, peers)


def _loads() -> list[float]:
    words = sys.argv[1:]
    return [float(words[words.index("--load") + 1])] if "--load" in words else [*LOADS]


def replay(trace: Trace, named: str) -> Figures:
    found, _ = run(setup(trace, DEVICES, named))
    return figures(trace, found)


def figures(trace: Trace, found: Report) -> Figures:
    """Return the mean, the p95 and the longest of the waits of each class of widths, in h."""
    if len(found.finished) != len(trace.arrivals):
        raise RuntimeError(f"{len(trace.arrivals) - len(found.finished)} jobs never ended")
    lost_h = defaultdict[str, list[float]](list)
    for job in trace.arrivals:
        lost_h[_class(job.width)].append(found.lost_s[job.task] / 3600)
    return {name: _spread(sorted(lost_h[name])) for name in map(_class, CLASSES) if lost_h[name]}


def _class(width: int) -> str:
    least = max(least for least in CLASSES if least <= width)
    return f"{least} and more" if least == CLASSES[-1] else f"{least}"


def _spread(in_order: list[float]) -> dict[str, float]:
    return {
        "mean_h": round(statistics.fmean(in_order), 3),
        "p95_h": round(quantile(in_order, 95) or 0.0, 3),
        "max_h": round(in_order[-1], 2),
    }


def compare(load: float, ours: Figures, theirs: Figures) -> list[Target]:
    return [
        Target(
            name=f"load {load:g}, {width} devices, {key.removesuffix('_h')}",
            value=ours[width][key],
            unit="h",
            op="<=",
            bound=round(WORSE * max(LEAST_H, theirs[width][key]), 4),
        )
        for width in ours
        for key in ("mean_h", "p95_h")
    ]


if __name__ == "__main__":
    sys.exit(main())
