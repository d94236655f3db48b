"""Gangs that span islands: every island decides with what it saw, and writes when it may."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from app.core.explanation import waiting_reasons
from app.core.model.lifecycle import ENDED, ON_A_DEVICE, Move, State, after
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Plan,
    PlanDecision,
    Policy,
    Snapshot,
    Terms,
)
from app.core.model.snapshot import changed as moved
from app.core.scheduling.cycle import decide
from app.core.scheduling.gangs import island_gangs
from app.core.scheduling.gangs.island_gangs import (
    BACK,
    OVER,
    GangMember,
    divided,
    of_gang,
    of_ticket,
)
from tests.thoroughness import rest_long, seeds

# --- how it is divided --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "devices", "islands", "expected"),
    [
        (3, {"a": 2, "b": 2}, 2, {"a": 2, "b": 1}),
        (3, {"a": 1, "b": 2}, 2, {"a": 1, "b": 2}),
        (6, {"a": 1, "b": 4, "c": 2}, 2, {"b": 4, "c": 2}),  # the fewest: none of a
        (7, {"a": 1, "b": 4, "c": 2}, 2, None),
        (7, {"a": 1, "b": 4, "c": 2}, 3, {"a": 1, "b": 4, "c": 2}),
        (2, {"a": 0, "b": 2}, 2, {"b": 2}),
    ],
)
def test_largest_islands_are_filled_first(
    width: int, devices: dict[str, int], islands: int, expected: dict[str, int] | None
) -> None:
    assert divided(width, devices, islands) == expected


# --- what members let each other do -------------------------------------------------------------

GANG = GangMember(island="c", state="blocked", epoch=4)
HELD = GangMember(island="a", state="running", good_for=5)
FREE = GangMember(island="b", state="waiting")


def test_tickets_are_taken_in_order_of_islands_and_the_gang_starts_last() -> None:
    blocked = replace(HELD, state="blocked", good_for=0)
    assert of_ticket(0, GANG, [blocked, FREE]) == Terms()
    assert of_ticket(1, GANG, [blocked, FREE]) == Terms(tickets=("a",))
    assert of_ticket(1, GANG, [HELD, FREE]) == Terms()
    assert of_gang(GANG, [HELD, FREE]) == Terms(tickets=("b",))
    assert of_gang(GANG, [HELD, replace(HELD, island="b")]) == Terms()


@pytest.mark.parametrize(
    ("gang", "ticket", "expected"),
    [
        (GANG, HELD, ""),
        (replace(GANG, willing=False), HELD, BACK),
        (replace(GANG, epoch=5), HELD, BACK),  # it ran with these seats, and was paused
        (replace(GANG, epoch=5, state="running"), HELD, ""),
        (replace(GANG, epoch=5, state="pausing"), replace(HELD, state="pausing"), ""),
        (GANG, replace(HELD, state="pausing"), BACK),
        (replace(GANG, epoch=5, state="failed"), HELD, OVER),
        (replace(GANG, state="cancelled"), FREE, OVER),
        (replace(GANG, epoch=5, state="running"), FREE, ""),
    ],
)
def test_a_ticket_is_good_for_one_epoch(
    gang: GangMember, ticket: GangMember, expected: str
) -> None:
    assert of_ticket(0, gang, [ticket]).lets_go == expected


def test_member_after_a_lost_ticket_releases_its_devices() -> None:
    """Else it would hold seats and wait for some on an island before its own."""
    lost = replace(HELD, state="waiting")
    later = replace(HELD, island="b")
    assert of_ticket(1, GANG, [lost, later]) == Terms(tickets=("a",), lets_go=BACK)


def test_running_gang_is_asked_for_devices_that_an_island_wants_back() -> None:
    runs = replace(GANG, state="running", epoch=5)
    assert of_gang(runs, [HELD, replace(HELD, island="b", state="pausing")]).lets_go == "b"


def test_reasons_name_the_missing_tickets() -> None:
    first, second = waiting_reasons._by_terms(Terms(tickets=("a", "b"), idle=True))
    assert (first.code, first.change.value) == ("TICKETS", ("a", "b"))
    assert second.code == "GANG_WANTS_NONE"


# --- whatever happens first ---------------------------------------------------------------------

POLICY = Policy(slice_min_s=1.0, slice_max_s=3.0, half_life_s=0.0)
TENANTS = {id: BoardTenant(id=id, name=id, weight=1000) for id in ("t0", "t1", "t2")}


class World:
    """Islands that look and write at any time, and devices that say what came true.

    Rows are values of `core.model.snapshot`, of which each island changes its own.  What it decided
    is written as `app.scheduling.journal` does: only if the others of a gang still let it.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.now_s = chance, 0.0
        self.devices = {island: chance.randint(1, 3) for island in "abc"}
        self.rows, self.island, self.good_for = (
            dict[str, BoardTask](),
            dict[str, str](),
            Counter[str](),
        )
        self.steps, self.used_us = dict[str, int](), Counter[str]()
        self.plans = dict[str, Plan]()
        for n in range(chance.randint(2, 4)):
            self._add_gang(f"g{n}", f"t{chance.randrange(3)}")
        for n in range(chance.randint(0, 5)):
            island = chance.choice("abc")
            self._add(f"j{n}", island, f"t{chance.randrange(3)}", 1)

    def _add_gang(self, id: str, tenant: str) -> None:
        wide = max(self.devices.values()) + 1
        parts = divided(self.chance.randint(wide, sum(self.devices.values())), self.devices, 3)
        assert parts is not None
        assert len(parts) > 1
        for island, width in parts.items():
            home = island == max(parts)
            name = id if home else f"{id}.{island}"
            self._add(name, island, tenant, width, gang=id, ticket=not home)

    def _add(self, id: str, island: str, tenant: str, width: int, **more: object) -> None:
        self.island[id], self.steps[id] = island, self.chance.randint(1, 3)
        self.rows[id] = moved(
            BoardTask(
                id=id, request=id, tenant=tenant, user=tenant, state="blocked", epoch=0, kind="c"
            ),
            width=width,
            across_hosts=True,
            **more,
        )

    def member(self, id: str) -> GangMember:
        row = self.rows[id]
        willing = not row.cancel_asked
        return GangMember(
            island=self.island[id], state=row.state, epoch=row.epoch,
            good_for=self.good_for[id], willing=willing,
        )  # fmt: skip

    def terms(self, id: str) -> Terms:
        gang = self.rows[id].gang
        if not gang:
            return Terms()
        ids = sorted((one for one, row in self.rows.items() if row.gang == gang and row.ticket),
                     key=self.island.__getitem__)  # fmt: skip
        tickets = [self.member(one) for one in ids]
        if id == gang:
            return of_gang(self.member(gang), tickets)
        return of_ticket(ids.index(id), self.member(gang), tickets)

    def seen(self, id: str) -> BoardTask:
        row = self.rows[id]
        accrued_us = 0 if row.started_s is None else int((self.now_s - row.started_s) * 1e6)
        return moved(
            row,
            conditions=replace(row.conditions, terms=self.terms(id)),
            accrued_us=accrued_us,
            held_us=accrued_us,
        )

    def look(self, island: str) -> None:
        mine = [id for id, row in self.rows.items() if self.island[id] == island]
        tasks = {id: self.seen(id) for id in mine if self.rows[id].state not in ENDED}
        devices = [BoardDevice(id=f"{island}{n}", host=f"{island}{n}", kind="c", lease_until_s=1e9)
                   for n in range(self.devices[island])]  # fmt: skip
        users = {id: BoardUser(id=id, tenant=id, faded_us=self.used_us[id] << 40) for id in TENANTS}
        self.plans[island] = decide(
            Snapshot(
                island=island, policy=POLICY, tenants=TENANTS, users=users,
                devices={device.id: device for device in devices}, tasks=tasks,
            ),
            now_s=self.now_s,
        )  # fmt: skip

    def write(self, island: str) -> None:
        plan = self.plans.pop(island, None)
        if plan is None or not all(self._is_as_seen(task) for task in plan.before.values()):
            return
        for decision in plan.decisions:
            self._write(decision)

    def _is_as_seen(self, task: BoardTask) -> bool:
        """An event of its own island would have made that look again."""
        row = self.rows[task.id]
        same = (row.state, row.epoch) == (task.state, task.epoch)
        return same and self.terms(task.id) == task.conditions.terms

    def _write(self, decision: PlanDecision) -> None:
        row, move = self.rows[decision.task], Move(decision.move)
        state = after(row.id, row.state, move)
        if move == Move.Launch:
            row = moved(row, epoch=row.epoch + 1, seats=decision.devices, launched_s=self.now_s)
            if row.ticket:
                self.good_for[row.id] = self.rows[row.gang].epoch + 1
                row, state = moved(row, started_s=self.now_s), State.running
        elif move in (Move.Paused, Move.Finished):
            row = self._charged(row)
        self.rows[row.id] = moved(row, state=state)

    def _charged(self, row: BoardTask) -> BoardTask:
        if row.started_s is not None:
            self.used_us[row.tenant] += int((self.now_s - row.started_s) * 1e6) * len(row.seats)
        return moved(row, seats=(), started_s=None)

    def tell(self, id: str) -> None:
        """Its device says how far it is."""
        row = self.rows[id]
        if row.ticket:
            return
        if row.state == State.starting:
            self.rows[id] = moved(row, state=State.running, started_s=self.now_s)
        elif row.state == State.pausing:
            self.rows[id] = moved(self._charged(row), state=State.waiting)
        elif row.state == State.running:
            self.steps[id] -= 1
            if not self.steps[id]:
                self.rows[id] = moved(self._charged(row), state=State.done)

    def lose(self, id: str) -> None:
        """A device of it is gone."""
        row = self.rows[id]
        if row.state in ON_A_DEVICE:
            self.rows[id] = moved(self._charged(row), state=State.waiting)
            if row.ticket and (gang := self.rows[row.gang]).state in ON_A_DEVICE:
                self.rows[gang.id] = moved(self._charged(gang), state=State.waiting)

    def check(self) -> None:
        sits = Counter(
            device
            for row in self.rows.values()
            if row.state in ON_A_DEVICE and row.state != State.pausing
            for device in row.seats
        )
        assert all(count == 1 for count in sits.values()), sits
        for row in self.rows.values():
            if row.ticket and self.rows[row.gang].state in ON_A_DEVICE:
                assert row.state in (State.running, State.pausing), (row.id, row.state)
                assert self.good_for[row.id] == self.rows[row.gang].epoch

    def play(self, ops: int) -> int:
        """Anything at any time; how many operations it took until all had ended."""
        for n in range(ops):
            if all(row.state in ENDED for row in self.rows.values()):
                return n
            act = self.chance.choice(["look", "look", "write", "write", "tell", "wait", "lose"])
            island, id = self.chance.choice("abc"), self.chance.choice(list(self.rows))
            if act in ("look", "write"):
                getattr(self, act)(island)
            elif act == "tell" or (act == "lose" and n < ops // 4 and n % 20 == 0):
                getattr(self, act)(id)
            elif act == "wait":
                self.now_s += self.chance.random()
            self.check()
        left = {id: row.state for id, row in self.rows.items() if row.state not in ENDED}
        raise AssertionError(f"stuck: {left}")


@pytest.mark.parametrize("seed", rest_long(seeds(range(60)), keep=20))
def test_all_gangs_end_and_none_runs_without_its_tickets(seed: int) -> None:
    world = World(random.Random(seed))
    world.play(20_000)
    tickets = [row for row in world.rows.values() if row.ticket]
    assert {row.state for row in tickets} <= {"done", "cancelled"}  # lost when its gang had ended
    assert {row.state for row in world.rows.values() if not row.ticket} == {"done"}


@pytest.mark.slow
def test_gangs_that_break_the_order_of_islands_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contrast: tickets asked for on all islands at once, and kept until all are held."""

    def greedy(n: int, gang: GangMember, tickets: list[GangMember]) -> Terms:
        told = island_gangs.of_ticket(n, gang, tickets)
        return replace(told, tickets=(), lets_go="" if told.tickets else told.lets_go)

    monkeypatch.setattr("tests.core.scheduling.gangs.test_island_gangs.of_ticket", greedy)
    monkeypatch.setattr(
        "tests.core.scheduling.gangs.test_island_gangs.POLICY", replace(POLICY, turns=False)
    )
    stuck, chances = 0, iter(range(30))
    while stuck < 3:
        try:
            World(random.Random(next(chances))).play(3000)
        except AssertionError as error:
            stuck += "stuck" in str(error)
