"""Defines the states of a stay (one epoch of a task on a device) and the moves between them.

`seating` lasts from the Launch until the task has the slot for the first time. A `running` task has
the slot or waits for its next slice. A `noticed` task has the slot and was told that it will be
stopped soon. A `pausing` or `stopping` task was told to do so and has not reached its safe point. A
`paused` task has a process that holds its state. A stay that `ended` has reported its end. A stay
that was `dropped` reports nothing, as the island notices that it is gone.

`python -m app.core.device.stay_state` prints the table, for docs/internals/architecture.md.
"""

from __future__ import annotations

from enum import StrEnum


class StayState(StrEnum):
    SEATING = "seating"
    RUNNING = "running"
    NOTICED = "noticed"
    PAUSING = "pausing"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"
    DROPPED = "dropped"


class StayMove(StrEnum):
    """Names a change of a stay's state: ordered, reported by the process, or decided by the
    device.
    """

    BEGIN = "begin"  # the task gets the slot for the first time
    NOTICE = "notice"  # a command is told that it will be stopped
    PAUSE = "pause"
    PAUSED = "paused"  # the process reached its safe point, or had nothing to finish
    CONTINUE = "continue"  # the next epoch goes on in the same process
    CANCEL = "cancel"
    END = "end"  # the stay's last event is reported
    DROP = "drop"


_MAY_END = {"cancel": "stopping", "end": "ended", "drop": "dropped"}

STAY_MOVES: dict[str, dict[str, str]] = {
    "seating": {"begin": "running", "pause": "pausing", **_MAY_END},
    "running": {"notice": "noticed", "pause": "pausing", "paused": "paused", **_MAY_END},
    "noticed": {"pause": "pausing", **_MAY_END},
    "pausing": {"paused": "paused", **_MAY_END},
    "paused": {"continue": "ended", **_MAY_END},
    "stopping": _MAY_END,
    "ended": {},
    "dropped": {},
}

#: States in which the task runs, or waits only for its next slice.
ACTIVE = frozenset({StayState.RUNNING, StayState.NOTICED})
#: States in which the stay is over; a process may still be dying.
OVER = frozenset({StayState.ENDED, StayState.DROPPED})


class IllegalStayMove(Exception):
    """Raised if the stay's state does not allow the move, which is a fault of the state machine."""


def state_after(state: StayState, move: StayMove) -> StayState:
    """Return the state to which `move` leads; raises IllegalStayMove if the table has no such
    move.
    """
    if move not in STAY_MOVES[state]:
        expected = ", ".join(STAY_MOVES[state]) or "nothing more"
        raise IllegalStayMove(f"a stay is {state}, got {move}, expected {expected}")
    return StayState(STAY_MOVES[state][move])


def stay_table() -> str:
    """Return the table of states and moves as Markdown: rows are states, columns are moves."""
    rows = [["state", *StayMove], ["---"] * (len(StayMove) + 1)]
    rows += [[s, *(STAY_MOVES[s].get(move, "·") for move in StayMove)] for s in StayState]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    import sys

    sys.stdout.write(stay_table() + "\n")
