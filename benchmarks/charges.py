"""Check that nobody holds devices without paying for them (rules F1 and F3), on a simulated island.

    python -m benchmarks.charges [--quick] [--devices 4]

Three tenants of equal weight want more than the devices there are. Two have endless jobs that take
whole devices. The third tries a strategy: work that is short beside its start, installs and
restores, fractions of every sort, gangs for which others wait, cancels and resubmissions. The
island decides by its own rules. This program looks at the devices by itself: at each instant it
asks which tasks keep a device from all others, and what the ledger has charged for that.

A device is held by the task that was launched on it, once the task before it has left. A task with
a fraction holds its part, and together with the other fractions on the device also the rest, while
a task of another user waits that the empty device would suit and the rest does not.

`held / charged, the worst` is the worst of each tenant, strategy and window of ten minutes in which
the tenant held more than a minute. `share of held time, error` is how far the third tenant's part
of all held time is from what it is owed, at most, in percentage points.

The quick form plays 20 minutes of one and of four devices, the long form two hours. There is no
peer: other schedulers charge from the allocation on, as they do not share a device by turns.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from app.core.fairness.usage_decay import FIXED_POINT_BITS
from app.core.model.device_choice import WHOLE_MILLI, DeviceTraits, choice_in
from app.core.model.lifecycle import Move, State
from app.core.model.snapshot import BoardDevice, BoardTask, BoardTenant, Plan, Policy
from app.core.scheduling.cycle import cycle
from app.core.simulation.simulator import Arrival, Costs, World
from benchmarks import Target, quick, report

TRIES, HONEST = "a", ("b", "c")
WINDOW_S, LEAST_S = 600.0, 60.0
MEMORY_BYTES = 80
ENDLESS_S = 1e7
# Usage does not fade, and a tenant that comes late is not lifted: both would change what is owed.
POLICY = Policy(half_life_s=0.0, idle_credit_s=0.0)
USUAL = Costs(start_s=0.2, pause_s=0.02, image_s=0.05, resume_s=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Describes what the third tenant asks for: `count` tasks, each with these fields of Arrival.

    A task is cancelled `cancel_s` after its launch, if that is given.
    """

    count: int = 8
    work_s: float = ENDLESS_S
    more: dict[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ("",)
    costs: Costs = USUAL
    cancel_s: float | None = None

    def arrivals(self, devices: int, until_s: float) -> list[Arrival]:
        """Return as many tasks as the devices could do at most, and some more."""
        each_s = self.work_s + self.costs.start_s if self.cancel_s is None else self.cancel_s
        parts = WHOLE_MILLI // min(choice_in(choice).fraction_milli for choice in self.choices)
        most = round(devices * min(parts, 10) * until_s / each_s)
        tasks = [
            _task(TRIES, n, self.work_s) for n in range(self.count if each_s > until_s else most)
        ]
        choices = [self.choices[n % len(self.choices)] for n in range(len(tasks))]
        return [
            replace(task, choice=choice, **self.more)
            for task, choice in zip(tasks, choices, strict=True)
        ]


def strategies(devices: int) -> dict[str, Strategy]:
    labelled = tuple(f"+n{n},%1" for n in range(devices))
    slow = replace(USUAL, start_s=2.0)
    almost_all = {"memory_bytes": MEMORY_BYTES - 1}
    return {
        "imports of 3 s before 50 ms of work": Strategy(
            work_s=0.05, costs=replace(USUAL, start_s=3.0)
        ),
        "installs of 60 s before 1 s of work": Strategy(
            work_s=1.0, costs=replace(USUAL, start_s=60.0)
        ),
        "restores of 8 s": Strategy(costs=replace(USUAL, image_s=4.0, resume_s=8.0)),
        "functions of 20 ms": Strategy(work_s=0.02, costs=replace(USUAL, start_s=0.1)),
        "cancelled while it starts": Strategy(work_s=60.0, costs=slow, cancel_s=1.9),
        "cancelled as soon as it runs": Strategy(work_s=60.0, costs=slow, cancel_s=2.1),
        "cancelled before its slice ends": Strategy(work_s=60.0, cancel_s=1.1),
        "a tenth of a device": Strategy(count=20 * devices, choices=("%100",)),
        "a thousandth of each device by label": Strategy(count=devices, choices=labelled),
        "half a device and a little": Strategy(count=3 * devices, choices=("%501",)),
        "almost all memory": Strategy(count=2 * devices, choices=("%1",), more=almost_all),
        "tenths that end before their slices": Strategy(work_s=0.7, choices=("%100",)),
        "gangs of all devices": Strategy(count=3, more={"width": devices}),
        "sessions of the highest priority": Strategy(count=2 * devices, more={"priority": 100}),
        "imports of 3 s in a tenth of a device": Strategy(
            work_s=0.05, choices=("%100",), costs=replace(USUAL, start_s=3.0)
        ),
        "imports of 3 s in gangs of all devices": Strategy(
            work_s=0.05, more={"width": devices}, costs=replace(USUAL, start_s=3.0)
        ),
        "cancelled in the middle of an install of 20 s": Strategy(
            work_s=60.0, costs=replace(USUAL, start_s=20.0), cancel_s=10.0
        ),
        "a tenth with half the memory": Strategy(
            count=2 * devices, choices=("%100",), more={"memory_bytes": MEMORY_BYTES // 2 + 1}
        ),
        "two parts of 0.4 on each device by label": Strategy(
            count=4 * devices, choices=tuple(f"+n{n},%400" for n in range(devices))
        ),
        "tenths by label that follow each other": Strategy(
            work_s=0.3, choices=tuple(f"+n{n},%100" for n in range(devices))
        ),
    }


def main() -> int:
    is_quick = quick()
    sizes = [int(sys.argv[sys.argv.index("--devices") + 1])] if "--devices" in sys.argv else [1, 4]
    found = {
        f"{name}, devices: {devices}": play(strategy, devices, 1200.0 if is_quick else 7200.0)
        for devices in sizes
        for name, strategy in strategies(devices).items()
    }
    worst = round(max(one.worst for one in found.values()), 4)
    error = round(100 * max(one.error for one in found.values()), 2)
    targets = [
        Target(name="held / charged, the worst", value=worst, unit="", op="<=", bound=1.02),
        Target(name="share of held time, error", value=error, unit="%", op="<=", bound=2.0),
    ]
    facts = {
        name: {"held / charged": round(one.worst, 4), "share, %": round(100 * one.share, 2)}
        for name, one in found.items()
    }
    return report("charges", targets, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds the worst held / charged of any tenant and window, and the third tenant's share."""

    worst: float
    share: float

    @property
    def error(self) -> float:
        return abs(self.share - 1 / (1 + len(HONEST)))


def play(strategy: Strategy, devices: int, until_s: float) -> Outcome:
    world = WatchedWorld(strategy, devices, until_s)
    held, charged, worst = Counter[str](), Counter[str](), 0.0
    for n in range(1, round(until_s / WINDOW_S) + 1):
        world.run(n * WINDOW_S)
        held_now, charged_now = Counter(world.held_us), world.charged_us()
        for tenant in (TRIES, *HONEST):
            mine_us = held_now[tenant] - held[tenant]
            paid_us = charged_now[tenant] - charged[tenant]
            if mine_us >= LEAST_S * 1e6:
                worst = max(worst, mine_us / paid_us if paid_us else math.inf)
        held, charged = held_now, charged_now
    return Outcome(worst=worst, share=held[TRIES] / sum(held.values()))


class WatchedWorld(World):
    """Plays an island, cancels what the strategy wants cancelled, and sees who keeps a device."""

    def __init__(self, strategy: Strategy, devices: int, until_s: float) -> None:
        self.strategy = strategy
        self.held_us: Counter[str] = Counter()
        self.cancels: list[tuple[int, str]] = []
        others = [_task(name, n, ENDLESS_S) for name in HONEST for n in range(2 * devices)]
        self.honest = [arrival.task for arrival in others]
        super().__init__(
            [*others, *strategy.arrivals(devices, until_s)],
            [
                BoardDevice(id=f"d{n}", host="h", kind="cpu", memory_bytes=MEMORY_BYTES,
                            traits=DeviceTraits(labels=(f"n{n}",)))
                for n in range(devices)
            ],
            [BoardTenant(id=name, name=name, weight=1000) for name in (TRIES, *HONEST)],
            POLICY,
            strategy.costs,
        )  # fmt: skip
        self.keep_timeline = False

    def run(self, until_s: float) -> None:
        while (at_us := self._soonest_us()) <= until_s * 1e6:
            self.advance(int(at_us))
            self._cancel_what_is_due()
            self.obey(cycle(self.board))
        self.advance(round(until_s * 1e6))

    def _soonest_us(self) -> float:
        soonest_us = self.next_us()
        cancels_us = min((at_us for at_us, _ in self.cancels), default=math.inf)
        return min(math.inf if soonest_us is None else soonest_us, max(cancels_us, self.now_us))

    def obey(self, plan: Plan) -> None:
        super().obey(plan)
        for decision in plan.decisions:
            task = self.tasks.get(decision.task)
            if decision.move == Move.Launch and task is not None and task.tenant == TRIES:
                if self.strategy.cancel_s is not None:
                    self.cancels.append(
                        (self.now_us + round(self.strategy.cancel_s * 1e6), task.id)
                    )
            elif decision.move == Move.Cancel and decision.devices and task is not None:
                self._say(Move.Stopped, task, 0)

    def _cancel_what_is_due(self) -> None:
        due = [id for at_us, id in self.cancels if at_us <= self.now_us]
        self.cancels = [one for one in self.cancels if one[0] > self.now_us]
        for id in due:
            task = self.tasks.get(id)
            if task is not None and task.state in (State.starting, State.running):
                self.board.set_task(replace(task, cancel_asked=True))

    def _let_it_be(self, at_us: int) -> None:
        if at_us > self.now_us:
            for tenant, part in self._holders():
                self.held_us[tenant] += round(part * (at_us - self.now_us))
        super()._let_it_be(at_us)

    def _holders(self) -> Iterator[tuple[str, float]]:
        """Yield who keeps which part of a device from all others now."""
        here = dict[str, list[BoardTask]]()
        for stay in self.board.stays.values():
            for device in stay.task.holds:
                if self.runs[stay.id].held_from_us is not None:
                    here.setdefault(device, []).append(stay.task)
        for device, tasks in here.items():
            parts = [_part(task) for task in tasks]
            # The honest tenants take whole devices, so only they may be kept out by fractions.
            is_kept_out = sum(parts) < 1.0 and any(
                task.state == State.waiting and _suits(task, device) for task in self._honest()
            )
            scale = 1.0 / sum(parts) if is_kept_out else 1.0
            yield from ((task.tenant, _part(task) * scale) for task in tasks)

    def _honest(self) -> list[BoardTask]:
        return [task for id in self.honest if (task := self.tasks.get(id)) is not None]

    def charged_us(self) -> Counter[str]:
        """Return what each tenant was charged, as a ledger shows it."""
        found = Counter[str]()
        for user in self.users.values():
            found[user.tenant] += self._faded[user.id] >> FIXED_POINT_BITS
        for stay in self.board.stays.values():
            rate = self.board.rate_of(stay.task)
            found[stay.task.tenant] += self._held_us(stay.task) * rate // 1000
        return found


def _part(task: BoardTask) -> float:
    milli = choice_in(task.choice).fraction_milli
    own = milli / WHOLE_MILLI
    return own if milli == WHOLE_MILLI else max(own, task.memory_bytes / MEMORY_BYTES)


def _suits(task: BoardTask, device: str) -> bool:
    return all(label == f"n{device[1:]}" for label in choice_in(task.choice).labels)


def _task(tenant: str, n: int, work_s: float) -> Arrival:
    return Arrival(
        at_s=0.0,
        task=f"{tenant}{n:06}",
        tenant=tenant,
        user=f"{tenant}1",
        work_s=work_s,
        tier="basic",
    )


if __name__ == "__main__":
    sys.exit(main())
