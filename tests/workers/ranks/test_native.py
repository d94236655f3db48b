"""Ranks over torch's own groups: every call of the feature matrix has stock gloo's bits, also where
the groups are dropped and built anew at random moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.ddp import features
from tests.workers.gangs import Gangs
from tests.workers.ranks.test_process_group import GLOO_LACKS, WARM

RANKS = 3
NAMES = [row.__name__ for row in features.ROWS if row.__name__ not in GLOO_LACKS]


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    host = Gangs(warm=WARM)
    yield host
    host.close()


@pytest.fixture(scope="module")
def by_gloo(gangs: Gangs) -> list[dict[str, Any]]:
    return _rows(gangs.right("features:every", ranks=RANKS, peers=True, params={"names": NAMES}))


def _rows(stories: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each rank, what every row gave."""
    return [story["losses"][0] for story in stories]


def _native(gangs: Gangs, entry: str = "features:every", **more: Any) -> list[dict[str, Any]]:
    return gangs.right(entry, **{"ranks": RANKS, "seats": RANKS, "native": True, **more})


def test_every_call_has_the_bits_of_stock_gloo(gangs: Gangs, by_gloo: list[dict[str, Any]]) -> None:
    ours = _rows(_native(gangs, params={"names": NAMES}))
    for name in NAMES:
        assert [rank[name] for rank in ours] == [rank[name] for rank in by_gloo], name


def test_groups_that_are_dropped_at_random_moments_keep_the_bits(
    gangs: Gangs, by_gloo: list[dict[str, Any]]
) -> None:
    stories = _native(gangs, params={"names": NAMES}, holds=1)
    ours = _rows(stories)
    for name in NAMES:
        assert [rank[name] for rank in ours] == [rank[name] for rank in by_gloo], name
    assert len(stories[0]["held_s"]) > 3
    assert stories[0]["built"] > 3


def test_ranks_go_on_with_messages_when_another_has_left_their_group(gangs: Gangs) -> None:
    stories = _native(gangs, "jobs:others_go_on", holds=2)
    assert _rows(stories) == [198.0, "left", 99.0]
    assert stories[0]["built"] > 1


def test_messages_of_a_monitored_barrier_are_not_received_by_the_script(gangs: Gangs) -> None:
    """Torch's gloo sends them with tags from 0 on, counted anew in each group that it makes."""
    assert _rows(_native(gangs, "jobs:messages_beside_a_barrier"))[0] == [2] * 8


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_forty_runs_of_holds_at_random_moments_are_right(gangs: Gangs, ranks: int) -> None:
    asked = {"ranks": ranks, "params": {"names": NAMES}}
    by_gloo = _rows(gangs.right("features:every", peers=True, **asked))
    for seed in range(100, 140):
        stories = _native(gangs, **asked, seats=ranks, holds=seed)
        assert _rows(stories) == by_gloo, f"holds={seed}"


def test_mismatched_collectives_are_named_by_the_rank_that_comes_last(gangs: Gangs) -> None:
    errors = gangs.errors("jobs:mismatched", ranks=2, seats=2, native=True, timeout_s=10.0)
    named = [error for error in errors if error.startswith("GangFailed: mismatched collectives")]
    assert named
    assert "all_reduce" in named[0]
    assert "broadcast" in named[0]
