"""Measure the CPU time of all processes of an idle system, and what the worker of a host holds.

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
HOST_DEVICES = 8
HOST_SETTLE_S = 30.0  # until the trials of eight devices have ended
HOST_MB, HOST_PROCESSES = 250.0, 3  # beside a zygote for each device
ZYGOTES_MB = 500.0  # they share what they import


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
    targets += of_host()
    return report("idle", targets, {name: round(value, 2) for name, value in percent.items()})


def of_host() -> list[Target]:
    """Measure the memory and the number of processes of a host that serves several devices."""
    with temporary_home() as home, running(home, devices=HOST_DEVICES) as system:
        time.sleep(HOST_SETTLE_S)
        [pid] = [pid for name, pid in system.pids().items() if name.startswith("host.")]
        worker = psutil.Process(pid)
        all_of_them = [worker, *worker.children(recursive=True)]
        ours = [one for one in all_of_them if not _is_zygote(one)]
        pss_mb, zygotes_mb = _pss_mb(ours), _pss_mb([*filter(_is_zygote, all_of_them)])
    return [
        Target(
            name=f"the worker of {HOST_DEVICES} devices, PSS beside zygotes",
            value=round(pss_mb, 1),
            unit="MB",
            op="<=",
            bound=HOST_MB,
        ),
        Target(
            name="its zygotes, PSS",
            value=round(zygotes_mb, 1),
            unit="MB",
            op="<=",
            bound=ZYGOTES_MB,
        ),
        Target(
            name=f"processes of a host with {HOST_DEVICES} devices",
            value=len(all_of_them),
            unit="",
            op="<=",
            bound=HOST_PROCESSES + HOST_DEVICES,
        ),
    ]


def _pss_mb(processes: list[psutil.Process]) -> float:
    return sum(one.memory_full_info().pss for one in processes) / 1e6


def _is_zygote(process: psutil.Process) -> bool:
    return any("zygote import main" in word for word in process.cmdline())


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
