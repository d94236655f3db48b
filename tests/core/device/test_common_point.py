"""The common point of a gang: programs of ranks, played call by call, against a plain closure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.device.common_point import (
    DROP_WITHIN_S,
    HOLD_WITHIN_S,
    CommonPoint,
    GangCounters,
    PointStage,
    RankCounters,
    is_at_rest,
    limits,
)


@dataclass
class PlayedGang:
    """Ranks that make their calls one by one; each call is a group, with its members."""

    members: list[tuple[int, ...]]  # of each group
    programs: list[list[int]]  # of each rank: the groups of its calls, in its order
    made: list[int] = field(default_factory=list)  # calls that each rank has begun
    inside: int | None = None  # the rank that is between raising `inside` and its call

    def __post_init__(self) -> None:
        self.made = [0] * len(self.programs)

    def begun(self, rank: int, group: int) -> int:
        return self.programs[rank][: self.made[rank]].count(group)

    def is_blocked(self, rank: int) -> bool:
        """True if the last call of the rank waits for a member that has not made it."""
        if not self.made[rank]:
            return False
        group = self.programs[rank][self.made[rank] - 1]
        number = self.begun(rank, group)
        return any(self.begun(other, group) < number for other in self.members[group])

    def counters(self) -> GangCounters:
        ranks = []
        for rank, made in enumerate(self.made):
            settled = made if not self.is_blocked(rank) else 0
            inside = int(self.inside == rank)
            ranks.append(RankCounters(inside=inside, calls=made, settled=settled))
        groups = {
            group: tuple(self.begun(rank, group) for rank in members)
            for group, members in enumerate(self.members)
        }
        return GangCounters(ranks=ranks, groups=groups)

    def may_pass(self, rank: int, most: dict[int, int]) -> bool:
        return any(
            self.begun(rank, group) < most[group]
            for group, members in enumerate(self.members)
            if rank in members
        )

    def can_move(self, rank: int) -> bool:
        return self.made[rank] < len(self.programs[rank]) and not self.is_blocked(rank)


@st.composite
def gangs(draw: st.DrawFn) -> PlayedGang:
    """Draw a gang whose programs can run to their end: all ranks follow one list of calls."""
    ranks = draw(st.integers(2, 8))
    groups = st.sets(st.integers(0, ranks - 1), min_size=2).map(lambda s: tuple(sorted(s)))
    members = draw(st.lists(groups, min_size=1, max_size=6))
    calls = draw(st.lists(st.integers(0, len(members) - 1), max_size=30))
    programs = [[call for call in calls if rank in members[call]] for rank in range(ranks)]
    return PlayedGang(members, programs)


def causes(gang: PlayedGang) -> list[int]:
    """Return how many calls each rank must make so that all that have begun come to their end.

    Written as a plain closure over whole programs, and not over counters.
    """
    need = [*gang.made]
    grew = True
    while grew:
        grew = False
        for group, members in enumerate(gang.members):
            most = max(gang.programs[r][: need[r]].count(group) for r in members)
            for rank in members:
                while gang.programs[rank][: need[rank]].count(group) < most:
                    need[rank] += 1
                    grew = True
    return need


@given(gangs(), st.integers(0, 2**32))
@settings(max_examples=300)
def test_exactly_the_causes_of_begun_calls_are_made(gang: PlayedGang, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(chance.randrange(40)):  # it runs, with ranks at different places
        moving = [rank for rank in range(len(gang.programs)) if gang.can_move(rank)]
        if moving:
            gang.made[chance.choice(moving)] += 1
    needed = causes(gang)
    while True:
        most = limits(gang.counters())
        passing = [
            rank
            for rank in range(len(gang.programs))
            if gang.can_move(rank) and gang.may_pass(rank, most)
        ]
        if not passing:
            break
        assert not is_at_rest(gang.counters())
        rank = chance.choice(passing)
        gang.made[rank] += 1
        assert gang.made[rank] <= needed[rank], "a rank went further than a cause"
    assert gang.made == needed
    assert is_at_rest(gang.counters())


def test_rank_about_to_call_keeps_the_gang_from_rest() -> None:
    gang = PlayedGang([(0, 1)], [[0], [0]], inside=1)
    assert not is_at_rest(gang.counters())
    gang.inside = None
    assert is_at_rest(gang.counters())


def test_receive_from_any_rank_keeps_the_gang_from_rest() -> None:
    waits = RankCounters(open_receives=1)
    assert not is_at_rest(GangCounters(ranks=[waits, RankCounters()]))


# --- the order ------------------------------------------------------------------------------------

REST = GangCounters(ranks=[RankCounters(calls=3, settled=3)] * 2, groups={0: (3, 3)})
BUSY = GangCounters(ranks=[RankCounters(calls=3, settled=2)] * 2, groups={0: (3, 3)})


def dropped(order: int, built: int = 0) -> GangCounters:
    rank = RankCounters(calls=3, settled=3, dropped=order, built=built)
    return GangCounters(ranks=[rank] * 2, groups={0: (3, 3)}, let_go=order)


def test_counters_are_true_only_if_two_readings_agree() -> None:
    point = CommonPoint()
    point.order(0.0)
    assert point.look(REST, 0.0) == PointStage.holding
    assert point.look(BUSY, 0.0) == PointStage.holding
    assert point.look(REST, 0.0) == PointStage.holding
    assert point.look(REST, 0.0) == PointStage.dropping


def test_order_is_over_when_all_have_let_go_and_the_next_waits_until_all_have_built() -> None:
    point = CommonPoint()
    point.order(0.0)
    stages = [point.look(counters, 0.0) for counters in (REST, REST, dropped(0), dropped(1))]
    assert stages == ["holding", "dropping", "dropping", "dropped"]
    assert point.is_settled
    point.end()
    point.order(1.0)
    assert point.number == 2
    assert [point.look(dropped(1), 1.0) for _ in range(2)] == ["holding", "holding"]
    assert point.look(dropped(1, built=1), 1.0) == "holding"
    assert point.look(dropped(1, built=1), 1.0) == "dropping"


def test_order_is_taken_back_when_its_time_is_over() -> None:
    point = CommonPoint()
    point.order(5.0)
    assert point.look(BUSY, 5.0 + HOLD_WITHIN_S - 0.01) == PointStage.holding
    assert point.look(BUSY, 5.0 + HOLD_WITHIN_S) == PointStage.taken_back
    assert point.look(REST, 100.0) == PointStage.taken_back
    point.order(100.0)  # it lasts until the tree runs again
    assert point.stage == PointStage.taken_back


def test_ranks_that_do_not_let_go_are_not_waited_for_ever() -> None:
    point = CommonPoint()
    point.order(0.0)
    point.look(REST, 0.0)
    assert point.look(REST, 1.0) == PointStage.dropping
    assert point.look(dropped(0), 1.0 + DROP_WITHIN_S) == PointStage.taken_back


def test_rank_that_has_ended_is_not_waited_for() -> None:
    ended = RankCounters(calls=2, settled=1, inside=1, is_over=True)
    rests = RankCounters(calls=2, settled=2)
    assert is_at_rest(GangCounters(ranks=[ended, rests], groups={0: (2, 2)}))
