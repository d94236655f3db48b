"""Quick checks before a search for victims leave out only what the search would not find."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.fairness.fair_tree import Branch
from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from app.core.scheduling.reclaim.preemption import goes_before_some, shared, victims
from app.core.simulation.simulator import Arrival, Costs, World
from tests.thoroughness import examples

POLICY = Policy(
    half_life_s=0, patience_s=1.5, wide_share=0.25, slice_min_s=1, slice_max_s=1, fresh_s=2
)


def unprotected_devices(board: Board) -> Counter[Branch]:
    """Count the devices of the stays that can give way, by top branch."""
    found = Counter[Branch]()
    for stay in board.stays.values():
        if stay.ripe and not stay.leaving and not board.urgency.patience.protected(stay.task):
            found[stay.leaf.top] += len(stay.devices)
    return found


def boards_of_a_replay(dice: random.Random) -> Iterator[Board]:
    """Yield the board after each round of a replay; one device is cordoned from time to time."""
    work = [
        Arrival(
            at_s=dice.uniform(0, 10),
            task=f"k{n:02}",
            tenant=(tenant := dice.choice("abc")),
            user=f"{tenant}{dice.randint(1, 2)}",
            work_s=dice.uniform(0.5, 8),
            width=dice.choice([1, 1, 2, 4]),
        )
        for n in range(25)
    ]
    some = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(5)]
    owners = [BoardTenant(id=id, name=id, weight=1000) for id in "abc"]
    world = World(work, some, owners, POLICY, Costs(image_s=0.1))
    while (at_us := world.next_us()) is not None:
        world.advance(at_us)
        if dice.random() < 0.1:  # patience depends on the number of open devices
            device = world.board.devices["d4"]
            world.board.set_device(replace(device, cordoned=not device.cordoned))
        world.obey(cycle(world.board))
        yield world.board


@settings(max_examples=examples(20))
@given(dice=st.randoms(use_true_random=False))
def test_preemptible_tops_of_any_board_are_those_of_its_unprotected_stays(
    dice: random.Random,
) -> None:
    for board in boards_of_a_replay(dice):
        tree, devices = board.tree, unprotected_devices(board)
        tops = board.preemptible_tops("cpu")
        assert {top for _, top in tops} == devices.keys()
        assert tops == sorted(tops, key=lambda each: each[0], reverse=True)
        for score, top in tops:
            assert score == tree.score(top, kind="cpu")
            beaten = sum(n for other, n in devices.items() if tree.score(other, kind="cpu") > score)
            assert board.better_served("cpu", score, top) == beaten


@settings(max_examples=examples(20))
@given(dice=st.randoms(use_true_random=False))
def test_task_that_goes_before_none_of_its_user_finds_no_victim_there(dice: random.Random) -> None:
    for board in boards_of_a_replay(dice):
        for leaf in [branch for branch in shared(board) if not branch.inner]:
            for here, line in leaf.lines.items():
                task = line.head[5]
                if not goes_before_some(board, leaf, here, task):
                    assert victims(board, task, within=leaf) is None
