"""Report steps, metrics and memory of a task to the supervisor."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.graph.runner import GraphJob
from workers.residents.endings import JSON

if TYPE_CHECKING:
    from workers.residents.work import Work


REPORT_S = 0.2  # seconds between two reports of progress and metrics, at least
# for this time, and until the report after it, a new task also reports the metrics of the steps
# between two reports
FIRST_POINTS_S = 2.0
FIRST_POINTS = 32  # most steps with metrics that a new task reports
FIRST_VALUES = 640  # most metric values that a new task reports, over all steps


@dataclass(slots=True)
class FirstPoints:
    """Keeps the metrics of a new task's first steps, evenly thinned over the steps.

    Reports and heartbeats have only the newest metrics, so a run shorter than a heartbeat would
    leave a single point.
    """

    until_s: float
    kept: list[tuple[int, JSON]] = field(default_factory=list)
    stride: int = 1  # in steps

    def add(self, step: int, metrics: JSON) -> None:
        numbers = {k: v for k, v in metrics.items() if not isinstance(v, str)}
        if not numbers or (step - 1) % self.stride:
            return
        self.kept.append((step, numbers))
        while len(self.kept) > min(FIRST_POINTS, max(1, FIRST_VALUES // len(numbers))):
            self.stride *= 2
            self.kept = [point for point in self.kept if (point[0] - 1) % self.stride == 0]

    def is_over(self, now_s: float) -> bool:
        return now_s > self.until_s


def report(work: Work) -> None:
    work.reported_s = time.monotonic()
    points = work.points
    work.say(
        "progress",
        ran=work.ran,
        metrics=work.metrics,
        points=[] if points is None else points.kept,
        memory_bytes=memory_bytes(work),
        spilled_bytes=work.job.spilled_bytes if isinstance(work.job, GraphJob) else 0,
        staged_us=int((work.staged_s + work.images.staging.waited_s) * 1e6),
    )
    if points is not None and points.is_over(work.reported_s):
        work.points = None


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
