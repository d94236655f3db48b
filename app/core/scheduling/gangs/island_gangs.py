"""Multi-island gangs: which members may take devices, keep them, or must release them.

A gang that is too wide for any one island takes a *ticket* on each of several islands, in the order
of the islands' names.  It takes its own slots on the last island, its *home island*.  A ticket is a
task like others of its island: it waits for its turn by fair share, is charged for what it holds,
and gives way when its slice is over.  But a ticket runs nothing: it keeps its devices for one epoch
of its gang.

    tickets: 1. reserve, in order   a: waiting -> running   b: waiting -> running
    gang:    2. commit, at home     c: waiting -> starting: ranks on the slots of a, b and c

The last slots are taken and the ranks are launched in one transaction.  A scheduler that decides
about a member locks the gang's row and looks at all members again.  So either all tickets are good
for the epoch of that launch, or none is used.

A member with slots on one island waits only for slots on later islands, so no gangs wait for each
other in a ring.  A member that cannot continue releases all slots on later islands.

Every scheduler writes only its own members, from the rows of all members at that moment. The only
message is "look again", so a scheduler that restarts finds what there is to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.core.model.lifecycle import ENDED, NOT_STARTED, ON_A_DEVICE, State
from app.core.model.snapshot import Terms

OVER = "over"  # `Terms.lets_go`: the gang has ended
BACK = "back"  # `Terms.lets_go`: the gang does not use these slots


@dataclass(frozen=True, slots=True, kw_only=True)
class GangMember:
    """Describes a gang, or one of its tickets, as read from its row.

    `good_for` is the epoch of the gang for which a ticket took its devices. A gang is `willing` if
    no user holds or cancels it, and no attempt of it failed a moment ago.
    """

    island: str
    state: str
    epoch: int = 0
    good_for: int = 0
    willing: bool = True


def divided(width: int, devices: Mapping[str, int], islands: int) -> dict[str, int] | None:
    """Divide `width` devices among at most `islands` islands, by name; None if they are too few.

    The largest islands are filled first, so that the fewest are used: ranks communicate slowly
    between islands.
    """
    largest = sorted(devices, key=lambda id: (-devices[id], id))[:islands]
    found, left = dict[str, int](), width
    for id in largest:
        if left > 0 and devices[id] > 0:
            found[id] = min(left, devices[id])
            left -= found[id]
    return dict(sorted(found.items())) if left <= 0 else None


def due(gang: GangMember) -> int:
    """Return the epoch of the launch that the tickets reserve devices for.

    It is the current launch of a gang on its devices, otherwise the next launch.
    """
    return gang.epoch if gang.state in ON_A_DEVICE else gang.epoch + 1


def is_held(ticket: GangMember, gang: GangMember) -> bool:
    return ticket.state == State.running and ticket.good_for == due(gang)


def _lacking(tickets: Sequence[GangMember], gang: GangMember) -> tuple[str, ...]:
    return tuple(one.island for one in tickets if not is_held(one, gang))


def of_gang(gang: GangMember, tickets: Sequence[GangMember]) -> Terms:
    """Return a gang's terms: it may start when all tickets are held, and must leave if a ticket is
    asked back.
    """
    lacking = _lacking(tickets, gang)
    on_seats = gang.state in ON_A_DEVICE
    return Terms(tickets=lacking, lets_go=lacking[0] if on_seats and lacking else "")


def of_ticket(n: int, gang: GangMember, tickets: Sequence[GangMember]) -> Terms:
    """Return the terms of the n-th of `tickets`, which are in the order of their islands."""
    wanted = gang.state in NOT_STARTED and gang.willing
    before = _lacking(tickets[:n], gang)
    return Terms(
        tickets=before,
        idle=not wanted,
        lets_go=_lets_go(tickets[n], gang, may_stay=wanted and not before),
    )


def _lets_go(ticket: GangMember, gang: GangMember, *, may_stay: bool) -> str:
    """Return why a ticket gives up its devices, or its place in line, now; "" if it keeps them."""
    if gang.state in ENDED:
        return OVER
    if ticket.state not in ON_A_DEVICE:
        return ""
    if gang.state in ON_A_DEVICE and ticket.good_for == gang.epoch:
        # the ranks still use the slots; a ticket that is asked back waits until they have left
        return ""
    return "" if may_stay and is_held(ticket, gang) else BACK
