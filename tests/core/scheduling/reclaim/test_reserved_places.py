"""Devices that a reservation names: who gets them, when, and who keeps them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from app.core.model.device_choice import DeviceTraits
from app.core.model.snapshot import Plan, Policy, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from tests.core.pictures import NOW_S, codes, island, seats
from tests.thoroughness import over_seeds


def reserved(snapshot: Snapshot, **owners: str) -> Snapshot:
    """Reserve devices by name; what is reserved is guaranteed too, as for every reservation."""
    devices, tenants = dict(snapshot.devices), dict(snapshot.tenants)
    for id, owner in owners.items():
        devices[id] = replace(devices[id], reserved_for=owner)
        tenant = tenants[owner[0]]
        owed = {"cpu": tenant.guarantee.get("cpu", 0) + 1}
        tenants[owner[0]] = replace(tenant, guarantee=owed)
    return replace(snapshot, devices=devices, tenants=tenants)


def plan(snapshot: Snapshot) -> Plan:
    return decide(snapshot, now_s=NOW_S)


WIDE: Mapping[str, dict[str, object]] = {"a": {"width": 2}}


def test_owner_gets_its_device_although_the_holder_has_had_less() -> None:
    drawn = island("b c b", queue="a", used={"a": 900, "b": 5, "c": 1})
    assert seats(plan(reserved(drawn, d1="a"))) == "d1: c>a"


def test_owner_gets_its_device_from_one_within_a_guarantee_of_its_own() -> None:
    drawn = reserved(island("b c", queue="a", used={"a": 900}), d0="a")
    tenants = {**drawn.tenants, "b": replace(drawn.tenants["b"], guarantee={"cpu": 1})}
    assert seats(plan(replace(drawn, tenants=tenants))) == "d0: b>a"


def test_owner_that_holds_other_devices_gets_the_reserved_one_too() -> None:
    drawn = island("a a b", queue="a", used={"a": 900})
    assert seats(plan(reserved(drawn, d2="a"))) == "d2: b>a.3"


def test_device_of_a_user_is_not_for_others_of_its_tenant() -> None:
    drawn = island("b", queue="a1 a2", used={"a": 900, "a1": 1, "a2": 99})
    assert seats(plan(reserved(drawn, d0="a2"))) == "d0: b>a2"


def test_whoever_borrows_the_device_keeps_it_for_a_full_slice() -> None:
    drawn = island("b'", queue="a", used={"a": 1})
    assert seats(plan(reserved(drawn, d0="a"))) == ""


def test_reserved_device_that_its_owner_does_not_want_is_lent() -> None:
    assert seats(plan(reserved(island(". a", queue="b"), d0="a"))) == "d0: b"


def test_others_take_a_reserved_device_last() -> None:
    assert seats(plan(reserved(island(". . a", queue="b"), d0="a"))) == "d1: b"


def test_owner_is_not_paused_on_its_device_for_one_that_had_less() -> None:
    drawn = reserved(island("a c", queue="b", used={"a": 900, "c": 1}), d0="a")
    assert seats(plan(drawn)) == "d1: c>b"
    alone = reserved(island("a", queue="b", used={"a": 900}), d0="a")
    tenants = {**alone.tenants, "a": replace(alone.tenants["a"], guarantee={})}
    alone = replace(alone, tenants=tenants)
    assert seats(plan(alone)) == ""
    assert "GUARANTEED_TO_OTHERS" in codes(plan(alone), "b")


def test_tasks_of_the_owner_take_turns_on_its_device() -> None:
    drawn = island("a1", queue="a2 b", used={"a1": 900, "a2": 1})
    assert seats(plan(reserved(drawn, d0="a"))) == "d0: a1>a2"


def test_only_a_task_that_suits_the_device_gets_it() -> None:
    drawn = reserved(island("b b", queue="a a", used={"a": 9000}), d0="a")
    chosen = {"a": replace(drawn.tasks["a"], choice="+fast")}
    assert seats(plan(replace(drawn, tasks={**drawn.tasks, **chosen}))) == "d0: b>a.2"
    fast = replace(drawn.devices["d0"], traits=DeviceTraits(labels=("fast",)))
    drawn = replace(drawn, tasks={**drawn.tasks, **chosen}, devices={**drawn.devices, "d0": fast})
    assert seats(plan(drawn)) == "d0: b>a"


def test_task_of_several_devices_gets_them_all_at_once() -> None:
    drawn = island("b c . d", queue="a", used={"a": 900}, tasks=dict(WIDE))
    found = plan(reserved(drawn, d0="a", d2="a"))
    assert [each.devices for each in found.decisions if each.task == "a"] == [("d2", "d0")]


def test_free_device_is_kept_while_the_other_one_has_its_slice() -> None:
    drawn = island("b' .", queue="a c", used={"a": 900}, tasks=dict(WIDE))
    assert seats(plan(reserved(drawn, d0="a", d1="a"))) == ""
    board = Board.of(reserved(drawn, d0="a", d1="a"), now_s=NOW_S)
    cycle(board)
    assert set(board.pools["cpu"].free) == {"d1"}  # of the round alone


def test_without_turns_nobody_gives_way() -> None:
    drawn = island("b .", queue="a c", policy=Policy(half_life_s=0.0, turns=False))
    assert seats(plan(reserved(drawn, d0="a"))) == "d1: a"


def test_limit_of_the_owner_holds() -> None:
    drawn = reserved(island("b a", queue="a"), d0="a")
    tenants = {**drawn.tenants, "a": replace(drawn.tenants["a"], limit={"cpu": 1})}
    assert seats(plan(replace(drawn, tenants=tenants))) == ""


@over_seeds(range(200))
def test_random_islands_settle_with_each_wanted_device_at_its_owner(seed: int) -> None:
    chance = random.Random(seed)
    cells = " ".join(chance.choice("abcd.") for _ in range(6))
    queue = " ".join(chance.choice("abcd") for _ in range(8))
    used = {id: float(chance.randrange(1000)) for id in "abcd"}
    drawn = island(cells, queue=f"{queue} a b", used=used)
    owners = {f"d{n}": chance.choice("ab") for n in chance.sample(range(6), 3)}
    board = Board.of(reserved(drawn, **owners), now_s=NOW_S)
    for _ in range(20):
        found = cycle(board)
        if not found.decisions:
            break
    else:
        raise AssertionError("it does not settle")
    for device, owner in owners.items():
        if any(board.tasks[id].tenant == owner for id in board.tasks if id in board.tree):
            assert board.tasks[board.seated[device]].tenant == owner


def confined(drawn: Snapshot, *kept: str) -> Snapshot:
    """Let a name a reservation that keeps these devices for its tenant."""
    drawn = reserved(drawn, **dict.fromkeys(kept, "a"))
    devices = {
        id: replace(each, traits=DeviceTraits(kept_for="r" if id in kept else ""))
        for id, each in drawn.devices.items()
    }
    tasks = {**drawn.tasks, "a": replace(drawn.tasks["a"], choice="@r")}
    return replace(drawn, devices=devices, tasks=tasks)


def test_task_that_names_a_reservation_of_certain_devices_starts_on_no_other() -> None:
    drawn = island(". b", queue="a", used={"a": 900})
    assert seats(plan(drawn)) == "d0: a"
    assert seats(plan(confined(drawn, "d1"))) == "d1: b>a"


def test_task_waits_and_says_why_where_its_reservation_keeps_no_device() -> None:
    found = plan(confined(island(". b", queue="a")))
    assert seats(found) == ""
    assert "of the reservation that it names" in found.reasons["a"][0].message
