"""The table of a task's life is closed, every state can be reached, and every state can end."""

from __future__ import annotations

import pytest

from app.core.model.lifecycle import (
    ENDED,
    LIFE,
    NOT_STARTED,
    ON_A_DEVICE,
    IllegalMove,
    Move,
    State,
    after,
    request_state,
    table,
)


def reachable(start: str) -> set[str]:
    found = {start}
    todo = [start]
    while todo:
        for to in (to for move, to in LIFE[todo.pop()].items() if move != "Again"):
            if to not in found:
                found.add(to)
                todo.append(to)
    return found


def test_the_table_names_every_state_and_only_known_moves() -> None:
    assert set(LIFE) == set(State)
    for moves in LIFE.values():
        assert set(moves) <= set(Move)
        assert set(moves.values()) <= set(State)


def test_every_move_is_known_to_some_state() -> None:
    assert {move for moves in LIFE.values() for move in moves} == set(Move)


def test_every_state_is_reached_from_blocked() -> None:
    assert reachable("blocked") == set(State)


@pytest.mark.parametrize("state", State)
def test_every_state_can_end(state: State) -> None:
    assert reachable(state) & ENDED


def test_every_state_is_in_exactly_one_group() -> None:
    sorts = [ENDED, ON_A_DEVICE, NOT_STARTED]
    assert sum(len(sort) for sort in sorts) == len(State)
    assert set().union(*sorts) == set(State)


def test_ended_task_stays_ended_until_a_user_starts_it_again() -> None:
    assert all(LIFE[state] == {"Again": "blocked"} for state in ENDED)


@pytest.mark.parametrize("state", sorted(ON_A_DEVICE))
def test_task_on_a_device_can_always_be_lost_finished_or_failed(state: str) -> None:
    assert {"Lost", "Finished", "Failed", "GaveUp"} <= set(LIFE[state])


def test_a_cancelled_task_never_goes_back_to_the_queue() -> None:
    assert reachable("stopping") == {"stopping", "done", "cancelled"}


def test_only_a_launch_brings_a_task_onto_a_device() -> None:
    entering = {
        move for state in NOT_STARTED for move, to in LIFE[state].items() if to in ON_A_DEVICE
    }
    assert entering == {"Launch"}


def test_illegal_move_says_what_was_expected() -> None:
    with pytest.raises(IllegalMove, match="task t is waiting, got Pause, expected Locked, Launch"):
        after("t", "waiting", "Pause")
    with pytest.raises(IllegalMove, match="expected Again"):
        after("t", "done", "Lost")


@pytest.mark.parametrize(
    ("states", "started", "expected"),
    [
        ("blocked waiting", False, "queued"),
        ("blocked waiting", True, "running"),  # paused, but it has run
        ("waiting starting", False, "running"),
        ("done waiting", True, "running"),
        ("done done", True, "done"),
        ("done cancelled", True, "cancelled"),
        ("failed cancelled done", True, "failed"),
        ("failed waiting", True, "running"),  # the others still go on
    ],
)
def test_state_of_a_request_follows_from_its_tasks(
    states: str, started: bool, expected: str
) -> None:
    assert request_state(states.split(), started=started) == expected


def test_the_printed_table_has_a_row_for_each_state() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + len(State)
    assert all(row.count("|") == len(Move) + 2 for row in rows)
