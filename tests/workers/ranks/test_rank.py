"""N ranks on M seats: the same bits for every M, turns that keep apart, squashing without harm.

The tests named after E1 to E9 are the acceptance list of elastic splicing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.thoroughness import in_rotation, rest_long
from tests.workers.gangs import JSON, Gangs, bits
from workers.ranks import turns
from workers.ranks.shared_memory import Arena, close, make

STEPS = 10


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    host = Gangs()
    yield host
    host.close()


@pytest.fixture(scope="module")
def spread(gangs: Gangs) -> dict[int, list[JSON]]:
    """By number of ranks: the undisturbed run, a seat for each."""
    return {
        ranks: gangs.right("jobs:Mlp", ranks=ranks, seats=ranks, steps=STEPS)
        for ranks in (2, 3, 4, 5, 8)
    }


def kinds(story: JSON) -> list[str]:
    return [event["kind"] for event in story["events"]]


# --- the same bits --------------------------------------------------------------------------------


# Ranks and slots.  `make bench` runs the others too.
TRIED = [(2, 1), (3, 2), (4, 2), (5, 4), (8, 3)]
OTHERS = [(3, 1), (4, 1), (4, 3), (5, 1), (5, 2), (5, 3), (8, 1), (8, 5)]


@pytest.mark.parametrize(("ranks", "seats"), rest_long([*TRIED, *OTHERS], keep=len(TRIED)))
def test_any_number_of_slots_gives_the_bits_of_a_slot_per_rank(
    gangs: Gangs, spread: dict[int, list[JSON]], ranks: int, seats: int
) -> None:
    found = gangs.right("jobs:Mlp", ranks=ranks, seats=seats, steps=STEPS)
    assert bits(found) == bits(spread[ranks])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_slots_that_change_at_random_change_no_bit(
    gangs: Gangs, spread: dict[int, list[JSON]], ranks: int
) -> None:
    dice = random.Random(ranks)
    resize = {step: dice.randint(1, ranks) for step in range(2, STEPS + 1) if dice.random() < 0.6}
    found = gangs.right(
        "jobs:Mlp", ranks=ranks, seats=dice.randint(1, ranks), steps=STEPS, resize=resize
    )
    assert bits(found) == bits(spread[ranks])


@pytest.mark.parametrize("job", ["Transformer", "Conv"])
def test_ordinary_training_does_not_depend_on_its_slots(gangs: Gangs, job: str) -> None:
    ways: list[dict[str, Any]] = [
        {"seats": 3},
        {"seats": 1},
        {"seats": 1, "squash": False},
        {"seats": 1, "swap": True},
        {"seats": 2, "resize": {4: 1, 6: 3, 8: 2}, "swap": True},
    ]
    found = [bits(gangs.right(f"jobs:{job}", ranks=3, steps=STEPS, **{**way})) for way in ways]
    assert all(other == found[0] for other in found)


def test_the_size_of_buckets_changes_no_bit(gangs: Gangs, spread: dict[int, list[JSON]]) -> None:
    """Every element is summed along the same tree, whichever bucket it travels in."""
    params = {"bucket_mb": 0.001}
    found = gangs.right("jobs:Mlp", ranks=4, seats=1, steps=STEPS, params=params)
    assert bits(found) == bits(spread[4])


def test_two_ranks_train_to_the_bits_of_gloo(gangs: Gangs, spread: dict[int, list[JSON]]) -> None:
    theirs = gangs.right("jobs:Mlp", ranks=2, steps=STEPS, peers=True)
    assert bits(theirs) == bits(spread[2])


def test_script_without_steps_is_resized_where_all_ranks_meet(gangs: Gangs) -> None:
    params = {"names": ["rank_dependent_flow", "metrics_by_hand"]}
    plain = gangs.right("features:every", ranks=3, seats=3, params=params)
    moved = gangs.right("features:every", ranks=3, seats=3, params=params, resize={0: 1})
    assert bits(moved) == bits(plain)
    assert [story["log"][-1]["seat"] for story in moved] == [0, 0, 0]


@pytest.mark.parametrize(
    ("before", "after", "step"), in_rotation([(1, 3), (1, 2), (2, 1), (3, 1)], range(2, 6))
)
def test_script_is_resized_within_a_step_too(
    gangs: Gangs, before: int, after: int, step: int
) -> None:
    """Also in the very meeting in which its ranks come to share what is equal."""
    plain = gangs.right("scripts:wishing", ranks=3, seats=3)
    for rank in range(3):
        params = {"wishes": {f"{step}:{rank}": after, f"{step + 2}:0": before}}
        moved = gangs.right("scripts:wishing", ranks=3, seats=before, params=params)
        assert bits(moved) == bits(plain)


# --- other seats, and a cut at the same time ---


def wander(gangs: Gangs, folder: Path, seed: int, *, steps: int, together: bool) -> list[JSON]:
    """What each rank saw while another process wished for seats and called to cuts."""
    dice = random.Random(seed)
    ranks = dice.choice([2, 3, 4, 5])
    return gangs.right(
        "tests.workers.cuts:wander",
        ranks=ranks,
        seats=dice.randint(1, ranks),
        slice_s=dice.choice([0.0, 1.0]),
        params={
            "notes": str(folder / "notes"),
            "seed": seed,
            "steps": steps,
            "together": together,
        },
    )


@pytest.mark.parametrize("seed", rest_long(range(1, 100)))
def test_cuts_and_resizes_in_any_order_change_no_bit(
    gangs: Gangs, tmp_path: Path, seed: int
) -> None:
    """All ranks stand at the same cuts, and train to the bits of the undisturbed run."""
    found = [story["losses"][0] for story in wander(gangs, tmp_path, seed, steps=20, together=True)]
    ranks = len(found)
    assert found[0]["cuts"]
    assert all(told["cuts"] == found[0]["cuts"] for told in found)
    alone = gangs.right("jobs:Mlp", ranks=ranks, seats=ranks, steps=20)
    want = [(story["hash"], [told["loss"] for told in story["losses"]]) for story in alone]
    assert [(told["hash"], told["losses"]) for told in found] == want


@pytest.mark.parametrize("seed", rest_long(range(1, 100)))
def test_independent_ranks_stop_at_the_same_cuts(gangs: Gangs, tmp_path: Path, seed: int) -> None:
    """Thousands of steps without a collective: nothing but the boundaries keeps them together."""
    stories = wander(gangs, tmp_path, seed, steps=4000, together=False)
    cuts = [story["losses"][0]["cuts"] for story in stories]
    assert all(other == cuts[0] for other in cuts)


# --- seats and turns ------------------------------------------------------------------------------


def test_neighbouring_ranks_share_a_slot_when_slots_do_not_divide_ranks() -> None:
    assert [turns.seat_of(rank, 5, 3) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert [turns.seat_of(rank, 8, 3) for rank in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [turns.seat_of(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]


def test_impossible_number_of_slots_is_refused() -> None:
    handles = make(2)
    for seats in (0, 3):
        with pytest.raises(ValueError, match="2 ranks take 1 to 2 seats"):
            turns.wish(Arena(handles), seats)
    close(handles)


def test_e01_turn_is_logged_with_its_slot_and_no_two_ranks_of_a_slot_run_at_once(
    gangs: Gangs,
) -> None:
    found = gangs.right("jobs:Mlp", ranks=5, seats=3, steps=STEPS, resize={4: 1, 7: 2})
    by_seat: dict[int, list[tuple[int, int]]] = {}
    for story in found:
        for turn in story["log"]:
            by_seat.setdefault(turn["seat"], []).append((turn["begun_ns"], turn["ended_ns"]))
    assert set(by_seat) == {0, 1, 2}
    assert len(by_seat[0]) > STEPS
    for intervals in by_seat.values():
        intervals.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(intervals))


def test_e02_turn_ends_where_the_rank_would_block(gangs: Gangs) -> None:
    """Per step a rank waits for the others' gradients, and for their agreement to the update."""
    found = gangs.right("jobs:Mlp", ranks=3, seats=1, steps=20, slice_s=60.0)
    for story in found:
        assert {turn["ended_by"] for turn in story["log"]} <= {"wait", "end"}
        assert len(story["log"]) <= 2 * 20 + 10  # and some at the start


def test_turn_ends_with_its_slice_between_two_steps(gangs: Gangs) -> None:
    """Ranks that need each other for nothing take turns all the same."""
    found = gangs.right("jobs:Alone", ranks=2, seats=1, steps=6, slice_s=0.0)
    for story in found:
        assert [turn["ended_by"] for turn in story["log"]].count("slice") >= 4


def test_rank_that_sleeps_outside_our_calls_loses_its_slot(gangs: Gangs, tmp_path: Path) -> None:
    found = gangs.right("jobs:waits_outside", ranks=2, seats=1, params={"folder": str(tmp_path)})
    assert [story["losses"] for story in found] == [[["hello", 2.0]]] * 2


def test_e03_e04_device_memory_is_moved_to_the_host_and_comes_back_in_place(gangs: Gangs) -> None:
    """Bits and identities hold (the job keeps views); every byte that left came back."""
    moved = gangs.right("jobs:Views", ranks=2, seats=1, steps=STEPS, squash=False, swap=True)
    still = gangs.right("jobs:Views", ranks=2, seats=2, steps=STEPS)
    assert bits(moved) == bits(still)
    for story in moved:
        # 64*32 + 64 + 8*64 + 8 weights, as parameters and two moments, and 128 KB of its own
        assert story["largest_bytes"] >= 3 * 4 * (64 * 32 + 8 * 64) + 128 * 1024
        assert story["out_bytes"] == story["in_bytes"] > STEPS / 3 * story["largest_bytes"]


ORDERS_AND_PAIRS = [  # the order of calls; the first to call, and the first that differs from it
    ((0, 1, 2), (0, 1)),
    ((0, 2, 1), (0, 1)),
    ((1, 0, 2), (1, 0)),
    ((1, 2, 0), (1, 2)),
    ((2, 0, 1), (2, 1)),
    ((2, 1, 0), (2, 1)),
]


def mismatch(first: int, other: int) -> str:
    """How ranks end where rank 1 calls a broadcast and the others sum."""
    sums, sends = "all_reduce(sum, float32[4])", "broadcast(from 0, float32[3])"
    calls = [f"rank {rank} called {sends if rank == 1 else sums}" for rank in (first, other)]
    told = "GangFailed: mismatched collectives: as call 1 of group 'c10d.0'"
    return f"{told} {calls[0]}, {calls[1]}"


@pytest.mark.parametrize(("order", "pair"), ORDERS_AND_PAIRS)
def test_e05_e06_mismatched_calls_in_a_known_order_name_the_first_two_that_differ(
    gangs: Gangs, order: tuple[int, ...], pair: tuple[int, int]
) -> None:
    params = {"order": list(order)}
    errors = gangs.errors("jobs:mismatched", ranks=3, seats=1, params=params)
    assert errors == [mismatch(*pair)] * 3


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_e05_e06_mismatched_calls_in_any_order_tell_all_ranks_of_one_such_pair(
    gangs: Gangs, seats: int
) -> None:
    """The ranks begin in the order in which their processes come."""
    errors = gangs.errors("jobs:mismatched", ranks=3, seats=seats)
    assert errors[0] in {mismatch(*pair) for _, pair in ORDERS_AND_PAIRS}
    assert errors == [errors[0]] * 3


def test_e07_e08_sums_are_made_only_when_the_last_rank_has_come(gangs: Gangs) -> None:
    """A handle is not completed, nor its tensor changed, while a rank of the seat has not run."""
    found = gangs.right("jobs:watches_its_handle", ranks=3, seats=1)
    seen = [story["losses"][0] for story in found]
    assert sorted(s["completed at once"] for s in seen) == [False, False, True]
    assert all(s["before"] == [rank] for rank, s in enumerate(seen) if not s["completed at once"])
    assert [s["after"] for s in seen] == [[3.0]] * 3


# --- squashing (E9) -------------------------------------------------------------------------------


def test_e09_equal_state_is_kept_once_and_updated_once(
    gangs: Gangs, spread: dict[int, list[JSON]]
) -> None:
    found = gangs.right("jobs:Mlp", ranks=4, seats=1, steps=STEPS)
    assert bits(found) == bits(spread[4])
    # Two steps are watched; in each of the others one rank updates and three are spared.
    assert sum(story["updates"] for story in found) == STEPS - 2
    assert sum(story["spared"] for story in found) == 3 * (STEPS - 2)
    weights = 64 * 32 + 64 + 8 * 64 + 8
    assert all(s["common_bytes"] == 4 * (3 * weights + 4) for s in found)  # and 4 step counts
    assert all(kinds(story) == ["squashed"] for story in found)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop", "NAdam", "RAdam", "Adagrad"])
def test_optimizers_of_torch_keep_equal_state_once(gangs: Gangs, optimizer: str) -> None:
    params = {"optimizer": optimizer}
    found, spread = (
        gangs.right("jobs:Mlp", ranks=3, seats=seats, steps=8, params=params) for seats in (1, 3)
    )
    assert bits(found) == bits(spread)
    assert all(kinds(story) == ["squashed"] for story in found)


@pytest.mark.parametrize("seed", rest_long(range(100)))
def test_parameter_changed_by_one_rank_is_found_at_its_next_step(gangs: Gangs, seed: int) -> None:
    """The seeded violation: 1e-7 added to one element, on one rank, once."""
    dice = random.Random(seed)
    ranks = dice.choice([2, 3, 4])
    spoil = {
        "rank": dice.randrange(ranks),
        "step": dice.randint(3, STEPS - 1),
        "at": dice.randrange(2048),
    }
    gang: JSON = {"ranks": ranks, "steps": STEPS, "params": {"spoil": spoil}}
    found = gangs.right("jobs:Mlp", seats=1, **gang)
    assert bits(found) == bits(gangs.right("jobs:Mlp", seats=ranks, **gang))
    told = f"rank {spoil['rank']}: parameter 0.weight was changed outside the optimizer's step"
    for story in found:
        violation = story["events"][1]
        assert violation["kind"] == "violation"
        assert violation["step"] == spoil["step"] + 1
        assert violation["what"] == told


def test_a_change_to_optimizer_state_is_found_and_named(gangs: Gangs) -> None:
    gang: JSON = {"ranks": 2, "steps": STEPS, "params": {"kind": "state by hand"}}
    found = gangs.right("jobs:OwnOptimizer", seats=1, **gang)
    assert bits(found) == bits(gangs.right("jobs:OwnOptimizer", seats=2, **gang))
    assert "rank 0: exp_avg of 0.weight was changed" in found[1]["events"][1]["what"]


def test_update_that_depends_on_the_rank_is_found(gangs: Gangs) -> None:
    gang: JSON = {"ranks": 3, "steps": STEPS, "params": {"kind": "other rate"}}
    found = gangs.right("jobs:OwnOptimizer", seats=1, **gang)
    assert bits(found) == bits(gangs.right("jobs:OwnOptimizer", seats=3, **gang))
    violation = found[0]["events"][1]
    assert violation["step"] == 6
    assert "its optimizer has other hyper-parameters" in violation["what"]


@pytest.mark.parametrize("swap", [False, True])
def test_gradient_that_differs_on_one_rank_is_found(gangs: Gangs, swap: bool) -> None:
    """Changed after DDP had summed it: by a digest, or where memory is moved by comparing."""
    gang: JSON = {"ranks": 3, "steps": STEPS, "params": {"kind": "other gradient"}}
    found = gangs.right("jobs:OwnOptimizer", seats=1, swap=swap, **gang)
    assert bits(found) == bits(gangs.right("jobs:OwnOptimizer", seats=3, **gang))
    violation = found[0]["events"][1]
    assert (violation["kind"], violation["step"]) == ("violation", 6)
    assert "differ" in violation["what"]


def test_parameters_changed_by_hand_on_every_rank_keep_their_bits(gangs: Gangs) -> None:
    gang: JSON = {"ranks": 3, "steps": STEPS, "params": {"kind": "decay by hand"}}
    found = gangs.right("jobs:OwnOptimizer", seats=1, **gang)
    assert bits(found) == bits(gangs.right("jobs:OwnOptimizer", seats=3, **gang))
    assert "violation" in kinds(found[0])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Counting", "its step changes more than tensors"),
        ("Noisy", "its step draws random numbers or calls collectives"),
        ("LBFGS", "its step takes a closure"),
    ],
)
def test_optimizer_that_does_more_than_change_tensors_is_left_alone(
    gangs: Gangs, kind: str, why: str
) -> None:
    gang: JSON = {"ranks": 2, "steps": 6, "params": {"kind": kind}}
    found = gangs.right("jobs:OwnOptimizer", seats=1, **gang)
    assert bits(found) == bits(gangs.right("jobs:OwnOptimizer", seats=2, **gang))
    assert [(e["kind"], e["what"]) for e in found[0]["events"]] == [("not squashed", why)]


def test_parameters_viewed_by_other_tensors_are_not_moved(gangs: Gangs) -> None:
    """The job checks its view against the parameter at every step."""
    found = gangs.right("jobs:Views", ranks=2, seats=1, steps=STEPS)
    assert bits(found) == bits(gangs.right("jobs:Views", ranks=2, seats=2, steps=STEPS))
    assert kinds(found[0]) == ["not shared"]
    assert "other tensors look into the memory of its optimizer" in found[0]["events"][0]["what"]


def test_view_of_common_memory_outlives_it(gangs: Gangs) -> None:
    """Made at step 5, checked ever after: through a violation, and a change of seats."""
    gang: JSON = {"ranks": 2, "steps": STEPS, "resize": {9: 2}}
    gang["params"] = {"view_at": 5, "spoil": {"rank": 1, "step": 6}}
    found = gangs.right("jobs:Views", seats=1, **gang)
    assert bits(found) == bits(gangs.right("jobs:Views", seats=2, **gang))
    assert kinds(found[0])[:2] == ["squashed", "violation"]


def test_common_step_that_one_rank_never_reaches_is_given_up(gangs: Gangs) -> None:
    gang: JSON = {"ranks": 3, "steps": STEPS}
    found = gangs.right("jobs:TwoOptimizers", seats=1, **gang)
    assert bits(found) == bits(gangs.right("jobs:TwoOptimizers", seats=3, **gang))
    assert "given up" in kinds(found[0])


def test_equal_state_is_shared_again_after_the_slots_changed(gangs: Gangs) -> None:
    found = gangs.right("jobs:Mlp", ranks=4, seats=2, steps=STEPS, resize={6: 1})
    for story in found:
        assert [e["step"] for e in story["events"] if e["kind"] == "squashed"] == [3, 6]
        assert "violation" not in kinds(story)


def test_rank_with_a_slot_of_its_own_shares_no_state(gangs: Gangs) -> None:
    found = gangs.right("jobs:Mlp", ranks=3, seats=2, steps=STEPS, resize={6: 3})
    assert kinds(found[2]) == []
    assert all(story["common_bytes"] == 0 for story in found)
