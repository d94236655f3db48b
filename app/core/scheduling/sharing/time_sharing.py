"""Lets graphs share devices: decides which may share, which join, and which must stop sharing.

A graph stops within some milliseconds and keeps its memory. So several graphs can live on one
device and take turns that are too short for messages from the island. The device itself gives the
turns (`core.scheduling.sharing.turns`), by usage and weight (F3); the island only says which graphs
take part. A graph that joins takes from the others only the turns that it is owed: no task is
paused, and no slice needs to be over first.

Graphs share only where that changes no other rule: no guarantee, limit or tier promise may apply. A
waiting graph takes a free device first. If none is free, it joins graphs that are ahead of it, or
else the device on which the least share is due. A graph joins only graphs that are nearly as well
served. A graph that is far behind gets a device of its own until it has caught up; otherwise graphs
would count as running without getting a turn. A waiting task that cannot share goes first: no
better served graph joins before it.

Usage is counted over all devices, so a user with graphs on two devices evens out their usage. If
there is no such user, some graphs move from one device to the other
(`core.scheduling.sharing.graph_moves`).

One graph of each user takes turns on a device. If places are left, the user's next graph is
launched too, as a *standby* (`heir`). The standby gets one turn to begin with, and more once the
graphs before it have ended. So a user with many graphs gets a share without gaps between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from itertools import islice

from app.core.fairness.fair_tree import Branch, Lane, above, unpinned
from app.core.fairness.fair_tree import lane as lane_of
from app.core.fairness.usage_decay import unscored, usage_us
from app.core.model.lifecycle import State
from app.core.model.snapshot import BoardTask, changed
from app.core.scheduling.board import Board
from app.core.scheduling.reclaim import preemption
from app.core.scheduling.reclaim.preemption import sides
from app.core.scheduling.sharing.turns import Level, Share
from app.core.scheduling.stays import BoardStay, slice_us

# µs of device time: two graphs may share if the less served one can catch up within this time
NEAR_US = 5_000_000
FAR_US = 20_000_000  # µs of device time: graphs further apart than this stop sharing
# µs of device time: graphs this far ahead are preferred when joining or moving
APART_US = 2_500_000
EVEN_US = 500_000  # µs of device time: graphs at most this far apart count as equally served
DEPTH = 16  # most users that are looked at, least served first
SOON_S = 3.0  # s; how long to wait for a graph that was just launched, in order to share with it
# s; how long to wait for a durable image of a graph whose present image pins it to another device
PATIENT_S = 10.0


# --- may share ------------------------------------------------------------------------------------


def may(board: Board, task: BoardTask) -> bool:
    """True if the task itself may share a device."""
    if not task.graph or task.width != 1 or task.elastic or task.moves_to is not None:
        return False
    if board.policy.tier_share.get(task.tier) and task.tier in board.urgency.honoured(task.kind):
        return False
    leaf = board.leaf(task)
    return are_plain(leaf) and (task.id in board.stays or leaf.room(board.lane_in_line(task)))


def are_plain(leaf: Branch) -> bool:
    """True if no guarantee and no limit applies to the branches above a user.

    The user's own limits do not matter: each task that shares a device counts as one on a device
    of its own.
    """
    return not any(b.guarantee or b.limit or b.most_running is not None for b in above(leaf.parent))


def _runs(task: BoardTask) -> bool:
    """True if the task runs beside others, or is about to."""
    return task.state == State.running or (task.shares and task.state == State.starting)


# --- places ---------------------------------------------------------------------------------------


class SharedDevices:
    """Describes, at one instant, the devices of a kind on which graphs run and that may be
    shared.
    """

    def __init__(self, board: Board, kind: str, devices: Sequence[str]) -> None:
        self.board, self.kind, self.pool = board, kind, board.pools[kind]
        self.devices = devices
        self.groups = {device: board.group(device) for device in devices}
        self._below: dict[Branch, list[tuple[str, BoardStay]]] | None = None
        self._highest: dict[str, tuple[set[Branch], int]] = {}
        self._spread: Counter[Branch] | None = None
        self._due: dict[Branch, Fraction] = {}
        self._loads: dict[str, Fraction] = {}
        self._rates: dict[Lane, int] = {}
        self._turns: dict[tuple[str, ...], list[BoardStay]] = {}

    def apart(self, mine: Branch, other: Branch) -> int:
        """Return the usage that `mine` would need to catch up with `other`."""
        mine, theirs = sides(mine, other)
        score = self.board.tree.score
        ahead = score(theirs, kind=self.kind) - score(mine, kind=self.kind)
        return unscored(ahead, mine.weight)

    @cached_property
    def all_run(self) -> bool:
        return all(map(all_run, self.groups.values()))

    def below(self, top: Branch) -> list[tuple[str, BoardStay]]:
        """Return (device, stay) of the stays that have turns below a top branch."""
        if self._below is None:
            self._below = defaultdict(list)
            for device, group in self.groups.items():
                for stay in self.in_turn(group):
                    self._below[stay.leaf.top].append((device, stay))
        return self._below.get(top, [])

    def is_level(self, mine: Branch, device: str, apart_us: int) -> bool:
        """Quick check: True if no stay there is of the same tenant, or ahead by more than
        `apart_us`.
        """
        if device not in self._highest:
            tops = {stay.leaf.top for stay in self.board.group(device)}
            most = max(self.board.tree.score(top, kind=self.kind) for top in tops)
            self._highest[device] = tops, most
        (tops, most), top = self._highest[device], mine.top
        if top in tops:
            return False
        ahead = unscored(most - self.board.tree.score(top, kind=self.kind), top.weight)
        return ahead <= self.usage(lane_of(self.kind), apart_us)

    def in_turn(self, group: Collection[BoardStay]) -> list[BoardStay]:
        """Return the stays of a group that get turns now: those that are served least."""
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
        """Return how far the best served stay with turns there is ahead of `mine`, as usage."""
        group = self.in_turn(self.groups[device])
        return max(self.apart(mine, stay.leaf) for stay in group)

    def usage(self, lane: Lane, device_us: int) -> int:
        """Return what so much device time adds to a user's usage."""
        if lane not in self._rates:
            self._rates[lane] = self.board.rate(lane)
        return self.board.tree.faded(device_us * self._rates[lane])

    def due(self, leaf: Branch) -> Fraction:
        """Return a user's share, by weights, among all that hold devices of the kind."""
        self._count()
        return self._due[leaf]

    def spread(self, leaf: Branch) -> int:
        """Return on how many devices a user has graphs."""
        return self._count()[leaf]

    def load(self, device: str) -> Fraction:
        """Return the sum of the shares that are due on a device."""
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
    """Divide one device by weights; at each level only branches above one of the leaves count."""
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


def places(board: Board) -> list[SharedDevices]:
    """Return the places of each kind that has any."""
    if board.policy.sharers_max < 2 or not board.policy.turns:
        return []
    found = defaultdict[str, list[str]](list)
    for device in sorted({id for stay in board.graphs.values() for id in stay.devices}):
        if device in board.devices and _is_place(board, device):
            found[board.devices[device].kind].append(device)
    return [SharedDevices(board, kind, found[kind]) for kind in sorted(found)]


def _is_place(board: Board, device: str) -> bool:
    """True if only graphs that may share run on the device, and another may join."""
    if device not in board.pools[board.devices[device].kind].open or device in board.kept_for:
        return False
    group = board.group(device)
    return bool(group) and all(_runs(stay.task) and may(board, stay.task) for stay in group)


# --- joining --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Describes the launch of a waiting task beside others; the stays in `gone` make room for
    it.
    """

    task: BoardTask
    device: str
    gone: tuple[BoardStay, ...] = ()


class WhyNoJoin(Enum):
    """Reasons why a waiting task does not join now."""

    waits = "it will, in a moment, or when others have caught up with it"
    passes = "no place is for it"
    stops = "nobody may go before it"


def next_join(here: SharedDevices) -> Join | None:
    """Return the first waiting task that may take turns on a device, and the device.

    Stays on the device may have to make room, each after a full slice: a stay of the same user with
    lower priority; on a full device a standby or the best served stay; stays too far ahead of the
    task. The best served stay and those ahead must have had more than the task will after its next
    slice. If no other task joins, a standby may.
    """
    for leaf, lane, task in waiting_graphs(here):
        choice = choice_of(here, leaf, lane, task)
        if isinstance(choice, Join):
            return choice
        if choice is WhyNoJoin.stops:
            break
    heirs = (_heir(here, device) for device in here.devices)
    return next((heir for heir in heirs if heir is not None), None)


def has_a_place(board: Board, task: BoardTask) -> bool:
    """True if a waiting task joins others, now or soon, so that no task need be paused for it."""
    here = next((one for one in places(board) if one.kind == task.kind), None)
    if here is None:
        return False
    choice = choice_of(here, board.leaf(task), board.lane_in_line(task), task)
    return isinstance(choice, Join) or choice is WhyNoJoin.waits


def may_not_be_passed(here: SharedDevices) -> list[Branch]:
    """Return the users whose first task cannot share now and must not be overtaken by others."""
    return [
        leaf
        for leaf, lane, task in waiting_graphs(here)
        if choice_of(here, leaf, lane, task) is WhyNoJoin.stops
    ]


def waiting_graphs(here: SharedDevices) -> Iterator[tuple[Branch, Lane, BoardTask]]:
    """Yield the first waiting task of each user, in the order of rule F3, up to `DEPTH` users."""
    tree = here.board.tree
    lanes = [lane for lane in tree.lanes if lane.kind == here.kind]
    return islice(_in_order(here.board, tree.root, lanes), DEPTH)


def choice_of(here: SharedDevices, leaf: Branch, lane: Lane, task: BoardTask) -> Join | WhyNoJoin:
    """Return where a waiting task joins, as if its image were durable; it may have to wait for
    that.
    """
    board = here.board
    if task.cancel_asked or not may(board, task):
        return WhyNoJoin.stops if _could_run(here, lane) else WhyNoJoin.passes
    if here.pool.fitting(unpinned(lane)):  # a device is free for it
        return WhyNoJoin.stops if lane.pin is None else WhyNoJoin.waits
    found = [join(here, leaf, lane, task, device) for device in here.devices]
    joins = [one for one in found if isinstance(one, Join)]
    is_pinned = lane.pin is not None and _waited_s(board, task) < PATIENT_S
    if lane.pin is not None and not is_pinned:
        joins = [one for one in joins if one.device == lane.pin]
    if not joins:
        return next(
            (each for each in (WhyNoJoin.stops, WhyNoJoin.waits) if each in found), WhyNoJoin.passes
        )
    best = min(joins, key=lambda one: _rank(here, leaf, lane, one))
    if takes_from(here, leaf, lane, task, [one.device for one in joins]):
        return WhyNoJoin.waits if is_pinned else WhyNoJoin.passes
    if is_pinned and lane.pin != best.device:
        return WhyNoJoin.waits
    return WhyNoJoin.waits if _is_better_soon(here, leaf, lane, best) else best


def _waited_s(board: Board, task: BoardTask) -> float:
    since_s = task.waits_since_s
    return board.now_s - since_s


def join(
    here: SharedDevices, leaf: Branch, lane: Lane, task: BoardTask, device: str
) -> Join | WhyNoJoin:
    """Return the join on this device, if the user has no graph there and the service levels are
    close.
    """
    group = here.groups[device]
    place = _place(here, leaf, task, device)
    if place is None:
        return WhyNoJoin.passes
    if yields(here, leaf, group, APART_US):
        return WhyNoJoin.waits
    others = [stay for stay in group if stay not in place]
    far = [s for s in here.in_turn(others) if not _near(here, leaf, s.leaf, NEAR_US)]
    if far:
        ahead = [stay for stay in others if _is_far_ahead(here, leaf, stay)]
        if not set(far) <= set(ahead):
            return WhyNoJoin.passes  # the task is far ahead of them
        if len(ahead) == len(others) or not all(_gives(here, leaf, task, s) for s in ahead):
            return WhyNoJoin.stops
        place, others = [*place, *ahead], [stay for stay in others if stay not in ahead]
    if not fits(here.board, device, others, lane):
        return WhyNoJoin.passes
    return Join(task=task, device=device, gone=tuple(place))


def _place(
    here: SharedDevices, leaf: Branch, task: BoardTask, device: str
) -> list[BoardStay] | None:
    """Return the stays that must make room for the task, [] if none must; None if there can be no
    room.
    """
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


def _is_far_ahead(here: SharedDevices, leaf: Branch, stay: BoardStay) -> bool:
    return here.apart(leaf, stay.leaf) > here.usage(stay.lane, NEAR_US)


def _rank(
    here: SharedDevices, leaf: Branch, lane: Lane, one: Join
) -> tuple[int, int, Fraction, int, str]:
    """Return a sort key for joins. Joins with graphs that are ahead come first, then joins for
    which no stay must make room, then joins with the least share due.
    """
    load, sharers = here.load(one.device), len(here.groups[one.device])
    return -_step(here, leaf, lane, one.device), len(one.gone), load, sharers, one.device


def _step(here: SharedDevices, leaf: Branch, lane: Lane, device: str) -> int:
    """Return how far ahead the stays on the device are, in steps of `APART_US`; 0 if they are
    nearly level.
    """
    apart = here.usage(lane, APART_US)
    return (here.ahead(leaf, device) + apart // 2) // apart


def _is_better_soon(here: SharedDevices, leaf: Branch, lane: Lane, best: Join) -> bool:
    """True if a graph was just launched on a device where the task will soon get more."""
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


def _is_new(here: SharedDevices, stay: BoardStay) -> bool:
    """True if the stay was just launched and others may join as soon as it runs."""
    task = stay.task
    if task.kind != here.kind or task.shares or task.state != State.starting:
        return False
    return here.board.now_s < task.launched_s + SOON_S and may(here.board, task)


def takes_from(
    here: SharedDevices, leaf: Branch, lane: Lane, task: BoardTask, joined: Collection[str]
) -> bool:
    """True if other stays, further ahead than the stays that the task could join, would give way to
    it (F6).

    These stays do not share, or share with graphs that are too far from the task.
    """
    if len(here.pool.open) <= len(joined):
        return False
    found = would_give_way(here, leaf, task)
    if not found or any(id in joined for victim in found for id in victim.stay.devices):
        return False
    theirs = min(here.apart(leaf, victim.stay.leaf) for victim in found)
    most = max((here.ahead(leaf, device) for device in joined), default=0)
    return theirs - most > here.usage(lane, APART_US)


def would_give_way(here: SharedDevices, leaf: Branch, task: BoardTask) -> list[preemption.Victim]:
    """Return the victims for the task (F6), as if its image were durable: among all tasks, or of
    its tenant.
    """
    board, as_saved = here.board, changed(task, saved=True)
    found = preemption.victims(board, as_saved)
    return found or preemption.victims(board, as_saved, within=leaf.top) or []


def of_user(leaf: Branch, group: Sequence[BoardStay]) -> list[BoardStay]:
    """Return the stays of one user, in the order of the user's queue."""
    return sorted((stay for stay in group if stay.leaf is leaf), key=in_line)


def _heir(here: SharedDevices, device: str) -> Join | None:
    """Return the join of a standby: the next task of a user with a graph on the device.

    Every less served user must have a graph there already.  Only a task that was never launched
    qualifies: a task that found no room waits for its turn.
    """
    board, group = here.board, here.groups[device]
    if len(group) >= board.policy.sharers_max:
        return None
    for leaf, lane, task in waiting_graphs(here):
        own = of_user(leaf, group)
        if not own or not may(board, task):
            return None
        is_next = len(own) == 1 and own[0].task.priority >= task.priority
        if is_next and not task.epoch and fits(board, device, group, lane):
            return Join(task=task, device=device)
    return None


def in_line(stay: BoardStay) -> tuple[int, float, str]:
    """Sort key: the order of the user's queue."""
    return -stay.task.priority, stay.task.submitted_s, stay.id


def _an_heir(group: Sequence[BoardStay]) -> BoardStay | None:
    """Return a standby that can be asked to make room; None if there is none."""
    ahead = set[Branch]()
    for stay in sorted(group, key=in_line):
        if stay.leaf in ahead and _may_ask(stay):
            return stay
        ahead.add(stay.leaf)
    return None


def _may_ask(stay: BoardStay) -> bool:
    return stay.ripe and stay.task.state == State.running


def _best_served(
    here: SharedDevices, leaf: Branch, task: BoardTask, group: Sequence[BoardStay]
) -> BoardStay | None:
    """Return the best served stay of the group; None if it need not give way."""
    most = max(group, key=lambda stay: (_lead(here, leaf, task, stay), stay.id))
    return most if _gives(here, leaf, task, most) else None


def _gives(here: SharedDevices, leaf: Branch, task: BoardTask, stay: BoardStay) -> bool:
    """True if the stay had a full slice, and more than the task will have had after its own (rule
    F6).
    """
    return _may_ask(stay) and _lead(here, leaf, task, stay) > 0


def _lead(here: SharedDevices, leaf: Branch, task: BoardTask, stay: BoardStay) -> int:
    """Return how much more the stay has had, by weight, if the task's next slice is charged
    already.
    """
    mine, theirs = sides(leaf, stay.leaf)
    fee = here.usage(stay.lane, slice_us(here.board.policy, task))
    score = here.board.tree.score
    return score(theirs, kind=here.kind) - score(mine, fee, kind=here.kind)


def _in_order(
    board: Board, branch: Branch, lanes: Collection[Lane]
) -> Iterator[tuple[Branch, Lane, BoardTask]]:
    """Yield the first task of each user in these lanes, in the order of rule F3."""
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


def fits(board: Board, device: str, group: Sequence[BoardStay], lane: Lane) -> bool:
    if not board.pools[lane.kind].meets_choice(device, lane):
        return False
    taken = sum(stay.lane.memory_bytes for stay in group)
    return taken + lane.memory_bytes <= board.devices[device].memory_bytes


def _near(here: SharedDevices, one: Branch, other: Branch, bound_us: int) -> bool:
    """True if the less served of the two branches would catch up within this device time."""
    bound = here.usage(lane_of(here.kind), bound_us)
    return here.apart(one, other) <= bound and here.apart(other, one) <= bound


# --- parting --------------------------------------------------------------------------------------


def stays_that_must_part(board: Board) -> list[BoardStay]:
    """Return the stays that must stop sharing a device; the least served of the group stays."""
    found = []
    for device in sorted(board.beside):
        if not _has_graphs(board, device):
            continue  # functions follow each other there
        group, kind = board.group(device), board.devices[device].kind
        if device in board.pools[kind].open:  # otherwise the device is emptied anyway
            here = SharedDevices(board, kind, [device])
            found += [stay for stay in _parts(here, group) if _may_ask(stay)]
    for here in places(board) if board.beside else ():
        found += [s for s in _due_elsewhere(here) if s not in found and _may_ask(s)]
    return found


def _has_graphs(board: Board, device: str) -> bool:
    return any(stay.task.graph for stay in board.group(device))


def _parts(here: SharedDevices, group: Sequence[BoardStay]) -> list[BoardStay]:
    """Return the stays that are too far ahead of a stay that gets a turn now.

    If any stay may not share, all but the first must leave.
    """
    board = here.board
    if not all(may(board, stay.task) for stay in group):
        first = min(group, key=lambda stay: (board.tree.score(stay.leaf.top), stay.id))
        return [stay for stay in group if stay is not first]
    in_turn, far = here.in_turn(group), here.usage(group[0].lane, FAR_US)
    return [s for s in group if any(here.apart(one.leaf, s.leaf) > far for one in in_turn)]


def _due_elsewhere(here: SharedDevices) -> Iterator[BoardStay]:
    """Yield stays whose turns are due to another task of their tenant, which is on another device
    or waits.
    """
    waiting = list(_waiting_for_whole(here))
    for device in here.devices:
        group = here.groups[device]
        for stay in group if len(group) > 1 else ():
            is_owed = any(_owes(here, stay, group, leaf, task) for leaf, task in waiting)
            if is_owed or (here.all_run and yields(here, stay.leaf, group, 2 * APART_US)):
                yield stay


def _waiting_for_whole(here: SharedDevices) -> Iterator[tuple[Branch, BoardTask]]:
    """Yield the waiting tasks that need devices for themselves."""
    for leaf, lane, task in waiting_graphs(here):
        if not may(here.board, task) and _could_run(here, lane):
            yield leaf, task


def _could_run(here: SharedDevices, lane: Lane) -> bool:
    return here.pool.size(here.board.bound(unpinned(lane))) >= lane.width


def _owes(
    here: SharedDevices, stay: BoardStay, group: Sequence[BoardStay], leaf: Branch, task: BoardTask
) -> bool:
    """True if the stay would give way to a task of its tenant, while the other stays would not.

    The others never give way while this stay continues, because its tenant has what it is owed.
    """
    if stay.leaf.top is not leaf.top or stay.leaf is leaf:
        return False
    over = above_both(leaf, stay.leaf)
    return over.parent is not None and has_others(group, over) and _gives(here, leaf, task, stay)


def yields(here: SharedDevices, leaf: Branch, group: Sequence[BoardStay], bound_us: int) -> bool:
    """True if a graph of the same tenant on another device is behind by more than `bound_us`.

    Both devices must also have graphs outside the lowest branch above both.  Then that branch gets
    more on the other device once it has less here.
    """
    bound = here.usage(group[0].lane, bound_us)
    for device, other in here.below(leaf.top):
        if other in group or here.apart(other.leaf, leaf) <= bound:
            continue
        over = above_both(leaf, other.leaf)
        if has_others(here.in_turn(here.groups[device]), over) and has_others(group, over):
            return True
    return False


def all_run(group: Sequence[BoardStay]) -> bool:
    return all(stay.task.state == State.running for stay in group)


def above_both(one: Branch, other: Branch) -> Branch:
    """Return the lowest branch above two leaves."""
    side, _ = sides(one, other)
    return side if side.parent is None else side.parent


def has_others(group: Sequence[BoardStay], over: Branch) -> bool:
    """True if a stay of the group is not below the branch."""
    return any(stay.leaf.path[: over.depth] != over.path for stay in group)


# --- shares for the device ------------------------------------------------------------------------


def shares(board: Board, device: str) -> list[Share]:
    """Return what the device needs to know to give turns; [] if the device is not shared."""
    if device not in board.beside or not _has_graphs(board, device):
        return []
    group = sorted(board.group(device), key=in_line)
    return [_share(board, stay, place) for place, stay in enumerate(group)]


def _share(board: Board, stay: BoardStay, place: int) -> Share:
    """Return a task's share in terms of the ledger: how much of its slot time is booked."""
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
