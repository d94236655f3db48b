"""Who gives way, in trees of depth one to three: guarantees, limits, the fewest, the cheapest.

Worked out by hand.  `drawn` makes an island in which every task has held its devices for a full
slice, unless it says otherwise; usage does not fade.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from app.core.fairness.usage_decay import FIXED_POINT_BITS
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
from app.core.scheduling.reclaim.preemption import nobody_gains_until_s
from app.core.simulation.simulator import Arrival, Costs, simulate

NOW_S = 1000.0
SECOND = 1_000_000


def drawn(
    tenants: Mapping[str, dict[str, Any]],
    tasks: str,
    *,
    devices: int | list[str] = 4,
    used: Mapping[str, float] | None = None,
    changed: Mapping[str, dict[str, Any]] | None = None,
    policy: Policy | None = None,
) -> Snapshot:
    """An island with tenants (fields by name), and tasks "name=user width place".

    A user is "tenant" or "tenant.name".  The place is "-" for who waits, or "+" for who runs on the
    next free devices.  `used` is in device-seconds by user, beyond what its tasks now hold.
    """
    kinds = ["cpu"] * devices if isinstance(devices, int) else devices
    all_devices = {
        f"d{n}": BoardDevice(
            id=f"d{n}", host="h", kind=kind, memory_bytes=8, lease_until_s=NOW_S + 99
        )
        for n, kind in enumerate(kinds)
    }
    free, found = list(all_devices), dict[str, BoardTask]()
    for n, said in enumerate(tasks.split(",")):
        name, width, place = said.split()
        id, _, user = name.partition("=")
        task = BoardTask(
            id=id, request=id, tenant=user.partition(".")[0], user=user, state="waiting", epoch=0,
            kind="cpu", width=int(width), tier="basic", submitted_s=float(n),
        )  # fmt: skip
        task = replace(task, **(changed or {}).get(id, {}))
        if place == "+":
            mine = [d for d in free if all_devices[d].kind == task.kind][: task.width]
            free = [d for d in free if d not in mine]
            task = _running(task, tuple(mine))
        found[id] = task
    users = {
        task.user: BoardUser(
            id=task.user,
            tenant=task.tenant,
            faded_us=int((used or {}).get(task.user, 0) * SECOND) << FIXED_POINT_BITS,
        )
        for task in found.values()
    }
    return Snapshot(
        island="drawn",
        policy=policy or Policy(half_life_s=0.0),
        tenants={
            id: BoardTenant(**{"id": id, "name": id, "weight": 1000, **told})
            for id, told in tenants.items()
        },
        users=users,
        devices=all_devices,
        tasks=found,
    )  # fmt: skip


def _running(task: BoardTask, seats: tuple[str, ...]) -> BoardTask:
    held_us = task.held_us or 10 * SECOND
    return replace(
        task,
        state="running",
        epoch=1,
        seats=seats,
        held_us=held_us,
        accrued_us=held_us,
        started_s=(NOW_S - held_us / SECOND) if task.started_s is None else task.started_s,
    )


def plan(snapshot: Snapshot) -> Plan:
    return decide(snapshot, now_s=NOW_S)


def told(plan: Plan) -> str:
    """ "b1>a1 F5" for each pause and who gains by it, "a1" for a launch on free devices."""
    lines = []
    for decision in plan.decisions:
        if decision.move == Move.Pause:
            lines.append(f"{decision.task}>{decision.against} {decision.rule}")
        elif decision.move == Move.Launch and decision.against is None:
            lines.append(decision.task)
    return ", ".join(lines)


Trees = dict[str, dict[str, Any]]


def cpu(devices: int) -> dict[str, int]:
    return {"cpu": devices}


# --- F5: what was lent comes back ---------------------------------------------------------------


def test_tenant_within_its_guarantee_takes_back_what_it_lent() -> None:
    # a has used far more than b: by F6 nobody would give way to it.
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {}}
    snapshot = drawn(tenants, "b1=b 1 +, b2=b 1 +, a1=a 1 -", devices=2, used={"a": 99})
    assert told(plan(snapshot)) == "b1>a1 F5"


def test_no_more_than_the_guarantee_is_taken_back() -> None:
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {}}
    snapshot = drawn(tenants, "b1=b 1 +, b2=b 1 +, a1=a 1 -, a2=a 1 -", devices=2, used={"a": 99})
    assert told(plan(snapshot)) == "b1>a1 F5"


def test_tenant_that_holds_its_guarantee_takes_nothing_back() -> None:
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {}}
    snapshot = drawn(tenants, "a1=a 1 +, b2=b 1 +, a2=a 1 -", devices=2, used={"a": 99})
    assert told(plan(snapshot)) == ""


def test_guarantee_is_not_touched_for_a_tenant_that_only_used_less() -> None:
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {}}
    snapshot = drawn(tenants, "a1=a 1 +, b1=b 1 -", devices=1, used={"a": 99})
    assert told(plan(snapshot)) == ""


def test_usage_decides_between_two_tenants_within_their_guarantees() -> None:
    # More is guaranteed than there is: then they take turns.
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {"guarantee": cpu(1)}}
    snapshot = drawn(tenants, "a1=a 1 +, b1=b 1 -", devices=1)
    assert told(plan(snapshot)) == "a1>b1 F6/F8"
    less = drawn(tenants, "a1=a 1 +, b1=b 1 -", devices=1, used={"b": 99})
    assert told(plan(less)) == ""


def test_no_task_gives_back_before_a_full_slice() -> None:
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {}}
    young = {"b1": {"held_us": SECOND // 2}}
    snapshot = drawn(tenants, "b1=b 1 +, a1=a 1 -", devices=1, changed=young)
    assert told(plan(snapshot)) == ""
    assert plan(snapshot).look_again_s == pytest.approx(NOW_S + 0.5)


def test_guarantee_counts_for_its_kind_of_device_only() -> None:
    tenants: Trees = {"a": {"guarantee": {"cuda": 1}}, "b": {}}
    snapshot = drawn(tenants, "b1=b 1 +, a1=a 1 -", devices=1, used={"a": 99})
    assert told(plan(snapshot)) == ""


def test_gang_takes_back_all_its_devices_from_several_tasks() -> None:
    tenants: Trees = {"a": {"guarantee": cpu(2)}, "b": {}, "c": {}}
    running = "b1=b 1 +, c1=c 1 +, c2=c 1 +"
    snapshot = drawn(tenants, f"{running}, a1=a 2 -", devices=3, used={"a": 99})
    assert told(plan(snapshot)) == "c1>a1 F5, c2>a1 F5"  # c was served more than b


def test_a_gang_wider_than_the_guarantee_does_not_count_as_guaranteed() -> None:
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {}}
    snapshot = drawn(tenants, "b1=b 1 +, b2=b 1 +, a1=a 2 -", devices=2, used={"a": 99})
    assert told(plan(snapshot)) == ""


def test_gang_on_partly_lent_devices_gives_way_only_to_the_owed_tenant() -> None:
    tenants: Trees = {"a": {"guarantee": cpu(1)}, "b": {"guarantee": cpu(3)}, "c": {}}
    owed = drawn(tenants, "b1=b 4 +, a1=a 1 -", used={"a": 99})
    assert told(plan(owed)) == "b1>a1 F5"
    not_owed = drawn(tenants, "b1=b 4 +, c1=c 1 -")  # c has had nothing, b ten seconds of four
    assert told(plan(not_owed)) == ""


#: Of p one task may run; a is guaranteed one device and has had more than b, which is given two.
ONE_RUNS: Trees = {
    "p": {"most_running": 1},
    "a": {"parent": "p", "guarantee": cpu(1)},
    "b": {"parent": "p", "guarantee": cpu(2)},
}
HAD: Mapping[str, float] = {"a": 99, "b.u": 20}


def test_branch_starts_to_borrow_only_when_no_sibling_is_owed() -> None:
    gang = "b1=b.u 1 +, b2=b.u 1 -, g1=b.v 3 -"
    assert told(plan(drawn(ONE_RUNS, gang, used=HAD))) == "b1>g1 F6/F8"
    # a's would be given the devices back at once, though b2 goes before both.
    assert told(plan(drawn(ONE_RUNS, f"{gang}, a1=a 1 -", used=HAD))) == ""


def test_task_told_to_pause_counts_as_waiting_for_the_borrow_rule() -> None:
    snapshot = drawn(ONE_RUNS, "b1=b.u 1 +, g1=b.v 3 -, a1=a 1 +", used=HAD)
    told_to = replace(snapshot.tasks["a1"], state="pausing")
    snapshot = replace(snapshot, tasks={**snapshot.tasks, "a1": told_to})
    assert told(plan(snapshot)) == ""


def test_single_tasks_are_not_replaced_by_a_gang_while_a_sibling_is_owed() -> None:
    tenants: Trees = {"q": {"guarantee": cpu(1)}, "p": {}}
    tenants = {**tenants, **{id: {"parent": "p", "guarantee": cpu(2)} for id in ("a", "b")}}
    tasks = "q1=q 1 +, b1=b.u 1 +, b2=b.u 1 +, b3=b.u 1 +, g1=b.v 2 -"
    alone = told(plan(drawn(tenants, tasks, used={"a": 99})))
    assert alone == "b1>g1 F6/F8, b2>g1 F6/F8"
    # Of b one device is lent, and a's gang needs two: all of g1 would go to it.
    assert told(plan(drawn(tenants, f"{tasks}, a1=a 2 -", used={"a": 99}))) == ""


# --- when nobody can gain -----------------------------------------------------------------------


def test_time_until_no_task_gains_is_known_in_advance() -> None:
    # a has had 10 s and runs on; b has had 12 s and would be charged a turn of 1 s: 13 s.
    one = drawn({"a": {}, "b": {}}, "a1=a 1 +, b1=b 1 -", devices=1, used={"b": 12})
    assert nobody_gains_until_s(Board.of(one, now_s=NOW_S)) == NOW_S + 3
    # On two devices a catches up in half the time.
    two = drawn({"a": {}, "b": {}}, "a1=a 2 +, b1=b 1 -", devices=2, used={"a": -10, "b": 12})
    assert nobody_gains_until_s(Board.of(two, now_s=NOW_S)) == NOW_S + 1.5


def test_next_turn_is_weighed_with_the_heaviest_waiting_branch() -> None:
    # b would be charged 1 s and stand at 13 s; c, of weight 2, at 12.5 + 1/2 = 13 s as well.  The
    # two lowest scores are b's and d's, so c is not looked at: its half second counts for all.
    tenants: Trees = {"a": {}, "b": {}, "c": {"weight": 2000}, "d": {}}
    tasks = "a1=a 1 +, b1=b 1 -, c1=c 1 -, d1=d 1 -"
    snapshot = drawn(tenants, tasks, devices=1, used={"b": 12, "c": 25, "d": 12.25})
    assert nobody_gains_until_s(Board.of(snapshot, now_s=NOW_S)) == NOW_S + 2.5


def test_round_is_due_now_if_a_task_gains_or_a_lower_branch_takes_turns() -> None:
    better = drawn({"a": {}, "b": {}}, "a1=a 1 +, b1=b 1 -", devices=1)
    assert nobody_gains_until_s(Board.of(better, now_s=NOW_S)) == NOW_S
    below = drawn({"a": {}, "b": {}}, "a1=a.u 1 +, a2=a.v 1 -", devices=1, used={"a.v": 99})
    assert nobody_gains_until_s(Board.of(below, now_s=NOW_S)) == NOW_S


def test_short_round_decides_the_same_as_a_whole_round() -> None:
    snapshot = drawn({"a": {}, "b": {}}, "a1=a 1 +, b1=b 1 -", devices=1, used={"b": 12})
    board = Board.of(snapshot, now_s=NOW_S)
    assert told(cycle(board)) == ""
    for at_s, expected in ((NOW_S + 2.9, ""), (NOW_S + 3.1, "a1>b1 F6/F8")):
        board.at(at_s)
        assert told(cycle(board)) == expected


# --- in trees -----------------------------------------------------------------------------------

#: p is guaranteed 2, its children x and y share that; q only borrows.
TWO_DEEP: Trees = {
    "p": {"guarantee": cpu(2)},
    "x": {"parent": "p"},
    "y": {"parent": "p"},
    "q": {},
    "z": {"parent": "q"},
}


def test_child_tenant_claims_under_its_parents_guarantee() -> None:
    snapshot = drawn(TWO_DEEP, "z1=z 1 +, z2=z 1 +, x1=x 1 -", devices=2, used={"x": 99})
    assert told(plan(snapshot)) == "z1>x1 F5"


def test_child_tenants_devices_are_safe_within_its_parents_guarantee() -> None:
    snapshot = drawn(TWO_DEEP, "x1=x 1 +, y1=y 1 +, z1=z 1 -", devices=2, used={"x": 9, "y": 9})
    assert told(plan(snapshot)) == ""


def test_siblings_share_their_parents_guarantee_by_usage() -> None:
    snapshot = drawn(TWO_DEEP, "x1=x 1 +, x2=x 1 +, y1=y 1 -, z1=z 1 -", devices=2)
    assert told(plan(snapshot)) == "x1>y1 F6/F8"


def test_childs_own_guarantee_holds_while_its_parent_borrows() -> None:
    tenants: Trees = {"p": {"guarantee": cpu(1)}, "x": {"parent": "p", "guarantee": cpu(1)},
               "y": {"parent": "p"}, "q": {"guarantee": cpu(1)}}  # fmt: skip
    # p holds two and is guaranteed one: what y holds is lent, what x holds is its own.
    snapshot = drawn(tenants, "x1=x 1 +, y1=y 1 +, q1=q 1 -", devices=2, used={"x": 50})
    assert told(plan(snapshot)) == "y1>q1 F5"


def test_parent_within_its_guarantee_protects_a_child_above_its_own() -> None:
    tenants: Trees = {"p": {"guarantee": cpu(2)}, "x": {"parent": "p", "guarantee": cpu(1)},
               "q": {"guarantee": cpu(1)}}  # fmt: skip
    # x borrows, but only from p's own guarantee: q has to be as little served to take a turn.
    snapshot = drawn(tenants, "x1=x 1 +, x2=x 1 +, q1=q 1 -", devices=2, used={"q": 99})
    assert told(plan(snapshot)) == ""


def test_tenants_three_levels_deep_are_compared_where_their_branches_part() -> None:
    tenants: Trees = {
        "p": {}, "x": {"parent": "p"}, "xx": {"parent": "x", "guarantee": cpu(1)},
        "xy": {"parent": "x"}, "y": {"parent": "p"}, "yy": {"parent": "y"},
    }  # fmt: skip
    # xx may claim from its sibling xy, however much it used; against yy it stands as x.
    near = drawn(tenants, "t1=xy 1 +, t2=xx 1 -", devices=1, used={"xx": 99})
    assert told(plan(near)) == "t1>t2 F5"
    far = drawn(tenants, "t1=yy 1 +, t2=xx 1 -", devices=1, used={"xx": 99})
    assert told(plan(far)) == ""


# --- F4: limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [{"limit": cpu(1)}, {"limit": {"*": 1}}, {"most_running": 1}],
    ids=["of a kind", "of all kinds", "of tasks"],
)
def test_a_limit_keeps_a_free_device_empty(limits: dict[str, Any]) -> None:
    assert told(plan(drawn({"a": limits}, "a1=a 1 +, a2=a 1 -", devices=2))) == ""


@pytest.mark.parametrize(
    "limits", [{"limit": cpu(1)}, {"limit": {"*": 1}}, {"most_running": 1}], ids=str
)
def test_users_take_turns_under_a_full_limit(limits: dict[str, Any]) -> None:
    snapshot = drawn({"a": limits}, "a1=a.u 1 +, a2=a.v 1 -", devices=2)
    assert told(plan(snapshot)) == "a1>a2 F6/F8"


def test_higher_priority_goes_first_under_a_full_limit() -> None:
    first = {"a2": {"priority": 1}}
    snapshot = drawn({"a": {"most_running": 1}}, "a1=a 1 +, a2=a 1 -", devices=2, changed=first)
    assert told(plan(snapshot)) == "a1>a2 F6/F8"


def test_gang_under_a_limit_preempts_enough_tasks_to_keep_the_limit() -> None:
    tenants: Trees = {"p": {"limit": cpu(3)}, "x": {"parent": "p"}, "y": {"parent": "p"}}
    # Five devices, two of them free: but with three more than y's p would hold five.
    snapshot = drawn(tenants, "x1=x 1 +, x2=x 1 +, x3=x 1 +, y1=y 2 -", devices=5)
    assert told(plan(snapshot)) == "x1>y1 F6/F8, x2>y1 F6/F8"


def test_limit_of_an_ancestor_binds_a_task_that_waited_too_long() -> None:
    """Rules F7 and F9 go before all others, but not above a limit."""
    tenants: Trees = {"p": {"limit": cpu(2)}, "x": {"parent": "p"}, "q": {}}
    aged = {"x1": {"submitted_s": 0.0}}
    policy = Policy(half_life_s=0.0, patience_s=100.0)
    tasks = "x2=x 1 +, q1=q 1 +, x1=x 2 -"
    snapshot = drawn(tenants, tasks, devices=4, changed=aged, policy=policy)
    assert told(plan(snapshot)) == "x2>x1 F7"  # its own makes room, not q's


@pytest.mark.parametrize(
    "limits", [{"limit": cpu(0)}, {"limit": {"*": 0}}, {"most_running": 0}], ids=str
)
def test_lowered_limit_takes_back_what_exceeds_it_after_a_full_slice(
    limits: dict[str, Any],
) -> None:
    policy = Policy(half_life_s=0.0, slice_max_s=20.0)
    long = {"a2": {"switch_us": SECOND}}  # its slice is 20 s, of which 10 have passed
    tasks = "a1=a 1 +, a2=a 1 +, a3=a 1 +, b1=b 1 -"
    snapshot = drawn({"a": {}, "b": {}}, tasks, devices=4, changed=long, policy=policy)
    board = Board.of(snapshot, now_s=NOW_S)
    assert told(cycle(board)) == "b1"
    board.set_tenant(BoardTenant(id="a", name="a", weight=1000, **limits))
    assert told(cycle(board)) == "a1>None F4, a3>None F4"
    assert board.next_s() == NOW_S + 10
    board.at(NOW_S + 10)
    assert told(cycle(board)) == "a2>None F4"


def test_lowered_limit_of_a_kind_takes_back_no_device_of_another_kind() -> None:
    """a's task on a cpu is in its first slice, and as many of its tasks run as may."""
    young = {"a1": {"held_us": SECOND // 2}, "a2": {"kind": "cuda"}}
    snapshot = drawn({"a": {}}, "a1=a 1 +, a2=a 1 +", devices=["cpu", "cuda"], changed=young)
    board = Board.of(snapshot, now_s=NOW_S)
    board.set_tenant(BoardTenant(id="a", name="a", weight=1000, limit=cpu(0), most_running=2))
    assert told(cycle(board)) == ""
    board.at(NOW_S + 10)
    assert told(cycle(board)) == "a1>None F4"


def test_lowered_limit_takes_back_no_more_than_exceeds_it() -> None:
    tenants: Trees = {"p": {"limit": cpu(3)}, "x": {"parent": "p"}, "y": {"parent": "p"}, "q": {}}
    tasks = "x1=x 2 +, y1=y 1 +, y2=y 1 +, q1=q 2 +"
    later = {"y2": {"started_s": NOW_S - 5}}
    assert told(plan(drawn(tenants, tasks, devices=6, changed=later))) == "y2>None F4"


def test_devices_left_over_by_a_gang_are_given_away_in_the_same_round() -> None:
    tenants: Trees = {"p": {"limit": cpu(2)}, "x": {"parent": "p"}, "y": {"parent": "p"}}
    snapshot = drawn(tenants, "x1=x 2 +, y1=y 1 -, y2=y 1 -", devices=2)
    assert told(plan(snapshot)) == "x1>y1 F6/F8, y2"


# --- the fewest, the cheapest first -------------------------------------------------------------

CLAIM: Trees = {"a": {"guarantee": cpu(4)}, "b": {}, "c": {}}


def test_basic_gives_way_before_standard_before_premium() -> None:
    tiers = {f"b{n}": {"tier": t} for n, t in enumerate(("premium", "standard", "basic"), start=1)}
    running = "b1=b 1 +, b2=b 1 +, b3=b 1 +"
    free = Policy(half_life_s=0.0, tier_share={})  # nothing is promised: it is an order only
    for width, expected in [
        (1, "b3>a1 F5"),
        (2, "b3>a1 F5, b2>a1 F5"),
        (3, "b3>a1 F5, b2>a1 F5, b1>a1 F5"),
    ]:
        snapshot = drawn(CLAIM, f"{running}, a1=a {width} -", devices=3, changed=tiers, policy=free)
        assert told(plan(snapshot)) == expected


def test_most_over_served_task_gives_way_first() -> None:
    running = "b1=b 1 +, c1=c 1 +"
    one = drawn(CLAIM, f"{running}, a1=a 1 -", devices=2, used={"b": 5})
    other = drawn(CLAIM, f"{running}, a1=a 1 -", devices=2, used={"c": 5})
    assert (told(plan(one)), told(plan(other))) == ("b1>a1 F5", "c1>a1 F5")


def test_lowest_priority_then_newest_task_of_a_user_gives_way() -> None:
    changed = {
        "b1": {"priority": 1, "started_s": NOW_S - 2},
        "b2": {"started_s": NOW_S - 9},
        "b3": {"started_s": NOW_S - 3},
    }
    running = "b1=b 1 +, b2=b 1 +, b3=b 1 +"
    snapshot = drawn(CLAIM, f"{running}, a1=a 1 -", devices=3, changed=changed)
    assert told(plan(snapshot)) == "b3>a1 F5"
    snapshot = drawn(CLAIM, f"{running}, a1=a 3 -", devices=3, changed=changed)
    assert told(plan(snapshot)) == "b3>a1 F5, b2>a1 F5, b1>a1 F5"


def test_wide_task_gives_way_where_narrower_tasks_do_not_free_enough() -> None:
    # Four are needed.  In order: 1, then 4.  With the four the one is not needed: it stays.
    snapshot = drawn(CLAIM, "b1=b 1 +, b2=b 4 +, a1=a 4 -", devices=5)
    assert told(plan(snapshot)) == "b2>a1 F5"


def test_free_devices_are_counted_before_any_task_is_paused() -> None:
    snapshot = drawn(CLAIM, "b1=b 1 +, b2=b 1 +, a1=a 3 -", devices=4)
    assert told(plan(snapshot)) == "b1>a1 F5"  # the third device; two are free


def test_task_on_an_unsuitable_device_is_not_paused() -> None:
    changed = {"a1": {"memory_bytes": 8}}
    snapshot = drawn(CLAIM, "b1=b 1 +, b2=b 1 +, a1=a 1 -", devices=2, changed=changed)
    small = replace(snapshot.devices["d0"], memory_bytes=4)
    snapshot = replace(snapshot, devices={**snapshot.devices, "d0": small})
    assert told(plan(snapshot)) == "b2>a1 F5"


def test_no_task_is_paused_if_too_few_may_be() -> None:
    young = {"b2": {"held_us": SECOND // 2}}
    snapshot = drawn(CLAIM, "b1=b 1 +, b2=b 1 +, a1=a 2 -", devices=2, changed=young)
    assert told(plan(snapshot)) == ""


# --- over time ----------------------------------------------------------------------------------


def test_returning_tenant_has_its_guarantee_within_one_slice() -> None:
    """Whenever it comes: at most a slice, a pause and a start later it has what is guaranteed."""
    costs = Costs(start_s=0.05, pause_s=0.02, image_s=0.03, resume_s=0.02)
    tenants = [
        BoardTenant(id="a", name="a", weight=1000, guarantee=cpu(2)),
        BoardTenant(id="b", name="b", weight=1000),
    ]
    devices = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(4)]
    for tenths in range(0, 40, 3):
        back_s = 30 + tenths / 10
        work = [
            Arrival(at_s=0, task=f"b{n}", tenant="b", user="b1", work_s=1e5, tier="basic")
            for n in range(6)
        ]
        work += [
            Arrival(at_s=0, task=f"old{n}", tenant="a", user="a1", work_s=10, tier="basic")
            for n in range(4)
        ]  # a has used much more than its part when it comes back
        work += [
            Arrival(at_s=back_s, task=f"a{n}", tenant="a", user="a1", work_s=1e5, tier="basic")
            for n in range(3)
        ]
        report = simulate(work, devices, tenants, Policy(half_life_s=0), costs=costs, until_s=60)
        waits_s = sorted(report.waits_s.get(f"a{n}", 60) for n in range(3))
        slice_s = 0.08 / 0.02  # F8: what a switch costs, over its share
        assert waits_s[1] <= slice_s + 0.1, f"back at {back_s} s"
        assert waits_s[0] > 0  # nothing was free


def test_gang_past_its_patience_is_unprotected_once_more_devices_make_it_narrow() -> None:
    policy = Policy(half_life_s=0.0, patience_s=10.0, wide_share=0.25)
    seen = drawn(
        {"a": {}},
        "gang=a 2 +, one=a 1 +",
        devices=8,
        changed={"gang": {"waited_s": 100.0}},
        policy=policy,
    )
    board = Board.of(seen, now_s=NOW_S)

    def unprotected() -> set[str]:
        return {id for stays in board.unprotected("cpu").values() for id in stays}

    assert unprotected() == {"one"}
    board.set_device(replace(seen.devices["d0"], id="d8"))
    assert unprotected() == {"gang", "one"}
    board.drop_task("one")
    pausing = replace(seen.tasks["gang"], state="pausing")
    board.set_task(pausing)
    board.set_task(replace(pausing, held_us=pausing.held_us + SECOND))
    assert unprotected() == set()
