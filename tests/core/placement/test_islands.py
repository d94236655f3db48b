"""Portions: which island runs what, so that little crosses between islands."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import settings as Profile
from hypothesis import strategies as st

from app.core.model.graphs.datablock import BlockGone
from app.core.placement.islands import (
    KindCapacity,
    PlacementIsland,
    Portions,
    apportion,
    is_led,
    reassign,
)
from app.core.placement.local_search import Effort
from app.core.placement.planner import (
    PlannedBlock,
    PlannedGraph,
    PlannedLink,
    PlannedNode,
    Unplaceable,
)
from tests.thoroughness import examples

MB, MS = 10**6, 10**6


def island(id: str, **room: object) -> PlacementIsland:
    """Two cuda devices, both of which the tenant may count on."""
    rooms = {"cuda": KindCapacity(**{"devices": 2, "share": 2, **room})}  # type: ignore[arg-type]
    return PlacementIsland(
        id=id, rooms=rooms, places=frozenset({f"{id}.host", f"{id}.d0", f"{id}.d1"})
    )


def links(*ids: str) -> list[PlannedLink]:
    """10 Gb/s each way."""
    return [
        PlannedLink(source=a, target=b, bytes_per_s=1_250_000_000)
        for a in ids
        for b in ids
        if a != b
    ]


def node(
    id: str, reads: str = "", writes: str = "", ms: float = 100, **more: object
) -> PlannedNode:
    return PlannedNode(
        id=id,
        time_ns={"cuda": int(ms * MS)},
        reads=tuple(reads.split()),
        writes=tuple(writes.split()),
        **more,  # type: ignore[arg-type]
    )


def block(id: str, mb: int, at: str = "") -> PlannedBlock:
    return PlannedBlock(id=id, bytes=mb * MB, at=tuple(at.split()))


def graph(nodes: list[PlannedNode], blocks: list[PlannedBlock]) -> PlannedGraph:
    return PlannedGraph(nodes=tuple(nodes), blocks=tuple(blocks))


ONE = graph([node("t", "x")], [block("x", 50, "b.host")])


# --- one task -----------------------------------------------------------------------------------


def test_single_task_goes_where_its_data_is() -> None:
    found = apportion(ONE, [island("a"), island("b")], links("a", "b"))
    assert found.seats == {"t": "b"}
    assert (found.bytes, found.makespan_ns) == (0, 100 * MS)
    assert found.portions == {"b": ("t",)}


def test_task_goes_elsewhere_if_waiting_takes_longer_than_copying() -> None:
    busy = island("b", busy_ns=500 * MS)
    found = apportion(ONE, [island("a"), busy], links("a", "b"))
    assert found.seats == {"t": "a"}
    assert [(c.block, c.source, c.target) for c in found.crossings] == [("x", "b", "a")]
    assert found.makespan_ns == 140 * MS  # 50 MB at 1.25 GB/s are 40 ms


def test_task_without_data_goes_where_it_ends_first() -> None:
    one = graph([node("t")], [])
    found = apportion(one, [island("a", busy_ns=20 * MS), island("b")], links("a", "b"))
    assert found.seats == {"t": "b"}


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (node("t", width=3), "2 devices, 3 are wanted"),
        (PlannedNode(id="t", time_ns={"cpu": 1}), "not of a kind that can run it"),
        (node("t", devices=("b.d0",)), "not among the devices that it names"),
    ],
)
def test_task_that_fits_no_island_is_refused_with_the_reason(one: PlannedNode, told: str) -> None:
    with pytest.raises(Unplaceable, match=f"node t: cuda of island a: {told}"):
        apportion(graph([one], []), [island("a")], [])


# --- graphs -------------------------------------------------------------------------------------


def test_graph_is_cut_at_the_edge_with_the_fewest_bytes() -> None:
    work = graph(
        [
            *(node(f"l{n}", "x", f"p{n}") for n in range(4)),
            *(node(f"r{n}", "y", f"q{n}") for n in range(4)),
            node("join", "p0 q0", "", 10),
        ],
        [
            block("x", 400, "a.host"),
            block("y", 400, "b.host"),
            *(block(f"{side}{n}", 1) for side in "pq" for n in range(4)),
        ],
    )
    found = apportion(work, [island("a"), island("b")], links("a", "b"))
    assert {found.seats[f"l{n}"] for n in range(4)} == {"a"}
    assert {found.seats[f"r{n}"] for n in range(4)} == {"b"}
    assert found.bytes == 1 * MB


def test_a_block_crosses_once_to_each_island_that_needs_it() -> None:
    readers = [node(f"r{n}", "x", devices=(f"{i}.d0",)) for n, i in enumerate("bbcc")]
    work = graph(readers, [block("x", 8, "a.host")])
    found = apportion(work, [island(id) for id in "abc"], links("a", "b", "c"))
    assert found.bytes == 16 * MB
    assert sorted(c.target for c in found.crossings) == ["b", "c"]


def test_chain_is_not_cut_although_another_island_is_idle() -> None:
    chain = graph(
        [node(f"t{n}", f"b{n}", f"b{n + 1}") for n in range(6)],
        [block("b0", 5, "a.host"), *(block(f"b{n}", 5) for n in range(1, 7))],
    )
    found = apportion(chain, [island("a"), island("b")], links("a", "b"))
    assert set(found.seats.values()) == {"a"}
    assert found.bytes == 0


def test_share_of_a_tenant_bounds_its_partition() -> None:
    """12 tasks of 100 ms; 3 devices of one island and 1 of the other are the tenant's share."""
    work = graph([node(f"t{n}") for n in range(12)], [])
    found = apportion(
        work, [island("a", devices=4, share=3), island("b", devices=4, share=1)], links("a", "b")
    )
    assert {id: len(tasks) for id, tasks in found.portions.items()} == {"a": 9, "b": 3}
    assert found.makespan_ns == 300 * MS


def test_gang_wider_than_the_share_takes_longer_in_proportion() -> None:
    wide = graph([node("t", width=4)], [])
    found = apportion(wide, [island("a", devices=4, share=2)], [])
    assert found.makespan_ns == 200 * MS


@given(seed=st.integers(0, 10**6))
@Profile(max_examples=examples(30))
def test_the_cut_is_counted_as_in_a_hypergraph(seed: int) -> None:
    draw = random.Random(seed)
    nodes, blocks = list[PlannedNode](), [block("x", 9, "a.host"), block("y", 7, "b.host")]
    for n in range(6):
        reads = [one.id for one in blocks if draw.random() < 0.35]
        blocks.append(block(f"b{n}", draw.choice((1, 5, 30))))
        nodes.append(node(f"t{n}", " ".join(reads), f"b{n}", draw.randint(20, 120)))
    work = graph(nodes, blocks)
    found = apportion(work, [island("a"), island("b")], links("a", "b"))
    assert found.bytes == cut(work, found.seats)
    assert found.makespan_ns <= found.least_makespan_ns * 1.05


@given(seed=st.integers(0, 10**6))
@Profile(max_examples=examples(30))
def test_the_cut_is_the_least_of_all(seed: int) -> None:
    """Six tasks of one second on two islands with two devices each: two rounds, so up to four on
    an island.  Copies take milliseconds.  Of all such assignments none crosses fewer bytes."""
    draw = random.Random(seed)
    blocks = [block(f"x{n}", draw.choice((1, 2, 5)), f"{draw.choice('ab')}.host") for n in range(8)]
    nodes = [
        node(f"t{n}", " ".join(b.id for b in blocks if draw.random() < 0.4), "", 1000)
        for n in range(6)
    ]
    work = graph(nodes, blocks)
    found = apportion(work, [island("a"), island("b")], links("a", "b"))
    names = [one.id for one in nodes]
    balanced = (seats for seats in product("ab", repeat=6) if 2 <= seats.count("a") <= 4)
    assert found.bytes == min(cut(work, dict(zip(names, seats, strict=True))) for seats in balanced)


def cut(work: PlannedGraph, seats: Mapping[str, str]) -> int:
    """For each block its bytes times (islands that have or need it, less one)."""
    total = 0
    for one in work.blocks:
        touched = {place[0] for place in one.at}
        touched |= {seats[n.id] for n in work.nodes if one.id in (*n.reads, *n.writes)}
        total += one.bytes * (len(touched) - 1)
    return total


# --- many islands -------------------------------------------------------------------------------

MANY = [f"i{n:02}" for n in range(40)]


def many(**room: object) -> list[PlacementIsland]:
    """Islands, the last of which is free first."""
    return [island(id, busy_ns=(50 - n) * 10 * MS, **room) for n, id in enumerate(MANY)]


def test_one_task_finds_the_soonest_of_many_islands() -> None:
    found = apportion(graph([node("t")], []), many(), links(*MANY))
    assert found.seats == {"t": "i39"}
    assert found.exact


def test_island_with_the_block_is_weighed_though_others_are_sooner() -> None:
    work = graph([node("t", "x")], [block("x", 5_000, "i03.host")])
    assert apportion(work, many(), links(*MANY)).seats == {"t": "i03"}


def test_chain_over_many_islands_stays_on_the_soonest() -> None:
    chain = graph(
        [node("s", "", "x"), node("t", "x", "y"), node("u", "y")], [block("x", 50), block("y", 50)]
    )
    assert set(apportion(chain, many(), links(*MANY)).seats.values()) == {"i39"}


def test_sweep_takes_as_many_islands_as_give_each_task_a_device() -> None:
    idle = [island(id) for id in MANY]
    found = apportion(graph([node(f"t{n}") for n in range(60)], []), idle, links(*MANY))
    assert [len(tasks) for tasks in found.portions.values()] == [2] * 30
    assert found.makespan_ns == 100 * MS


def test_nodes_stay_on_a_late_island_of_many() -> None:
    work = graph([node("s"), node("t")], [])
    found = reassign(work, many(), links(*MANY), before={"s": "i00", "t": "dead"}, done=[], at={})
    assert found.seats == {"s": "i00", "t": "i39"}


def test_refusal_names_all_of_many_islands() -> None:
    with pytest.raises(Unplaceable) as refused:
        apportion(graph([node("t", width=3)], []), many(), links(*MANY))
    assert str(refused.value).count("2 devices, 3 are wanted") == len(MANY)


@given(seed=st.integers(0, 10**6))
@Profile(max_examples=examples(30))
def test_no_placement_of_a_sweep_ends_sooner(seed: int) -> None:
    """Five tasks that are alike, on three islands whose devices become free at different times."""
    draw = random.Random(seed)
    several = [island(id, share=draw.choice((1, 2)), busy_ns=draw.randint(0, 300)) for id in "abc"]
    nodes = [PlannedNode(id=f"t{n}", time_ns={"cuda": 100}) for n in range(5)]
    found = apportion(graph(nodes, []), several, links("a", "b", "c"))
    rooms = {one.id: one.rooms["cuda"] for one in several}
    assert found.exact
    assert found.makespan_ns == min(
        max(rooms[id].busy_ns + 100 * -(-seats.count(id) // rooms[id].share) for id in {*seats})
        for seats in product("abc", repeat=5)
    )


# --- an island dies -----------------------------------------------------------------------------

CHAINS = graph(
    [node(f"{c}{n}", f"{c}b{n}", f"{c}b{n + 1}") for c in "pq" for n in range(4)],
    [
        block("pb0", 1, "store"),
        block("qb0", 1, "store"),
        *(block(f"{c}b{n}", 3) for c in "pq" for n in range(1, 5)),
    ],
)


def places(*ids: str) -> list[PlacementIsland]:
    """The store is a place of each island's links, here of the first that lives."""
    return [
        PlacementIsland(
            id=id,
            rooms={"cuda": KindCapacity(devices=1)},
            places=frozenset({f"{id}.d0", *(["store"] if not n else [])}),
        )
        for n, id in enumerate(ids)
    ]


def before() -> Portions:
    return apportion(CHAINS, places("a", "b"), links("a", "b"))


def test_only_nodes_of_a_lost_island_are_assigned_again() -> None:
    first = before()
    assert {first.seats["p0"], first.seats["q0"]} == {"a", "b"}
    dead = first.seats["p0"]
    lives = "b" if dead == "a" else "a"
    after = reassign(
        CHAINS,
        places(lives, "c"),
        links(lives, "c"),
        before=first.seats,
        done=["q0"],
        at={"pb0": ("store",), "qb0": ("store",), "qb1": (f"{lives}.d0",)},
    )
    assert after.again == ()
    assert all(after.seats[f"q{n}"] == lives for n in (1, 2, 3))
    assert all(after.seats[f"p{n}"] == "c" for n in range(4))


def test_blocks_lost_with_an_island_are_made_again_and_no_others() -> None:
    first = before()
    dead = first.seats["p0"]
    lives = "b" if dead == "a" else "a"
    after = reassign(
        CHAINS,
        places(lives),
        [],
        before=first.seats,
        done=["p0", "p1", "q0", "q1"],
        at={"pb0": ("store",), "qb0": ("store",), "qb2": (f"{lives}.d0",)},
    )
    assert after.again == ("p0", "p1")  # qb1 is gone too, but nobody needs it any more
    assert set(after.seats) == {"p0", "p1", "p2", "p3", "q2", "q3"}


def test_lost_upload_cannot_be_made_again() -> None:
    with pytest.raises(BlockGone, match="no copy of pb0 is left"):
        reassign(CHAINS, places("a"), [], before=before().seats, done=[], at={"qb0": ("store",)})


def test_a_long_graph_of_which_little_moves_is_assigned_anew() -> None:
    chain = graph(
        [node(f"t{n}", f"b{n}", f"b{n + 1}", 1) for n in range(1200)],
        [block("b0", 1, "store"), *(block(f"b{n}", 1) for n in range(1, 1201))],
    )
    stay = {f"t{n}": "a" for n in range(1200)} | {"t600": "dead"}
    after = reassign(
        chain,
        places("a", "b"),
        links("a", "b"),
        before=stay,
        done=[],
        at={"b0": ("store",)},
        effort=Effort(guard=1050, search=2000),
    )
    assert after.seats == {f"t{n}": "a" for n in range(1200)}
    assert after.bytes == 0


@given(
    st.lists(st.tuples(st.floats(0.5, 1), st.floats(0, 0.99)), min_size=1, max_size=20),
    st.floats(0.1, 60),
)
def test_island_whose_leaders_follow_each_other_within_a_lease_counts_as_led_throughout(
    leaders: list[tuple[float, float]], lease_s: float
) -> None:
    """Each leader renews its lease for the last time, and the next one takes over `gap` of a lease
    after the end of it.
    """
    for held, gap in leaders:
        for passed in (0.0, held, held + gap / 2, held + gap):  # in leases, since the last renewal
            assert is_led((held - passed) * lease_s, lease_s=lease_s)
    held, _ = leaders[-1]
    assert not is_led((held - (held + 1)) * lease_s - 1e-9, lease_s=lease_s)
    assert not is_led(None, lease_s=lease_s)
