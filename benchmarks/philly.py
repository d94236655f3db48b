"""Replay a real cluster's job list on 640 and 512 devices with the scheduler's own code.

    python -m benchmarks.philly [--quick] [TRACE]

The list has 82,247 jobs of 15 tenants with equal weights. Usage fades in 7 days, durations are
known, a pause and a resume cost 60 s each, and slices are 6,000 s (so that switching costs 2 %). A
wait is all the time that a job lost: end minus submission minus run time, so pauses and switches
count. The same program replays the peers: FIFO, FIFO with EASY, and fair share with EASY. None of
them pauses jobs.

The time is that of one core for the whole replay at 640 devices and its report: the median of three
replays, or one with `--once`. `--quick` replays the first 20,000 jobs once, and has only the target
of time, in proportion.
"""

from __future__ import annotations

import gzip
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.simulation.simulator import Costs, Report
from app.core.simulation.trace import Trace, read
from app.core.simulation.what_if import Setup, quantile, run
from benchmarks import Target, quick, report

NAME = "philly_82k_vc.csv.gz"
TRACES = Path(__file__).parent / "traces"
QUICK_JOBS = 20_000
SWITCH_S = 60.0
SLICE_S = 2 * SWITCH_S / 0.02
PEERS = ("fifo", "fifo-easy", "fair-easy")
WIDE = 16  # devices
MANY = 300  # jobs: only tenants with more have a meaningful mean
REPLAY_S = 10.0  # of one core, for all jobs

Figures = dict[str, Any]


def main() -> int:
    trace = opened()
    jobs = len(trace.arrivals)
    runs = 1 if quick() or "--once" in sys.argv[1:] else 3
    fair = {devices: measure(trace, devices, "fair", runs) for devices in (640, 512)}
    peers = {
        f"{devices} devices": {
            "roundhouse": fair[devices],
            **{named: measure(trace, devices, named, 1) for named in PEERS},
        }
        for devices in (640, 512)
    }
    bound_s = round(REPLAY_S * jobs / 82_247, 2)
    told = f"replay of {jobs:,} jobs, 640 devices"
    targets = [Target(name=told, value=fair[640]["cpu_s"], unit="s", op="<=", bound=bound_s)]
    if not quick():
        targets += waits(fair[640], fair[512])
    return report("philly", targets, peers)


def waits(at_640: Figures, at_512: Figures) -> list[Target]:
    rows = [
        ("640 devices, mean wait", at_640["mean_h"], 2.0),
        ("640 devices, p95 of 16 devices and more", at_640["wide_p95_h"], 16.0),
        ("640 devices, longest of 16 devices and more", at_640["wide_max_h"], 31.0),
        ("512 devices, mean wait", at_512["mean_h"], 12.0),
        ("512 devices, p95 of 16 devices and more", at_512["wide_p95_h"], 226.0),
        ("512 devices, worst tenant's mean", at_512["worst_tenant_mean_h"], 190.0),
    ]
    return [
        Target(name=name, value=value, unit="h", op="<=", bound=bound)
        for name, value, bound in rows
    ]


def opened() -> Trace:
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    folder = Path(os.environ.get("ROUNDHOUSE_TRACES", TRACES))
    path = Path(given[0]) if given else folder / NAME
    if not path.exists():
        told = f"no trace at {path}: give its path, or its folder in ROUNDHOUSE_TRACES"
        raise SystemExit(told)
    with gzip.open(path, "rt", newline="") as lines:
        trace = read(lines)
    if not quick():
        return trace
    some = trace.arrivals[:QUICK_JOBS]
    return Trace(arrivals=some, left_out=trace.left_out, began_s=trace.began_s)


def setup(trace: Trace, devices: int, named: str) -> Setup:
    """Return a replay on so many equal devices, with tenants of equal weights."""
    names = sorted({arrival.tenant for arrival in trace.arrivals})
    return Setup(
        arrivals=trace.arrivals,
        devices=[BoardDevice(id=f"d{n:03}", host="h", kind="cuda") for n in range(devices)],
        tenants=[BoardTenant(id=name, name=name, weight=1000) for name in names],
        policy=Policy(slice_min_s=SLICE_S, slice_max_s=SLICE_S),
        named=named,
        costs=Costs(image_s=SWITCH_S, resume_s=SWITCH_S),
    )


def measure(trace: Trace, devices: int, named: str, runs: int) -> Figures:
    replay, took_s = setup(trace, devices, named), []
    for _ in range(runs):
        began_s = time.process_time()
        found, summary = run(replay)
        took_s.append(time.process_time() - began_s)
    return {
        **figures(trace, found),
        **_shown(summary),
        "cpu_s": round(statistics.median(took_s), 2),
    }


def figures(trace: Trace, found: Report) -> Figures:
    """Return the waits in hours, as in the table of the published figures."""
    if len(found.finished) != len(trace.arrivals):
        raise RuntimeError(f"{len(trace.arrivals) - len(found.finished)} jobs never ended")
    lost_h = {task: lost_s / 3600 for task, lost_s in found.lost_s.items()}
    wide = sorted(lost_h[arrival.task] for arrival in trace.arrivals if arrival.width >= WIDE)
    by_tenant: dict[str, list[float]] = {}
    for arrival in trace.arrivals:
        by_tenant.setdefault(arrival.tenant, []).append(lost_h[arrival.task])
    means = [statistics.fmean(lost) for lost in by_tenant.values() if len(lost) > MANY]
    in_order = sorted(lost_h.values())
    return {
        "mean_h": round(statistics.fmean(in_order), 3),
        "p50_h": round(quantile(in_order, 50) or 0.0, 3),
        "p99_h": round(quantile(in_order, 99) or 0.0, 2),
        "max_h": round(in_order[-1], 2),
        "worst_tenant_mean_h": round(max(means), 2),
        "wide_p95_h": round(quantile(wide, 95) or 0.0, 2),
        "wide_max_h": round(wide[-1], 2),
    }


def _shown(summary: dict[str, Any]) -> Figures:
    return {
        "slowdown": summary["slowdown"],
        "pauses": summary["pauses"],
        "utilisation": summary["utilisation"],
        "fairness_error": summary["fairness_error"],
    }


if __name__ == "__main__":
    sys.exit(main())
