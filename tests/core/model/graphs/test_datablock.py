"""Checks which copies of datablocks are evicted, and which tasks run again when copies are lost."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import settings as Profile
from hypothesis import strategies as st

from app.core.model.graphs.datablock import BlockGone, EvictableCopy, cone, victims
from tests.thoroughness import examples

# --- eviction ----------------------------------------------------------------------------------


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
