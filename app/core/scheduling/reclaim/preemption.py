"""Choose the tasks that give way to a waiting task without a free device (rules F4 to F6, F9).

Two tasks are compared where their branches part.  The compared sides are two siblings: `mine`,
above the waiting task, and `theirs`, above the running task.

* F5: if `mine` stays within its guarantee with the devices that it gains, `theirs` gives back what
  it borrowed.
* F6, F8: otherwise `theirs` gives way if it is strictly better served than `mine` will be once the
  next turn is charged.  Devices within a guarantee are taken only for a branch within its own.
* F4: if a limit leaves no room for the task, only tasks below that limit give way, and so many that
  the limit is kept.  F7, F9: for a task that waited too long, victims need not be better served;
  all other conditions hold.
* F8: among equally urgent tasks of one user, a task that has held its devices for a minute (and a
  slice) gives way to a fresh task (`Board.is_fresh`) and to an older one.  These are two levels of
  foreground-background scheduling, as in Tiresias (NSDI 2019), with first come, first served in
  each level: a short task does not wait for a long one, and many long tasks do not all end late.
* No task gives way before a full slice, nor while its tier (F9) or patience (F7) protects it.  No
  task is paused if elastic tasks hold enough devices beyond their need
  (`core.scheduling.reclaim.elastic`).

Why there is no cycle: a victim must have held its devices for a full slice since its last launch.
So at one instant no task is paused twice, and between two pauses of one task a slice passes.  There
would be no cycle even if a slice took no time; such cycles would show as needless turns.  Without
guarantees, a task's place is the scores of its branches from the top down, then its priority, its
freshness, and its age.  (A launch can make the task's siblings less fresh, and makes none fresher.)
A pause removes tasks for one with a place before all of theirs.  So of two sets of running tasks,
the later set always has the first task that the other set lacks.

With guarantees, a branch that does not borrow goes before one that borrows, whatever their scores.
Whether a branch borrows depends on what runs.  So three more rules keep F5 and F6 from undoing each
other:

* A gang that is partly on lent devices gives way as a whole to a branch within its guarantee.  It
  does not give way to a branch that is only less served.
* By F6 no branch gets more devices on loan while a sibling that goes before it waits in vain, or
  was just told to pause.  A gang that is partly on lent devices counts with all its devices.
* F5 does not pause a task that would at once be owed its devices again, as the less served one
  (`comes_back`).  That can happen if a pause frees more devices than the waiting task needs.

As few tasks as possible are chosen: none of the victims can be left out.  The order is: lent
devices, if the waiting task is owed them; basic tasks, then standard ones; the most over-served
branches; the lowest priority; those that can go on on another device; the latest start.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from app.core.fairness.fair_tree import ALL, Branch, Lane, above
from app.core.fairness.usage_decay import score as scored
from app.core.fairness.usage_decay import unscored
from app.core.model.decision_rule import DecisionRule
from app.core.model.lifecycle import State
from app.core.model.snapshot import TIERS, BoardTask, changed
from app.core.scheduling.board import Board, alike, place_in_line
from app.core.scheduling.gangs import gang_waits
from app.core.scheduling.pool import part_bytes
from app.core.scheduling.stays import NEVER, RESOLUTION_S, BoardStay, ripe_s, slice_us

NOT_TO_BE_HAD = 1 << 30  # more devices than exist
NOTHING: Mapping[str, Any] = {}
# with more pairs than this (a waiting task and a running leaf), no exact time is computed
LOOK_AHEAD_PAIRS = 16


@dataclass(frozen=True, slots=True)
class Victim:
    """Names a stay that is paused, and the rule that allows it: RECLAIM or TURN."""

    stay: BoardStay
    rule: DecisionRule


@dataclass(frozen=True, slots=True)
class _Side:
    """A leaf with preemptible (`ripe`) stays, compared with the waiting task."""

    leaf: Branch
    theirs: Branch
    owed: bool  # True if the waiting task's side is within its guarantee
    better: bool  # True if `theirs` is better served, even after the next turn
    scores: tuple[int, int]  # score of `theirs`, score of the leaf


def victims(
    board: Board,
    task: BoardTask,
    *,
    within: Branch | None = None,
    urgent: bool = False,
    offered: Mapping[str, int] = NOTHING,
) -> list[Victim] | None:
    """Return the stays that give way to `task`; None if there are not enough.

    `within` restricts the victims to one branch. For an `urgent` task (F7, F9) victims need not be
    better served. If a limit (F4) leaves no room, only stays below the limit give way, and enough
    of them to keep it. `offered` counts by task the suitable extra devices that elastic tasks give
    back (`core.scheduling.reclaim.elastic`); these are used before any pause.
    """
    if not board.unprotected(task.kind):
        return None
    if within is None and not urgent and hopeless(board, task):
        return None
    shut = shut_by(board, task)
    if shut is not None and (within is None or shut.depth > within.depth):
        within = shut
    claim = _Claim(board, task, urgent=urgent, offered=offered)
    sides = claim.compared(within)
    if not sides:
        return None
    claim.measure_need()
    if claim.need <= 0 and claim.over <= 0:
        return None  # there is room: the task waits for another reason
    if not claim.enough(sides):
        return None
    near = claim.where_its_image_lies(sides)
    if near is not None:
        return near
    found = claim.fewest(claim.chosen(sides))
    while back := claim.comes_back(found):
        claim.spared |= back
        found = claim.fewest(claim.chosen(sides))
    if not found or claim.outgrows(found):
        return None
    return found


def hopeless(board: Board, task: BoardTask) -> bool:
    """True if a quick check shows that no running task can give way to this one.

    The check compares the branches just below the root. Tasks in the task's own branch are looked
    at later, when the tasks of that branch take turns.
    """
    leaf, lane, kind = board.leaf(task), alike(task), task.kind
    top = leaf.top
    if not top.borrows(lane):
        return False
    best = board.best_served(kind, top)
    if best is None:
        return top.children <= 1 and len(board.priorities) <= 1 and leaf not in board.settled
    if best <= board.tree.score(top, kind=kind):
        return True
    fee = board.tree.faded(slice_us(board.policy, task) * board.rate(lane))
    score = board.tree.score(top, fee, kind=kind)
    if best <= score:
        return True
    if len(board.priorities) > 1 or any(branch.children > 1 for branch in below(leaf, top)):
        return False  # tasks of the same top branch may give way
    if leaf in board.settled:
        return False
    pool = board.pools.get(kind)
    free = len(pool.free) + pool.grown if pool is not None else 0
    return free + board.better_served(kind, score, top) < lane.width


def nobody_can_gain(board: Board, head: BoardTask) -> bool:
    """True if no stay gives way to `head`, the least served task, and so to no other task."""
    top = board.leaf(head).top
    if board.guarantees or not board.ripe:
        return not board.ripe
    best = board.best_served(head.kind, top)
    return best is None or best <= board.tree.score(top, kind=head.kind)


class _Claim:
    """A waiting task and the devices that it needs from others."""

    def __init__(
        self, board: Board, task: BoardTask, *, urgent: bool, offered: Mapping[str, int] = NOTHING
    ) -> None:
        self.board, self.task, self.urgent, self.offered = board, task, urgent, offered
        self.lane, self.leaf = board.lane(task), board.leaf(task)
        self.pool = board.pools.get(task.kind)
        self.unprotected = board.unprotected(task.kind)
        # devices needed; devices to be released to keep the limits (`measure_need`)
        self.need = self.over = 0
        self.turn_us = slice_us(board.policy, task)
        self.rate = board.rate(self.lane)
        self.taken: dict[Branch, int] = defaultdict(int)
        self.spared: set[str] = set()  # stays that would at once take back what they gave
        self.fee = board.tree.faded(self.turn_us * self.rate)
        self._charged: dict[Branch, int] = {}  # branch above the task -> its score with the fee
        self._kept_tiers: tuple[str, ...] | None = None

    def measure_need(self) -> None:
        """Set `need` and `over`, which only the choice of victims needs."""
        if self.pool is not None and self.pool.size(self.lane) >= self.lane.width:
            self.need = max(0, self.lane.width - self._free() - sum(self.offered.values()))
            self.over = _over(self.leaf, self.lane)

    def _free(self) -> int:
        assert self.pool is not None
        if self.lane.pins:
            return self.pool.pins_free(self.lane)
        return self.pool.fitting(self.lane)

    def compared(self, within: Branch | None) -> list[_Side]:
        """Compare all leaves, or those below a branch, with the waiting task."""
        leaves: Iterable[Branch] = self.unprotected
        if within is not None:
            depth, path = within.depth, within.path
            leaves = [leaf for leaf in leaves if leaf.path[:depth] == path]
        return [side for leaf in leaves if (side := self.side(leaf)) is not None]

    def side(self, leaf: Branch) -> _Side | None:
        """Compare a leaf with the waiting task; None if no stay of the leaf gives way."""
        tree = self.board.tree
        mine, theirs = sides(self.leaf, leaf)
        kind = self.lane.kind
        scores = (tree.score(theirs, kind=kind), tree.score(leaf, kind=kind))
        if mine is theirs:
            below_own = self.urgent or self._below_own(leaf)
            return _Side(leaf, leaf, False, True, scores) if below_own else None
        borrowed = self._all_lent(leaf, theirs)
        owed = not mine.borrows(self.lane)
        better = self.urgent or scores[0] > self.score_with_fee(mine)
        if (owed and (borrowed or better)) or (borrowed and better):
            return _Side(leaf, theirs, owed, better, scores)
        return None

    def score_with_fee(self, mine: Branch) -> int:
        """Return the score that a branch above the task would have with the charge for the task's
        next turn.
        """
        found = self._charged.get(mine)
        if found is None:
            tree, kind = self.board.tree, self.lane.kind
            found = self._charged[mine] = tree.score(mine, self.fee, kind=kind)
        return found

    def _all_lent(self, leaf: Branch, theirs: Branch, width: int = 1) -> bool:
        return all(self._lent(branch, width) for branch in below(leaf, theirs))

    def _below_own(self, leaf: Branch) -> bool:
        return any(self._outranks(stay) for stay in self.unprotected.get(leaf, NOTHING).values())

    def _outranks(self, stay: BoardStay) -> bool:
        """True if the waiting task goes before a running task of the same user."""
        if stay.task.priority != self.task.priority:
            return stay.task.priority < self.task.priority
        settled = stay.id in self.board.settled.get(stay.leaf, ())
        return settled and goes_before(self.board, self.task, stay.task)

    def _lent(self, branch: Branch, width: int) -> bool:
        """True if the branch, without what was already taken, has `width` devices beyond its
        guarantee.
        """
        kind = self.lane.kind
        if not branch.guarantee:
            return True
        return branch.held[kind] - self.taken[branch] - width >= branch.guarantee.get(kind, 0)

    def enough(self, sides: list[_Side]) -> bool:
        """Quick check: True if all stays of these sides together have enough devices."""
        unprotected = self.unprotected
        have = sum(len(stay.devices) for side in sides for stay in unprotected[side.leaf].values())
        return have >= max(self.need, self.over)

    def where_its_image_lies(self, sides: list[_Side]) -> list[Victim] | None:
        """Return the victims on the device that holds the task's image, so that no state needs to
        move.
        """
        on = self.task.image_on
        if on is None or self.lane.width > 1 or self.over > 1:
            return None
        stay = self.board.stays.get(self.board.seated.get(on, ""))
        for side in sides:
            if stay is not None and stay.leaf is side.leaf and self._may_ask(stay, side):
                rule = self._rule(side, stay)
                return None if rule is None else self._with_all_beside(Victim(stay, rule))
        return None

    def chosen(self, sides: list[_Side]) -> list[Victim]:
        """Return enough victims, in the order in which they are taken; [] if there are not
        enough.
        """
        sides.sort(key=lambda side: (side.scores, side.leaf.path), reverse=True)
        need, over, chosen = self.need, self.over, dict[str, Victim]()
        self.taken.clear()
        asked = [(side, stay) for side in sides for stay in self._in_order(side)]
        if sum(len(stay.devices) for _, stay in asked) < max(need, over):
            return []
        # Lent devices come back before a branch gives way within its guarantee.
        rules = (
            (DecisionRule.RECLAIM, DecisionRule.TURN)
            if any(side.owed for side in sides)
            else (DecisionRule.TURN,)
        )
        for by, tier in product(rules, TIERS):
            for side, stay in asked:
                gain = self.gain(stay)
                if stay.id in chosen or not ((need > 0 and gain) or over > 0):
                    continue
                if stay.task.tier == tier and self._rule(side, stay) == by:
                    all_beside = self._with_all_beside(Victim(stay, by))
                    if all_beside is None:
                        continue
                    chosen |= {victim.stay.id: victim for victim in all_beside}
                    need, over = need - gain, over - stay.lane.width
                    for victim in all_beside:
                        self._take(victim.stay)
            if need <= 0 and over <= 0:
                return list(chosen.values())
        return []

    def _in_order(self, side: _Side) -> list[BoardStay]:
        stays = [stay for stay in self.unprotected[side.leaf].values() if self._may_ask(stay, side)]
        stays.sort(
            key=lambda stay: (
                stay.task.priority,
                stay.task.is_bound,
                -(stay.task.started_s or 0.0),
                stay.id,
            )
        )
        return stays

    def _may_ask(self, stay: BoardStay, side: _Side) -> bool:
        if not stay.ripe or stay.task.kind != self.task.kind:
            return False
        if self.over <= 0 and self.gain(stay) == 0:
            return False
        if self._is_emptied(stay):
            return False
        if stay.id in self.spared:
            return False
        if side.leaf is self.leaf and not self.urgent and not self._outranks(stay):
            return False
        if self.turn_us > stay.turn_us and self.held_us(stay) < self.turn_us:
            return False
        return stay.task.state == State.running and not self._protected(stay)

    def _is_emptied(self, stay: BoardStay) -> bool:
        """True if the stay's device is being emptied for a whole task, so that no fraction may
        follow.
        """
        is_closed = self.pool is not None and stay.devices[0] in self.pool.closed
        return is_closed and self.lane.is_fraction

    def gives_way(self, stay: BoardStay) -> bool:
        """True if, after its turn, the stay gives way in addition to those taken so far. It is then
        taken, too.
        """
        side = self.side(stay.leaf)
        if side is None or self._protected(stay) or self._rule(side, stay) is None:
            return False
        self._take(stay)
        return True

    def turn_over_s(self, stay: BoardStay) -> float:
        """Return when the stay has held its devices for as long as the waiting task's turn."""
        started_s = stay.task.started_s
        return NEVER if started_s is None else started_s + self.turn_us / 1e6

    def held_us(self, stay: BoardStay) -> float:
        return (self.board.now_s - (stay.task.started_s or self.board.now_s)) * 1e6

    def _protected(self, stay: BoardStay) -> bool:
        task = stay.task
        if is_reserved(self.board, stay, self.task):
            return True
        if self.board.urgency.patience.protected(task):
            return True
        if not self.board.policy.tier_share.get(task.tier):
            return False
        if self._kept_tiers is None:
            self._kept_tiers = self.board.urgency.honoured(task.kind)
        if task.tier not in self._kept_tiers:
            return False
        away_us = self.turn_us + task.switch_us
        if not self.urgent:
            return self.board.urgency.is_due_after(task, away_us)
        left_s = self.board.urgency.slack_s(task) - away_us / 1e6
        promised = self.task.epoch and self.board.policy.tier_share.get(self.task.tier)
        # If both tasks are behind their promises, the one that would be further behind continues.
        return left_s <= (self.board.urgency.slack_s(self.task) if promised else 0.0)

    def _rule(self, side: _Side, stay: BoardStay) -> DecisionRule | None:
        """Return the rule by which the stay gives way in addition to those taken so far; None if
        none.

        A gang that is partly lent is given back as a whole, but only to a branch within its
        guarantee. If more devices are guaranteed than exist, only better served branches give back
        such a gang.
        """
        if side.leaf is self.leaf:
            return self._turn_rule(stay)
        whole = self._all_lent(side.leaf, side.theirs, stay.lane.width)
        if side.owed and (whole or self._all_lent(side.leaf, side.theirs)):
            return (
                DecisionRule.RECLAIM
                if whole or side.better or self._guarantees_fit(side.theirs)
                else None
            )
        return self._turn_rule(stay) if side.better and (side.owed or whole) else None

    def _turn_rule(self, stay: BoardStay) -> DecisionRule | None:
        """Return the rule for a stay of the same user; None if it does not give way.

        A gang that would have to wait for its devices again has a longer turn (rule F7).
        """
        if not self.urgent and self.board.now_s < gang_waits.turn_ends_s(self.board, stay):
            return None
        return DecisionRule.TURN

    def _guarantees_fit(self, side: Branch) -> bool:
        """True if all guarantees at the branch's level fit into the devices."""
        promised = self.board.promised[_parent(side).path, self.lane.kind]
        return self.pool is not None and promised <= self.pool.size()

    def _take(self, stay: BoardStay, sign: int = 1) -> None:
        for branch in below(stay.leaf, sides(self.leaf, stay.leaf)[1]):
            self.taken[branch] += sign * stay.lane.width

    def gain(self, stay: BoardStay) -> int:
        """Count the suitable devices gained by pausing the stay, without those offered anyway."""
        gain = self._gain(stay)
        return gain - self.offered.get(stay.id, 0) if self.offered else gain

    def _gain(self, stay: BoardStay) -> int:
        assert self.pool is not None
        lane = self.lane
        anywhere = lane.pin is None and lane.host is None
        if anywhere and not lane.memory_bytes and not lane.choice and self.pool.whole:
            return len(stay.devices)
        return sum(self.pool.takes(id, lane) for id in stay.devices)

    def fewest(self, chosen: list[Victim]) -> list[Victim]:
        """Drop the victims that are not needed after all, last chosen first."""
        groups = dict[tuple[str, ...], list[Victim]]()  # the stays that share a device count once
        for victim in chosen:
            groups.setdefault(victim.stay.devices, []).append(victim)
        firsts = [group[0].stay for group in groups.values()]
        surplus = sum(self.gain(stay) for stay in firsts) - self.need
        room = sum(stay.lane.width for stay in firsts) - self.over
        for stay in reversed(firsts):
            gain, width = self.gain(stay), stay.lane.width
            if gain <= surplus and (width <= room or self.over <= 0):
                surplus, room = surplus - gain, room - width
                del groups[stay.devices]
        return [victim for group in groups.values() for victim in group]

    def comes_back(self, found: list[Victim]) -> set[str]:
        """Return the victims by F5 that would at once be owed their devices back.

        When a partly lent gang leaves, its branch may hold less than its guarantee. If the branch
        is then served less, a narrower task of the branch would at once take the place again. Such
        a gang is only chosen if the other lent devices are not enough.
        """
        if self.urgent or len(found) < 2:
            return set()
        tree, kind, back = self.board.tree, self.lane.kind, set[str]()
        for victim in found:
            stay, (mine, theirs) = victim.stay, sides(self.leaf, victim.stay.leaf)
            if victim.rule != DecisionRule.RECLAIM or not theirs.guarantee:
                continue
            given = sum(v.stay.lane.width for v in found if theirs in above(v.stay.leaf))
            rest = theirs.held[kind] - given
            if rest + stay.lane.width <= theirs.guarantee.get(kind, 0):
                fee = tree.faded(stay.turn_us * self.board.rate(stay.lane))
                if self.score_with_fee(mine) > tree.score(theirs, fee, kind=kind):
                    back.add(stay.id)
        return back

    def _with_all_beside(self, first: Victim) -> list[Victim] | None:
        """Add all stays that share a device with a victim; None if one of them does not give way.

        A device is free only when all stays that share it have left. For a fraction only as many
        must leave as make room for it.
        """
        found, device = [first], first.stay.devices[0]
        if self.lane.is_fraction and device in self.board.fractions:
            return self._with_enough_beside(first)
        beside, fractions = self.board.beside, self.board.fractions
        shared = [id for id in first.stay.devices if id in beside or id in fractions]
        for stay in (stay for device in shared for stay in self.board.group(device)):
            if stay is not first.stay:
                victim = self._asked_beside(stay, found)
                if victim is None:
                    return None
                found.append(victim)
        return found

    def _asked_beside(self, stay: BoardStay, found: list[Victim]) -> Victim | None:
        """Return the stay as a victim if it gives way together with those found so far."""
        for victim in found:
            self._take(victim.stay)
        side = self.side(stay.leaf) if stay.ripe else None
        rule = None if side is None else self._rule(side, stay)
        for victim in found:
            self._take(victim.stay, -1)
        if side is None or rule is None or not self._may_ask(stay, side):
            return None
        return Victim(stay, rule)

    def _with_enough_beside(self, first: Victim) -> list[Victim] | None:
        """Add stays on the same device as the first victim until the waiting fraction fits; None if
        it cannot.
        """
        device, found = first.stay.devices[0], [first]
        if self._fits_without(device, found):
            return found
        others = [stay for stay in self.board.group(device) if stay is not first.stay]
        for stay in sorted(others, key=lambda stay: (-(stay.task.started_s or 0.0), stay.id)):
            victim = self._asked_beside(stay, found)
            if victim is not None:
                found.append(victim)
                if self._fits_without(device, found):
                    return found
        return None

    def _fits_without(self, device: str, gone: list[Victim]) -> bool:
        assert self.pool is not None
        part, size_bytes = self.pool.parts.get(device), self.pool.open.get(device, 0)
        if part is None:
            return False
        lanes = [victim.stay.lane for victim in gone]
        milli = part.milli + sum(lane.milli for lane in lanes)
        memory_bytes = part.memory_bytes + sum(part_bytes(lane, size_bytes) for lane in lanes)
        return milli >= self.lane.milli and memory_bytes >= part_bytes(self.lane, size_bytes)

    def empty_at_s(self, device: str) -> float:
        """Return when all fractions on a device will give way, as things are now; NEVER if not all
        will.
        """
        self.taken.clear()
        return max((self.leaves_at_s(stay) for stay in self.board.group(device)), default=NEVER)

    def leaves_at_s(self, stay: BoardStay) -> float:
        board, task = self.board, stay.task
        if not board.policy.turns:
            return board.end_s(stay)
        if task.started_s is None:
            task = changed(task, started_s=board.now_s)
        from_s, turn_s = task.started_s or 0.0, max(self.turn_us, stay.turn_us) / 1e6
        if stay.leaf is self.leaf:
            if task.priority == self.task.priority:
                gives_way = goes_before(board, self.task, task)
                turn_s = max(turn_s, board.policy.fresh_s)
            else:
                gives_way = task.priority < self.task.priority
            return from_s + turn_s if gives_way else NEVER
        return from_s + turn_s if self.gives_way(stay) else NEVER

    def outgrows(self, found: list[Victim]) -> bool:
        """True if a branch would borrow more although a sibling that goes before it waits without
        success.

        That sibling was tried before; it would at once claim what was gained.
        """
        by_f5 = all(victim.rule == DecisionRule.RECLAIM for victim in found)
        if not self.board.guarantees or self.urgent or by_f5:
            return False
        return any(
            branch.guarantee and self._lends_more(branch, found) and self._first_beside(branch)
            for branch in above(self.leaf)
        )

    def _lends_more(self, branch: Branch, found: list[Victim]) -> bool:
        """True if the branch would hold more on loan; a partly lent gang counts as a whole."""
        own, held = branch.guarantee.get(self.lane.kind, 0), branch.held[self.lane.kind]
        rest = held - sum(v.stay.lane.width for v in found if branch in above(v.stay.leaf))
        with_it = rest + self.lane.width
        return with_it > own and with_it - min(rest, own) > max(0, held - own)

    def _first_beside(self, branch: Branch) -> bool:
        """True if a sibling goes before this borrowing branch and waits, or was told to pause.

        A stay that was told to pause for a turn within its own branch is about to wait.
        """
        tree, kind, parent = self.board.tree, self.lane.kind, _parent(branch)
        pool, last = self.board.pools[kind], (True, tree.score(branch, kind=kind))
        lanes = [
            lane
            for lane in tree.lanes
            if lane.kind == kind and pool.size(self.board.bound(lane)) >= lane.width
        ]
        for borrows, score, side in self._on_their_way_out(branch):
            if (borrows, score) < last and side is not branch:
                return True
        for lane in lanes:
            for borrows, score, side in tree.keys(parent, lane):
                if (borrows, score) < last and side is not branch:
                    first = tree.first_below(side, (lane,))
                    if first is not None:
                        self.board.memory.looked_at(self.task, first[2])
                    return True
        return False

    def _on_their_way_out(self, branch: Branch) -> Iterator[tuple[bool, int, Branch]]:
        """Yield siblings of a branch with pausing tasks, in the form of `FairTree.keys`."""
        too = (id for ids in self.board.leaving_too.values() for id in ids)
        for id in sorted({*self.board.leaving.values(), *too}):
            stay = self.board.stays[id]
            task, lane = stay.task, stay.lane
            _, side = sides(branch, stay.leaf)
            if task.state != State.pausing or side.parent is not branch.parent:
                continue
            if lane.kind == self.lane.kind and all(b.room(lane) for b in below(stay.leaf, side)):
                yield side.borrows(lane), self.board.tree.score(side, kind=lane.kind), side


def turns_end(
    board: Board, task: BoardTask, *, urgent: bool = True
) -> list[tuple[float, str, int]]:
    """Return when stays end, or when they may give way to an urgent task; in the form of
    `Pool.ends`.

    To a task that is not `urgent` they give way only if they are better served (F6), or lent (F5).
    Stays that may not give way even then count only at their own end. Otherwise devices could be
    kept for ever.
    """
    claim, found = _Claim(board, task, urgent=urgent), list[tuple[float, str, int]]()
    stays = [s for s in board.stays.values() if s.task.kind == task.kind and not s.leaving]
    turns = sorted((max(ripe_s(stay), claim.turn_over_s(stay)), stay.id) for stay in stays)
    for over_s, id in turns:
        stay = board.stays[id]
        at_s = board.end_s(stay)
        if stay.leaf is claim.leaf and not urgent:
            at_s = min(at_s, claim.leaves_at_s(stay))
        elif over_s < at_s and claim.gives_way(stay):
            at_s = over_s
        found.append((at_s, id, max(0, claim.gain(stay) - stay.grown)))
    return sorted(_last_beside(board, found))


def _last_beside(
    board: Board, ends: list[tuple[float, str, int]]
) -> Iterator[tuple[float, str, int]]:
    """Yield for each shared device only the last end, since only then the device is free."""
    last = dict[tuple[str, ...], tuple[float, str, int]]()
    for end in sorted(ends):
        last[board.stays[end[1]].devices] = end
    yield from last.values()


def leaves_at_s(board: Board, task: BoardTask) -> Callable[[BoardStay], float]:
    """Return a function that says when a stay gives way to a waiting task in addition to those that
    it was asked for before, as things are now; NEVER if it does not.
    """
    return _Claim(board, task, urgent=False).leaves_at_s


def device_to_empty(board: Board, task: BoardTask) -> str | None:
    """Return the device with fractions that a whole task could have first; None if there is none.

    Fractions often end or begin, so they seldom all give way at the same moment. If new ones began
    there meanwhile, the whole task would wait for ever. If tasks take turns, all fractions on the
    device give way within a full slice, or the minute of F8.
    """
    pool, lane = board.pools.get(task.kind), board.lane(task)
    if pool is None or not pool.parts or lane.is_fraction or lane.width > 1:
        return None
    if shut_by(board, task) is not None:
        return None
    claim = _Claim(board, task, urgent=False)
    ends = {id: claim.empty_at_s(id) for id in pool.parts if pool.takes(id, lane)}
    found = [(at_s, id) for id, at_s in ends.items() if id not in pool.closed]
    at_s, id = min(found, default=(NEVER, ""))
    return id if id and (at_s < NEVER or not board.policy.turns) else None


def is_reserved(board: Board, stay: BoardStay, task: BoardTask) -> bool:
    """True if all devices of a stay are reserved for its tenant or user, and not for the task."""
    if not board.reserved:
        return False
    mine, theirs = board.leaf(task).path, stay.leaf.path
    owners = {board.reserved.get(id, "") for id in stay.devices}
    return owners <= {*theirs} and owners.isdisjoint(mine)


def shut_by(board: Board, task: BoardTask) -> Branch | None:
    """Return the lowest branch above a task whose limits have no room for it; None if there is
    none.
    """
    leaf, lane = board.leaf(task), alike(task)
    return next((branch for branch in above(leaf) if not branch.room(lane)), None)


def _over(leaf: Branch, lane: Lane) -> int:
    """Return how many devices tasks below the limits above `leaf` must release to keep these limits
    (F4).
    """
    over = 0
    for branch in above(leaf):
        if branch.room(lane):
            continue
        most = branch.most_running
        if most is not None and branch.running > most - (most == 0):
            # replacing one task by another does not help: the limit was lowered
            return NOT_TO_BE_HAD
        for kind in (lane.kind, ALL):
            over = max(over, branch.held[kind] + lane.width - branch.limit.get(kind, NOT_TO_BE_HAD))
        over = max(over, 1)
    return over


def goes_before(board: Board, task: BoardTask, settled: BoardTask) -> bool:
    """True if a waiting task goes before an equally urgent settled task of the same user (rule F8).

    A fresh task does; otherwise the older task goes first.
    """
    return board.is_fresh(task) or place_in_line(task) < place_in_line(settled)


def goes_before_some(board: Board, leaf: Branch, lane: Lane, task: BoardTask) -> bool:
    """Return False if the first task of a user's lane may take the place of no task of that user.

    Of equally urgent tasks only the settled ones give way (F8).
    """
    if len(board.priorities) > 1:
        return True
    stays, settled = board.unprotected(lane.kind).get(leaf), board.settled.get(leaf)
    if not stays or not settled:
        return False
    return any(
        id in settled and (lane.fresh or task.submitted_s <= stay.task.submitted_s)
        for id, stay in stays.items()
    )


def sides(mine: Branch, theirs: Branch) -> tuple[Branch, Branch]:
    """Return the two siblings at which the paths of two leaves separate; for one leaf, the leaf
    twice.
    """
    while mine.depth > theirs.depth:
        mine = _parent(mine)
    while theirs.depth > mine.depth:
        theirs = _parent(theirs)
    while mine is not theirs and mine.parent is not theirs.parent:
        mine, theirs = _parent(mine), _parent(theirs)
    return mine, theirs


def _parent(branch: Branch) -> Branch:
    assert branch.parent is not None
    return branch.parent


def below(leaf: Branch, top: Branch) -> Iterator[Branch]:
    """Yield the branches from a leaf up to `top`, both included."""
    yield leaf
    while leaf is not top:
        leaf = _parent(leaf)
        yield leaf


# --- when a task may gain -----------------------------------------------------------------------


def next_turn_s(board: Board) -> float:
    """Return when time alone may first let a waiting task take the place of a preemptible stay; or
    NEVER.

    Scores cross because running tasks use more. If there are too many pairs to compute, the result
    is the next step of an eighth of the shortest slice at which a task may gain.
    """
    claims, most = list[tuple[BoardTask, Branch]](), LOOK_AHEAD_PAIRS / len(board.ripe)
    if most < 2:
        return _look_s(board)
    for node in (board.tree.root, *shared(board)):
        for lane in board.tree.lanes:
            claims += [(found[2], node) for found in board.tree.heads(node, lane)]
            if len(claims) > most:
                return _look_s(board)
    instants = (at_s for task, node in claims for at_s in _turns_s(board, task, node))
    return min((at_s for at_s in instants if at_s > board.now_s), default=NEVER)


def _turns_s(board: Board, task: BoardTask, node: Branch) -> Iterator[float]:
    """Yield for each leaf below a branch when the task may take the place of the leaf's stays."""
    claim = _Claim(board, task, urgent=False)
    for leaf in board.ripe:
        if leaf.path[: node.depth] == node.path:
            yield _turn_s(board, claim, leaf)


def _look_s(board: Board) -> float:
    """Return the next time at which a task may gain, in steps of an eighth of the shortest slice
    from now.
    """
    step_s = max(board.policy.slice_min_s / 8, RESOLUTION_S)
    moved, until_s = board.memory.quiet
    if moved == board.tree.moved and until_s == NEVER:
        return NEVER
    if moved != board.tree.moved or until_s <= board.now_s + step_s:
        return board.now_s + step_s
    return board.now_s + step_s * math.ceil((until_s - board.now_s) / step_s)


def nobody_gains_until_s(board: Board) -> float:
    """Return when a waiting task may first take another's place if only time passes; the answer may
    be too early, but never too late. With guarantees, or with turns below the top, the scores at
    the top do not decide alone: then the answer is now.
    """
    tree = board.tree
    if board.guarantees or shared(board):
        return board.now_s
    least = math.inf
    for kind in {lane.kind for lane in tree.lanes}:
        ripe = board.preemptible_tops(kind)
        claims = _claims(board, kind) if ripe else []
        for score, top in ripe:
            lowest = min((claim for claim, mine in claims if mine is not top), default=None)
            if lowest is not None and lowest < score:
                return board.now_s
            if lowest is not None and top.rate:  # otherwise the device reports new usage later
                least = min(least, unscored(lowest - score, top.weight) // top.rate)
    return tree.accrued_s(int(least)) if least < math.inf else NEVER


def _claims(board: Board, kind: str) -> list[tuple[int, Branch | None]]:
    """Return the lowest scores that waiting top branches can have after the shortest turn.

    The two lowest scores of each lane stand for all; a turn changes the score of the heaviest
    branch least. A score without a branch may belong to any branch.
    """
    tree, found = board.tree, list[tuple[int, Branch | None]]()
    for lane in tree.lanes:
        if lane.kind == kind:
            turn_us = int(1e6 * min(board.policy.slice_min_s, board.policy.slice_max_s))
            fee = tree.faded(turn_us * board.rate(lane))
            for _, score, top in tree.lowest(tree.root, lane):
                found.append((score + scored(fee, board.heaviest), top))
    return found


def shared(board: Board) -> list[Branch]:
    """Return the branches below the root where some tasks had a full turn and others wait.

    The deepest branches come first.
    """
    found: dict[Branch, None] = {}
    for leaf in board.ripe:
        if leaf.lines and (len(board.priorities) > 1 or _own_turn(board, leaf)):
            found[leaf] = None
        above = leaf.parent
        while above is not None and above.parent is not None:
            if above.lines and above.children > 1:
                found[above] = None
            above = above.parent
    return sorted(found, key=lambda branch: (-branch.depth, branch.path))


def _own_turn(board: Board, leaf: Branch) -> bool:
    """True if a user's waiting task may go before one of the user's settled tasks (F8)."""
    settled = board.settled.get(leaf)
    if settled is None:
        return False
    if any(lane.fresh for lane in leaf.lines):
        return True
    youngest_s = max(stay.task.submitted_s for stay in settled.values())
    return any(line.head[2] <= youngest_s for line in leaf.lines.values())


def _turn_s(board: Board, claim: _Claim, leaf: Branch) -> float:
    """Return when the claim may take a leaf's stays, judged by scores and slices only."""
    mine, theirs = sides(claim.leaf, leaf)
    if mine is theirs:
        crossing_s = board.now_s
    else:
        tree, kind = board.tree, claim.lane.kind
        crossing_s = tree.overtakes_s(theirs, mine, claim.turn_us * claim.rate, kind=kind)
        if tree.score(theirs, kind=kind) <= claim.score_with_fee(mine):
            crossing_s += RESOLUTION_S / 2  # the score must be higher, not equal
    first_s = NEVER
    for stay in board.ripe[leaf].values():
        slice_s = (stay.task.started_s or 0.0) + max(claim.turn_us, stay.turn_us) / 1e6
        if slice_s <= crossing_s:
            return crossing_s
        first_s = min(first_s, slice_s)
    return first_s
