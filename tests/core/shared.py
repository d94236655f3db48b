"""An island whose graphs share devices, played in simulated time.

Devices give turns by `core.scheduling.sharing.turns` from what the island last told each of them,
and tell it what was held every BEAT_S, each at its own instants; a pause, a durable image and a
launch take their time.  Between two rounds nothing is decided.  `rules` of every round are looked
at.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from app.core.fairness.usage_decay import FIXED_POINT_BITS
from app.core.fairness.water_filling import Claimant, divide_tree
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Plan,
    PlanDecision,
    Policy,
    Snapshot,
)
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import decide
from app.core.scheduling.sharing import time_sharing
from app.core.scheduling.sharing.turns import TURN_US, least_served

POLICY = Policy(half_life_s=0.0, sharers_max=4, tier_share={}, slice_min_s=1.0, slice_max_s=1.0)
BEAT_S = 0.5
ROUND_S = 0.1
RESUME_S = 0.01  # who was paused there is there


@dataclass(frozen=True)
class Wants:
    """A user of a tenant, and how many graphs, or jobs, it has at a time; each lasts `work_s`."""

    tenant: str
    user: str
    graphs: int = 1
    jobs: int = 0
    burst_us: int = 2000
    work_s: float = float("inf")
    memory_bytes: int = 0


class Shared:
    """`start_s`, `pause_s` and `save_s` are what devices take."""

    def __init__(
        self,
        devices: int,
        tenants: list[BoardTenant],
        wants: list[Wants],
        *,
        policy: Policy = POLICY,
        weights: dict[str, int] | None = None,
        start_s: float = 0.7,
        pause_s: float = 0.05,
        save_s: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.dice, self.now_s, self.count = random.Random(seed), 1000.0, 0
        self.start_s, self.pause_s, self.save_s = start_s, pause_s, save_s
        self.policy, self.wants = policy, {want.user: want for want in wants}
        self.tenants = {tenant.id: tenant for tenant in tenants}
        self.users = {
            want.user: BoardUser(
                id=want.user, tenant=want.tenant, weight=(weights or {}).get(want.user, 1000)
            )
            for want in wants
        }
        self.devices = {
            f"d{n}": BoardDevice(
                id=f"d{n}", host="h", kind="cpu", memory_bytes=8, lease_until_s=1e9
            )
            for n in range(devices)
        }
        self.tasks: dict[str, BoardTask] = {}
        self.held_us: Counter[str] = Counter()  # by user
        self.idle_us: Counter[str] = Counter()  # by device
        self.so_far: dict[str, int] = {}  # by task, in this epoch, as its device knows
        self.left_us: dict[str, float] = {}
        self.due: list[tuple[float, str, int, str]] = []  # what comes true by itself
        self.rota: dict[str, list] = {}  # as each device was last told
        self.clock_s = dict.fromkeys(self.devices, self.now_s)  # until when it gave turns
        self.beat_s = {
            id: self.now_s + BEAT_S * n / len(self.devices) for n, id in enumerate(self.devices)
        }
        self.moved: dict[str, float] = {}
        self.rules: Counter[str] = Counter()
        self.longest_s: Counter[str] = Counter()
        self.last_s = dict.fromkeys(self.users, self.now_s)
        for want in wants:
            for n in range(want.graphs + want.jobs):
                self.come(want, is_graph=n < want.graphs)

    def come(self, want: Wants, *, is_graph: bool) -> None:
        self.count += 1
        id = f"{want.user}-{self.count:04}"
        self.tasks[id] = BoardTask(
            id=id,
            request=id,
            tenant=want.tenant,
            user=want.user,
            state="waiting",
            epoch=0,
            kind="cpu",
            submitted_s=self.now_s,
            graph=is_graph,
            memory_bytes=want.memory_bytes,
        )
        self.left_us[id] = want.work_s * 1e6

    # --- time ---

    def play(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.round()
            self.now_s += ROUND_S
            for device in self.devices:
                self.give_turns(device)

    def round(self) -> None:
        self.happen()
        for device in self.devices:
            if self.beat_s[device] <= self.now_s:
                self.beat_s[device] += BEAT_S
                self.tell(device)
        moved = Counter[str]()
        while (plan := decide(self.snapshot(), now_s=self.now_s)).decisions:
            for decision in plan.decisions:
                self.obey(decision)
            moved.update(d.task for d in plan.decisions if d.move != "Share")
            assert max(moved.values(), default=0) <= 1, f"a cycle: {_told(plan)}"
        self.check()
        board = Board.of(self.snapshot(), now_s=self.now_s)
        for device in self.devices:
            self.rota[device] = time_sharing.shares(board, device)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            island="shared",
            policy=self.policy,
            tenants=dict(self.tenants),
            users=dict(self.users),
            devices=dict(self.devices),
            tasks=dict(self.tasks),
        )

    def set(self, id: str, **after: object) -> None:
        self.tasks[id] = replace(self.tasks[id], **after)

    def happen(self) -> None:
        for event in sorted(self.due):
            at_s, id, epoch, what = event
            if at_s > self.now_s:
                break
            task = self.tasks.get(id)
            if task is None or task.epoch != epoch:
                self.due.remove(event)
            elif what == "paused" and task.state == "pausing":
                self.due.remove(event)
                self.book(id)
                self.set(
                    id,
                    state="waiting",
                    seats=(),
                    started_s=None,
                    shares=False,
                    held_us=0,
                    image_on=task.seat,
                    saved=False,
                    waiting_since_s=self.now_s,
                )
                self.due.append((self.now_s + self.save_s, id, epoch, "saved"))
            elif what == "saved":
                self.due.remove(event)
                self.set(id, saved=True)
            elif what == "started" and not self.is_taken(task):
                self.due.remove(event)
                self.set(id, state="running", started_s=self.now_s, image_on=None)

    def is_taken(self, task: BoardTask) -> bool:
        others = [t for t in self.tasks.values() if t.seats == task.seats and t.id != task.id]
        return any(not (task.shares and t.shares) and t.state != "starting" for t in others)

    def give_turns(self, device: str) -> None:
        """Turns, and on to the end of a burst; who ends is told at once."""
        while self.clock_s[device] < self.now_s:
            on = {
                t.id: t
                for t in self.tasks.values()
                if t.seats == (device,) and t.state in ("running", "pausing") and t.started_s
            }
            if not on:
                self.idle_us[device] += round((self.now_s - self.clock_s[device]) * 1e6)
                self.clock_s[device] = self.now_s
                return
            told = [share for share in self.rota.get(device, ()) if share.task in on]
            if len(told) > 1:
                held = {s.task: self.so_far.get(s.task, s.held_us) for s in self.rota[device]}
                id = least_served(self.rota[device], held, {share.task for share in told})
            else:
                id = told[0].task if told else min(on)
            burst = self.wants[on[id].user].burst_us
            lasts_us = -(-TURN_US // burst) * burst
            self.so_far[id] = self.so_far.get(id, 0) + lasts_us
            self.held_us[on[id].user] += lasts_us
            self.last_s[on[id].user] = self.clock_s[device]
            self.clock_s[device] += lasts_us / 1e6
            self.left_us[id] -= lasts_us
            if self.left_us[id] <= 0:
                self.book(id)
                task = self.tasks.pop(id)
                self.come(self.wants[task.user], is_graph=task.graph)
                return
        for user, last_s in self.last_s.items():
            self.longest_s[user] = max(self.longest_s[user], self.now_s - last_s)

    def tell(self, device: str) -> None:
        for task in list(self.tasks.values()):
            if task.seats == (device,):
                self.book(task.id)

    def book(self, id: str) -> None:
        """What it held is known from now on, and booked."""
        task = self.tasks[id]
        more_us = self.so_far.get(id, 0) - task.held_us
        user = self.users[task.user]
        faded = user.faded_us + (more_us << FIXED_POINT_BITS)
        self.users[user.id] = replace(user, faded_us=faded)
        self.set(id, held_us=task.held_us + more_us)

    # --- decisions ---

    def obey(self, decision: PlanDecision) -> None:
        task = self.tasks[decision.task]
        self.rules[f"{decision.move} {decision.rule}"] += 1
        if decision.move == "Launch":
            self.set(
                task.id,
                state="starting",
                seats=decision.devices,
                epoch=task.epoch + 1,
                shares=decision.shares,
                launched_s=self.now_s,
            )
            self.so_far[task.id] = 0
            takes_s = RESUME_S if task.image_on == decision.devices[0] else self.start_s
            self.due.append((self.now_s + takes_s, task.id, task.epoch + 1, "started"))
        elif decision.move == "Share":
            self.set(task.id, shares=True)
        else:
            assert decision.move == "Pause", decision
            held_s = self.now_s - task.started_s
            assert held_s >= self.policy.slice_min_s - 1e-6, "before a full slice"
            if decision.rule == "regroup":
                self.moved[task.id] = self.now_s
            self.set(task.id, state="pausing")
            self.due.append((self.now_s + self.pause_s, task.id, task.epoch, "paused"))

    def check(self) -> None:
        on = defaultdict(list)
        for task in self.tasks.values():
            if task.state in ("starting", "running"):
                on[task.seats[0]].append(task)
        for device, tasks in on.items():
            assert len(tasks) <= max(1, self.policy.sharers_max), device
            assert len(tasks) == 1 or all(t.graph and t.shares for t in tasks), tasks
            assert max(Counter(t.user for t in tasks).values()) <= 2
        free = self.devices.keys() - {id for t in self.tasks.values() for id in t.seats}
        waits = [
            t
            for t in self.tasks.values()
            if t.state == "waiting" and (t.saved or t.image_on in free)
        ]
        assert not (free and waits), f"{free} stand free while {waits} wait"

    # --- what is right ---

    def fair(self) -> dict[str, float]:
        """Max-min by weights over the tree: nobody can use more devices than it has tasks."""

        def below(parent: str | None) -> dict[str, Claimant]:
            made: dict[str, Claimant] = {}
            for tenant in self.tenants.values():
                if tenant.parent == parent:
                    mine = below(tenant.id) | {
                        user.id: Claimant(weight=user.weight, demand=self.demand(user.id))
                        for user in self.users.values()
                        if user.tenant == tenant.id
                    }
                    if mine:
                        made[tenant.id] = Claimant(weight=tenant.weight, children=mine)
            return made

        parts = divide_tree(len(self.devices), below(None))
        return {path[-1]: float(part) for path, part in parts.items() if path[-1] in self.users}

    def demand(self, user: str) -> int:
        want = self.wants[user]
        return min(want.graphs + want.jobs, len(self.devices))


def _told(plan: Plan) -> str:
    return "; ".join(f"{d.move} {d.task} {' '.join(d.devices)} {d.rule}" for d in plan.decisions)


def drawn(seed: int, *, jobs: float = 0.0) -> Shared:
    """A random island: 1 to 4 devices, tenants and users of random weights, bursts and lengths."""
    dice = random.Random(seed)
    tenants = [BoardTenant(id="t0", name="t0", weight=dice.choice([1000, 2000, 4000, 8000]))]
    for n in range(1, dice.randint(2, 6)):
        parent = dice.choice([None, None, None, tenants[0].id])
        tenants.append(
            BoardTenant(
                id=f"t{n}", name=f"t{n}", weight=dice.choice([1000, 2000, 4000]), parent=parent
            )
        )
    wants, weights = [], {}
    for tenant in tenants:
        for n in range(dice.choice([1, 1, 2])):
            user = f"{tenant.id}u{n}"
            weights[user] = dice.choice([1000, 1000, 3000])
            is_job = dice.random() < jobs
            many = dice.choice([1, 1, 2, 4])
            wants.append(
                Wants(
                    tenant.id,
                    user,
                    graphs=0 if is_job else many,
                    jobs=many if is_job else 0,
                    burst_us=dice.randint(500, 16_000),
                    work_s=dice.choice([float("inf"), float("inf"), 5.0, 20.0]),
                )
            )
    return Shared(
        dice.randint(1, 4),
        tenants,
        wants,
        weights=weights,
        save_s=dice.choice([0.2, 1.0]),
        start_s=dice.choice([0.3, 1.0]),
        seed=seed,
    )
