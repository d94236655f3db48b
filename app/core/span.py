"""Gangs that span islands: who of them may take seats, who keeps them, and who lets go.

A gang that is too wide for any one island takes a *ticket* on each of several, in the order of the
islands' names, and its own seats on the last, its *home*.  A ticket is a task like others of its
island: it waits for its turn by fair share, is charged for what it holds, and gives way when its
slice is over.  Only it runs nothing: it keeps its seats for one epoch of its gang.

    tickets: 1. reserve, in order   a: waiting -> running   b: waiting -> running
    gang:    2. commit, at home     c: waiting -> starting: ranks on the seats of a, b and c

The last seats are taken and the ranks are launched in one transaction.  Whoever decides about any
member locks the gang's row and looks at all of them again; so either all tickets are good for the
epoch of that launch, or none is used.
This is `core.ticket` with seats for memory: who has seats on one island waits for those on later
ones only, so no gangs wait for each other in a ring, and who cannot go on lets go of all behind.

Every scheduler writes its own members only, from what the rows of all of them say at that moment.
Nothing is told but "look again", so whoever dies and comes back finds what there is to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.core.island import Terms
from app.core.lifecycle import ENDED, NOT_STARTED, ON_A_DEVICE, State

OVER = "over"  # `Terms.lets_go`: its gang has ended,
BACK = "back"  # or does not go on with these seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A gang, or one of its tickets, as its row says.

    `good_for` is the epoch of its gang for which a ticket took its seats.  A gang is `willing` if
    nobody holds or cancels it, and no attempt of it failed a moment ago.
    """

    island: str
    state: str
    epoch: int = 0
    good_for: int = 0
    willing: bool = True


def divided(width: int, devices: Mapping[str, int], islands: int) -> dict[str, int] | None:
    """How many of `width` seats lie on which of at most so many `islands`, by name.

    None if they are too few.  The fewest islands, for what ranks say to each other is slow between
    them: so the largest, each filled before the next.
    """
    largest = sorted(devices, key=lambda id: (-devices[id], id))[:islands]
    found, left = dict[str, int](), width
    for id in largest:
        if left > 0 and devices[id] > 0:
            found[id] = min(left, devices[id])
            left -= found[id]
    return dict(sorted(found.items())) if left <= 0 else None


def due(gang: Member) -> int:
    """The epoch of the launch that its tickets are for: the one under way, or the next."""
    return gang.epoch if gang.state in ON_A_DEVICE else gang.epoch + 1


def is_held(ticket: Member, gang: Member) -> bool:
    return ticket.state == State.running and ticket.good_for == due(gang)


def _lacking(tickets: Sequence[Member], gang: Member) -> tuple[str, ...]:
    return tuple(one.island for one in tickets if not is_held(one, gang))


def of_gang(gang: Member, tickets: Sequence[Member]) -> Terms:
    """It is launched when all its tickets are held, and leaves its seats if one is asked back."""
    lacking = _lacking(tickets, gang)
    on_seats = gang.state in ON_A_DEVICE
    return Terms(tickets=lacking, lets_go=lacking[0] if on_seats and lacking else "")


def of_ticket(n: int, gang: Member, tickets: Sequence[Member]) -> Terms:
    """The n-th of `tickets`, which stand in the order of their islands."""
    wanted = gang.state in NOT_STARTED and gang.willing
    before = _lacking(tickets[:n], gang)
    return Terms(
        tickets=before,
        idle=not wanted,
        lets_go=_lets_go(tickets[n], gang, may_stay=wanted and not before),
    )


def _lets_go(ticket: Member, gang: Member, *, may_stay: bool) -> str:
    """Why it gives up its seats, or its place in line, now; "" if it does not."""
    if gang.state in ENDED:
        return OVER
    if ticket.state not in ON_A_DEVICE:
        return ""
    if gang.state in ON_A_DEVICE and ticket.good_for == gang.epoch:
        return ""  # the ranks are there; one that is asked back waits until they have left
    return "" if may_stay and is_held(ticket, gang) else BACK
