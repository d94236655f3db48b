"""Rule F7: devices are kept for a gang whose turn has come, and others lose little by it.

The bound of docs/internals/fair_share.md: in a time T the others lose 2 % of the devices, and one
wait of the widest gang for a slice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.core.fairness.fair_tree import lane
from app.core.model.lifecycle import Move, State
from app.core.model.snapshot import BoardDevice, BoardTenant, GangWait, Plan, Policy
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.gangs import gang_waits
from app.core.scheduling.record import as_json, from_json, seen_by
from app.core.scheduling.stays import STALE_S
from app.core.simulation.simulator import Arrival, Costs, World, simulate
from tests.thoroughness import rest_long, seeds

COSTS = Costs(image_s=0.65, resume_s=0.65)  # so that a slice is as long as it may be
POLICY = Policy(half_life_s=0.0, idle_credit_s=0.0)
ENDLESS_S = 1e6


def devices(n: int, **details: Any) -> list[BoardDevice]:
    return [BoardDevice(id=f"d{i}", host="h", kind="cpu", **details) for i in range(n)]


def tenants(*names: str, **details: Any) -> list[BoardTenant]:
    return [BoardTenant(id=name, name=name, weight=1000, **details) for name in names]


def task(id: str, *, tenant: str, work_s: float, at_s: float = 0.0, **details: Any) -> Arrival:
    return Arrival(
        at_s=at_s,
        task=id,
        tenant=tenant,
        user=f"{tenant}1",
        work_s=work_s,
        **{"tier": "basic", **details},
    )


def singles(dice: random.Random, *, n: int, longest_s: float, names: str = "ab") -> list[Arrival]:
    """Tasks of one device, of lengths that differ widely."""
    return [
        task(f"{name}{i:04}", tenant=name, work_s=dice.uniform(0.05, 1.0) * longest_s)
        for name in names
        for i in range(n)
    ]


def played(world: World, until_s: float) -> Iterator[Plan]:
    """Yield the plan of each round."""
    while (at_us := world.next_us()) is not None and at_us <= until_s * 1e6:
        world.advance(at_us)
        plan = cycle(world.board)
        yield plan
        world.obey(plan)


def world_of(work: list[Arrival], some: list[BoardDevice], all_tenants: list[BoardTenant]) -> World:
    return World(work, some, all_tenants, POLICY, COSTS)


def until_it_waits(world: World, until_s: float = 3600.0) -> GangWait:
    """Play until devices stand free for a gang."""
    for _ in played(world, until_s):
        wait = world.board.waits.get("cpu")
        if wait is not None and wait.gang and wait.idle:
            return wait
    raise AssertionError("no gang waited")


# --- what the others lose -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", rest_long(seeds(range(20)), keep=3))
def test_single_tasks_lose_no_more_than_the_bound_to_any_gangs(seed: int) -> None:
    dice, n, until_s = random.Random(seed), 6, 2400.0
    longest_s = dice.choice([5.0, 30.0, 60.0, 400.0])
    gangs = [
        task(
            f"gang{i}",
            tenant=f"g{i}",
            work_s=dice.choice([20.0, 300.0, ENDLESS_S]),
            at_s=dice.uniform(0, until_s / 2),
            width=dice.randint(2, n),
        )
        for i in range(dice.randint(1, 6))
    ]
    work = [*singles(dice, n=int(8 * until_s / longest_s) + 20, longest_s=longest_s), *gangs]
    report = simulate(
        work,
        devices(n),
        tenants("a", "b", *(gang.tenant for gang in gangs)),
        POLICY,
        costs=COSTS,
        until_s=until_s,
        checked=False,
    )
    lost_s = n * until_s - sum(report.device_s.values())
    widest = max(gang.width for gang in gangs)
    assert lost_s <= POLICY.wait_share * n * until_s + widest * POLICY.slice_max_s


@pytest.mark.parametrize("seed", rest_long(seeds(range(4))))
def test_board_made_anew_keeps_the_same_devices(seed: int) -> None:
    dice = random.Random(seed)
    gangs = [
        task(f"gang{i}", tenant="g", work_s=dice.choice([30.0, ENDLESS_S]), width=2 + i)
        for i in range(3)
    ]
    work = [*singles(dice, n=60, longest_s=40.0), *gangs]
    report = simulate(
        work, devices(4), tenants(*"abg"), POLICY, costs=COSTS, until_s=500.0, checked=True
    )
    assert any(line.decision.rule == "F7" for line in report.timeline)


def test_gang_of_all_devices_gets_nine_tenths_of_its_share_within_an_hour() -> None:
    work = [*singles(random.Random(1), n=900, longest_s=40.0)]
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    held = {
        share: simulate(
            work,
            devices(4),
            tenants(*"abg"),
            replace(POLICY, wait_share=share),
            costs=COSTS,
            until_s=3600.0,
            checked=False,
        ).device_s["g"]
        for share in (0.02, 0.0)
    }
    owed = 4 * 3600 / 3
    assert held[0.02] >= 0.9 * owed
    assert held[0.0] < 0.5 * owed  # as it was without waits


def test_wait_is_given_up_soon_after_the_last_device_was_expected() -> None:
    world = world_of(
        [*singles(random.Random(2), n=200, longest_s=50.0),
         task("gang", tenant="g", work_s=ENDLESS_S, width=4)],
        devices(4),
        tenants(*"abg"),
    )  # fmt: skip
    wait = until_it_waits(world)
    assert wait.at_s <= world.now_s + POLICY.slice_max_s
    assert gang_waits.waiting_gang(world.board, "cpu") is not None
    world.board.at(wait.at_s + gang_waits.look_s(world.board))
    assert gang_waits.waiting_gang(world.board, "cpu") is None


def test_wait_of_a_gang_ends_when_it_has_held_devices() -> None:
    """It may have started otherwise and be back in its queue."""
    work = singles(random.Random(2), n=200, longest_s=50.0)
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    world = world_of(work, devices(4), tenants(*"abg"))
    until_it_waits(world)
    gang = gang_waits.waiting_gang(world.board, "cpu")
    assert gang is not None
    world.board.set_task(replace(gang, epoch=gang.epoch + 1))
    assert gang_waits.waiting_gang(world.board, "cpu") is None


def test_quiet_island_looks_seldom_whether_a_gang_may_wait_but_soon_after_one_arrives() -> None:
    day_s, arrives_s = 86_400.0, 50_000.0
    policy = replace(POLICY, slice_min_s=day_s, slice_max_s=day_s, patience_s=100 * day_s)
    work = [task(f"a{i}", tenant="a", work_s=ENDLESS_S) for i in range(4)]
    work += [
        task(f"gang{at_s}", tenant="g", work_s=ENDLESS_S, at_s=at_s, width=4)
        for at_s in (60.0, arrives_s)
    ]
    world = World(work, devices(4), tenants(*"ag"), policy, COSTS)
    looks_s = []
    for _ in played(world, day_s - 60.0):
        wait = world.board.waits.get("cpu")
        if wait is not None and wait.again_s > world.now_s:
            looks_s.append(world.now_s)
    assert len(looks_s) < 100
    assert any(arrives_s <= at_s <= arrives_s + STALE_S for at_s in looks_s)


# --- which gangs wait ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "known", "is_wide"),
    [(2, 8, True), (2, 9, True), (2, 10, False), (3, 10, True), (4, 16, True), (76, 256, True),
     (75, 256, False), (1, 1, False), (2, 2, True), (9, 8, True)],
)  # fmt: skip
def test_gang_is_wide_from_three_tenths_of_its_kind(width: int, known: int, is_wide: bool) -> None:
    board = world_of([], devices(known), tenants("a")).board
    assert gang_waits.is_wide(board, lane("cpu", width)) is is_wide


def test_gang_is_wide_by_the_devices_that_suit_it() -> None:
    some = [*devices(30), *(replace(one, id=f"m{one.id}", memory_bytes=8) for one in devices(4))]
    board = world_of([], some, tenants("a")).board
    assert not gang_waits.is_wide(board, lane("cpu", 2))
    assert gang_waits.is_wide(board, lane("cpu", 2, 8))
    board.set_device(replace(board.devices["d0"], memory_bytes=8))
    for n in range(1, 8):
        board.set_device(replace(board.devices[f"d{n}"], memory_bytes=8))
    assert not gang_waits.is_wide(board, lane("cpu", 2, 8))  # 2 of 12 by now


def test_narrow_gangs_change_nothing_by_waits() -> None:
    dice = random.Random(9)
    work = singles(dice, n=80, longest_s=40.0)
    work += [
        task(f"gang{i}", tenant="g", work_s=200.0, at_s=10.0 * i, width=dice.choice([2, 3]))
        for i in range(12)
    ]
    with_waits, without = (
        simulate(
            work,
            devices(16),
            tenants(*"abg"),
            replace(POLICY, wait_share=share),
            costs=COSTS,
            until_s=1200.0,
            checked=False,
        )
        for share in (0.02, 0.0)
    )
    assert with_waits.timeline == without.timeline


# --- devices that it may not use ----------------------------------------------------------------


@pytest.mark.parametrize("seed", rest_long(seeds(range(8)), keep=3))
def test_devices_that_a_gang_may_not_use_are_not_kept_for_it(seed: int) -> None:
    """Small devices never stand free while a task waits that could run there."""
    dice = random.Random(seed)
    some = [*devices(4, memory_bytes=8)]
    some += [BoardDevice(id=f"s{i}", host="h", kind="cpu", memory_bytes=4) for i in range(3)]
    work = [
        replace(one, memory_bytes=dice.choice([2, 2, 6]))
        for one in singles(dice, n=300, longest_s=40.0)
    ]
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=3, memory_bytes=8))
    world, waited = world_of(work, some, tenants(*"abg")), 0
    for _ in played(world, 1200.0):
        waited += gang_waits.waiting_gang(world.board, "cpu") is not None
        free = {id for id in world.board.pools["cpu"].free if id.startswith("s")}
        small = [t for t in world.tasks.values() if t.memory_bytes == 2]
        assert not free or not any(t.state == State.waiting for t in small)
    assert waited > 10


def test_gang_without_room_below_a_limit_does_not_wait() -> None:
    limited = [*tenants("a", "b"), *tenants("g", limit={"cpu": 3})]
    work = singles(random.Random(3), n=200, longest_s=40.0)
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    world = world_of(work, devices(4), limited)
    for _ in played(world, 600.0):
        assert gang_waits.waiting_gang(world.board, "cpu") is None
        assert not any(not leaving for leaving in world.board.pools["cpu"].free.values())


def test_gang_does_not_wait_for_devices_that_are_guaranteed_to_others() -> None:
    some = [*tenants("a", guarantee={"cpu": 2}), *tenants("b", "g")]
    work = singles(random.Random(4), n=300, longest_s=40.0)
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    world = world_of(work, devices(4), some)
    for _ in played(world, 600.0):
        assert gang_waits.waiting_gang(world.board, "cpu") is None


def test_guaranteed_task_does_not_wait_for_a_basic_gang() -> None:
    some = [*tenants("a", "b", "g"), *tenants("owner", guarantee={"cpu": 1})]
    work = singles(random.Random(5), n=200, longest_s=50.0)
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    world = world_of(work, devices(4), some)
    until_it_waits(world)
    plan = decide(_with(world, task("own", tenant="owner", work_s=10)), now_s=world.now_s)
    assert "own" in {one.task for one in plan.decisions if one.move == Move.Launch}
    plan = decide(_with(world, task("other", tenant="a", work_s=10)), now_s=world.now_s)
    assert "other" not in {one.task for one in plan.decisions if one.move == Move.Launch}


def _with(world: World, arrival: Arrival) -> Any:
    """Return what the world shows, with one more task that just came."""
    seen = world.snapshot()
    like = next(one for one in seen.tasks.values() if one.state == State.waiting and one.width == 1)
    new = replace(
        like,
        id=arrival.task,
        request=arrival.task,
        tenant=arrival.tenant,
        user=f"{arrival.tenant}1",
        submitted_s=world.now_s,
    )
    user = next(iter(seen.users.values()))
    users = {**seen.users, new.user: replace(user, id=new.user, tenant=arrival.tenant, faded_us=0)}
    return replace(seen, users=users, tasks={**seen.tasks, new.id: new})


# --- the turn that follows ----------------------------------------------------------------------


def test_gang_that_waited_keeps_its_devices_for_half_of_what_pays_for_the_wait() -> None:
    work = singles(random.Random(6), n=400, longest_s=50.0)
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    world, turns = world_of(work, devices(4), tenants(*"abg")), list[tuple[float, float]]()
    for plan in played(world, 3600.0):
        for one in plan.decisions:
            if one.task == "gang" and one.move == Move.Pause:
                before = plan.before["gang"]
                least_s = 4 * world.board.waits["cpu"].each_s / (POLICY.wait_share * 4) / 2
                turns.append((world.now_s - (before.started_s or 0.0), least_s))
    assert len(turns) > 2
    assert all(held_s >= least_s - 1e-6 for held_s, least_s in turns)


def test_guarantee_ends_the_turn_of_a_gang_that_waited() -> None:
    some = [*tenants("a", "b", "g"), *tenants("owner", guarantee={"cpu": 1})]
    work = singles(random.Random(7), n=400, longest_s=50.0)
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    world = world_of(work, devices(4), some)
    for _ in played(world, 3600.0):
        stay = world.board.stays.get("gang")
        if (
            stay is not None
            and stay.ripe
            and gang_waits.turn_ends_s(world.board, stay) > (world.now_s + 1)
        ):
            break
    plan = decide(_with(world, task("own", tenant="owner", work_s=10)), now_s=world.now_s)
    assert {(one.task, one.move) for one in plan.decisions} >= {("gang", Move.Pause)}


# --- records ------------------------------------------------------------------------------------


def test_round_in_which_a_gang_waits_is_repeated_from_its_record() -> None:
    work = singles(random.Random(8), n=400, longest_s=50.0)
    work.append(task("gang", tenant="g", work_s=ENDLESS_S, width=4))
    world, repeated = world_of(work, devices(4), tenants(*"abg")), 0
    for plan in played(world, 3600.0):
        before = {wait.kind: wait for wait in world.board.memory.waits}.get("cpu")
        if not plan.decisions or before is None or not before.gang:
            continue
        seen = from_json(as_json(seen_by(world.board, plan, plan.before, island="i")))
        assert seen.waits == world.board.memory.waits
        assert decide(seen, now_s=world.now_s).decisions == plan.decisions
        repeated += 1
    assert repeated > 2
