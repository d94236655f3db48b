"""Which hosts install packages for tasks that wait, and which packages go first."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

import pytest

from app.core.scheduling import package_hosts
from app.core.scheduling.package_hosts import (
    LOOKED_AT,
    OPEN,
    STATES,
    PackageHost,
    asked,
    given_up,
    hosts_for,
)

LOCK = "5" * 64


def host(name: str, state: str = "", *, devices: int = 1, idle: int = 1) -> PackageHost:
    return PackageHost(name=name, devices=devices, idle=idle, state=state)


def test_one_task_is_prepared_on_one_idle_host() -> None:
    hosts = [host(f"h{n}") for n in range(50)]
    assert len(hosts_for(LOCK, hosts, tasks=1, width=1)) == 1
    assert len(hosts_for(LOCK, hosts, tasks=7, width=1)) == 7
    chosen = {min(hosts_for(f"{n:064x}", hosts, tasks=1, width=1)) for n in range(100)}
    assert len(chosen) > 20, "locks spread over the hosts"


@pytest.mark.parametrize("state", ["ready", "building", "waiting"])
def test_host_that_has_begun_is_not_joined_by_another(state: str) -> None:
    hosts = [host("a"), host("b", state), host("c")]
    assert hosts_for(LOCK, hosts, tasks=1, width=1) == {"b"}


def test_idle_host_is_prepared_where_the_ready_one_is_busy() -> None:
    hosts = [host("a", "ready", idle=0), host("b", idle=0), host("c")]
    assert hosts_for(LOCK, hosts, tasks=1, width=1) == {"a", "c"}


def test_without_idle_hosts_enough_busy_ones_are_prepared() -> None:
    hosts = [host(f"h{n}", devices=4, idle=0) for n in range(5)]
    assert len(hosts_for(LOCK, hosts, tasks=5, width=1)) == 2


def test_failed_host_keeps_trying_and_another_one_takes_its_place() -> None:
    hosts = [host("a", "failed"), host("b")]
    assert hosts_for(LOCK, hosts, tasks=1, width=1) == {"a", "b"}


def test_gang_is_prepared_on_a_host_that_is_wide_enough() -> None:
    hosts = [host("a"), host("b", devices=4, idle=4), host("c")]
    assert hosts_for(LOCK, hosts, tasks=1, width=4) == {"b"}
    assert hosts_for(LOCK, [host("a"), host("c")], tasks=1, width=2) == {"a", "c"}


@pytest.mark.parametrize(("width", "idle"), [(12, 4), (16, 7)])
def test_gang_over_several_hosts_is_prepared_on_all_that_it_needs(width: int, idle: int) -> None:
    hosts = [host("a", "ready", devices=8, idle=8), host("b", devices=8, idle=idle)]
    assert hosts_for(LOCK, hosts, tasks=1, width=width) == {"a", "b"}


def test_host_that_takes_no_work_is_kept_if_it_is_ready_and_counts_for_nothing() -> None:
    drained = [host("a", "ready", devices=0, idle=0), host("b", "waiting", devices=0, idle=0)]
    assert hosts_for(LOCK, drained, tasks=1, width=1) == {"a"}
    assert hosts_for(LOCK, [*drained, host("c")], tasks=1, width=1) == {"a", "c"}


def _drawn(dice: random.Random) -> PackageHost:
    devices = dice.choice([0, 1, 2, 4, 8, 8])
    state = dice.choice([*STATES, "", ""])
    return host(f"h{dice.random()}", state, devices=devices, idle=dice.randint(0, devices))


def test_chosen_hosts_have_enough_devices_for_all_tasks() -> None:
    """Of hosts that hold a whole task, or of all if there are none; each in the end is free."""
    several = all_of_them = 0
    for seed in range(3000):
        dice = random.Random(seed)
        hosts = [_drawn(dice) for _ in range(dice.randint(1, 8))]
        tasks, width = dice.randint(1, 5), dice.choice([1, 1, 2, 4, 12, 16])
        chosen = hosts_for(LOCK, hosts, tasks=tasks, width=width)
        able = [one for one in hosts if one.state != "failed"]
        places = [one for one in able if one.devices >= width] or able
        total = sum(one.devices for one in places)
        has = sum(one.devices for one in places if one.name in chosen)
        assert has >= min(tasks * width, total), seed
        several += len(chosen) > 1
        all_of_them += has == total
    assert several > 1000
    assert 500 < all_of_them < 2800


def test_lock_is_given_up_only_where_nobody_can_be_expected_to_have_it() -> None:
    for states in combinations_with_replacement(STATES, 4):
        hosts = [host(f"h{n}", state) for n, state in enumerate(states)]
        hopeful = {"ready", "building", "waiting"} & {*states}
        failed = states.count("failed")
        assert bool(given_up(hosts)) is (not hopeful and failed >= package_hosts.TRIED)
    assert given_up([host("a", "failed")])
    assert not given_up([host("a", "failed"), host("b")])
    assert not given_up([])


def test_first_lock_of_each_tenant_goes_before_the_second_of_any() -> None:
    greedy = {f"g{n}": float(n) for n in range(100)}
    turns = package_hosts.in_turn({"greedy": greedy, "late": {"x": 500.0, "g1": 600.0}})
    assert turns[:3] == ["g0", "x", "g1"]
    assert {*turns} <= {*greedy, "x"}
    assert len(turns) == LOOKED_AT + 1


def test_host_is_asked_for_few_locks_that_it_lacks_and_all_that_it_has() -> None:
    locks = [f"l{n:02}" for n in range(30)]
    ready = frozenset(locks[::2])
    found = asked(locks, ready)
    assert ready <= {*found}
    assert [one for one in found if one not in ready] == locks[1 : 2 * OPEN : 2]
    assert found == sorted(found), "a host builds and keeps them in this order"
