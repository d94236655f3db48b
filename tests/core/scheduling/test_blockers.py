"""The place of one in line without picking anybody, and the reasons that go with it (rule F10)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from app.core.explanation import waiting_reasons
from app.core.fairness.usage_decay import FIXED_POINT_BITS
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Change,
    Policy,
    Snapshot,
)
from app.core.scheduling import blockers
from app.core.scheduling.blockers import WaitingBranch, before
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import decide
from tests.core.pictures import NOW_S, island, seats
from tests.thoroughness import over_seeds

SECOND = 10**6 << FIXED_POINT_BITS


def board(drawn: Snapshot) -> Board:
    return Board.of(drawn, now_s=NOW_S)


def tree_of(chance: random.Random, *, tied: bool = False) -> Snapshot:
    """A random tree of tenants, users in any of them, tasks of one shape; no device is up."""
    tenants = {}
    for n in range(chance.randint(1, 6)):
        parent = chance.choice([None, *tenants])
        weight = 1000 if tied else chance.randint(1, 4) * 500 + chance.randint(0, 9)
        guarantee = {"cpu": chance.choice([0, 0, 1])}
        tenants[f"t{n}"] = BoardTenant(
            id=f"t{n}", name=f"t{n}", weight=weight, parent=parent, guarantee=guarantee
        )
    users = {
        f"u{n}": BoardUser(
            id=f"u{n}",
            tenant=chance.choice(list(tenants)),
            faded_us=0 if tied else chance.randint(0, 10**7) << FIXED_POINT_BITS,
            weight=1000 if tied else chance.choice([500, 1000, 1700]),
        )
        for n in range(chance.randint(1, 8))
    }
    tasks = {
        f"k{n}": BoardTask(
            id=f"k{n}", request="r", tenant=users[user].tenant, user=user, state="waiting",
            epoch=0, kind="cpu", priority=chance.choice([0, 0, 1]), submitted_s=chance.random(),
        )
        for n in range(chance.randint(1, 25))
        for user in [chance.choice(list(users))]
    }  # fmt: skip
    device = BoardDevice(id="d0", host="h", kind="cpu", lease_until_s=NOW_S + 10)
    return Snapshot(
        island="drawn",
        policy=Policy(half_life_s=0.0),
        tenants=tenants,
        users=users,
        devices={"d0": device},
        tasks=tasks,
    )


@over_seeds(range(300))
def test_place_of_a_task_is_that_of_picking_one_by_one(seed: int) -> None:
    drawn = tree_of(random.Random(seed))
    told = {task.id: blockers.place(board(drawn), task)[0] for task in drawn.tasks.values()}
    picked = [task.id for task, _ in blockers.line(board(drawn))]
    assert sorted(told, key=told.__getitem__) == picked
    assert sorted(told.values()) == list(range(1, len(picked) + 1))


@over_seeds(range(50))
def test_no_two_tasks_share_a_place_even_if_equally_served(seed: int) -> None:
    drawn = tree_of(random.Random(seed), tied=True)
    told = [blockers.place(board(drawn), task)[0] for task in drawn.tasks.values()]
    assert sorted(told) == list(range(1, len(told) + 1))


def test_tasks_before_it_are_counted_by_own_user_tenant_and_others() -> None:
    drawn = island(
        "z'",
        queue="a a a2 b b b c",
        used={"a": 0.1, "a2": 0.05, "b": 0, "c": 99, "z": 100},
        tasks={"a.2": {"priority": 1}},
    )
    # By tenant: b 0, a 0.15, b 1, a 1.15, b 2, ...; in a: its user a2 first, then a, urgent first.
    place, ahead = blockers.place(board(drawn), drawn.tasks["a"])
    assert place == 6
    assert (ahead.tenants, ahead.users, ahead.higher, ahead.earlier) == (3, 1, 1, 0)


def test_a_tenant_within_its_guarantee_goes_before_all_who_borrow() -> None:
    drawn = island("z'", queue="a b", used={"a": 50, "b": 0, "z": 100})
    owed = replace(drawn.tenants["a"], guarantee={"cpu": 1})
    drawn = replace(drawn, tenants={**drawn.tenants, "a": owed})
    assert blockers.place(board(drawn), drawn.tasks["a"])[0] == 1
    assert blockers.place(board(drawn), drawn.tasks["b"])[0] == 2


def test_tasks_before_it_are_counted_as_the_formula_says() -> None:
    me = WaitingBranch("m", faded=10, weight=2, fee=4, waiting=9)
    # My 2nd task stands at (10 + 1 * 4) / 2 = 7.
    others = [
        WaitingBranch("a", faded=0, weight=1, fee=3, waiting=9),  # 0 3 6 | 9: three
        WaitingBranch("b", faded=0, weight=1, fee=3, waiting=2),  # only two wait
        WaitingBranch(
            "l", faded=7, weight=1, fee=1, waiting=9
        ),  # 7 is equal, and l is before m: one
        WaitingBranch("z", faded=7, weight=1, fee=1, waiting=9),  # equal, but z is behind
        WaitingBranch("y", faded=8, weight=1, fee=1, waiting=9),
        WaitingBranch(
            "g", faded=99, weight=1, fee=1, waiting=5, borrows=False
        ),  # all within a guarantee
    ]
    who, counts = before(me, 1, others)
    assert [other.name for other in who] == ["a", "b", "l", "g"]
    assert counts == [3, 2, 1, 5]


def test_nearest_change_is_that_of_the_first_reason_to_end() -> None:
    task = BoardTask(
        id="a", request="r", tenant="t", user="u", state="waiting", epoch=0, kind="cpu", width=4
    )
    seen = waiting_reasons.Blockers(devices=2, up=2, open=2, busy=1, free=1, turn_s=1.0)
    reasons = waiting_reasons.waiting(task, seen, waiting_reasons.Ahead(earlier=3))
    assert [reason.code for reason in reasons] == [
        "TOO_FEW_DEVICES",
        "WAITING_FOR_DEVICE",
        "EARLIER_TASK_AHEAD",
    ]
    first = waiting_reasons.nearest(reasons)
    assert first is reasons[0]
    assert (first.change.action, first.change.value) == ("set_devices_min", 2)
    assert waiting_reasons.nearest([]) is None


@pytest.mark.parametrize(
    ("width", "seen", "told"),
    [
        (1, {"up": 4, "open": 1, "busy": 1}, (3, 1)),
        (3, {"up": 4, "open": 2, "busy": 1, "free": 1}, (2, 2)),
        (3, {"up": 4, "open": 3, "busy": 1, "free": 2}, (1, 1)),
        (2, {"up": 4, "open": 2, "free": 1, "lent": 1, "busy": 1}, None),  # enough are to be had
        (1, {"up": 4, "open": 0, "busy": 0}, None),  # DEVICE_DRAINED tells that all are
        (1, {"up": 2, "open": 2, "busy": 2}, None),
        (1, {"up": 4, "open": 1, "busy": 1, "pinned_to": ("d0",)}, None),
    ],
)
def test_drained_devices_while_the_task_lacks_some_are_a_reason(width, seen, told) -> None:
    task = BoardTask(
        id="a", request="r", tenant="t", user="u", state="waiting", epoch=0, kind="cpu", width=width
    )
    found = waiting_reasons.Blockers(devices=4, turn_s=1.0, **seen)
    reasons = waiting_reasons.waiting(task, found, waiting_reasons.Ahead())
    drained = [reason for reason in reasons if reason.code == "SOME_DEVICES_DRAINED"]
    if told is None:
        assert drained == []
        return
    (reason,) = drained
    assert reason.message.startswith(f"{told[0]} of 4 cpu devices ")
    assert reason.change == Change(action="open_devices", value=told[1], of="cpu")


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ({"up": 1, "stopping": ("d0",)}, "Device d0 is stopping"),
        ({"up": 2, "stopping": ("d0", "d1")}, "Devices d0, d1 are stopping"),
        ({"up": 5, "stopping": tuple("abcde")}, "Devices a, b, c and 2 more are stopping"),
        ({"up": 2, "open": 1, "free": 1, "stopping": ("d0",)}, None),
        ({"up": 2, "open": 1, "busy": 1, "stopping": ("d0",), "pinned_to": ("d1",)}, None),
    ],
)
def test_stopping_devices_while_the_task_lacks_one_are_a_reason(seen, told) -> None:
    task = BoardTask(
        id="a", request="r", tenant="t", user="u", state="waiting", epoch=0, kind="cpu"
    )
    found = waiting_reasons.Blockers(devices=5, turn_s=1.0, **{"open": 0, "busy": 0, **seen})
    reasons = waiting_reasons.waiting(task, found, waiting_reasons.Ahead())
    found = {reason.code: reason for reason in reasons}
    assert not found.keys() & {"DEVICE_DRAINED", "SOME_DEVICES_DRAINED"}
    if told is None:
        assert "DEVICE_STOPPING" not in found
        return
    reason = found["DEVICE_STOPPING"]
    assert reason.message == f"{told}: no new work starts there."
    assert reason.change == Change(action="wait_for_workers", value=1, of="cpu")


def test_every_reason_code_has_a_rank_and_an_actor() -> None:
    assert waiting_reasons.CODES.keys() >= waiting_reasons.START
    assert waiting_reasons.CODES.keys() >= waiting_reasons.CLOSED
    assert set(waiting_reasons.CODES.values()) == {"wait", "change_request", "ask_admin"}


@over_seeds(range(200))
def test_first_of_few_waiting_tasks_is_picked_first(seed):
    drawn = board(tree_of(random.Random(seed)))
    few = random.Random(seed).sample(sorted(drawn.tasks), k=min(4, len(drawn.tasks)))
    order = blockers.soonest_first(drawn, few)
    assert sorted(order) == sorted(few)
    alone = board(tree_of(random.Random(seed)))
    for id in set(alone.tasks) - set(few):
        alone.tree.drop(id)
    found = alone.tree.first(alone.tree.lanes)
    assert found is not None
    assert order[0] == found[2].id


def test_task_that_does_not_wait_has_no_place():
    drawn = board(tree_of(random.Random(0)))
    assert blockers.soonest_first(drawn, ["nobody"]) == []


def test_device_is_wanted_while_a_task_waits_for_its_kind() -> None:
    chance = random.Random(7)
    drawn = board(tree_of(chance))
    assert blockers.is_wanted(drawn, "d0")
    assert blockers.is_wanted(drawn, "unknown")
    for id in list(drawn.tasks):
        drawn.drop_task(id)
    assert not blockers.is_wanted(drawn, "d0")


@pytest.mark.parametrize(("limit", "is_wanted"), [({}, False), ({"*": 1}, True), ({"*": 2}, False)])
def test_device_is_wanted_by_a_task_that_may_hold_no_second_one(
    limit: dict[str, int], is_wanted: bool
) -> None:
    drawn = island("a .", queue="a", tasks={"a.2": {"kind": "gpu"}})
    drawn.devices["d1"] = replace(drawn.devices["d1"], kind="gpu")
    drawn.tenants["a"] = replace(drawn.tenants["a"], limit=limit)
    assert blockers.is_wanted(board(drawn), "d0") is is_wanted


@pytest.mark.parametrize("switch_s", [0, 1])
@pytest.mark.parametrize("waited_s", [0, 807, 808, 809, 1079, 1100])
def test_holder_is_named_as_protected_exactly_if_it_is_not_paused(
    waited_s: int, switch_s: int
) -> None:
    """It may wait 1080 s of an hour, is urgent 270 s before that, and would wait 1 s for b."""
    fields = {"away": ((NOW_S - 10 - waited_s, NOW_S - 10),), "switch_us": 10**6 * switch_s}
    held = {"held_us": 700_000_000, "started_s": NOW_S - 700}
    drawn = island("a", queue="b", used={"a": 99}, tasks={"a": {**fields, **held}})
    seen = blockers.find_blockers(board(drawn), drawn.tasks["b"])
    assert (seen.protected == 0) == (seats(decide(drawn, now_s=NOW_S)) == "d0: a>b")
    assert seen.protected == (waited_s >= 1080 - 270 - 1 - switch_s)


@pytest.mark.parametrize(("switch_s", "told_s"), [(0.1, 60), (5, 250)])
def test_own_task_gives_way_after_its_slice_if_that_is_longer_than_a_minute(
    switch_s: float, told_s: int
) -> None:
    drawn = island("a", queue="a", tasks={"a": {"switch_us": int(switch_s * 1e6)}})
    seen = blockers.find_blockers(board(drawn), drawn.tasks["a.2"])
    assert (seen.own_soon, seen.minute_s) == (1, told_s)
