"""The rank that is behind is named when the gang stands still, and at no other time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.device.gang_watch import (
    JOIN_S,
    PATIENCE_S,
    GangWatch,
    RankIs,
    RankStanding,
    who_is_behind,
)
from app.core.model.protocol.wellformed import SENTENCE_MOST

CALL = "all_reduce(sum, [4] of torch.float32), call 51 of group 'default'"
OWN = "runs code of its own."
TWO = f"Ranks 0 and 1 wait in {CALL}"
ONE = f"Rank 0 waits in {CALL}, to which"


def gang(picture, *, lacks=(), text=CALL, mark=0):
    """Ranks from a picture: w waits in the call, r runs, e has ended, a is away, n is new, q is
    ready, o is on another host.
    """
    does = {
        each.name[0]: each for each in RankIs if each != RankIs.ready and each != RankIs.elsewhere
    }
    does |= {"q": RankIs.ready, "o": RankIs.elsewhere}
    told = {RankIs.waits: text, RankIs.away: "time.sleep"}
    return [
        RankStanding(
            rank=rank,
            does=does[letter],
            text=told.get(does[letter], ""),
            lacks=tuple(lacks) if does[letter] == RankIs.waits else (),
            mark=(mark, rank),
        )
        for rank, letter in enumerate(picture)
    ]


@pytest.mark.parametrize(
    ("picture", "lacks", "sentence"),
    [
        ("wwr", [2], f"{TWO}, to which rank 2 has not come: rank 2 {OWN}"),
        ("wr", [1], f"{ONE} rank 1 has not come: rank 1 {OWN}"),
        ("wer", [1, 2], f"{ONE} ranks 1 and 2 have not come: rank 1 has ended, rank 2 {OWN}"),
        ("wa", [1], f"{ONE} rank 1 has not come: rank 1 is away (time.sleep)."),
        ("wn", [1], f"{ONE} rank 1 has not come: rank 1 has not joined the gang."),
        ("wo", [1], f"{ONE} rank 1 has not come: rank 1 is on another host."),
        ("wrq", [1, 2], f"{ONE} rank 1 has not come: rank 1 {OWN}"),
        ("wwr", [], f"{TWO}, and rank 2 {OWN}"),
        ("qqr", [], f"Ranks 0 and 1 wait for a slot, and rank 2 {OWN}"),
        ("rrr", [], ""),
        ("wwq", [], ""),
        ("eee", [], ""),
    ],
)  # fmt: skip
def test_sentence_names_the_rank_that_the_others_wait_for(picture, lacks, sentence):
    assert who_is_behind(gang(picture, lacks=lacks)) == sentence


def test_rank_that_waits_itself_is_not_the_one_behind():
    """Rank 0 waits for 1, which waits for 2, which computes."""
    first, second, third = gang("wwr", lacks=[1])
    second = RankStanding(rank=1, does=RankIs.waits, text="recv(2 to 1)", lacks=(2,), mark=(0, 1))
    told = who_is_behind([first, second, third])
    assert told == f"Rank 1 waits in recv(2 to 1), to which rank 2 has not come: rank 2 {OWN}"


def test_nothing_is_told_before_the_gang_has_stood_for_a_second():
    watch, stands = GangWatch(), gang("wr", lacks=[1])
    assert watch.news(stands, 10.0) is None
    assert watch.news(stands, 10.0 + PATIENCE_S - 0.01) is None
    assert "rank 1 runs" in watch.news(stands, 10.0 + PATIENCE_S)


def test_sentence_is_told_once_and_taken_back_when_a_rank_moves():
    watch, stands = GangWatch(), gang("wr", lacks=[1])
    watch.news(stands, 0.0)
    assert watch.news(stands, 1.5)
    assert watch.news(stands, 2.0) is None
    assert watch.news(gang("rr", mark=1), 2.5) == ""
    assert watch.news(gang("rr", mark=1), 9.0) is None  # nobody waits


def test_gang_of_long_steps_is_given_the_time_that_it_usually_takes():
    watch, now_s = GangWatch(), 0.0
    for step in range(5):
        for _ in range(20):  # ten seconds each
            watch.news(gang("wr", lacks=[1], mark=step), now_s)
            now_s += 0.5
    told = [watch.news(gang("wr", lacks=[1], mark=9), now_s + n / 2) for n in range(60)]
    first = next(n for n, who in enumerate(told) if who)
    assert 19.0 <= first / 2 <= 21.0


def test_gang_that_imports_is_given_longer_and_learns_nothing_from_it():
    watch = GangWatch()
    assert watch.news(gang("nn", lacks=[1], mark=1), 0.0) is None
    assert watch.news(gang("wn", lacks=[1], mark=2), 20.0) is None
    assert watch.news(gang("wn", lacks=[1], mark=2), 20.0 + JOIN_S - 0.1) is None
    assert "has not joined" in watch.news(gang("wn", lacks=[1], mark=2), 20.0 + JOIN_S)
    assert watch.news(gang("wr", lacks=[1], mark=3), 60.0) == ""
    assert "rank 1 runs" in watch.news(gang("wr", lacks=[1], mark=3), 60.0 + PATIENCE_S)


def test_gang_that_stands_by_order_is_not_watched():
    watch, stands = GangWatch(), gang("wr", lacks=[1])
    watch.news(stands, 0.0)
    assert watch.news(stands, 2.0)
    assert watch.news(None, 3.0) == ""
    assert watch.news(stands, 3600.0) is None  # the hour does not count as a usual pause
    assert watch.news(stands, 3601.5)


@given(
    st.lists(
        st.builds(
            RankStanding,
            rank=st.integers(0, 2**62),
            does=st.sampled_from(RankIs),
            text=st.text(max_size=256),
            lacks=st.lists(st.integers(-(2**62), 2**62), max_size=40).map(tuple),
        ),
        max_size=40,
    )
)
def test_whatever_a_hostile_gang_writes_gives_a_sentence_of_bounded_length(standings):
    assert len(who_is_behind(standings)) < 6 * SENTENCE_MOST + 20 * 300
