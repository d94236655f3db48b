"""Lists of jobs that are gangs of every width: each replay ends, and no round looks back."""

from __future__ import annotations

import math
import random

import pytest

from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.simulation.simulator import Arrival, Costs
from app.core.simulation.trace import read
from app.core.simulation.what_if import Setup, run
from tests.thoroughness import rest_long

#: Two gangs lose patience; devices are kept for the one, and the other fits beside it.
TWO_IMPATIENT_GANGS = """timestamp,duration,num_gpus,cluster
0,500000,1,b
0,500000,1,b
0,40000,1,b
0,40000,1,b
1,10,4,a
2,900000,2,c
"""
SHORT, LONG = 25, 1000


def replay(arrivals: list[Arrival], devices: int, *, slice_s: float, tenants: str = "abc") -> float:
    """Replays a list as `roundhouse simulate` does; returns when the last task ended."""
    setup = Setup(
        arrivals=arrivals,
        devices=[BoardDevice(id=f"cuda.{n}", host="h", kind="cuda") for n in range(devices)],
        tenants=[BoardTenant(id=name, name=name, weight=1000) for name in tenants],
        policy=Policy(slice_min_s=slice_s, slice_max_s=slice_s),
        costs=Costs(image_s=60.0, resume_s=60.0),
    )
    report, _ = run(setup)
    assert set(report.finished) == {arrival.task for arrival in arrivals}
    assert math.isfinite(report.until_s)
    return report.until_s


def random_list(seed: int) -> tuple[list[Arrival], int, float]:
    """(jobs, devices, slice in seconds), drawn by a seed."""
    dice = random.Random(seed)
    devices = dice.randint(4, 8)
    jobs = dice.choice([30, 60, 300 if seed >= SHORT else 100])
    mean_s = dice.choice([600.0, 6000.0, 60_000.0])
    at_s, arrivals = 0.0, list[Arrival]()
    for n in range(jobs):
        at_s += dice.expovariate(devices / (2.5 * mean_s))
        tenant, work_s = dice.choice("abc"), round(dice.expovariate(1 / mean_s), 3) + 1.0
        arrivals.append(
            Arrival(
                at_s=at_s,
                task=f"j{n:03}",
                tenant=tenant,
                user=tenant,
                work_s=work_s,
                width=dice.randint(1, devices),
                kind="cuda",
                tier="basic",
                priority=dice.choice([0, 0, 0, 1]),
                expected_s=dice.choice([work_s, work_s, None]),
            )
        )
    return arrivals, devices, mean_s * dice.choice([0.3, 1.0, 10.0])


def test_simulate_two_gangs_without_patience_ends() -> None:
    lines = TWO_IMPATIENT_GANGS.splitlines(keepends=True)
    trace = read(lines, kind="cuda", tier="basic", expected=True)
    replay(list(trace.arrivals), 4, slice_s=1_000_000.0)


@pytest.mark.parametrize(
    "seed",
    rest_long(range(LONG), keep=12),
)
@pytest.mark.slow
def test_simulate_random_gangs_ends(seed: int) -> None:
    arrivals, devices, slice_s = random_list(seed)
    replay(arrivals, devices, slice_s=slice_s)
