"""Generates a list of jobs like those of the Helios clusters, for any load and number of devices.

Helios is described in Hu et al., "Characterization and Prediction of Deep Learning Workloads in
Large-Scale GPU Datacenters" (SC '21). Nothing of its traces is copied; the list has these
statistics of the paper, about:

* More than half of the jobs need one device, and take 3 to 12 % of the device time. Jobs of 8
  devices and more take 60 % or more of it. The mean is 3.7 devices.
* Runtimes are heavy-tailed: the median is 206 s, the mean 6,652 s.
* Submissions follow the day: half as many at night, and fewer at noon and at 18 o'clock.
* A few users take most of the device time (5 % of the users 45 to 60 %).

Runtimes are log-normal and end at five days. `shape` tells the statistics that a list has.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect
from itertools import accumulate

from app.core.simulation.simulator import Arrival
from app.core.simulation.trace import Trace

DAY_S = 86_400.0
LONGEST_S = 5 * DAY_S
SPREAD = 2.55  # standard deviation of the logarithm of a runtime
# devices -> (part of all jobs, mean runtime in s before the longest are cut)
WIDTHS = {
    1: (0.545, 3_600.0),
    2: (0.13, 11_000.0),
    4: (0.13, 14_500.0),
    8: (0.15, 11_000.0),
    16: (0.03, 12_500.0),
    32: (0.012, 11_000.0),
    64: (0.003, 8_500.0),
}
# relative number of submissions in each hour of a day
HOURS = [*[6] * 8, *[12] * 4, 9, *[12] * 5, 9, *[12] * 3, 9, 8]
TENANTS, USERS = 12, 10  # users of each tenant
SKEW = 1.3  # the n-th tenant, and each tenant's n-th user, submit n ** -SKEW as many jobs


def helios(*, load: float, devices: int, days: float, seed: int = 0) -> Trace:
    """Return a list that keeps `devices` busy for `days`, `load` times as much as they can do."""
    dice, lasts_s = random.Random(seed), days * DAY_S
    wanted_s, work = load * devices * lasts_s, list[tuple[int, float]]()
    while wanted_s > 0:
        width = dice.choices([*WIDTHS], weights=[part for part, _ in WIDTHS.values()])[0]
        if width <= devices:
            work.append((width, _runtime_s(dice, width)))
            wanted_s -= width * work[-1][1]
    came_s = sorted(_submission_s(dice, lasts_s) for _ in work)
    digits = len(str(len(work)))
    arrivals = tuple(
        _arrival(dice, f"j{n:0{digits}}", at_s, *job)
        for n, (at_s, job) in enumerate(zip(came_s, work, strict=True))
    )
    return Trace(arrivals=arrivals, left_out=0, began_s=0.0)


def _runtime_s(dice: random.Random, width: int) -> float:
    middle = math.log(WIDTHS[width][1]) - SPREAD**2 / 2
    return min(LONGEST_S, max(1.0, dice.lognormvariate(middle, SPREAD)))


def _submission_s(dice: random.Random, lasts_s: float) -> float:
    sums = list(accumulate(HOURS))
    while True:
        hour = bisect(sums, dice.uniform(0, sums[-1] - 1e-9))
        at_s = dice.randrange(math.ceil(lasts_s / DAY_S)) * DAY_S + (hour + dice.random()) * 3600
        if at_s < lasts_s:
            return at_s


def _arrival(dice: random.Random, task: str, at_s: float, width: int, work_s: float) -> Arrival:
    tenant = f"vc{_skewed(dice, TENANTS):02}"
    return Arrival(
        at_s=at_s,
        task=task,
        tenant=tenant,
        user=f"{tenant}/u{_skewed(dice, USERS)}",
        work_s=work_s,
        width=width,
        kind="cuda",
        tier="basic",
        expected_s=work_s,
    )


def _skewed(dice: random.Random, count: int) -> int:
    return dice.choices(range(count), weights=[(n + 1) ** -SKEW for n in range(count)])[0]


def shape(trace: Trace) -> dict[str, float]:
    """Return the statistics of a list that the paper gives of Helios."""
    jobs = trace.arrivals
    total_s = sum(job.width * job.work_s for job in jobs)
    of_one = [job for job in jobs if job.width == 1]
    night = sum(job.at_s % DAY_S < 8 * 3600 for job in jobs)
    return {
        "jobs": len(jobs),
        "mean devices": round(statistics.fmean(job.width for job in jobs), 2),
        "median runtime, s": round(statistics.median(job.work_s for job in jobs), 1),
        "mean runtime, s": round(statistics.fmean(job.work_s for job in jobs), 1),
        "jobs of one device": round(len(of_one) / len(jobs), 3),
        "their part of the device time": round(sum(job.work_s for job in of_one) / total_s, 3),
        "part of 8 devices and more": round(
            sum(job.width * job.work_s for job in jobs if job.width >= 8) / total_s, 3
        ),
        "submitted from 0 to 8 o'clock": round(night / len(jobs), 3),
    }
