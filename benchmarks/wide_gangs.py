"""Check that wide gangs get what they are owed within an hour, and what that costs (rule F7).

    python -m benchmarks.wide_gangs [--quick]

A tenant has one gang of 2 to 8 of 8 devices that never ends. Two tenants of the same weight keep
more tasks of one device waiting than there are devices. These tasks last 30, 300 or 3,000 s, give
or take a fifth. Every task is of the basic tier, which promises nothing. Usage does not fade. A
pause and a resume cost 0.65 s each, so a slice is 60 s, the longest. That is as hard for the gang
as it gets, as no task of 30 s gives way before it ends.

The gang comes when the others have run for ten minutes, and has used as much as they have. It is
owed its share by water-filling: a third of the devices, or its width if that is less. `held / owed`
is the worst at any instant from an hour after the gang came, of all that it held and was owed since
then. The devices' lost time is the time in which no task held them since the gang came, while
others waited.

The policy is the default one. While one gang waits, no task of its kind takes another's turn. On
hundreds of devices that would cost more than it gives to many small gangs, so only gangs of 30 % of
their kind or more wait (`benchmarks.helios` has 256 devices).

The peer is the same island without waits (`Policy.wait_share` 0): devices are kept for a gang only
once it has waited for ten hours. The quick form has one seed and the widths 2, 4 and 8 for three
hours. The long form has three seeds and all widths for six.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from typing import Any

from app.core.model.lifecycle import Move
from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.simulation.simulator import Arrival, Costs, Report, simulate
from benchmarks import Target, quick, report

DEVICES = 8
GANG, OTHERS = "gang", ("a", "b")
TENANTS = (*OTHERS, GANG)
COSTS = Costs(image_s=0.65, resume_s=0.65)
POLICY = Policy(half_life_s=0.0, idle_credit_s=0.0)
COMES_S, HOUR_S = 600.0, 3600.0
STAYS_S = (30.0, 300.0, 3000.0)
UNEVEN = 0.2  # a task lasts up to this part more or less
AHEAD = 1.5  # times as many tasks as the devices could do


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Describes a gang of so many devices beside tasks of so many seconds, for `lasts_s` after it
    came.
    """

    width: int
    stay_s: float
    lasts_s: float
    seed: int

    @property
    def until_s(self) -> float:
        return COMES_S + self.lasts_s

    @property
    def owed(self) -> float:
        """Return the number of devices that are owed to the gang."""
        return min(self.width, DEVICES / len(TENANTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds the part of its due that a gang held, and the part of the devices that stood idle."""

    worst: float
    lost: float
    waited_s: float


def main() -> int:
    widths = (2, 4, 8) if quick() else range(2, DEVICES + 1)
    hours, seeds = (3, 1) if quick() else (6, 3)
    found = {
        (width, stay_s): [
            play(Case(width=width, stay_s=stay_s, lasts_s=hours * HOUR_S, seed=seed), POLICY)
            for seed in range(seeds)
        ]
        for stay_s in STAYS_S
        for width in widths
    }
    outcomes = [outcome for some in found.values() for outcome in some]
    worst, lost = min(one.worst for one in outcomes), max(one.lost for one in outcomes)
    targets = [
        Target(name="held / owed, the worst", value=round(worst, 4), unit="", op=">=", bound=0.9),
        Target(name="lost to waiting", value=round(100 * lost, 2), unit="%", op="<=", bound=2.0),
    ]
    hardest = Case(width=DEVICES, stay_s=STAYS_S[0], lasts_s=hours * HOUR_S, seed=0)
    return report("wide_gangs", targets, {**_facts(found), **_peer(hardest)})


def _facts(found: dict[tuple[int, float], list[Outcome]]) -> dict[str, Any]:
    return {
        f"{width} of {DEVICES} beside tasks of {stay_s:g} s": {
            "held / owed, the worst": round(min(one.worst for one in some), 4),
            "lost, %": round(100 * max(one.lost for one in some), 2),
            "first start after, s": round(max(one.waited_s for one in some), 1),
        }
        for (width, stay_s), some in found.items()
    }


def _peer(case: Case) -> dict[str, Any]:
    without = play(case, replace(POLICY, wait_share=0.0))
    told = f"without waits, {case.width} of {DEVICES} beside tasks of {case.stay_s:g} s"
    return {f"{told}: held / owed, the worst": round(without.worst, 4)}


def play(case: Case, policy: Policy) -> Outcome:
    found = simulate(
        [*_others(case), _gang(case)],
        [BoardDevice(id=f"d{n}", host="h", kind="cuda") for n in range(DEVICES)],
        [BoardTenant(id=id, name=id, weight=1000) for id in TENANTS],
        policy,
        costs=COSTS,
        until_s=case.until_s,
        checked=False,
    )
    held_s = sum(found.device_s.values())
    return Outcome(
        worst=_worst(case, _turns(found, case)),
        lost=1.0 - (held_s - DEVICES * COMES_S) / (DEVICES * case.lasts_s),
        waited_s=found.waits_s.get(GANG, case.lasts_s),
    )


def _others(case: Case) -> list[Arrival]:
    """Return the tasks of the other tenants; those that run first end at different times."""
    dice = random.Random(case.seed)
    count = DEVICES + int(AHEAD * DEVICES * case.until_s / case.stay_s / len(OTHERS))
    return [
        _task(
            f"{tenant}{n:05}",
            tenant=tenant,
            work_s=case.stay_s * _length(dice, first=n < DEVICES // len(OTHERS)),
        )
        for tenant in OTHERS
        for n in range(count)
    ]


def _length(dice: random.Random, *, first: bool) -> float:
    return dice.uniform(0.1, 1.0) if first else dice.uniform(1.0 - UNEVEN, 1.0 + UNEVEN)


def _gang(case: Case) -> Arrival:
    work_s = 2 * case.until_s  # more than there is time for
    return replace(_task(GANG, tenant=GANG, work_s=work_s), width=case.width, at_s=COMES_S)


def _task(id: str, *, tenant: str, work_s: float) -> Arrival:
    return Arrival(
        at_s=0.0, task=id, tenant=tenant, user=f"{tenant}1", work_s=work_s, kind="cuda",
        tier="basic",
    )  # fmt: skip


def _turns(found: Report, case: Case) -> list[tuple[float, float]]:
    """Return the times from when to when the gang held its devices, since it came."""
    own = [line for line in found.timeline if line.decision.task == GANG]
    times_s = [
        line.at_s - COMES_S for line in own if line.decision.move in (Move.Launch, Move.Pause)
    ]
    if len(times_s) % 2:
        times_s.append(case.lasts_s)
    return list(zip(times_s[::2], times_s[1::2], strict=True))


def _worst(case: Case, turns: list[tuple[float, float]]) -> float:
    """Return the least part of its due that the gang had held at any instant.

    The part is least when a turn begins, an hour after the gang came, or at the end.
    """
    begins_s = [from_s for from_s, _ in turns if from_s > HOUR_S]
    return min(
        case.width * _held_s(turns, at_s) / (case.owed * at_s)
        for at_s in (HOUR_S, *begins_s, case.lasts_s)
    )


def _held_s(turns: list[tuple[float, float]], at_s: float) -> float:
    return sum(min(to_s, at_s) - from_s for from_s, to_s in turns if from_s < at_s)


if __name__ == "__main__":
    sys.exit(main())
