"""Defines the states of a task and the moves between them: "a STATE task that sees MOVE becomes
...".

Two rules hold. A state changes only by a move in this table, and only `app.scheduling.journal`
applies moves. A paused task is a *waiting* task with an image, so there is one queue with one rule.
A migration is a pause on one device and a launch on another, so there is no state for it.

`blocked` means that a start condition does not hold: an input is missing, `after` has not ended,
`not_before` lies ahead, or the task is held. `Locked` takes a waiting task back there when its
owner holds it. `starting` begins when the island commits a Launch, which raises the task's epoch by
one. `running` begins when the device reports it, and continues while the task takes turns with
other tasks on a device (`Share`), and when its cost changes (`Charge`). In `stopping` the island
waits for the device to release the task.

A lot stays `blocked` until all its members have ended (`Gathered`). A failed or cancelled task that
a user lets start again (`Again`) keeps its epoch, so nothing that comes late from before counts. Of
those that are done, only a lot starts again, for members of it that failed.

`python -m app.core.model.lifecycle` prints the table of docs/reference/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class State(StrEnum):
    blocked = "blocked"
    waiting = "waiting"
    starting = "starting"
    running = "running"
    splicing = "splicing"
    pausing = "pausing"
    stopping = "stopping"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"


class Move(StrEnum):
    """A change of a task's state: decided by the island, or reported by a device."""

    Unlocked = "Unlocked"
    Locked = "Locked"
    Launch = "Launch"
    Started = "Started"
    Splice = "Splice"
    Spliced = "Spliced"
    Share = "Share"
    Charge = "Charge"
    Pause = "Pause"
    Paused = "Paused"
    Finished = "Finished"
    Lost = "Lost"
    Failed = "Failed"
    GaveUp = "GaveUp"
    Cancel = "Cancel"
    Stopped = "Stopped"
    Gathered = "Gathered"
    Again = "Again"


# Moves that may end a task's stay on a device, in whatever state the task is there. Failed puts it
# back into the queue while attempts are left; GaveUp is a failure with no attempt left. A device
# that shuts down pauses its tasks without an order.
_ON_A_DEVICE = {
    "Paused": "waiting",
    "Finished": "done",
    "Lost": "waiting",
    "Failed": "waiting",
    "GaveUp": "failed",
    "Cancel": "stopping",
}

LIFE: dict[str, dict[str, str]] = {
    "blocked": {
        "Unlocked": "waiting",
        "GaveUp": "failed",
        "Cancel": "cancelled",
        "Gathered": "done",
    },
    "waiting": {
        "Locked": "blocked",
        "Launch": "starting",
        "GaveUp": "failed",
        "Cancel": "cancelled",
    },
    "starting": {"Started": "running", "Charge": "starting", **_ON_A_DEVICE},
    "running": {
        "Splice": "splicing",
        "Share": "running",
        "Charge": "running",
        "Pause": "pausing",
        **_ON_A_DEVICE,
    },
    "splicing": {"Spliced": "running", **_ON_A_DEVICE},
    "pausing": _ON_A_DEVICE,
    # Events that the device sent before it got the cancel may still arrive. They change nothing
    # until the device has released the task.
    "stopping": {
        "Started": "stopping",
        "Paused": "stopping",
        "Finished": "done",
        "Lost": "cancelled",
        "Failed": "cancelled",
        "GaveUp": "cancelled",
        "Stopped": "cancelled",
    },
    "done": {"Again": "blocked"},
    "failed": {"Again": "blocked"},
    "cancelled": {"Again": "blocked"},
}

ENDED = frozenset({State.done, State.failed, State.cancelled})
ON_A_DEVICE = frozenset(
    {State.starting, State.running, State.splicing, State.pausing, State.stopping}
)
NOT_STARTED = frozenset({State.blocked, State.waiting})


class IllegalMove(Exception):
    """Raised when the task's state does not allow the move."""

    def __init__(self, task: str, state: str, move: str) -> None:
        self.task, self.state, self.move = task, state, move
        expected = ", ".join(LIFE[state])
        super().__init__(f"task {task} is {state}, got {move}, expected {expected}")


def after(task: str, state: str, move: str) -> State:
    """Return the state that `move` leads to; raises IllegalMove if the table has no such move."""
    if move not in LIFE[state]:
        raise IllegalMove(task, state, move)
    return State(LIFE[state][move])


def request_state(states: Iterable[str], *, started: bool) -> str:
    """Return the state of a request from the states of its tasks.

    `started`: at least one task has ever run.
    """
    states = set(states)
    if states <= ENDED:
        for end in (State.failed, State.cancelled):
            if end in states:
                return end
        return State.done
    return "running" if started or states & ON_A_DEVICE else "queued"


def table() -> str:
    """Return the table as Markdown, one row per state, one column per move."""
    rows = [["state", *Move], ["---"] * (len(Move) + 1)]
    rows += [[state, *(LIFE[state].get(move, "·") for move in Move)] for state in State]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
