"""The table of a stay's states is closed, reaches every state, and ends every stay."""

from __future__ import annotations

import pytest

from app.core.device.stay_state import (
    OVER,
    STAY_MOVES,
    IllegalStayMove,
    StayMove,
    StayState,
    state_after,
    stay_table,
)


def reachable(start: str) -> set[str]:
    found, todo = {start}, [start]
    while todo:
        for to in STAY_MOVES[todo.pop()].values():
            if to not in found:
                found.add(to)
                todo.append(to)
    return found


def test_the_table_names_every_state_and_every_move_and_no_other() -> None:
    assert set(STAY_MOVES) == set(StayState)
    assert {move for moves in STAY_MOVES.values() for move in moves} == set(StayMove)
    assert {to for moves in STAY_MOVES.values() for to in moves.values()} <= set(StayState)


def test_every_state_is_reached_from_seating() -> None:
    assert reachable("seating") == set(StayState)


@pytest.mark.parametrize("state", StayState)
def test_a_stay_can_be_over_from_every_state(state: StayState) -> None:
    assert reachable(state) & OVER


@pytest.mark.parametrize("state", sorted(OVER))
def test_a_stay_that_is_over_never_changes(state: StayState) -> None:
    assert STAY_MOVES[state] == {}


def test_a_move_that_the_table_lacks_names_state_move_and_what_was_expected() -> None:
    assert state_after(StayState.SEATING, StayMove.BEGIN) == "running"
    with pytest.raises(IllegalStayMove, match="a stay is ended, got begin, expected nothing more"):
        state_after(StayState.ENDED, StayMove.BEGIN)


def test_the_printed_table_has_a_row_for_each_state() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in stay_table().splitlines()]
    assert rows == ["state", "---", *StayState]
