"""The life of a task: one table, read aloud as "a STATE task that sees MOVE becomes ...".

Two rules hold.  A state changes only by a move in this table, and only `app.journal` applies one.
A paused task is a *waiting* task with an image: one queue, one rule.  A migration is a pause here
and a launch there, so there is no moving state.

`blocked` means that a start condition does not hold (an input is missing, `after` has not ended,
`not_before` lies ahead, or somebody holds it); `Locked` takes a waiting task back there when its
owner holds it.  `starting` begins when the island commits a Launch, which raises the task's epoch
by one; `running` begins when the device says so, and goes on while it takes turns there with
others (`Share`).  `stopping` waits for the device to let go.

The table is printed by `python -m app.core.lifecycle`, for docs/architecture.md.
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
    """What happens to a task: decided by the island, or reported by a device."""

    Unlocked = "Unlocked"
    Locked = "Locked"
    Launch = "Launch"
    Started = "Started"
    Splice = "Splice"
    Spliced = "Spliced"
    Share = "Share"
    Pause = "Pause"
    Paused = "Paused"
    Finished = "Finished"
    Lost = "Lost"
    Failed = "Failed"
    GaveUp = "GaveUp"
    Cancel = "Cancel"
    Stopped = "Stopped"


# What may end a task's stay on a device, whatever it was doing there.  Failed goes back to the
# queue while attempts are left; GaveUp is Failed with none left.  A device that shuts down pauses
# what it holds without being told.
_ON_A_DEVICE = {
    "Paused": "waiting",
    "Finished": "done",
    "Lost": "waiting",
    "Failed": "waiting",
    "GaveUp": "failed",
    "Cancel": "stopping",
}

LIFE: dict[str, dict[str, str]] = {
    "blocked": {"Unlocked": "waiting", "GaveUp": "failed", "Cancel": "cancelled"},
    "waiting": {
        "Locked": "blocked",
        "Launch": "starting",
        "GaveUp": "failed",
        "Cancel": "cancelled",
    },
    "starting": {"Started": "running", **_ON_A_DEVICE},
    "running": {"Splice": "splicing", "Share": "running", "Pause": "pausing", **_ON_A_DEVICE},
    "splicing": {"Spliced": "running", **_ON_A_DEVICE},
    "pausing": _ON_A_DEVICE,
    # Events that were already under way when the cancel was written still arrive: they change
    # nothing until the device has let go.
    "stopping": {
        "Started": "stopping",
        "Paused": "stopping",
        "Finished": "done",
        "Lost": "cancelled",
        "Failed": "cancelled",
        "GaveUp": "cancelled",
        "Stopped": "cancelled",
    },
    "done": {},
    "failed": {},
    "cancelled": {},
}

ENDED = frozenset({State.done, State.failed, State.cancelled})
ON_A_DEVICE = frozenset(
    {State.starting, State.running, State.splicing, State.pausing, State.stopping}
)
NOT_STARTED = frozenset({State.blocked, State.waiting})


class IllegalMove(Exception):
    """A task was told to make a move that its state does not know."""

    def __init__(self, task: str, state: str, move: str) -> None:
        self.task, self.state, self.move = task, state, move
        expected = ", ".join(LIFE[state]) or "nothing more"
        super().__init__(f"task {task} is {state}, got {move}, expected {expected}")


def after(task: str, state: str, move: str) -> State:
    """The state that `move` leads to; raises IllegalMove if the table has no such move."""
    if move not in LIFE[state]:
        raise IllegalMove(task, state, move)
    return State(LIFE[state][move])


def request_state(states: Iterable[str], *, started: bool) -> str:
    """What a request is, from what its tasks are; `started`: one of them has ever run."""
    states = set(states)
    if states <= ENDED:
        for end in (State.failed, State.cancelled):
            if end in states:
                return end
        return State.done
    return "running" if started or states & ON_A_DEVICE else "queued"


def table() -> str:
    """The table as Markdown, one row a state, one column a move."""
    rows = [["state", *Move], ["---"] * (len(Move) + 1)]
    rows += [[state, *(LIFE[state].get(move, "·") for move in Move)] for state in State]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
