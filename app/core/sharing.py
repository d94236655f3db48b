"""Graphs that share devices: who may, who joins whom, and who must not any more.

A graph stops within some milliseconds and keeps its memory, so several can live on one device and
take turns there that no message could order: the device gives them (`core.rota`), by usage and
weight (F3), and the island only says who takes part.  To join takes nothing from anybody but the
turns that are due to who joins: nobody is paused, and no slice need be over first.

They share where it makes no rule mean anything else: none that a guarantee, a limit or a promise of
a tier is about.  Who waits takes a free device first.  If none is free it joins those who are ahead
of it, else those to whom least is due.  And only while they are nearly as well served: who is far
behind has a device for itself until it has caught up, as ever, so that nobody is said to run who
gets no turn.  Who waits and cannot share goes first: nobody better served than it joins.

Usage is counted over all devices, so a user with graphs on two of them makes them even.  Where none
has, some move from one to the other (`core.regroup`).

Of each user one takes turns on a device.  Where places are left its next one is launched too, its
**heir**: it has one turn to begin with, and more when those before it have ended.  So a user with
many graphs has its share without a gap between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from itertools import islice

from app.core import reclaim
from app.core.board import Board, Stay, slice_us
from app.core.fairshare import Branch, Lane, unpinned, unscored, usage_us
from app.core.fairshare import lane as lane_of
from app.core.island import Task, changed
from app.core.lifecycle import State
from app.core.reclaim import above, sides
from app.core.rota import Level, Share

NEAR_US = 5_000_000  # of the device: who joins would catch up with the others so soon, or they
FAR_US = 20_000_000  # and who is so far from them shares no longer
APART_US = 2_500_000  # so far ahead are others whom one rather joins, or moves to
EVEN_US = 500_000  # and who is no more behind or ahead than this is as well served
DEPTH = 16  # so many users are looked at, the least served first
SOON_S = 3.0  # so long who was just launched is waited for, to share with it
PATIENT_S = 10.0  # and so long until an image is durable that pins one to the wrong device


# --- who may --------------------------------------------------------------------------------------


def may(board: Board, task: Task) -> bool:
    """May it share a device, as far as it itself goes?"""
    if not task.graph or task.width != 1 or task.elastic or task.moves_to is not None:
        return False
    if board.policy.tier_share.get(task.tier) and task.tier in board.honoured(task.kind):
        return False
    return all(_is_plain(branch) for branch in above(board.leaf(task)))


def _is_plain(branch: Branch) -> bool:
    return not branch.guarantee and not branch.limit and branch.most_running is None


def _runs(task: Task) -> bool:
    """Or will at once, beside others."""
    return task.state == State.running or (task.shares and task.state == State.starting)


# --- where ----------------------------------------------------------------------------------------


class Places:
    """The devices of a kind on which graphs run, and may take turns with others, at an instant."""

    def __init__(self, board: Board, kind: str, devices: Sequence[str]) -> None:
        self.board, self.kind, self.pool = board, kind, board.pools[kind]
        self.devices = devices
        self.groups = {device: board.group(device) for device in devices}
        self._below: dict[Branch, list[tuple[str, Stay]]] | None = None
        self._highest: dict[str, tuple[set[Branch], int]] = {}
        self._spread: Counter[Branch] | None = None
        self._due: dict[Branch, Fraction] = {}
        self._loads: dict[str, Fraction] = {}
        self._rates: dict[Lane, int] = {}
        self._turns: dict[tuple[str, ...], list[Stay]] = {}

    def apart(self, mine: Branch, other: Branch) -> int:
        """How far another is ahead of one, in the usage that one would need to catch up."""
        mine, theirs = sides(mine, other)
        score = self.board.tree.score
        ahead = score(theirs, kind=self.kind) - score(mine, kind=self.kind)
        return unscored(ahead, mine.weight)

    @cached_property
    def all_run(self) -> bool:
        return all(map(all_run, self.groups.values()))

    def below(self, top: Branch) -> list[tuple[str, Stay]]:
        """Those below a branch at the top who have turns, and on which device."""
        if self._below is None:
            self._below = defaultdict(list)
            for device, group in self.groups.items():
                for stay in self.in_turn(group):
                    self._below[stay.leaf.top].append((device, stay))
        return self._below.get(top, [])

    def is_level(self, mine: Branch, device: str, apart_us: int) -> bool:
        """A quick look: is nobody there further ahead of one than this, nor of its tenant?"""
        if device not in self._highest:
            tops = {stay.leaf.top for stay in self.board.group(device)}
            most = max(self.board.tree.score(top, kind=self.kind) for top in tops)
            self._highest[device] = tops, most
        (tops, most), top = self._highest[device], mine.top
        if top in tops:
            return False
        ahead = unscored(most - self.board.tree.score(top, kind=self.kind), top.weight)
        return ahead <= self.usage(lane_of(self.kind), apart_us)

    def in_turn(self, group: Collection[Stay]) -> list[Stay]:
        """Those of a device who have turns there now: nobody beside them is less served."""
        key = tuple(stay.id for stay in group)
        if key not in self._turns:
            even = -self.usage(lane_of(self.kind), EVEN_US)
            leaves = dict.fromkeys(stay.leaf for stay in group)
            in_turn = {
                leaf for leaf in leaves if all(self.apart(leaf, other) >= even for other in leaves)
            }
            self._turns[key] = [stay for stay in group if stay.leaf in in_turn]
        return self._turns[key]

    def ahead(self, mine: Branch, device: str) -> int:
        """How far somebody who has turns there is ahead of one."""
        group = self.in_turn(self.groups[device])
        return max(self.apart(mine, stay.leaf) for stay in group)

    def usage(self, lane: Lane, device_us: int) -> int:
        """What so much time of a device adds to what one used."""
        if lane not in self._rates:
            self._rates[lane] = self.board.rate(lane)
        return self.board.tree.faded(device_us * self._rates[lane])

    def due(self, leaf: Branch) -> Fraction:
        """A user's part of what all have that hold devices of the kind, by weights."""
        self._count()
        return self._due[leaf]

    def spread(self, leaf: Branch) -> int:
        """On how many devices a user has graphs."""
        return self._count()[leaf]

    def load(self, device: str) -> Fraction:
        """What is due to those who share a device, there."""
        if device not in self._loads:
            leaves = dict.fromkeys(stay.leaf for stay in self.board.group(device))
            parts = (self.due(leaf) / self.spread(leaf) for leaf in leaves)
            self._loads[device] = sum(parts, Fraction(0))
        return self._loads[device]

    def _count(self) -> Counter[Branch]:
        if self._spread is None:
            stays = [s for s in self.board.stays.values() if s.lane.kind == self.kind]
            stays = [stay for stay in stays if not stay.leaving]
            pairs = {(stay.leaf, device) for stay in stays for device in stay.devices}
            self._spread = Counter(leaf for leaf, _ in pairs)
            self._due = _due({stay.leaf for stay in stays})
        return self._spread


def _due(leaves: Collection[Branch]) -> dict[Branch, Fraction]:
    """By weights, at each level among those that are above any of these."""
    branches = {branch for leaf in leaves for branch in above(leaf)}
    among = Counter[Branch]()
    for branch in branches:
        if branch.parent is not None:
            among[branch.parent] += branch.weight
    due = dict.fromkeys(leaves, Fraction(1))
    for leaf in leaves:
        for branch in above(leaf):
            if branch.parent is not None:
                due[leaf] *= Fraction(branch.weight, among[branch.parent])
    return due


def places(board: Board) -> list[Places]:
    """Of each kind, if there are any."""
    if board.policy.sharers_max < 2 or not board.policy.turns:
        return []
    found = defaultdict[str, list[str]](list)
    for device in sorted({id for stay in board.graphs.values() for id in stay.devices}):
        if device in board.devices and _is_place(board, device):
            found[board.devices[device].kind].append(device)
    return [Places(board, kind, found[kind]) for kind in sorted(found)]


def _is_place(board: Board, device: str) -> bool:
    """Does nothing but graphs that may share run there, and may another join?"""
    if device not in board.pools[board.devices[device].kind].open or device in board.kept_for:
        return False
    group = board.group(device)
    return bool(group) and all(_runs(stay.task) and may(board, stay.task) for stay in group)


# --- who joins ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """One that waits is launched on a device beside others; those `gone` make place for it."""

    task: Task
    device: str
    gone: tuple[Stay, ...] = ()


class Else(Enum):
    """Why who waits does not join now."""

    waits = "it will, in a moment, or when others have caught up with it"
    passes = "no place is for it"
    stops = "nobody may go before it"


def who_joins(here: Places) -> Join | None:
    """Who goes first of those that wait and may take turns with those on a device.

    And who makes place for it, after a full slice: one of the same user with a lower priority, or,
    where as many share the device as may, an heir, or the best served of them, if it has had more
    than the other will have after the next one.  Where nobody else joins, an heir may.
    """
    for leaf, lane, task in who_wait(here):
        choice = choice_of(here, leaf, lane, task)
        if isinstance(choice, Join):
            return choice
        if choice is Else.stops:
            break
    heirs = (_heir(here, device) for device in here.devices)
    return next((heir for heir in heirs if heir is not None), None)


def has_a_place(board: Board, task: Task) -> bool:
    """Does who waits join others, now or in a moment?  Then nobody is paused for it."""
    here = next((one for one in places(board) if one.kind == task.kind), None)
    if here is None:
        return False
    choice = choice_of(here, board.leaf(task), board.lane_in_line(task), task)
    return isinstance(choice, Join) or choice is Else.waits


def may_not_be_passed(here: Places) -> list[Branch]:
    """Whose first may share with nobody as things are, and goes before all who are less served."""
    return [
        leaf
        for leaf, lane, task in who_wait(here)
        if choice_of(here, leaf, lane, task) is Else.stops
    ]


def who_wait(here: Places) -> Iterator[tuple[Branch, Lane, Task]]:
    """The first of each user, in the order of rule F3; of many not the last."""
    tree = here.board.tree
    lanes = [lane for lane in tree.lanes if lane.kind == here.kind]
    return islice(_in_order(here.board, tree.root, lanes), DEPTH)


def choice_of(here: Places, leaf: Branch, lane: Lane, task: Task) -> Join | Else:
    """Where one that waits goes, as if its image were durable; it may have to wait until it is."""
    board = here.board
    if task.cancel_asked or not may(board, task):
        return Else.stops if _could_run(here, lane) else Else.passes
    if here.pool.fitting(unpinned(lane)):  # it has a device for itself
        return Else.stops if lane.pin is None else Else.waits
    found = [join(here, leaf, lane, task, device) for device in here.devices]
    joins = [one for one in found if isinstance(one, Join)]
    is_pinned = lane.pin is not None and _waited_s(board, task) < PATIENT_S
    if lane.pin is not None and not is_pinned:
        joins = [one for one in joins if one.device == lane.pin]
    if not joins:
        return next((each for each in (Else.stops, Else.waits) if each in found), Else.passes)
    best = min(joins, key=lambda one: _rank(here, leaf, lane, one))
    if takes_from(here, leaf, lane, task, [one.device for one in joins]):
        return Else.waits if is_pinned else Else.passes
    if is_pinned and lane.pin != best.device:
        return Else.waits
    return Else.waits if _is_better_soon(here, leaf, lane, best) else best


def _waited_s(board: Board, task: Task) -> float:
    since_s = task.submitted_s if task.waiting_since_s is None else task.waiting_since_s
    return board.now_s - since_s


def join(here: Places, leaf: Branch, lane: Lane, task: Task, device: str) -> Join | Else:
    """On this device, if its own are not there, it fits, and those there are as well served."""
    group = here.groups[device]
    place = _place(here, leaf, task, device)
    if place is None:
        return Else.passes
    if yields(here, leaf, group, APART_US):
        return Else.waits
    others = [stay for stay in group if stay not in place]
    far = [s for s in here.in_turn(others) if not _near(here, leaf, s.leaf, NEAR_US)]
    if far:
        ahead = [stay for stay in others if _is_far_ahead(here, leaf, stay)]
        if not set(far) <= set(ahead):
            return Else.passes  # it is far ahead of them
        if len(ahead) == len(others) or not all(_gives(here, leaf, task, s) for s in ahead):
            return Else.stops
        place, others = [*place, *ahead], [stay for stay in others if stay not in ahead]
    if not fits(here.board, device, others, lane):
        return Else.passes
    return Join(task=task, device=device, gone=tuple(place))


def _place(here: Places, leaf: Branch, task: Task, device: str) -> list[Stay] | None:
    """Who makes place for it, if anybody has to; None if nobody does."""
    group = here.groups[device]
    if own := of_user(leaf, group):
        is_better = own[-1].task.priority < task.priority and _may_ask(own[-1])
        return own[-1:] if is_better else None
    if len(group) < here.board.policy.sharers_max:
        return []
    gone = _an_heir(group)
    if gone is None and not here.is_level(leaf, device, slice_us(here.board.policy, task)):
        gone = _best_served(here, leaf, task, group)
    return None if gone is None else [gone]


def _is_far_ahead(here: Places, leaf: Branch, stay: Stay) -> bool:
    return here.apart(leaf, stay.leaf) > here.usage(stay.lane, NEAR_US)


def _rank(here: Places, leaf: Branch, lane: Lane, one: Join) -> tuple[int, int, Fraction, int, str]:
    """Those who are ahead, where nobody makes place for it, those to whom least is due."""
    load, sharers = here.load(one.device), len(here.groups[one.device])
    return -_step(here, leaf, lane, one.device), len(one.gone), load, sharers, one.device


def _step(here: Places, leaf: Branch, lane: Lane, device: str) -> int:
    """How often they are as far ahead as matters; around 0 while they are level."""
    apart = here.usage(lane, APART_US)
    return (here.ahead(leaf, device) + apart // 2) // apart


def _is_better_soon(here: Places, leaf: Branch, lane: Lane, best: Join) -> bool:
    """Was one just launched beside whom it will have more?"""
    if not best.gone and _step(here, leaf, lane, best.device) > 0:
        return False
    load = here.load(best.device)
    return any(
        stay.leaf is not leaf
        and fits(here.board, stay.devices[0], [stay], lane)
        and here.load(stay.devices[0]) < load
        for stay in here.board.graphs.values()
        if _is_new(here, stay)
    )


def _is_new(here: Places, stay: Stay) -> bool:
    """Was it just launched, where others may join it as soon as it runs?"""
    task = stay.task
    if task.kind != here.kind or task.shares or task.state != State.starting:
        return False
    return here.board.now_s < task.launched_s + SOON_S and may(here.board, task)


def takes_from(here: Places, leaf: Branch, lane: Lane, task: Task, joined: Collection[str]) -> bool:
    """Would others give way to it (F6) who are further ahead of it than those whom it could join?

    They do not share, or those who do are too far from it.
    """
    if len(here.pool.open) <= len(joined):
        return False
    found = would_give_way(here, leaf, task)
    if not found or any(id in joined for victim in found for id in victim.stay.devices):
        return False
    theirs = min(here.apart(leaf, victim.stay.leaf) for victim in found)
    most = max((here.ahead(leaf, device) for device in joined), default=0)
    return theirs - most > here.usage(lane, APART_US)


def would_give_way(here: Places, leaf: Branch, task: Task) -> list[reclaim.Victim]:
    """Who would (F6), were its image durable: of all, or else of those below its own tenant."""
    board, as_saved = here.board, changed(task, saved=True)
    found = reclaim.victims(board, as_saved)
    return found or reclaim.victims(board, as_saved, within=leaf.top) or []


def of_user(leaf: Branch, group: Sequence[Stay]) -> list[Stay]:
    """Those of one user, in the order of its line."""
    return sorted((stay for stay in group if stay.leaf is leaf), key=in_line)


def _heir(here: Places, device: str) -> Join | None:
    """The next of the least served user, if everybody who is served less has one there already.

    Once: who was launched and found no room is launched again when it is its turn.
    """
    board, group = here.board, here.groups[device]
    if len(group) >= board.policy.sharers_max:
        return None
    for leaf, lane, task in who_wait(here):
        own = of_user(leaf, group)
        if not own or not may(board, task):
            return None
        is_next = len(own) == 1 and own[0].task.priority >= task.priority
        if is_next and not task.epoch and fits(board, device, group, lane):
            return Join(task=task, device=device)
    return None


def in_line(stay: Stay) -> tuple[int, float, str]:
    """As in the line of its user."""
    return -stay.task.priority, stay.task.submitted_s, stay.id


def _an_heir(group: Sequence[Stay]) -> Stay | None:
    """One that can be asked to make place."""
    ahead = set[Branch]()
    for stay in sorted(group, key=in_line):
        if stay.leaf in ahead and _may_ask(stay):
            return stay
        ahead.add(stay.leaf)
    return None


def _may_ask(stay: Stay) -> bool:
    return stay.ripe and stay.task.state == State.running


def _best_served(here: Places, leaf: Branch, task: Task, group: Sequence[Stay]) -> Stay | None:
    """None if it cannot be asked."""
    most = max(group, key=lambda stay: (_lead(here, leaf, task, stay), stay.id))
    return most if _gives(here, leaf, task, most) else None


def _gives(here: Places, leaf: Branch, task: Task, stay: Stay) -> bool:
    """Rule F6: does it give way, after a full slice, and having had more than the other will?"""
    return _may_ask(stay) and _lead(here, leaf, task, stay) > 0


def _lead(here: Places, leaf: Branch, task: Task, stay: Stay) -> int:
    """By how much it has had more, by weight, once the next slice is charged to the other."""
    mine, theirs = sides(leaf, stay.leaf)
    fee = here.usage(stay.lane, slice_us(here.board.policy, task))
    score = here.board.tree.score
    return score(theirs, kind=here.kind) - score(mine, fee, kind=here.kind)


def _in_order(
    board: Board, branch: Branch, lanes: Collection[Lane]
) -> Iterator[tuple[Branch, Lane, Task]]:
    """The first of each user in these lanes, in the order of rule F3."""
    if not branch.inner:
        found = board.tree.first_below(branch, lanes)
        if found is not None:
            yield found
        return
    keys: dict[Branch, tuple[bool, int]] = {}
    for lane in lanes:
        for borrows, score, child in board.tree.keys(branch, lane):
            keys[child] = min(keys.get(child, (True, score)), (borrows, score))
    for child in sorted(keys, key=lambda child: (keys[child], child.name)):
        yield from _in_order(board, child, lanes)


def fits(board: Board, device: str, group: Sequence[Stay], lane: Lane) -> bool:
    taken = sum(stay.lane.memory_bytes for stay in group)
    return taken + lane.memory_bytes <= board.devices[device].memory_bytes


def _near(here: Places, one: Branch, other: Branch, bound_us: int) -> bool:
    """Would the less served of two have caught up within this time of the device?"""
    bound = here.usage(lane_of(here.kind), bound_us)
    return here.apart(one, other) <= bound and here.apart(other, one) <= bound


# --- who parts ------------------------------------------------------------------------------------


def who_parts(board: Board) -> list[Stay]:
    """Those who share a device and must not any more; the least served of them stays."""
    found = []
    for device in sorted(board.beside):
        group, kind = board.group(device), board.devices[device].kind
        if device in board.pools[kind].open:  # else it is emptied anyway
            here = Places(board, kind, [device])
            found += [stay for stay in _parts(here, group) if _may_ask(stay)]
    for here in places(board) if board.beside else ():
        found += [s for s in _who_yields(here) if s not in found and _may_ask(s)]
    return found


def _parts(here: Places, group: Sequence[Stay]) -> list[Stay]:
    """Who got too far ahead of those in turn; all but the first, where anybody may not share."""
    board = here.board
    if not all(may(board, stay.task) for stay in group):
        first = min(group, key=lambda stay: (board.tree.score(stay.leaf.top), stay.id))
        return [stay for stay in group if stay is not first]
    in_turn, far = here.in_turn(group), here.usage(group[0].lane, FAR_US)
    return [s for s in group if any(here.apart(one.leaf, s.leaf) > far for one in in_turn)]


def _who_yields(here: Places) -> Iterator[Stay]:
    """Who takes turns that are due to another of its tenant, who is elsewhere or waits."""
    waiting = list(_who_need_all(here))
    for device in here.devices:
        group = here.groups[device]
        for stay in group if len(group) > 1 else ():
            is_owed = any(_owes(here, stay, group, leaf, task) for leaf, task in waiting)
            if is_owed or (here.all_run and yields(here, stay.leaf, group, 2 * APART_US)):
                yield stay


def _who_need_all(here: Places) -> Iterator[tuple[Branch, Task]]:
    """Those in line who need devices for themselves."""
    for leaf, lane, task in who_wait(here):
        if not may(here.board, task) and _could_run(here, lane):
            yield leaf, task


def _could_run(here: Places, lane: Lane) -> bool:
    return here.pool.size(here.board.bound(unpinned(lane))) >= lane.width


def _owes(here: Places, stay: Stay, group: Sequence[Stay], leaf: Branch, task: Task) -> bool:
    """Would it give way to one of its tenant, if others did, too, whose turn it is not to do so?

    While it goes on they never do: what is due to its tenant it has.
    """
    if stay.leaf.top is not leaf.top or stay.leaf is leaf:
        return False
    over = above_both(leaf, stay.leaf)
    return over.parent is not None and has_others(group, over) and _gives(here, leaf, task, stay)


def yields(here: Places, leaf: Branch, group: Sequence[Stay], bound_us: int) -> bool:
    """Is one on another device so far behind, which would have what a branch above both is due?

    There are others besides, here and there: of these that branch then gets more there, less here.
    """
    bound = here.usage(group[0].lane, bound_us)
    for device, other in here.below(leaf.top):
        if other in group or here.apart(other.leaf, leaf) <= bound:
            continue
        over = above_both(leaf, other.leaf)
        if has_others(here.in_turn(here.groups[device]), over) and has_others(group, over):
            return True
    return False


def all_run(group: Sequence[Stay]) -> bool:
    return all(stay.task.state == State.running for stay in group)


def above_both(one: Branch, other: Branch) -> Branch:
    """The lowest branch above two leaves."""
    side, _ = sides(one, other)
    return side if side.parent is None else side.parent


def has_others(group: Sequence[Stay], over: Branch) -> bool:
    """Is anybody in a group not below a branch?"""
    return any(stay.leaf.path[: over.depth] != over.path for stay in group)


# --- what the device is told ----------------------------------------------------------------------


def shares(board: Board, device: str) -> list[Share]:
    """What the device needs to know to give turns; empty if nobody shares it."""
    if device not in board.beside:
        return []
    group = sorted(board.group(device), key=in_line)
    return [_share(board, stay, place) for place, stay in enumerate(group)]


def _share(board: Board, stay: Stay, place: int) -> Share:
    """As the ledger has it: of its seat time so much is booked, in the usage of its branches."""
    task = stay.task
    path = reversed([branch for branch in above(stay.leaf) if branch.parent is not None])
    return Share(
        task=task.id,
        epoch=task.epoch,
        place=place,
        held_us=task.held_us - task.accrued_us,
        rate=board.rate_of(task),
        path=tuple(_level(board, branch, task.kind) for branch in path),
    )


def _level(board: Board, branch: Branch, kind: str) -> Level:
    policy, faded = board.policy, board.tree.usage(branch) + branch.lifts.get(kind, 0)
    used = usage_us(
        faded, now_s=board.now_s, since_s=policy.since_s, half_life_s=policy.half_life_s
    )
    return Level(name=branch.name, used=used, weight=branch.weight)
