"""Elastic tasks are seated with what they need, use what nobody asks for, and give it back at once.

A cell of `tests.core.pictures` is one device, so who holds several is drawn here by `on`.  Work is
in device-seconds: on k of the N devices that it can use a task runs at k/N of its speed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from app.core.explanation.waiting_reasons import Reason, breadth
from app.core.model.lifecycle import Move
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Plan,
    Policy,
    Snapshot,
)
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.record import as_json, from_json, seen_by
from app.core.simulation.simulator import Arrival, Costs, Report, simulate
from benchmarks.no_cycles import BOUND, ELASTIC, Shop, judge
from benchmarks.no_cycles import island as random_island
from tests.thoroughness import rest_long, seeds

NOW_S = 1000.0
SECOND = 1_000_000


def on(
    *tasks: BoardTask, devices: int = 4, tenants: dict[str, BoardTenant] | None = None
) -> Snapshot:
    """An island of `devices` d0, d1, ... and these tasks; tenants are named by a letter."""
    named = {
        task.tenant: BoardTenant(id=task.tenant, name=task.tenant, weight=1000) for task in tasks
    }
    return Snapshot(
        island="drawn",
        policy=Policy(half_life_s=0.0, grow_after_s=60.0),
        tenants=named | (tenants or {}),
        users={task.user: BoardUser(id=task.user, tenant=task.tenant) for task in tasks},
        devices={
            f"d{n}": BoardDevice(id=f"d{n}", host="h", kind="cpu", lease_until_s=NOW_S + 1e6)
            for n in range(devices)
        },
        tasks={task.id: task for task in tasks},
    )


def task(id: str, seats: str = "", *, held_s: float = 100.0, **details: Any) -> BoardTask:
    """`a` of tenant a runs on its `seats` ("d0 d1") for `held_s`, or waits."""
    values: dict[str, Any] = {"width": 1, "user": f"{id[0]}1", **details}
    if seats:
        values |= {"state": "running", "epoch": 1, "seats": tuple(seats.split())}
        values |= {"started_s": NOW_S - held_s, "held_us": round(held_s * SECOND)}
        values["accrued_us"] = values["held_us"]
    else:
        values |= {"state": "waiting", "epoch": 0, "submitted_s": NOW_S - 1}
    return BoardTask(id=id, request=id, tenant=id[0], kind="cpu", **values)


def grown(id: str, seats: str, *, ago_s: float = 70.0, **details: Any) -> BoardTask:
    """As `task`, on more devices than it needs since `ago_s`."""
    held_us = round(ago_s * SECOND)
    one = task(id, seats, **{"width_max": 8, **details})
    return replace(one, resized_s=NOW_S - ago_s, held_us=held_us, accrued_us=held_us)


def told(plan: Plan) -> list[str]:
    """ "a: d0 d1" for a task that is now on these, "b: -" for one that is paused, "c > ..."."""
    return [
        f"{d.task}: {'-' if d.move == Move.Pause else ' '.join(d.devices)}" for d in plan.decisions
    ]


# --- growing ------------------------------------------------------------------------------------


def test_task_alone_grows_to_all_devices_that_it_can_use() -> None:
    plan = decide(on(task("a", "d0", width_max=3)), now_s=NOW_S)
    assert told(plan) == ["a: d0 d1 d2"]
    assert [(d.move, d.rule) for d in plan.decisions] == [(Move.Splice, "grow")]


def test_task_starts_with_the_devices_it_needs_and_grows_later() -> None:
    plan = decide(on(task("a", width=2, width_max=4)), now_s=NOW_S)
    assert told(plan) == ["a: d0 d1"]
    young = decide(on(task("a", "d0", held_s=59.0, width_max=3)), now_s=NOW_S)
    assert (young.decisions, young.look_again_s) == ((), NOW_S + 1.0)


def test_task_that_switches_slowly_is_not_resized_for_one_turn() -> None:
    """A switch of 2 s may cost 2 % of the time, so a turn is 100 s; 60 s bound it."""
    policy = Policy(half_life_s=0.0, grow_after_s=1.0, slice_max_s=300.0)
    slow = task("a", "d0", held_s=99.0, width_max=2, switch_us=2 * SECOND)
    assert decide(replace(on(slow), policy=policy), now_s=NOW_S).decisions == ()
    assert told(decide(replace(on(slow), policy=policy), now_s=NOW_S + 1.0)) == ["a: d0 d1"]


def test_free_devices_go_one_by_one_to_the_least_served_task() -> None:
    """Both were charged a turn for nothing yet: 100 s of a device each, a has twice the weight."""
    heavy = {"a": BoardTenant(id="a", name="a", weight=2000)}
    both = on(
        task("a", "d0", width_max=8), task("b", "d1", width_max=8), devices=302, tenants=heavy
    )
    sizes = {d.task: len(d.devices) for d in decide(both, now_s=NOW_S).decisions}
    # a/2 = b with a + b = 500: 200 s of devices that both used, 300 devices for a turn of 1 s.
    assert sizes == {"a": 8, "b": 8}
    wide = replace(both, tasks={id: replace(t, width_max=400) for id, t in both.tasks.items()})
    sizes = {d.task: len(d.devices) for d in decide(wide, now_s=NOW_S).decisions}
    assert (100 + sizes["a"]) // 2 in range(100 + sizes["b"] - 2, 100 + sizes["b"] + 3)
    assert sum(sizes.values()) == 302


def test_growing_exceeds_no_limit() -> None:
    limited = {"a": BoardTenant(id="a", name="a", weight=1000, limit={"cpu": 2})}
    plan = decide(on(task("a", "d0", width_max=4), tenants=limited), now_s=NOW_S)
    assert told(plan) == ["a: d0 d1"]


def test_task_does_not_grow_onto_a_device_that_a_waiting_task_could_take() -> None:
    strict = Policy(half_life_s=0.0, turns=False, backfill="strict")
    waiting = on(task("a", "d0 d1", width=2, width_max=4), task("b", width=3), task("c"))
    drawn = replace(waiting, policy=strict)
    assert decide(drawn, now_s=NOW_S).decisions == ()  # c could: only the policy keeps it out
    alone = replace(drawn, tasks={id: t for id, t in drawn.tasks.items() if id != "c"})
    assert told(decide(alone, now_s=NOW_S)) == ["a: d0 d1 d2 d3"]  # b could not


# --- giving back --------------------------------------------------------------------------------


def test_new_task_takes_a_lent_device_and_no_task_is_paused() -> None:
    plan = decide(on(grown("a", "d0 d1 d2 d3"), task("b")), now_s=NOW_S)
    assert told(plan) == ["a: d0 d1 d2", "b: d3"]
    assert [(d.move, d.rule, d.against) for d in plan.decisions] == [
        (Move.Splice, "F5", "b"),
        (Move.Launch, "F3", "a"),
    ]


def test_best_served_tenant_takes_a_lent_device_back_too() -> None:
    greedy = on(grown("a", "d0 d1 d2 d3"), task("b"))
    users = {**greedy.users, "b1": BoardUser(id="b1", tenant="b", faded_us=1 << 80)}
    assert told(decide(replace(greedy, users=users), now_s=NOW_S)) == ["a: d0 d1 d2", "b: d3"]
    own = on(grown("a", "d0 d1 d2 d3"), task("a2"))
    assert told(decide(own, now_s=NOW_S)) == ["a: d0 d1 d2", "a2: d3"]


def test_lent_device_is_given_back_before_a_full_turn() -> None:
    young = grown("a", "d0 d1 d2 d3", ago_s=0.5)
    assert told(decide(on(young, task("b")), now_s=NOW_S)) == ["a: d0 d1 d2", "b: d3"]


def test_task_keeps_the_devices_that_it_needs() -> None:
    drawn = on(grown("a", "d0 d1 d2 d3", width=3), task("b", width=2))
    users = {**drawn.users, "b1": BoardUser(id="b1", tenant="b", faded_us=1 << 80)}
    assert decide(replace(drawn, users=users), now_s=NOW_S).decisions == ()


def test_gang_takes_free_and_lent_devices_together() -> None:
    plan = decide(on(grown("a", "d0 d1 d2"), task("b", width=3)), now_s=NOW_S)
    assert told(plan) == ["a: d0", "b: d3 d1 d2"]


def test_only_the_devices_still_missing_are_taken_by_a_pause() -> None:
    """Of two that b needs a gives back one; of c's, who had more, the latest is paused."""
    late = task("c2", "d3", held_s=90.0)
    drawn = on(grown("a", "d0 d1"), task("c", "d2"), late, task("b", width=2))
    assert told(decide(drawn, now_s=NOW_S)) == ["a: d0", "c2: -", "b: d1 d3"]


def test_guaranteed_devices_are_not_lent() -> None:
    a = {"a": BoardTenant(id="a", name="a", weight=1000, guarantee={"cpu": 3})}
    plan = decide(on(grown("a", "d0 d1 d2 d3"), task("b"), tenants=a), now_s=NOW_S)
    assert told(plan) == ["a: d0 d1 d2", "b: d3"]
    held = on(grown("a", "d0 d1 d2", width=2), task("c", "d3", held_s=0.5), task("b"), tenants=a)
    assert decide(held, now_s=NOW_S).decisions == ()


def test_limit_has_room_again_when_a_device_is_given_back() -> None:
    """Tenant a may hold two and holds two: a gives one back for a2, which takes it."""
    limited = {"a": BoardTenant(id="a", name="a", weight=1000, limit={"cpu": 2})}
    drawn = on(grown("a", "d0 d1"), task("a2"), devices=3, tenants=limited)
    assert told(decide(drawn, now_s=NOW_S)) == ["a: d0", "a2: d1"]


def test_round_waits_for_a_resize_before_it_pauses_a_task() -> None:
    busy = replace(grown("a", "d0 d1", ago_s=1.0), state="splicing")
    drawn = on(busy, task("c", "d2"), task("c2", "d3"), task("b"))
    assert decide(drawn, now_s=NOW_S).decisions == ()
    ready = replace(drawn, tasks={**drawn.tasks, "a": replace(busy, state="running")})
    assert told(decide(ready, now_s=NOW_S)) == ["a: d0", "b: d1"]


def test_drained_device_is_given_back_if_the_others_are_enough() -> None:
    drawn = on(grown("a", "d0 d1 d2", width=2))
    cordoned = {**drawn.devices, "d0": replace(drawn.devices["d0"], cordoned=True)}
    drained = replace(drawn, devices=cordoned)
    assert told(decide(drained, now_s=NOW_S)) == ["a: d1 d2"]
    needs = replace(drained.tasks["a"], width=3)
    assert told(decide(replace(drained, tasks={"a": needs}), now_s=NOW_S))[:1] == ["a: -"]


def test_task_asked_to_hold_fewer_gives_back_the_last_device_first() -> None:
    asked = grown("a", "d0 d1 d2", width_max=2)
    assert told(decide(on(asked), now_s=NOW_S)) == ["a: d0 d1"]
    assert told(decide(on(replace(asked, width_max=0)), now_s=NOW_S)) == ["a: d0"]
    board = Board.of(on(replace(asked, width_max=1)), now_s=NOW_S)
    assert told(cycle(board)) == ["a: d0"]
    smaller = board.tasks["a"]
    assert (smaller.state, smaller.leaves) == ("splicing", ("d1", "d2"))
    board.set_task(replace(smaller, state="running", leaves=()))
    assert sorted(board.pools["cpu"].free) == ["d1", "d2", "d3"]
    assert not board.elastic


def test_moving_task_gives_back_extra_devices_first_and_does_not_grow() -> None:
    moves = grown("a", "d0 d1", moves_to="d1", movable=True)
    assert told(decide(on(moves), now_s=NOW_S)) == ["a: d0"]
    alone = task("a", "d0", width_max=4, moves_to="", movable=True)
    assert told(decide(on(alone), now_s=NOW_S)) == []


def test_task_grows_when_its_owner_allows_more_devices() -> None:
    board = Board.of(on(task("a", "d0", width_max=1)), now_s=NOW_S)
    assert told(cycle(board)) == []
    board.set_task(replace(board.tasks["a"], width_max=3))
    assert told(cycle(board)) == ["a: d0 d1 d2"]


def test_task_cancelled_during_a_resize_releases_all_devices() -> None:
    smaller = replace(grown("a", "d0 d1"), state="splicing", leaves=("d2",), cancel_asked=True)
    board = Board.of(on(smaller), now_s=NOW_S)
    assert told(cycle(board)) == ["a: d0 d1 d2"]
    board.drop_task("a")
    assert sorted(board.pools["cpu"].free) == ["d0", "d1", "d2", "d3"]


# --- whose ranks are conducted by its home -------------------------------------------------------


def at_home(*tasks: BoardTask, far: str = "", **drawn: Any) -> Snapshot:
    """As `on`; the devices named in `far` are another host's."""
    island = on(*tasks, **drawn)
    devices = {
        id: replace(device, host="far" if id in far.split() else "h")
        for id, device in island.devices.items()
    }
    return replace(island, devices=devices, policy=replace(island.policy, homebound=True))


def test_task_grows_only_onto_devices_of_its_host() -> None:
    drawn = at_home(task("a", "d1", width_max=4), far="d0 d3")
    assert told(decide(drawn, now_s=NOW_S)) == ["a: d1 d2"]


def test_task_grows_onto_other_hosts_last_if_its_ranks_may_part() -> None:
    parts = task("a", "d1", width_max=3, across_hosts=True)
    assert told(decide(at_home(parts, far="d0 d3"), now_s=NOW_S)) == ["a: d1 d2 d0"]
    assert told(decide(at_home(parts, far="d0 d2 d3"), now_s=NOW_S)) == ["a: d1 d0 d2"]


def waits_for_two(**more: Any) -> BoardTask:
    return task("g", width=2, width_max=4, one_host=True, **more)


def test_gang_of_one_host_begins_where_enough_devices_are_free() -> None:
    begins = decide(at_home(waits_for_two(), far="d1 d3"), now_s=NOW_S)
    assert told(begins) in (["g: d1 d3"], ["g: d0 d2"])
    busy = at_home(waits_for_two(), task("a", "d0"), far="d1 d3")
    assert told(decide(busy, now_s=NOW_S)) == ["g: d1 d3"]
    busy = at_home(waits_for_two(), task("a", "d1"), far="d1 d3")
    assert told(decide(busy, now_s=NOW_S)) == ["g: d0 d2"]
    parts = at_home(task("g", width=2, width_max=4), task("a", "d0"), task("b", "d1"), far="d1 d3")
    assert told(decide(parts, now_s=NOW_S)) == ["g: d2 d3"]


def test_gang_waits_and_says_so_while_free_devices_are_on_two_hosts() -> None:
    drawn = at_home(
        waits_for_two(), task("a", "d0", held_s=0.5), task("b", "d1", held_s=0.5), far="d1 d3"
    )
    plan = decide(drawn, now_s=NOW_S)
    assert told(plan) == []
    (gang,) = [r for r in plan.reasons["g"] if r.code == "GANG_NEEDS_MORE_DEVICES"]
    assert gang.message == "Needs 2 devices of far at once; 1 of 2 are free."


def test_tasks_on_the_host_of_the_gang_give_way_to_it() -> None:
    """On the other host nobody is paused for it, however much it had."""
    tenants = {
        id: BoardTenant(id=id, name=id, weight=1000, guarantee={"cpu": 2} if id == "a" else {})
        for id in ("a", "b")
    }
    others = [
        replace(task(id, device), tenant="b", user="b1")
        for id, device in (("x", "d0"), ("y", "d1"), ("z", "d3"))
    ]
    drawn = at_home(
        replace(waits_for_two(), tenant="a", user="a1"), *others, tenants=tenants, far="d1 d3"
    )
    plan = decide(drawn, now_s=NOW_S)
    assert told(plan) == ["x: -", "g: d2 d0"]


def test_gang_begins_on_any_host_with_enough_lent_devices() -> None:
    """Also where another host is as large, and nobody there gives way."""
    others = [task(id, device, held_s=0.5) for id, device in (("x", "d1"), ("y", "d3"))]
    drawn = at_home(
        waits_for_two(), *others, task("w", "d5", held_s=0.5), grown("z", "d0 d2 d4"),
        far="d1 d3 d5", devices=6,
    )  # fmt: skip
    assert told(decide(drawn, now_s=NOW_S)) == ["z: d0", "g: d2 d4"]


def test_several_gangs_begin_in_one_round_and_no_task_is_paused() -> None:
    others = [task(f"n{n}", f"d{n}") for n in (4, 5, 6)]
    gangs = [replace(waits_for_two(), id=id) for id in ("g", "k")]
    drawn = at_home(*gangs, *others, far="d1 d3 d5", devices=7)
    assert told(decide(drawn, now_s=NOW_S)) == ["g: d0 d2", "k: d1 d3"]


def test_gang_goes_to_another_host_where_no_task_gives_way() -> None:
    """On the first by name two run that are more urgent, of the same user."""
    owed = {"g": BoardTenant(id="g", name="g", weight=1000, guarantee={"cpu": 4})}
    urgent = [
        replace(task(id, on), tenant="g", user="g1", priority=50)
        for id, on in (("x", "d1"), ("y", "d3"))
    ]
    others = [replace(task(id, on), tenant="b", user="b1") for id, on in (("v", "d0"), ("w", "d2"))]
    drawn = at_home(waits_for_two(), *urgent, *others, tenants=owed, far="d1 d3")
    assert told(decide(drawn, now_s=NOW_S)) == ["v: -", "w: -", "g: d0 d2"]


def test_gang_never_begins_on_a_host_with_too_few_devices() -> None:
    drawn = at_home(waits_for_two(), far="d1", devices=2)
    plan = decide(drawn, now_s=NOW_S)
    assert told(plan) == []
    (gang,) = [r for r in plan.reasons["g"] if r.code == "TOO_FEW_DEVICES"]
    assert "of far at once; 1 cpu device takes work" in gang.message


def test_gang_begins_when_a_missing_device_comes_up() -> None:
    """It waits for whichever host has enough first."""
    drawn = at_home(waits_for_two(), task("a", "d0", held_s=0.5), far="d1 d3", devices=3)
    board = Board.of(drawn, now_s=NOW_S)
    assert told(cycle(board)) == []
    board.set_device(replace(board.devices["d1"], id="d3", host="far"))
    assert told(cycle(board)) == ["g: d1 d3"]


def test_task_never_gives_back_its_home_device() -> None:
    drawn = at_home(grown("a", "d0 d1"), task("b", memory_bytes=8), devices=2)
    sizes = {"d0": 8, "d1": 4}
    devices = {id: replace(d, memory_bytes=sizes[id]) for id, d in drawn.devices.items()}
    assert told(decide(replace(drawn, devices=devices), now_s=NOW_S)) == ["a: -", "b: d0"]
    anywhere = replace(drawn, devices=devices, policy=replace(drawn.policy, homebound=False))
    assert told(decide(anywhere, now_s=NOW_S)) == ["a: d1", "b: d0"]


def test_task_survives_the_loss_of_a_lent_device_but_not_of_its_home() -> None:
    drawn = at_home(grown("a", "d0 d1 d2"), devices=3)

    def without(*lost: str) -> Plan:
        devices = {
            id: replace(device, lease_until_s=NOW_S - 1) if id in lost else device
            for id, device in drawn.devices.items()
        }
        return decide(replace(drawn, devices=devices), now_s=NOW_S)

    assert told(without("d1")) == ["a: d0 d2"]
    assert told(without("d1", "d2")) == ["a: d0"]
    assert next(d.move for d in without("d0").decisions) == Move.Lost


def test_ranks_die_with_a_lost_device_of_another_host_but_leave_a_drained_one() -> None:
    drawn = at_home(grown("a", "d0 d1", across_hosts=True), devices=2, far="d1")

    def with_d1(**changes: Any) -> Plan:
        devices = {**drawn.devices, "d1": replace(drawn.devices["d1"], **changes)}
        return decide(replace(drawn, devices=devices), now_s=NOW_S)

    assert [d.move for d in with_d1(lease_until_s=NOW_S - 1).decisions][:1] == [Move.Lost]
    assert told(with_d1(cordoned=True)) == ["a: d0"]


def test_ranks_leave_a_lost_device_of_their_own_host() -> None:
    """They are processes of the home device, which lives."""
    drawn = at_home(grown("a", "d0 d1"), devices=2)
    lost = replace(drawn.devices["d1"], lease_until_s=NOW_S - 1)
    assert told(decide(replace(drawn, devices={**drawn.devices, "d1": lost}), now_s=NOW_S)) == [
        "a: d0"
    ]


def test_device_lost_during_a_resize_is_noticed_after_it() -> None:
    drawn = at_home(replace(grown("a", "d0 d1 d2"), state="splicing"), devices=3)
    board = Board.of(drawn, now_s=NOW_S)
    board.set_device(replace(drawn.devices["d2"], lease_until_s=NOW_S + 1))
    board.at(NOW_S + 2)
    plan = cycle(board)
    assert told(plan) == []
    assert plan.look_again_s is None or plan.look_again_s > board.now_s, "it waits for the device"
    board.set_task(replace(board.tasks["a"], state="running"))
    assert told(cycle(board)) == ["a: d0 d1"]


def test_round_that_loses_a_device_is_not_repeated_at_once() -> None:
    drawn = at_home(grown("a", "d0 d1 d2"), devices=3)
    board = Board.of(drawn, now_s=NOW_S)
    board.set_device(replace(drawn.devices["d2"], lease_until_s=NOW_S + 1))
    board.at(NOW_S + 2)
    plan = cycle(board)
    assert told(plan) == ["a: d0 d1"]
    assert plan.look_again_s is None or plan.look_again_s > board.now_s


def test_gang_goes_on_when_its_image_is_durable_and_never_with_fewer_devices() -> None:
    paused = task("a", width=2, epoch=1, image_on="d0", saved=False)
    plan = decide(on(paused, devices=2), now_s=NOW_S)
    assert told(plan) == []
    plan = decide(on(replace(paused, saved=True), devices=2), now_s=NOW_S)
    assert [len(decision.devices) for decision in plan.decisions] == [2]


# --- what is told -------------------------------------------------------------------------------


def test_explanation_says_how_many_devices_are_held_and_lent() -> None:
    assert breadth(grown("a", "d0 d1 d2", width=2)) == (
        "It holds 3 of the 8 devices that it can use, 1 of them until somebody asks for them: "
        "it needs 2."
    )
    assert breadth(task("a", "d0", width_max=4)) == (
        "It holds the 1 that it needs, and uses up to 4 while nobody asks for them."
    )
    assert (breadth(task("a", "d0")), breadth(task("a", width_max=4))) == ("", "")


def test_device_being_given_back_is_promised_to_one_task_only() -> None:
    smaller = replace(grown("a", "d0 d1"), state="splicing", leaves=("d2",))
    drawn = on(smaller, task("b"), task("c"), task("d"), devices=3)
    plan = decide(drawn, now_s=NOW_S)
    assert [d.devices for d in plan.decisions] == [("d2",)]


# --- why it waits -------------------------------------------------------------------------------


def test_waiting_gang_is_told_how_many_devices_it_could_get() -> None:
    """b needs four: one is free, a can give back one; a's other two are guaranteed to it."""
    a = {"a": BoardTenant(id="a", name="a", weight=1000, guarantee={"cpu": 2})}
    drawn = on(grown("a", "d0 d1 d2", ago_s=1.0), task("b", width=4), tenants=a)
    said: dict[str, Reason] = {r.code: r for r in decide(drawn, now_s=NOW_S).reasons["b"]}
    gang = said["GANG_NEEDS_MORE_DEVICES"]
    assert gang.message == (
        "Needs 4 devices at once; 1 of 4 are free, and 1 more can be had from tasks that hold "
        "more than they need."
    )
    assert (gang.change.action, gang.change.value) == ("set_devices_min", 2)


# --- replays ------------------------------------------------------------------------------------


def devices(n: int) -> list[BoardDevice]:
    return [BoardDevice(id=f"d{i}", host="h", kind="cpu") for i in range(n)]


TENANTS = [BoardTenant(id=name, name=name, weight=1000) for name in "ab"]


def arrival(id: str, at_s: float, work_s: float, width: int = 1, most: int = 0) -> Arrival:
    return Arrival(
        at_s=at_s,
        task=id,
        tenant=id[0],
        user=f"{id[0]}1",
        work_s=work_s,
        width=width,
        width_max=most,
    )


def story(report: Report) -> list[tuple[float, str, str, int]]:
    return [
        (line.at_s, line.decision.task, str(line.decision.move), len(line.decision.devices))
        for line in report.timeline
    ]


def test_small_trace_ends_as_computed_by_hand() -> None:
    """Two devices; a needs one, can use two, and has 100 s of work on both: 200 device-seconds.

    0 s: a begins on one.  10 s (grow_after): it is resized, which takes 4 s, and steps on two from
    14 s on, with 190 device-seconds left.  30 s: b comes for one device; a steps no more while it
    is resized, 158 left.  34 s: b begins and is done at 54 s; a steps on one, and was resized at
    34 s, so it may grow from 44 s on, and does when b's device is free at 54 s, 138 left.  58 s:
    it steps on two, and is done at 127 s.
    """
    policy = Policy(half_life_s=0.0, grow_after_s=10.0)
    work = [arrival("a", 0.0, 100.0, 1, 2), arrival("b", 30.0, 20.0)]
    report = simulate(work, devices(2), TENANTS, policy, costs=Costs(resize_s=4.0))
    assert story(report) == [
        (0.0, "a", "Launch", 1),
        (10.0, "a", "Splice", 2),
        (30.0, "a", "Splice", 1),
        (30.0, "b", "Launch", 1),
        (54.0, "a", "Splice", 2),
    ]
    assert report.finished == {"a": 127.0, "b": 54.0}
    # a: one to 10 s, two to 34 s, one to 54 s, two to 127 s.
    assert report.device_s == {"a": 10.0 + 48.0 + 20.0 + 146.0, "b": 20.0}
    assert report.waits_s == {"a": 0.0, "b": 4.0}
    assert (report.resizes, report.pauses) == ({"a": 3}, {})


def test_resize_costs_half_of_a_pause_by_default() -> None:
    assert Costs(image_s=60.0, resume_s=20.0).resizing_s == 40.0
    assert Costs(image_s=60.0, resize_s=5.0).resizing_s == 5.0


def test_task_does_the_same_work_on_any_number_of_devices() -> None:
    """Without costs: 90 device-seconds are 90 s on one device, and (90 - 10) / 3 + 10 on three."""
    policy = Policy(half_life_s=0.0, grow_after_s=10.0)
    for n, done_s in ((1, 90.0), (2, 50.0), (3, 36.666667)):
        report = simulate([arrival("a", 0.0, 30.0, 1, 3)], devices(n), TENANTS, policy)
        assert report.finished["a"] == pytest.approx(done_s, abs=1e-5)
        assert report.device_s["a"] == pytest.approx(90.0, abs=1e-5)


# --- whatever the island ------------------------------------------------------------------------

REAL = Costs(start_s=0.05, pause_s=0.01, image_s=0.02, resume_s=0.02, save_s=0.5)
SLOW = Costs(start_s=1.0, pause_s=0.2, image_s=0.1, resume_s=0.1, save_s=3.0)


def _played(seed: int) -> tuple[Report, list[Arrival], int]:
    dice = random.Random(seed)
    base = random_island(ELASTIC + 2 * seed + 1, timeless=False)
    kinds = Counter(device.kind for device in base.devices.values() if device.memory_bytes == 8)
    arrivals = [
        Arrival(
            at_s=dice.choice([0.0, dice.uniform(0, 30)]),
            task=one.id,
            tenant=one.tenant,
            user=one.user,
            work_s=dice.choice([0.3, 2.0, dice.uniform(0.1, 40)]),
            width=one.width,
            width_max=one.width_max,
            kind=one.kind,
            memory_bytes=one.memory_bytes,
            priority=one.priority,
            tier=one.tier,
        )
        for one in base.tasks.values()
        if one.width <= min(kinds[one.kind], _room(base, one))
    ]
    policy = replace(
        base.policy,
        half_life_s=dice.choice([0.0, 0.0, 30.0, 604800.0]),
        patience_s=dice.choice([20.0, 1000.0]),
        grow_after_s=dice.choice([0.0, 0.5, 5.0]),
        turns=dice.random() < 0.8,
        backfill=dice.choice(["easy", "easy", "greedy", "strict"]),
    )
    costs = dice.choice([Costs(), REAL, SLOW, replace(SLOW, resize_s=0.0)])
    tenants = base.tenants.values()
    report = simulate(arrivals, base.devices.values(), tenants, policy, costs=costs, until_s=5000)
    return report, arrivals, len(base.devices)


def _room(base: Snapshot, one: BoardTask) -> int:
    """The least limit above it."""
    room, at = 99, base.tenants.get(one.tenant)
    while at is not None:
        room = min([room, *at.limit.values()])
        at = base.tenants.get(at.parent or "")
    return room


@pytest.mark.parametrize("first", seeds(range(0, 40, 20)))
def test_all_work_ends_and_charges_equal_held_time(first: int) -> None:
    """`simulate` checks each step: seats, sizes, slices, idle devices, the board made anew."""
    resizes = 0
    for seed in range(first, first + 20):
        report, arrivals, _ = _played(seed)
        assert set(report.finished) == {one.task for one in arrivals}, f"seed {seed}"
        held = sum(
            Fraction(amount) * Fraction(interval.lasts_s)
            for interval in report.intervals
            for amount in interval.held.values()
        )
        charged = sum(Fraction(seconds) for seconds in report.device_s.values())
        assert abs(held - charged) < Fraction(1, 1000), f"seed {seed}"
        resizes += sum(report.resizes.values())
    assert resizes > 10


@pytest.mark.parametrize(
    ("first", "smaller"),
    [
        *rest_long([(ELASTIC + seed, 30) for seed in range(0, 600, 300)]),
        *rest_long([(BOUND + seed, 20) for seed in range(0, 900, 300)]),  # gangs stay on one host
    ],
)
@pytest.mark.slow
def test_random_elastic_islands_settle_by_the_rules(first: int, smaller: int) -> None:
    count = sum((judge(seed) for seed in range(first, first + 300)), start=Counter())
    assert count["islands"] == 300
    assert count["grown"] > 10
    assert count["made smaller"] > smaller


def _plain(drawn: Snapshot) -> Snapshot:
    """Without guarantees, limits, tiers, priorities, and gangs that lost patience."""
    tenants = {
        id: replace(tenant, guarantee={}, limit={}, most_running=None)
        for id, tenant in drawn.tenants.items()
    }
    tasks = {
        id: replace(t, tier="basic", priority=0, waited_s=0.0) for id, t in drawn.tasks.items()
    }
    policy = replace(drawn.policy, patience_s=1e9)
    return replace(drawn, policy=policy, tenants=tenants, tasks=tasks)


def test_round_with_elastic_tasks_is_repeated_from_its_record() -> None:
    """Rounds that resize, and pause nobody: of the others it is told in
    tests/app/scheduling/test_board_follower."""
    resized = 0
    for seed in range(120):
        shop = Shop(_plain(random_island(ELASTIC + seed, timeless=seed % 2 == 0)))
        for _ in range(4):
            board = Board.of(shop.snapshot(), now_s=shop.now_s)
            plan = cycle(board, lift=False)
            made = {decision.move for decision in plan.decisions}
            if Move.Splice in made and Move.Pause not in made:
                seen = from_json(as_json(seen_by(board, plan, plan.before, island="i")))
                assert decide(seen, now_s=shop.now_s).decisions == plan.decisions, f"seed {seed}"
                resized += 1
            cycle(shop.board, lift=False)
            shop.obey(plan)
            shop.later(0.5)
    assert resized > 15


def test_new_board_knows_devices_being_given_back() -> None:
    smaller = replace(grown("a", "d0 d1"), state="splicing", leaves=("d2",))
    board = Board.of(on(smaller, devices=3), now_s=NOW_S)
    stay = board.stays["a"]
    assert (stay.rate, stay.grown, dict(board.pools["cpu"].free)) == (3000, 1, {"d2": True})
    board.set_task(replace(smaller, state="running", leaves=(), resized_s=NOW_S))
    assert (stay.rate, stay.grown, dict(board.pools["cpu"].free)) == (2000, 1, {"d2": False})
