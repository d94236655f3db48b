"""Measure the CPU time of all processes of an idle system.

python -m benchmarks.idle [--quick]
"""

from __future__ import annotations

import sys
import time

import psutil

from app.local.embedded_servers import temporary_home
from app.local.up import Handle, running
from benchmarks import Target, quick, report

SETTLE_S = 5.0
BOUND_PERCENT = 5.0


def main() -> int:
    watch_s = 10.0 if quick() else 60.0
    with temporary_home() as home, running(home) as system:
        time.sleep(SETTLE_S)
        before = cpu_s(system)
        time.sleep(watch_s)
        after = cpu_s(system)
    percent = {name: 100 * (after[name] - before.get(name, 0.0)) / watch_s for name in after}
    targets = [
        Target(
            name="the idle system",
            value=round(sum(percent.values()), 2),
            unit="% of a core",
            op="<=",
            bound=BOUND_PERCENT,
        )
    ]
    return report("idle", targets, {name: round(value, 2) for name, value in percent.items()})


def cpu_s(system: Handle) -> dict[str, float]:
    """Return the CPU seconds used so far by each process of the system and all its descendants."""
    found = {name: family_s(pid) for name, pid in system.pids().items()}
    return {"supervisor": own_s(psutil.Process(system.process.pid)), **found}


def family_s(pid: int) -> float:
    process = psutil.Process(pid)
    return own_s(process) + sum(_child_s(one) for one in process.children(recursive=True))


def _child_s(process: psutil.Process) -> float:
    """Return a child's CPU seconds; 0 if it has just ended, as a process of Postgres may."""
    try:
        return own_s(process)
    except psutil.NoSuchProcess:
        return 0.0


def own_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
