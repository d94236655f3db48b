"""Gives elastic tasks devices beyond their need, and takes them back (rules F5, F8).

An elastic task is seated with what it needs (`BoardTask.width`), like any other task. Free devices
that no waiting task could take are lent to tasks that can use more. Waiting tasks get lent devices
back at once. So the following always holds.

* Devices that a task holds beyond its need count as free for all waiting tasks, however well served
  those are. The elastic task gives devices back and continues with the rest, before any task is
  paused. There is one exception: a branch that is within its guarantee with these devices gives
  them only to a branch that is within its own guarantee and less served.
* Growing is no claim: no task is paused for it, and no limit is exceeded. Only the need of tasks
  decides whether a task has room, borrows or lends. So growing does not change which task pauses
  which.
* If ranks are led by their task's coordinator host (`Policy.homebound`), the task never gives back
  the first device that it took, which is on that host. It grows onto devices of that host first,
  and onto other hosts only if it may live `across_hosts`.
* Growing is slow: a task grows only after `grow_after_s` and a turn have passed since it was seated
  or resized. So resizing costs no more of the time than taking turns does.

Why there is no cycle: a task gives devices back only to a task that is seated with them, and grows
only onto devices that no waiting task could take. So each move adds to the running tasks, or leaves
them as they are and adds to what they hold (docs/internals/fair_share.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from app.core.fairness.fair_tree import ALL, Branch, above, lane
from app.core.model.lifecycle import State
from app.core.model.snapshot import BoardTask, Policy
from app.core.scheduling.board import Board
from app.core.scheduling.gangs.nearness import nearest
from app.core.scheduling.pool import Pool
from app.core.scheduling.reclaim.preemption import below, sides
from app.core.scheduling.stays import NEVER, BoardStay, slice_us


class ReturnOffer(NamedTuple):
    """Describes a device that a stay can be made to give back, now or when its resize has ended.

    `suits`: the waiting task could run on the device. `lent`: no branch of the stay needs the
    device for its guarantee.
    """

    stay: BoardStay
    device: str
    suits: bool
    lent: bool

    @property
    def now(self) -> bool:
        return self.stay.task.state == State.running


@dataclass(frozen=True, slots=True)
class ElasticResize:
    """Describes a stay that continues with other `devices`."""

    stay: BoardStay
    devices: tuple[str, ...]
    lent: bool = True


# --- giving back --------------------------------------------------------------------------------


def offers(board: Board, task: BoardTask, *, urgent: bool = False) -> list[ReturnOffer]:
    """Return what `task` may take from tasks that hold more than they need, in order.

    Lent devices come first.  For a task within a guarantee, devices that are not lent follow.  In
    both groups the most over-served branch gives first, then the lowest priority, then the latest
    start.
    """
    if not board.grown:
        return []
    claim = _GrowClaim(board, task, urgent=urgent)
    grown = [stay for stay in board.elastic.values() if stay.grown and claim.concerns(stay)]
    grown.sort(key=claim.place)
    found = list[ReturnOffer]()
    for lent in (True, False):
        for stay in grown:
            taken = sum(offer.stay is stay for offer in found)
            order = claim.devices(stay)[: stay.grown]
            found += claim.taken(stay, order[taken:], lent=lent)
    return found


class _GrowClaim:
    """Finds what a waiting task may take from tasks that hold more than they need."""

    def __init__(self, board: Board, task: BoardTask, *, urgent: bool) -> None:
        self.board, self.task, self.urgent = board, task, urgent
        self.lane, self.leaf = board.lane(task), board.leaf(task)
        self.pool = board.pools.get(task.kind)
        self.gone: Counter[Branch] = Counter()
        self.fee = board.tree.faded(slice_us(board.policy, task) * board.rate(self.lane))
        self.all_kinds = any(ALL in branch.limit for branch in above(self.leaf))

    def concerns(self, stay: BoardStay) -> bool:
        """True if the stay's devices are of the task's kind, or if a limit covers all kinds."""
        return stay.lane.kind == self.task.kind or self.all_kinds

    def place(self, stay: BoardStay) -> tuple[int, int, int, float, str]:
        """Sort key: the most over-served stay first, as in `core.scheduling.reclaim.preemption`."""
        score, kind = self.board.tree.score, stay.lane.kind
        theirs = sides(self.leaf, stay.leaf)[1]
        task = stay.task
        scores = -score(theirs, kind=kind), -score(stay.leaf, kind=kind)
        return (*scores, task.priority, -(task.started_s or 0.0), task.id)

    def devices(self, stay: BoardStay) -> list[str]:
        """Return the devices that a stay could give: suitable ones first, among these the ones
        taken last.
        """
        latest = stay.devices[self.board.policy.homebound :][::-1]
        return sorted(latest, key=lambda id: not self.suits(stay, id))

    def suits(self, stay: BoardStay, id: str) -> bool:
        same = self.pool is not None and stay.lane.kind == self.task.kind
        return same and self.pool is not None and self.pool.takes(id, self.lane)

    def taken(
        self, stay: BoardStay, devices: Sequence[str], *, lent: bool
    ) -> Iterator[ReturnOffer]:
        """Yield offers for these devices, as many as may still be taken from the stay."""
        mine, theirs = sides(self.leaf, stay.leaf)
        branches = [] if mine is theirs else list(below(stay.leaf, theirs))
        kind = stay.lane.kind
        if not lent and not (kind == self.task.kind and self._owed(mine, theirs)):
            return
        for id in devices:
            if lent and not all(self._lends(branch, kind) for branch in branches):
                return
            self.gone.update(branches)
            yield ReturnOffer(stay, id, self.suits(stay, id), lent)

    def _lends(self, branch: Branch, kind: str) -> bool:
        """True if the branch, without what was already taken from it, holds more than its
        guarantee.
        """
        if not branch.guarantee:
            return True
        holds = branch.held[kind] + branch.grown.get(kind, 0) - self.gone[branch]
        return holds > branch.guarantee.get(kind, 0)

    def _owed(self, mine: Branch, theirs: Branch) -> bool:
        """True if `mine` is within its guarantee and, after its turn, still less served than
        `theirs`.
        """
        score, kind = self.board.tree.score, self.task.kind
        if mine.borrows(self.lane):
            return False
        return self.urgent or score(theirs, kind=kind) > score(mine, self.fee, kind=kind)


def given_back(
    board: Board, task: BoardTask, offered: Sequence[ReturnOffer], paused: Sequence[BoardStay] = ()
) -> list[ElasticResize] | None:
    """Return the resizes that make room for `task`; None if they free too few devices now.

    `paused` are stays that release all they hold. No device is given back without need.
    """
    lacks = _Lacks(board, task, paused)
    chosen = list[ReturnOffer]()
    for offer in offered:
        if offer.now and offer.stay not in paused and lacks.helped_by(offer):
            chosen.append(offer)
            lacks.take(offer, 1)
    if not lacks.nothing:
        return None
    for offer in chosen[::-1]:
        lacks.take(offer, -1)
        if lacks.nothing:
            chosen.remove(offer)
        else:
            lacks.take(offer, 1)
    return _by_stay(chosen)


class _Lacks:
    """Counts the devices that a task still lacks, and by how many its limits are exceeded."""

    def __init__(self, board: Board, task: BoardTask, paused: Sequence[BoardStay]) -> None:
        here, leaf, pool = board.lane(task), board.leaf(task), board.pools.get(task.kind)
        suits = [pool.takes(id, here) for s in paused for id in s.devices] if pool else []
        self.devices = here.width - _free(pool, board, task) - sum(suits)
        self.over: dict[tuple[Branch, str], int] = {}
        for branch in above(leaf):
            for kind in (task.kind, ALL):
                if kind in branch.limit:
                    holds = branch.held[kind] + branch.grown.get(kind, 0) + here.width
                    gone = sum(
                        stay.lane.width + stay.grown
                        for stay in paused
                        if kind in (ALL, stay.lane.kind) and _is_below(stay, branch)
                    )
                    self.over[branch, kind] = holds - gone - branch.limit[kind]

    @property
    def nothing(self) -> bool:
        return self.devices <= 0 and all(n <= 0 for n in self.over.values())

    def helped_by(self, offer: ReturnOffer) -> bool:
        if self.devices > 0 and offer.suits:
            return True
        return any(self.over[key] > 0 for key in self._counts_for(offer))

    def take(self, offer: ReturnOffer, n: int) -> None:
        self.devices -= n * offer.suits
        for key in self._counts_for(offer):
            self.over[key] -= n

    def _counts_for(self, offer: ReturnOffer) -> Iterator[tuple[Branch, str]]:
        for branch, kind in self.over:
            if kind in (ALL, offer.stay.lane.kind) and _is_below(offer.stay, branch):
                yield branch, kind


def _is_below(stay: BoardStay, branch: Branch) -> bool:
    return stay.leaf.path[: branch.depth] == branch.path


def _free(pool: Pool | None, board: Board, task: BoardTask) -> int:
    here = board.lane(task)
    if pool is None:
        return 0
    return pool.pins_free(here) if here.pins else pool.fitting(here)


def _by_stay(chosen: Iterable[ReturnOffer]) -> list[ElasticResize]:
    gone: dict[str, list[ReturnOffer]] = {}
    for offer in chosen:
        gone.setdefault(offer.stay.id, []).append(offer)
    found = list[ElasticResize]()
    for given in gone.values():
        stay, leaves = given[0].stay, {offer.device for offer in given}
        keeps = tuple(id for id in stay.devices if id not in leaves)
        found.append(ElasticResize(stay, keeps, all(offer.lent for offer in given)))
    return found


# --- growing ------------------------------------------------------------------------------------


def calm_s(policy: Policy, task: BoardTask) -> float:
    """Return the seconds for which a task is left unchanged after it was seated or resized."""
    return max(policy.grow_after_s, slice_us(policy, task) / 1e6)


def grows_s(board: Board, task: BoardTask) -> float:
    """Return when a running task may grow."""
    since_s = task.held_since_s
    return NEVER if since_s is None else since_s + calm_s(board.policy, task)


def next_growth_s(board: Board) -> float:
    """Return when the next task may grow onto a device that is free; NEVER if none will."""
    instants = (
        grows_s(board, stay.task)
        for stay in board.elastic.values()
        if _wants(stay) and not all(board.pools[stay.lane.kind].free.values())
    )
    return min((at_s for at_s in instants if at_s > board.now_s), default=NEVER)


def growth(board: Board, kept: Collection[str]) -> list[ElasticResize]:
    """Return which tasks grow onto free devices that no waiting task could take.

    Kinds in `kept` (F7) are left out. Each device goes to the task that would be least served with
    one more.
    """
    ready = [
        stay
        for stay in board.elastic.values()
        if _wants(stay) and stay.ripe and grows_s(board, stay.task) <= board.now_s
    ]
    shares, found = _Shares(board), list[ElasticResize]()
    for kind in sorted({stay.lane.kind for stay in ready} - set(kept)):
        stays = [stay for stay in ready if stay.lane.kind == kind]
        free = _nobodys(board, kind)
        could = _could_sit(board, kind) if free else None
        if could is not None:
            board.memory.in_the_way.add(could.id)
        elif free:
            given = shares.divide(stays, free)
            found += [
                ElasticResize(stay, stay.devices + tuple(given[stay.id]))
                for stay in sorted(stays, key=lambda stay: stay.id)
                if stay.id in given
            ]
    return found


def _wants(stay: BoardStay) -> bool:
    task = stay.task
    stays = task.state == State.running and task.moves_to is None
    return stays and len(stay.devices) < task.width_max


def _nobodys(board: Board, kind: str) -> list[str]:
    """Return the empty devices, smallest first, to which no waiting task is pinned."""
    pool, pinned = board.pools[kind], set(board.pinned())
    free = [id for id, leaving in pool.free.items() if not leaving and id not in pinned]
    return sorted(free, key=lambda id: (pool.open[id], id))


def _could_sit(board: Board, kind: str) -> BoardTask | None:
    """Return a waiting task that could take the free devices but was held back; None if there is
    none.
    """
    pool = board.pools[kind]
    for here in sorted(board.tree.lanes, key=lambda here: (here.width, here.memory_bytes)):
        found = board.tree.first((here,)) if here.kind == kind else None
        if found is None:
            continue
        given = sum(offer.suits for offer in offers(board, found[2]))
        if _free(pool, board, found[2]) + given >= here.width:
            return found[2]
    return None


class _Shares:
    """Devices given to growing tasks in this round, by branch."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.given: Counter[tuple[Branch, str]] = Counter()
        self.fees: Counter[Branch] = Counter()

    def divide(self, stays: Sequence[BoardStay], free: list[str]) -> dict[str, list[str]]:
        """Return the devices given to each task; `free` devices are given in the order of the
        list.
        """
        given: dict[str, list[str]] = {}
        line = [(self._place(stay), stay) for stay in stays]
        heapify(line)
        while line and free:
            place, stay = line[0]
            if (now := self._place(stay)) != place:  # a task's place can only become later
                heapreplace(line, (now, stay))
                continue
            mine = given.get(stay.id, [])
            device = self._next(stay, mine, free)
            if device is None:
                heappop(line)
                continue
            free.remove(device)
            given.setdefault(stay.id, []).append(device)
            self._give(stay)
        return given

    def _next(self, stay: BoardStay, mine: Sequence[str], free: Sequence[str]) -> str | None:
        """Return the free device that the task may have and that is nearest to its own.

        Devices of its coordinator's host are preferred.
        """
        pool, homebound = self.board.pools[stay.lane.kind], self.board.policy.homebound
        able = (id for id in free if self._may(stay, len(mine), id))
        if not (pool.knows_locations or homebound):
            return next(able, None)
        may = list(able)
        there = [id for id in may if self._is_near(stay, id)] if homebound else []
        smallest = min((pool.open[id] for id in there or may), default=0)
        alike = [id for id in there or may if pool.open[id] == smallest]
        return next(iter(nearest(alike, 1, [*stay.devices, *mine], pool.locations)), None)

    def _may(self, stay: BoardStay, more: int, id: str) -> bool:
        """True if the task can use this device in addition and all limits have room for it (F4)."""
        if len(stay.devices) + more >= stay.task.width_max:
            return False
        if not self.board.pools[stay.lane.kind].fits(id, stay.lane):
            return False
        bound = self.board.policy.homebound and not stay.task.across_hosts
        if bound and not self._is_near(stay, id):
            return False
        return all(
            branch.held[k] + branch.grown.get(k, 0) + self.given[branch, k] < branch.limit[k]
            for branch in above(stay.leaf)
            for k in (stay.lane.kind, ALL)
            if k in branch.limit
        )

    def _is_near(self, stay: BoardStay, id: str) -> bool:
        devices = self.board.devices
        return devices[id].host == devices[stay.devices[0]].host

    def _give(self, stay: BoardStay) -> None:
        one = lane(stay.lane.kind, 1, stay.lane.memory_bytes)
        turn_us = slice_us(self.board.policy, stay.task)
        fee = self.board.tree.faded(turn_us * self.board.rate(one))
        for branch in above(stay.leaf):
            self.fees[branch] += fee
            for k in (stay.lane.kind, ALL):
                self.given[branch, k] += 1

    def _place(self, stay: BoardStay) -> tuple[object, ...]:
        """Return a sort key for a task, as if it had one more device: by rule F3, level by level
        from the top of the tree.
        """
        kind, task, score = stay.lane.kind, stay.task, self.board.tree.score
        path = list(above(stay.leaf))[-2::-1]
        levels = tuple(
            (self._borrows(branch, kind), score(branch, self.fees[branch], kind=kind), branch.name)
            for branch in path
        )
        mine = self.given[stay.leaf, kind]
        return (levels, -task.priority, task.submitted_s, task.id, mine)

    def _borrows(self, branch: Branch, kind: str) -> bool:
        holds = branch.held[kind] + branch.grown.get(kind, 0) + self.given[branch, kind]
        return not branch.guarantee or holds >= branch.guarantee.get(kind, 0)
