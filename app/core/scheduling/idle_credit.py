"""Bound idle credit: a branch that returns is ahead of the others only by a limited amount.

Usage fades (rule F2), so a branch that was away for long returns with little usage, and would go
first until it has caught up.  As in start-time fair queueing, a branch that begins to wait for a
kind of device therefore begins at the level of service of its siblings there, less a credit:

    lift = max(lift, (level - credit / weight of all that want them) * weight - usage)

* The level is the lowest score of the siblings that wait and have room.  If none waits, it is the
  highest score of the siblings that hold such devices.  The level is remembered and never falls.
  So branches that arrive one after another begin at one level, and waiting until the others are
  done gains nothing.
* The credit is what the whole kind delivers in `Policy.idle_credit_s`, divided by weight.  So
  however many branches return at once, together they keep the others waiting no longer than that.
* A branch that stays in line gets no new lift, and a lift falls only by fading: leaving and
  returning gains nothing.  A new branch begins like a returning one.

A lift, the idle-credit floor, is faded usage like any other, so waiting never changes an order.  It
counts only in comparisons about that kind on that island, and the ledger does not know it.  Levels
are whole numbers per weight: two branches that begin at one level have equal scores, whatever their
weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from app.core.fairness.fair_tree import Branch, Path, above
from app.core.fairness.usage_decay import unscored
from app.core.model.snapshot import IdleCreditFloor
from app.core.scheduling.board import MILLI, Board
from app.core.scheduling.rounds.round_memory import Service
from app.core.scheduling.stays import stale_s

FORGOTTEN_S = 60.0  # s after which the memory of an earlier board is not used

BranchAndKind = tuple[Branch, str]  # a branch, and the kind of device that it waits for


def welcome(board: Board) -> None:
    """Give an idle-credit floor to each branch that began to wait; new floors are added to
    `lifted`.
    """
    tree = board.tree
    board.memory.gone.update(tree.left)
    tree.left.clear()
    came, ended = list(tree.came), board.memory.ended
    if not came and not ended:
        return
    tree.came.clear()
    board.memory.ended = {}
    board.memory.new.update(dict.fromkeys(came))
    new: dict[BranchAndKind, dict[Branch, None]] = defaultdict(dict)
    for branch, kind in came:
        if branch.parent is not None:
            new[branch.parent, kind][branch] = None
    for leaf, kind in ended:
        _see_off(board, leaf, kind, new)
    for (parent, kind), branches in new.items():
        floor = _floor(board, parent, kind, branches)
        for branch in branches:
            _lift(board, branch, kind, floor)


def _lift(board: Board, branch: Branch, kind: str, floor: int) -> None:
    lift_us = floor * branch.weight - board.tree.usage(branch)
    if lift_us <= branch.lifts.get(kind, 0):
        return
    tenant, user = (branch.name, "") if branch.inner else branch.path[-2:]
    lift = IdleCreditFloor(tenant=tenant, user=user, kind=kind, faded_us=lift_us)
    board.set_lift(lift)
    board.memory.lifted[tenant, user, kind] = lift


def _floor(board: Board, parent: Branch, kind: str, new: Collection[Branch]) -> int:
    """Return the level at which new arrivals begin, as faded usage for a weight of 1."""
    service = board.memory.services.setdefault((parent, kind), Service())
    if board.now_s >= service.again_s or service.came >= service.weight:
        _look(board, parent, kind, service, new)
    service.came += sum(branch.weight for branch in new)
    weight = service.weight + service.came
    pool = board.pools.get(kind)
    each_s = pool.all_cost if pool is not None else MILLI
    credit = board.tree.faded(round(board.policy.idle_credit_s * 1e6) * each_s)
    return unscored(service.level, 1) - credit // weight


def _look(
    board: Board, parent: Branch, kind: str, service: Service, new: Collection[Branch]
) -> None:
    """Measure how well served the siblings are.

    A measurement is used again until a minute has passed or the total weight of the siblings has
    doubled.  So the cost of an arrival does not grow with the number of siblings.
    """
    waiting = _counted(board.tree.waiting_children(parent, kind)).difference(new)
    holding = _counted(_holders(board, parent, kind)).difference(new)
    if waiting:
        seen = min(board.tree.score(branch, kind=kind) for branch in waiting)
    else:
        seen = max((board.tree.score(branch, kind=kind) for branch in holding), default=0)
    service.level = max(service.level, seen)
    service.weight, service.came = sum(branch.weight for branch in waiting | holding), 0
    service.again_s = board.now_s + stale_s(board.policy)


def _counted(branches: Iterable[Branch]) -> set[Branch]:
    """Return those branches whose score tells how well they are served: a budget that demotes a
    branch puts it behind all others, whatever it has used.
    """
    return {branch for branch in branches if not branch.is_demoted}


def _holders(board: Board, parent: Branch, kind: str) -> set[Branch]:
    """Return the children of a branch that hold devices of a kind."""
    found = set[Branch]()
    for stay in board.stays.values():
        branch = stay.leaf
        if stay.lane.kind != kind or branch.path[: parent.depth] != parent.path:
            continue
        while branch.parent is not parent and branch.parent is not None:
            branch = branch.parent
        found.add(branch)
    return found


def _see_off(
    board: Board, leaf: Branch, kind: str, new: Mapping[BranchAndKind, Collection[Branch]]
) -> None:
    """Keep the level of a branch that neither holds nor wants devices now, for branches that arrive
    later.
    """
    branch = leaf
    while branch.parent is not None and not branch.held[kind] and not branch.in_line(kind):
        parent = branch.parent
        came = new.get((parent, kind), ())
        waiting = board.tree.waiting_children(parent, kind)
        if not branch.is_demoted and all(other in came for other in waiting):
            service = board.memory.services.setdefault((parent, kind), Service())
            service.level = max(service.level, board.tree.score(branch, kind=kind))
        branch = parent


# --- memory for a new board -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CarriedLevels:
    """Carries to the next board which branches wait, and how well they were served.

    A branch that held devices counts as waiting, since it may have been preempted meanwhile. A
    round that was not committed has set no floors, so its new arrivals are new again.
    """

    in_line: frozenset[tuple[Path, str]]
    services: Mapping[tuple[Path, str], Service]
    since_s: float
    at_s: float

    @classmethod
    def of(cls, board: Board) -> CarriedLevels:
        tree = board.tree
        here = {(b, lane.kind) for b in tree.branches.values() for lane in b.lines}
        here |= {(b, stay.lane.kind) for stay in board.stays.values() for b in above(stay.leaf)}
        known = (
            (here | board.memory.gone.keys() | tree.left.keys())
            - board.memory.new.keys()
            - tree.came.keys()
        )
        return cls(
            in_line=frozenset((branch.path, kind) for branch, kind in known),
            services={
                (branch.path, kind): it for (branch, kind), it in board.memory.services.items()
            },
            since_s=board.policy.since_s,
            at_s=board.now_s,
        )


def recall(board: Board, memory: CarriedLevels | None) -> None:
    """On a new board, treat as new arrivals only branches that were not waiting on the old board.

    Without a memory, or with an old one, no branch is new: the scheduler has just begun to lead its
    island.
    """
    tree = board.tree
    if memory is None or board.now_s - memory.at_s > FORGOTTEN_S:
        tree.came.clear()
        return
    tree.came = {
        (branch, kind): None
        for branch, kind in tree.came
        if (branch.path, kind) not in memory.in_line
    }
    if memory.since_s == board.policy.since_s:
        board.memory.services = {
            (tree.branches[path], kind): service
            for (path, kind), service in memory.services.items()
            if path in tree.branches
        }
