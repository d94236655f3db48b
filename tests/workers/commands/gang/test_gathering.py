"""The stub brings ranks with native collectives to their common point before it stores them.

The ranks are played: the test writes into their shared table what they would write.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from app.core.device.common_point import HOLD_WITHIN_S
from tests.workers.commands.test_keeping import stub
from workers.commands import runner
from workers.commands.gang.ranks import Gang
from workers.commands.runner import Stub
from workers.hardware.cuda_checkpoint import TreeMemory
from workers.ranks import shared_memory, turns
from workers.ranks.native import call_counters as of
from workers.ranks.native.call_counters import counts_at
from workers.ranks.turns import RankState

__all__ = ["stub"]  # a fixture


class PlayedRanks:
    """Two ranks of the stub's command, with one group."""

    def __init__(self, stub: Stub) -> None:
        self.gang = stub.gang = Gang.made(2, 2, "native", "cpu", is_stored=True)
        self.arena, self.words = self.gang.board, self.gang.board.words
        self.words[self.arena.group(0) + of.NAME], self.words[self.arena.group(0) + of.SIZE] = 1, 2
        for rank in range(2):
            self.write(rank, turns.STATE, RankState.RUNNING)

    def write(self, rank: int, word: int, value: int) -> None:
        self.words[self.arena.rank(rank) + word] = value

    def call(self, rank: int) -> None:
        """Begin a call of the group."""
        self.words[counts_at(self.arena, 0) + rank] += 1
        self.words[self.arena.rank(rank) + of.CALLS] += 1

    def settle(self) -> None:
        for rank in range(2):
            self.write(rank, of.SETTLED, self.words[self.arena.rank(rank) + of.CALLS])


@pytest.fixture
def ranks(stub, monkeypatch):
    monkeypatch.setattr(runner, "tell_owner", lambda told: None)
    played = PlayedRanks(stub)
    yield played
    shared_memory.close(played.gang.handles)


def test_ranks_run_until_all_have_let_go_of_their_groups(stub, ranks):
    ranks.call(0)
    ranks.settle()
    assert not stub.comes_to_point()
    assert ranks.words[of.HOLD] == 1
    assert ranks.words[ranks.arena.group(0) + of.LIMIT] == 1  # rank 1 may come to the call
    assert not stub.comes_to_point()  # and until then nothing is dropped
    ranks.call(1)
    ranks.settle()
    assert not stub.comes_to_point()
    assert not stub.comes_to_point()
    assert ranks.words[of.DROP] == 1
    ranks.write(0, of.DROPPED, 1)
    assert not stub.comes_to_point()
    ranks.write(1, of.DROPPED, 1)
    assert stub.comes_to_point()
    assert not stub._holds_groups
    stub._leave_point()
    assert ranks.words[of.HOLD] == 0


def test_ranks_that_come_to_no_point_are_frozen_and_the_image_says_who_is_behind(
    stub, ranks, monkeypatch
):
    ranks.call(0)
    assert not stub.comes_to_point()
    later_s = time.monotonic() + HOLD_WITHIN_S
    monkeypatch.setattr(runner.time, "monotonic", lambda: later_s)
    assert stub.comes_to_point()
    assert ranks.words[of.HOLD] == 0  # the order is taken back
    stub.keeping.has_beside = True
    why = stub.processes_to_store()["bound_because"]
    assert why.startswith("its ranks came to no common point within 30 s: Rank 0 waits in ")
    assert "to which rank 1 has not come" in why
    assert not stub.is_in_doubt  # the next image is tried again


def test_ranks_stopped_for_a_lease_hold_their_groups_and_are_not_stored(stub, ranks):
    assert not stub.comes_to_point()
    stub.held.add("trust")
    assert stub.comes_to_point()  # they stand already
    stub.keeping.has_beside = True
    told = stub.processes_to_store()["bound_because"]
    assert told == "its ranks were stopped before they came to a common point"


def test_no_order_is_given_where_nothing_is_stored(stub, ranks):
    stub.start = replace(stub.start, stores_processes=False)
    stub.devices = TreeMemory.found("cpu", may_go_on=lambda: True)
    assert stub.comes_to_point()
    assert ranks.words[of.HOLD] == 0


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1])
def test_image_whose_table_has_no_order_is_refused(stub, ranks, number):
    ranks.words[of.HOLD] = number
    with pytest.raises(ValueError, match=f"their table has order {number}"):
        ranks.gang.gathering.adopt()


def test_ranks_of_an_image_stand_at_the_point_until_they_run(stub, ranks):
    ranks.words[of.HOLD] = ranks.words[of.DROP] = 7
    ranks.gang.gathering.adopt()
    assert not stub._holds_groups
    stub._leave_point()
    assert ranks.words[of.HOLD] == 0
    assert not stub.comes_to_point()
    assert ranks.words[of.HOLD] == 8
