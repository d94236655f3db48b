"""The process group `splice`: every call of the feature matrix, the order of sums, and faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.ddp import features
from tests.workers.gangs import Gangs
from workers.ranks.rendezvous import ascent

RANKS = 3
# AVG; coalescing with a device; a second init_process_group; futures of most calls
GLOO_LACKS = {"reductions", "coalesced", "as_under_torchrun", "asynchronous"}
WARM = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)
ROWS = [row.__name__ for row in features.ROWS]


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    host = Gangs(warm=WARM)
    yield host
    host.close()


@pytest.fixture(scope="module")
def rows(gangs: Gangs) -> dict[int, list[dict[str, Any]]]:
    """By number of seats: for each rank, what every row returned."""
    found = {}
    for seats in (1, RANKS):
        stories = gangs.right("features:every", ranks=RANKS, seats=seats)
        found[seats] = [story["losses"][0] for story in stories]
    return found


@pytest.mark.parametrize("row", ROWS)
def test_one_slot_and_a_slot_per_rank_give_the_same_bits(
    rows: dict[int, list[dict[str, Any]]], row: str
) -> None:
    assert [rank[row] for rank in rows[1]] == [rank[row] for rank in rows[RANKS]]


def test_two_ranks_give_the_bits_of_gloo(gangs: Gangs) -> None:
    """With two contributions there is only one order."""
    params = {"names": ["ddp", "ddp_batch_norm", "ddp_no_sync", "all_reduce"]}
    ours = gangs.right("features:every", ranks=2, seats=1, params=params)
    theirs = gangs.right("features:every", ranks=2, peers=True, params=params)
    assert [story["losses"] for story in ours] == [story["losses"] for story in theirs]


def test_three_ranks_differ_from_gloo_only_by_the_order_of_sums(
    gangs: Gangs, rows: dict[int, list[dict[str, Any]]]
) -> None:
    names = [row for row in ROWS if row not in GLOO_LACKS]
    theirs = gangs.right("features:every", ranks=RANKS, peers=True, params={"names": names})
    for ours, story in zip(rows[1], theirs, strict=True):
        for name in names:
            _must_be_near(ours[name], story["losses"][0][name], name)


def _must_be_near(one: Any, other: Any, where: str) -> None:
    if isinstance(one, list):
        assert len(one) == len(other), where
        for a, b in zip(one, other, strict=True):
            _must_be_near(a, b, where)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5), where
    elif not (isinstance(one, str) and len(one) == 64):  # a digest of bits that may differ
        assert one == other, where


def test_a_compiled_model_trains_to_the_same_bits(gangs: Gangs) -> None:
    params = {"names": ["compiled_aot"]}
    found = [
        [s["losses"] for s in gangs.right("features:every", ranks=2, seats=seats, params=params)]
        for seats in (1, 2)
    ]
    assert found[0] == found[1]


# --- the order of sums ---


def test_tree_of_sums_does_not_depend_on_the_order_of_arrival() -> None:
    """((0+1)+2)+...: leaves 0..n-1, inner nodes from n on, in the order in which they are built."""
    assert ascent(1) == ((),)
    assert ascent(2) == (((1, 2),), ((0, 2),))
    # 0 and 1 make node 3; it and 2 make node 4
    assert ascent(3) == (((1, 3), (2, 4)), ((0, 3), (2, 4)), ((3, 4),))
    # (0,1) -> 5, (2,3) -> 6, (5,6) -> 7, (7,4) -> 8
    assert ascent(5)[2] == ((3, 6), (5, 7), (4, 8))
    assert ascent(5)[4] == ((7, 8),)


@pytest.mark.parametrize("seats", [1, 2, 4])
def test_four_ranks_add_in_pairs(gangs: Gangs, seats: int) -> None:
    """(1e8 + 1) + (-1e8 + 1): both ones are lost, where one after the other would leave 1."""
    stories = gangs.right("jobs:order", ranks=4, seats=seats)
    assert [story["losses"] for story in stories] == [[0.0]] * 4


def test_the_fifth_rank_is_added_last(gangs: Gangs) -> None:
    stories = gangs.right("jobs:order", ranks=5, seats=2)
    assert [story["losses"] for story in stories] == [[3.0]] * 5


# --- faults ---


@pytest.mark.parametrize("seats", [1, 2])
def test_mismatched_collectives_name_both_ranks_and_both_calls(gangs: Gangs, seats: int) -> None:
    errors = gangs.errors("jobs:mismatched", ranks=2, seats=seats)
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("GangFailed: mismatched collectives: as call 1 of group")
        assert "all_reduce(sum, float32[4])" in error
        assert "broadcast(from 0, float32[3])" in error
        assert "rank 0" in error
        assert "rank 1" in error


def test_a_sum_of_different_shapes_is_a_mismatch(gangs: Gangs) -> None:
    errors = gangs.errors("jobs:other_shapes", ranks=2, seats=1)
    assert all("float32[4]" in error and "float32[5]" in error for error in errors)


def test_gathering_unequal_sizes_names_the_ranks(gangs: Gangs) -> None:
    errors = gangs.errors("jobs:sizes_differ", ranks=2, seats=1)
    assert all("rank 1 brought 12 bytes" in error and "has 8" in error for error in errors)


@pytest.mark.parametrize("seats", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("other_root", ["mismatched", "broadcast(from 0, float32[4])", "broadcast(from 1, "]),
        ("other_operation", ["mismatched", "all_reduce(sum, ", "all_reduce(max, "]),
        ("other_type", ["mismatched", "float32[4]", "float64[4]"]),
        ("barrier_in_a_branch", ["mismatched", "called barrier()", "called all_reduce(sum, "]),
        ("groups_in_another_order", ["rank 0 waits in all_reduce(", "rank 1 has not called"]),
        ("key_set_after_the_barrier", ["rank 1 waits in store.wait(", "rank 0 waits in barrier()"]),
        ("uneven_inputs_without_join", ["rank 1 waits in all_reduce(", "rank 0 has ended"]),
    ],
)
def test_a_deadlock_ends_with_the_names_of_ranks_and_calls(
    gangs: Gangs, seats: int, name: str, told: list[str]
) -> None:
    error = gangs.errors(f"deadlocks:{name}", ranks=3, seats=seats)[1]
    assert error.startswith("GangFailed: ")
    assert [part for part in (*told, "rank 1") if part not in error] == []


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_rank_that_skips_a_step_is_found(gangs: Gangs, seats: int) -> None:
    """The others' calls are one ahead from there on: the last of them nobody answers."""
    errors = gangs.errors("deadlocks:LeavesAStepOut", ranks=3, seats=seats, steps=8)
    for rank in (0, 2):
        assert "which rank 1 has not called" in errors[rank]
        assert "rank 1 has ended" in errors[rank]


@pytest.mark.parametrize("seats", [1, 3])
def test_ranks_that_wait_for_each_other_end_with_the_state_of_each(
    gangs: Gangs, seats: int
) -> None:
    errors = gangs.errors("jobs:cross_waiting", ranks=3, seats=seats)
    for error in errors:
        assert error.startswith("GangFailed: the ranks wait for each other: rank 0 waits in")
        assert "a message from rank 1 to rank 0, tag 0" in error
        assert "which rank 1 has not called" in error


def test_waiting_for_a_rank_that_has_ended_is_an_error(gangs: Gangs) -> None:
    stories = gangs.tell("jobs:one_leaves", ranks=3, seats=1)
    assert stories[2]["losses"] == ["left"]
    for rank in (0, 1):
        assert "which rank 2 has not called" in stories[rank]["error"]
        assert "rank 2 has ended" in stories[rank]["error"]


@pytest.mark.parametrize("seats", [1, 3])
def test_a_killed_rank_is_named_to_the_others(gangs: Gangs, seats: int) -> None:
    stories = gangs.tell("jobs:one_is_killed", ranks=3, seats=seats)
    assert stories[1] == {"killed": -9}
    for rank in (0, 2):
        assert "rank 1 has died" in stories[rank]["error"]


def test_an_error_of_one_rank_ends_the_others_with_its_text(gangs: Gangs) -> None:
    errors = gangs.errors("jobs:one_raises", ranks=3, seats=2)
    assert errors[1] == "ValueError: the tenant's own mistake"
    told = "GangFailed: rank 1 failed: ValueError: the tenant's own mistake"
    assert (errors[0], errors[2]) == (told, told)


def test_key_that_is_never_set_ends_with_an_error(gangs: Gangs) -> None:
    errors = gangs.errors("jobs:key_that_nobody_sets", ranks=2, seats=1)
    assert all("store.wait" in error and "wait for each other" in error for error in errors)


def test_every_wait_has_a_deadline(gangs: Gangs) -> None:
    """Rank 1 sleeps past the others' patience: they say who did not come."""
    stories = gangs.tell("jobs:one_is_late", ranks=2, seats=2, timeout_s=20.0)
    assert stories[0]["losses"] == ["monitored_barrier: ranks [1] did not come within 0.3 s"]


def test_unsupported_call_is_refused_at_once(gangs: Gangs) -> None:
    [story] = gangs.right("jobs:unsupported", ranks=1)
    told = story["losses"][0]
    assert [text.split(":")[0] for text in told] == [
        "the process group 'splice' takes no sparse tensors",
        "the process group 'splice' has no reduction by scaled sum",
        told[2].split(":")[0],
    ]
    assert "splits, merges and profiles no groups" in told[2]
