"""Report steps, metrics and memory of a task to the supervisor."""

from __future__ import annotations

import resource
import time

from workers.graph.runner import GraphJob
from workers.residents.endings import JSON
from workers.residents.work import Work

REPORT_S = 0.2  # seconds between two reports of progress and metrics, at least
FULL_S = 0.05  # the same if a whole message of rows waits


def add_row(work: Work, step: int, metrics: JSON) -> None:
    """Keep the metrics of a step for the next report, which is due earlier if many rows wait."""
    work.metrics = metrics
    work.rows.add(step, metrics)
    best = work.spec.checkpoint.best
    if best is not None and (ranked := best.ranked(step, metrics)) is not None:
        work.ranked = ranked


def is_due(work: Work) -> bool:
    return time.monotonic() - work.reported_s >= (FULL_S if work.rows.fill_a_message else REPORT_S)


def report_all(work: Work) -> None:
    """Report until no row of metrics is left, and at least once."""
    report(work)
    while work.rows:
        report(work)


def report(work: Work) -> None:
    work.reported_s = time.monotonic()
    work.say(
        "progress",
        ran=work.ran,
        metrics=work.metrics,
        points=work.rows.take(),
        thinned=work.rows.thinned,
        memory_bytes=memory_bytes(work),
        spilled_bytes=work.job.spilled_bytes if isinstance(work.job, GraphJob) else 0,
        staged_us=int((work.staged_s + work.images.staging.waited_s) * 1e6),
    )


def memory_bytes(work: Work) -> int:
    """Return the memory of this process on the device.

    On an accelerator, the process's host memory is not counted here: its control group limits it.
    """
    if not work.accelerator.is_host:
        return work.accelerator.held_bytes()
    away_bytes = work.images.absence.bytes
    return max(0, anonymous_bytes() - work.base_bytes - away_bytes - work.lazy_bytes)


def anonymous_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:  # a sandbox without /proc: use the peak instead
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (int(resident) - int(shared)) * resource.getpagesize()
