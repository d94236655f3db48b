"""A gang on several hosts: arenas of their own, joined by TCP, give the bits of one arena."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from tests.thoroughness import in_rotation
from tests.workers.ddp import features
from tests.workers.gangs import Gangs, bits
from tests.workers.ranks.test_process_group import WARM
from workers.ranks import shared_memory
from workers.ranks.rendezvous import Group, RemoteMembers, ascent, branches
from workers.ranks.shared_memory import DEPTH, STORED_LAND_BYTES, Arena
from workers.ranks.turns import Turns, hosts_of

RANKS = 3
ROWS = [row.__name__ for row in features.ROWS]
HOSTS = {"two": [1, 1], "three": [1, 1, 1]}  # seats of each; on two, ranks 0 and 1 share one


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    host = Gangs(warm=WARM)
    yield host
    host.close()


@pytest.fixture(scope="module")
def rows(gangs: Gangs) -> dict[str, list[dict[str, Any]]]:
    """For each rank, what every row of the feature matrix returned."""
    ways: dict[str, dict[str, Any]] = {"one": {"seats": 1}}
    ways |= {name: {"hosts": hosts} for name, hosts in HOSTS.items()}
    return {
        name: [s["losses"][0] for s in gangs.right("features:every", ranks=RANKS, **way)]
        for name, way in ways.items()
    }


@pytest.mark.parametrize("row", ROWS)
def test_ranks_on_several_hosts_give_the_bits_of_one_host(
    rows: dict[str, list[dict[str, Any]]], row: str
) -> None:
    for name in HOSTS:
        assert [rank[row] for rank in rows[name]] == [rank[row] for rank in rows["one"]]


@pytest.mark.parametrize(
    ("entry", "hosts"),
    in_rotation(
        ["jobs:Mlp", "jobs:Transformer", "jobs:Sharded", "jobs:Joined"],
        [[2, 1], [1, 2], [1, 1, 1]],
    ),
)
def test_five_ranks_on_three_devices_of_several_hosts_give_the_same_bits(
    gangs: Gangs, entry: str, hosts: list[int]
) -> None:
    alone = gangs.right(entry, ranks=5, seats=1, steps=8)
    assert bits(gangs.right(entry, ranks=5, hosts=hosts, steps=8)) == bits(alone)


def test_equal_state_of_the_ranks_of_a_slot_is_kept_once_on_several_hosts(gangs: Gangs) -> None:
    """Ranks 0 and 1 share a seat, as do 2 and 3: after two steps, half of theirs are spared."""
    stories = gangs.right("jobs:Mlp", ranks=5, hosts=[2, 1], steps=8)
    assert [story["spared"] + story["updates"] for story in stories] == [6, 6, 6, 6, 0]
    assert sum(story["spared"] for story in stories) == 12


# --- who folds what ---


def test_host_combines_contributions_below_one_node_before_sending() -> None:
    """((0+1)+(2+3))+4 with 0 1 2 here and 3 4 there: nodes 5, 6, 7, 8 in the order of the sums."""
    found = branches((0, 0, 0, 1, 1))
    assert found.ways == (((1, 5),), ((0, 5),), (), (), ())
    assert set(found.tops) == {(5, 0), (2, 0), (3, 1), (4, 1)}
    assert found.joins == ((2, 3, 6), (5, 6, 7), (7, 4, 8))


@pytest.mark.parametrize("size", range(2, 14))
def test_each_sum_is_made_once_on_any_hosts(size: int) -> None:
    """Folded on one host or joined between hosts: every node of the tree, by the same children."""
    children = {}
    for leaf, way in enumerate(ascent(size)):
        at = leaf
        for sibling, parent in way:
            children[parent] = {at, sibling}
            at = parent
    for seats in ((1, 1), (2, 1), (1, 1, 1)):
        if sum(seats) > size:
            continue
        found = branches(hosts_of(size, seats))
        joined = {parent: {left, right} for left, right, parent in found.joins}
        folded = {parent for way in found.ways for _, parent in way}
        assert joined.keys() | folded == children.keys()
        assert not joined.keys() & folded
        assert all(children[parent] == pair for parent, pair in joined.items())


# --- the store, groups, room ---


@pytest.mark.parametrize("hosts", [[1, 1], [1, 1, 1]], ids=str)
def test_changes_of_the_key_value_store_have_one_order(gangs: Gangs, hosts: list[int]) -> None:
    told = [s["losses"][0] for s in gangs.right("hosts:store", ranks=RANKS, hosts=hosts)]
    assert sorted(n for rank in told for n in rank["numbers"]) == list(range(1, 16))
    assert all(rank["kept"] == ["15", "", "0", "1", "2"] for rank in told)
    [first] = {rank["first"] for rank in told}
    assert [rank["won"] for rank in told] == [first] * RANKS


def test_rank_far_ahead_of_another_host_waits_for_it(gangs: Gangs) -> None:
    stories = gangs.right("hosts:runs_ahead", ranks=RANKS, hosts=[1, 1])
    assert stories[2]["losses"] == [4096.0 * sum(range(DEPTH + 7))]


def test_places_of_ended_groups_are_used_again_on_every_host(gangs: Gangs) -> None:
    stories = gangs.right("hosts:groups_come_and_go", ranks=RANKS, hosts=[1, 1])
    assert [story["losses"] for story in stories] == [[3.0 * sum(range(300))]] * RANKS


def test_call_that_is_just_being_claimed_is_no_mismatch() -> None:
    """Whose number stands there while what it is does not yet: a bridge waits for the whole."""
    board = Arena(shared_memory.make(2, (0, 1), 1, STORED_LAND_BYTES))
    abroad, said = RemoteMembers(Turns(board, 1)), []
    index = abroad.exchange.index("pair", (0, 1))
    ticket = abroad.ticket(Group("pair", index, (0, 1), 0, (0, 1)), 0, "barrier()")
    asks = Thread(target=lambda: said.append(abroad.differs(ticket)))
    with board.locked():
        board.words[ticket.slot] = ticket.number + 1
        asks.start()
        asks.join(0.2)
        assert said == []
        board.clear_slot(ticket.slot)
    asks.join()
    assert said == [False]
    shared_memory.close(board.handles)


# --- faults ---


@pytest.mark.parametrize("hosts", [[1, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("jobs:mismatched", ["mismatched", "all_reduce(sum, float32[4])", "broadcast(from 0, "]),
        ("deadlocks:other_operation", ["mismatched", "all_reduce(sum, ", "all_reduce(max, "]),
        ("deadlocks:other_type", ["mismatched", "float32[4]", "float64[4]"]),
        ("deadlocks:barrier_in_a_branch", ["called barrier()", "called all_reduce(sum, "]),
        ("deadlocks:groups_in_another_order", ["wait for each other: rank 0 waits", "rank 0, 2"]),
        ("deadlocks:key_set_after_the_barrier", ["rank 1 waits in store.wait(", "rank 2 waits"]),
        ("jobs:cross_waiting", ["a message from rank 1 to rank 0, tag 0", "rank 2 waits"]),
        ("jobs:key_that_nobody_sets", ["store.wait(0//never 0)", "store.wait(0//never 2)"]),
    ],
)
def test_mistake_of_a_script_is_reported_to_all_ranks_of_all_hosts(
    gangs: Gangs, hosts: list[int], entry: str, told: list[str]
) -> None:
    for error in gangs.errors(entry, ranks=RANKS, hosts=hosts):
        assert error.startswith("GangFailed: ")
        assert [part for part in (*told, "rank 1") if part not in error] == []
        assert "rank 0" in error or "rank 2" in error  # whoever of them came to the odd one first


@pytest.mark.parametrize("hosts", [[1, 1], [1, 1, 1]], ids=str)
def test_rank_that_waits_for_ended_ranks_elsewhere_is_told(gangs: Gangs, hosts: list[int]) -> None:
    error = gangs.errors("deadlocks:uneven_inputs_without_join", ranks=RANKS, hosts=hosts)[1]
    for part in ("rank 1 waits in all_reduce(", "rank 0 has ended", "rank 2 has ended"):
        assert part in error


def test_error_and_death_are_reported_with_their_rank(gangs: Gangs) -> None:
    raised = gangs.errors("jobs:one_raises", ranks=RANKS, hosts=[1, 1, 1])
    told = "GangFailed: rank 1 failed: ValueError: the tenant's own mistake"
    assert raised == [told, "ValueError: the tenant's own mistake", told]
    killed = gangs.tell("jobs:one_is_killed", ranks=RANKS, hosts=[1, 1, 1])
    assert killed[1] == {"killed": -9}
    assert all("rank 1 has died" in killed[rank]["error"] for rank in (0, 2))


def test_dead_bridge_ends_all_ranks_with_its_name(gangs: Gangs) -> None:
    errors = gangs.errors("hosts:last_rank_kills_its_bridge", ranks=RANKS, hosts=[1, 1])
    for rank in (0, 1):
        assert "the connection to host 1, of rank 2, is lost: " in errors[rank]
    assert "bridge of host 1 has died" in errors[2] or "Broken pipe" in errors[2]


@pytest.mark.parametrize("hosts", [[1, 1], [1, 1, 1]], ids=str)
def test_lost_host_ends_the_ranks_of_the_others(gangs: Gangs, hosts: list[int]) -> None:
    stories = gangs.tell("hosts:last_host_goes", ranks=RANKS, hosts=hosts)
    assert stories[2] == {"killed": -9}
    for rank in (0, 1):
        assert "of rank 2, is lost: " in stories[rank]["error"]
