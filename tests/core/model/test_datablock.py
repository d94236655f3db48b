"""Datablocks: the table of a copy's life, who gives way, what must run again, bytes by way."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as Profile
from hypothesis import strategies as st

from app.core.model.datablock import (
    COPY,
    HOLDS_MEMORY,
    WHOLE,
    BlockGone,
    CopyMove,
    CopyState,
    EvictableCopy,
    IllegalCopyMove,
    StillNeeded,
    TrackedBlock,
    account,
    check,
    cone,
    table,
    victims,
)
from tests.thoroughness import examples


def reachable(start: str) -> set[str]:
    found, todo = {start}, [start]
    while todo:
        for to in COPY[todo.pop()].values():
            if to not in found:
                found.add(to)
                todo.append(to)
    return found


# --- the table ----------------------------------------------------------------------------------


def test_the_table_names_every_state_and_only_known_moves() -> None:
    assert set(COPY) == set(CopyState)
    for moves in COPY.values():
        assert set(moves) <= set(CopyMove)
        assert set(moves.values()) <= set(CopyState)


def test_every_move_is_known_to_some_state() -> None:
    assert {move for moves in COPY.values() for move in moves} == set(CopyMove)


def test_every_state_is_reached_from_absent_and_can_come_to_an_end() -> None:
    assert reachable("absent") == set(CopyState)
    assert all("absent" in reachable(state) for state in CopyState)


def test_copy_is_whole_only_after_a_transfer_or_by_the_fate_of_others() -> None:
    entering = {
        move
        for state, moves in COPY.items()
        for move, to in moves.items()
        if to in WHOLE and state not in WHOLE
    }
    assert entering == {"Made", "Arrived"}


def test_every_copy_at_a_place_can_be_lost_with_it() -> None:
    assert all("Lose" in COPY[state] for state in HOLDS_MEMORY | {CopyState.spilled})


def test_the_printed_table_has_a_row_for_each_state() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + len(CopyState)
    assert all(row.count("|") == len(CopyMove) + 2 for row in rows)


def test_the_page_shows_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "internals" / "graphs.md"
    assert table() in page.read_text()


# --- copies -------------------------------------------------------------------------------------

FRESH = TrackedBlock(id="x", bytes=10, refs=2, recipe=True)


def states(block: TrackedBlock) -> str:
    return " ".join(f"{place}={state}" for place, state in sorted(block.copies.items()))


def test_the_first_copy_is_exclusive_and_the_next_makes_both_shared() -> None:
    one = FRESH.expect("d0")
    assert states(one) == "d0=in_flight"
    one = one.landed("d0")
    assert states(one) == "d0=exclusive"
    two = one.expect("d1").landed("d1")
    assert states(two) == "d0=shared d1=shared"
    assert states(two.dropped("d0")) == "d1=exclusive"


def test_last_copy_stays_while_it_is_needed() -> None:
    one = FRESH.expect("d0").landed("d0")
    with pytest.raises(StillNeeded, match="d0 holds the last whole copy of x, which 2 still need"):
        one.dropped("d0")
    assert states(one.released(2).dropped("d0")) == ""


def test_a_spilled_copy_is_whole_elsewhere_and_comes_back() -> None:
    one = FRESH.expect("d0").landed("d0")
    with pytest.raises(IllegalCopyMove, match="x on d0 is exclusive, got Spill"):
        one.spilled("d0")
    away = one.expect("host").landed("host").spilled("d0")
    assert states(away) == "d0=spilled host=exclusive"
    assert (away.held_bytes("d0"), away.held_bytes("host")) == (0, 10)
    assert states(away.expect("d0").landed("d0")) == "d0=shared host=shared"


def test_copy_put_aside_is_not_remembered_when_the_slower_place_dies() -> None:
    away = FRESH.expect("d0").landed("d0").expect("host").landed("host").spilled("d0")
    assert states(away.lost(["host"])) == "host=lost"


def test_inout_port_takes_the_memory_only_if_nothing_else_needs_it() -> None:
    one = FRESH.expect("d0").landed("d0")
    with pytest.raises(StillNeeded, match="which 1 still need"):
        one.overwritten("d0")
    assert states(one.released().overwritten("d0")) == "d0=invalid"
    two = one.expect("d1").landed("d1")
    assert states(two.overwritten("d0")) == "d0=invalid d1=exclusive"


def test_lost_place_takes_its_copies_and_transfers_with_it() -> None:
    one = FRESH.expect("d0").landed("d0").expect("d1").landed("d1").expect("d2")
    after = one.lost(["d1", "d2", "d9"])
    assert states(after) == "d0=exclusive d1=lost d2=lost"
    assert after.whole == ("d0",)


def test_a_transfer_that_failed_leaves_nothing() -> None:
    assert states(FRESH.expect("d0").failed("d0")) == ""


def test_unknown_move_says_what_was_expected() -> None:
    with pytest.raises(IllegalCopyMove, match="x on d0 is absent, got Made, expected Expect"):
        FRESH.landed("d0")


def test_copy_cannot_be_released_more_often_than_held() -> None:
    with pytest.raises(ValueError, match="x is needed by 2, 3 cannot let go"):
        FRESH.released(3)
    assert FRESH.took(3).released(5).free


PLACES = ("d0", "d1", "host", "disk")
TRY = (
    "expect",
    "landed",
    "failed",
    "spilled",
    "dropped",
    "overwritten",
    "lose",
    "took",
    "released",
)


@given(steps=st.lists(st.tuples(st.sampled_from(TRY), st.sampled_from(PLACES)), max_size=40))
def test_copies_keep_their_rule_whatever_happens(steps: list[tuple[str, str]]) -> None:
    """What is refused changes nothing; what is allowed leaves one exclusive or several shared."""
    block = FRESH
    for what, place in steps:
        try:
            if what == "lose":
                block = block.lost([place])
            elif what in ("took", "released"):
                block = getattr(block, what)()
            else:
                block = getattr(block, what)(place)
        except (IllegalCopyMove, StillNeeded, ValueError):
            continue
        assert check(block) == ()
        count = [block.state(place) for place in PLACES]
        assert count.count(CopyState.exclusive) == (len(block.whole) == 1)


def test_broken_rule_between_copies_is_reported() -> None:
    two = TrackedBlock(
        id="x", bytes=1, copies={"a": CopyState.exclusive, "b": CopyState.shared}, refs=0
    )
    assert "only copy beside others" in check(two)[0]
    none = TrackedBlock(id="x", bytes=1, refs=3)
    assert check(none) == ("3 need x, which lies nowhere and cannot be made",)


# --- who gives way ------------------------------------------------------------------------------


def held(block: str, next_use: int | None, bytes_: int = 10, clean: bool = True) -> EvictableCopy:
    return EvictableCopy(block=block, bytes=bytes_, next_use=next_use, clean=clean)


def names(chosen: tuple[EvictableCopy, ...]) -> str:
    return " ".join(one.block for one in chosen)


def test_block_never_used_here_again_is_evicted_first() -> None:
    copies = [held("soon", 3), held("late", 9), held("never", None), held("later", 12)]
    assert names(victims(copies, 25)) == "never later late"
    assert names(victims(copies, 1)) == "never"


def test_among_equals_clean_copies_go_first_then_large_ones() -> None:
    copies = [held("dirty", 5, clean=False), held("small", 5, 4), held("large", 5, 9)]
    assert names(victims(copies, 13)) == "large small"


def test_nothing_is_evicted_without_need() -> None:
    """The small one came first by its next use, but the large one behind it frees enough."""
    assert names(victims([held("small", 9, 1), held("large", 8, 50)], 50)) == "large"
    assert victims([held("x", 1)], 0) == ()


def test_all_are_evicted_if_even_that_is_too_little() -> None:
    assert names(victims([held("a", 1), held("b", 2)], 100)) == "b a"


@given(uses=st.lists(st.integers(0, 6), min_size=1, max_size=24), room=st.integers(1, 4))
@Profile(max_examples=examples(150))
def test_eviction_of_equal_blocks_faults_as_rarely_as_any_choice(
    uses: list[int], room: int
) -> None:
    """Belady's choice is optimal for equal clean blocks: compared with the best of all choices."""

    def ahead(block: int, n: int) -> int | None:
        return next((m for m in range(n + 1, len(uses)) if uses[m] == block), None)

    inside, faults = set[int](), 0
    for n, block in enumerate(uses):
        if block in inside:
            continue
        faults += 1
        if len(inside) == room:
            gone = victims([held(str(b), ahead(b, n), 1) for b in sorted(inside)], 1)
            inside -= {int(one.block) for one in gone}
        inside.add(block)
    assert faults == fewest_faults(uses, room)


def fewest_faults(uses: list[int], room: int) -> int:
    """By trying every set that memory can hold, step by step."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for block in uses:
        after: dict[frozenset[int], int] = {}
        for inside, faults in best.items():
            if block in inside:
                options = [(inside, faults)]
            else:
                kept = [
                    frozenset(few)
                    for few in combinations(sorted(inside), min(len(inside), room - 1))
                ]
                options = [(few | {block}, faults + 1) for few in kept]
            for now, count in options:
                after[now] = min(count, after.get(now, count))
        best = after
    return min(best.values())


# --- what must run again ------------------------------------------------------------------------

#  in -> a -> x -> b -> y -> d -> w
#              `-> c -> z -'
MAKER = {"x": "a", "y": "b", "z": "c", "w": "d"}
READS = {"a": ("in",), "b": ("x",), "c": ("x",), "d": ("y", "z")}


def again(wanted: str, whole: str) -> tuple[str, ...]:
    return cone(wanted.split(), whole=frozenset(whole.split()), maker=MAKER, reads=READS).tasks


def test_only_the_maker_of_a_lost_block_runs_again_if_its_inputs_exist() -> None:
    assert again("w", "in x y z") == ("d",)
    assert again("y", "in x z") == ("b",)


def test_inputs_of_makers_are_made_first_and_only_once() -> None:
    assert again("w", "in x y") == ("c", "d")
    assert again("w", "in") == ("a", "b", "c", "d")
    assert again("y z", "in") == ("a", "b", "c")


def test_nothing_runs_again_for_a_whole_block() -> None:
    assert again("w y", "w y") == ()


def test_block_without_a_maker_is_gone() -> None:
    with pytest.raises(BlockGone, match="no copy of in is left"):
        again("w", "")


@given(seed=st.integers(0, 10**6))
def test_nodes_to_run_again_are_enough_and_none_can_be_left_out(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    reads = {
        f"t{n}": tuple(f"b{m}" for m in range(n) if draw.random() < 0.4) or ("in",)
        for n in range(count)
    }
    maker = {f"b{n}": f"t{n}" for n in range(count)}
    whole = frozenset({"in", *(block for block in maker if draw.random() < 0.4)})
    wanted = [block for block in maker if draw.random() < 0.5]
    found = cone(wanted, whole=whole, maker=maker, reads=reads)

    def enough(tasks: tuple[str, ...]) -> bool:
        there = set(whole)
        for task in tasks:
            if not set(reads[task]) <= there:
                return False
            there |= {block for block, made_by in maker.items() if made_by == task}
        return set(wanted) <= there

    assert enough(found.tasks)
    assert found.blocks == {block for block in maker if maker[block] in found.tasks}
    for left_out in found.tasks:
        assert not enough(tuple(task for task in found.tasks if task != left_out))


# --- planned against moved ----------------------------------------------------------------------


def test_bytes_are_counted_by_link_and_compared_with_the_plan() -> None:
    plan = account([(("x", "host", "d0"), 10), (("y", "d0", "d1"), 5), (("x", "host", "d0"), 10)])
    assert (plan.planned_bytes, plan.moved_bytes) == (25, 0)
    half = plan.counting([(("x", "host", "d0"), 10)]).counting([(("x", "host", "d0"), 10)])
    assert half.moved_bytes == 20
    assert half.differences() == ("y from d0 to d1: 5 bytes planned, 0 moved",)
    done = half.counting([(("y", "d0", "d1"), 5)])
    assert done.differences() == ()
    more = done.counting([(("z", "d0", "host"), 3)])
    assert more.differences() == ("z from d0 to host: 0 bytes planned, 3 moved",)
