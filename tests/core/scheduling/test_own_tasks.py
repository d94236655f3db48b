"""One user's own tasks (rule F8): which of them are fresh, and which of them goes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model.snapshot import BoardDevice, BoardTask, BoardTenant, BoardUser, Policy, Snapshot
from app.core.scheduling.board import Board, waited_longer

NOW_S = 1000.0
SECOND_US = 1_000_000
BEGUN_US, SETTLED_US = 5 * SECOND_US, 90 * SECOND_US

STATES = {
    "new": {"state": "waiting"},
    "paused": {"state": "waiting", "had_us": BEGUN_US, "epoch": 1},
    "settled": {"state": "waiting", "had_us": SETTLED_US, "epoch": 1},
    "held": {"state": "blocked", "had_us": BEGUN_US, "epoch": 1},
    "running": {"state": "running", "epoch": 1, "started_s": NOW_S - 1},
    "ended": {"state": "done"},
}


def task(n: int, **more: object) -> BoardTask:
    device = (f"d{n}",) if more.get("state") == "running" else ()
    request = f"r{n % 2}"
    return BoardTask(
        id=f"t{n}", request=request, tenant="a", user="ann", kind="cpu", seats=device,
        submitted_s=float(n), **{"epoch": 0, **more},
    )  # fmt: skip


def snapshot(*tasks: BoardTask) -> Snapshot:
    return Snapshot(
        island="isle",
        policy=Policy(),
        tenants={"a": BoardTenant(id="a", name="a", weight=1000)},
        users={"ann": BoardUser(id="ann", tenant="a")},
        devices={
            f"d{n}": BoardDevice(id=f"d{n}", host="h", kind="cpu", lease_until_s=NOW_S + 60)
            for n in range(5)
        },
        tasks={one.id: one for one in tasks if one.state != "done"},
    )


def queued_fresh(board: Board) -> dict[str, bool]:
    """Return for each waiting task whether it stands in a queue of fresh tasks."""
    return {id: entry[6].lane.fresh for id, entry in board.tree._where.items()}


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(sorted(STATES))), max_size=30))
def test_freshness_after_changes_is_that_of_a_new_board(moves: list[tuple[int, str]]) -> None:
    tasks = {n: task(n, state="waiting") for n in range(5)}
    board = Board.of(snapshot(*tasks.values()), now_s=NOW_S)
    for n, state in moves:
        tasks[n] = task(n, **STATES[state])
        board.set_task(tasks[n])
        assert queued_fresh(board) == queued_fresh(Board.of(snapshot(*tasks.values()), now_s=NOW_S))


def test_paused_task_of_a_request_is_fresh_again_when_the_other_one_has_ended() -> None:
    paused, running = task(1, **STATES["paused"]), task(3, **STATES["running"])
    board = Board.of(snapshot(paused, running), now_s=NOW_S)
    assert queued_fresh(board) == {"t1": False}
    board.set_task(replace(running, state="done", seats=()))
    assert queued_fresh(board) == {"t1": True}


@pytest.mark.parametrize(
    ("fresh_since_s", "older_since_s", "passes"),
    [(0.0, 990.0, True), (985.0, 990.0, False), (979.0, 990.0, True), (995.0, 990.0, False)],
)
def test_fresh_task_passes_if_it_waited_longer_before_the_pause_than_since(
    fresh_since_s: float, older_since_s: float, passes: bool
) -> None:
    fresh = task(1, state="waiting", waiting_since_s=fresh_since_s)
    older = task(2, **STATES["settled"], waiting_since_s=older_since_s)
    assert waited_longer(fresh, older, NOW_S) is passes
