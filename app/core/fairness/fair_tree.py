"""Keeps the fair order: the least served tenant, in it the least served user, then priority, then
age.

Usage and scores are those of `core.fairness.usage_decay`: waiting never changes the order. If two
scores are equal, the oldest task goes first.

A pick costs O(depth * log fan-out): every branch of the tree keeps a heap of its own children.

`core.scheduling.board` adds what running tasks have used since the ledger's last charge.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapify, heappop, heappush, heappushpop
from itertools import chain
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from app.core.fairness.usage_decay import (
    FIXED_POINT_BITS,
    SCORE_BITS,
    growth_over,
    half_life,
    integral_over,
    score,
)
from app.core.model.device_choice import WHOLE_MILLI, choice_in

# --- the tree -----------------------------------------------------------------------------------

Item = TypeVar("Item")
Path = tuple[str, ...]

MOST_US = 2.0**512  # far more than any usage; sums of such values are floats, too
ALL = "*"  # key of a limit on devices of all kinds together


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Describes a queue class: all tasks with the same need, so that the same devices suit each of
    them.

    The need is `width` devices of `kind` with `memory_bytes` each that suit the `choice`
    (`core.model.device_choice`). `pins` are the only suitable devices, if there are any. `host` is
    the only suitable host; "" in a queue stands for any one host. `fresh` tasks have held devices
    for less than a minute and have queues of their own (rule F8). `milli` are the thousandths that
    the choice asks of a device. If the choice names more than one of `hosts`, `places` are the only
    suitable devices, as many on each host (`on_places`); in a queue there are none. The function
    `lane` makes the objects in queues, so that equal ones are identical and hash fast.
    """

    kind: str
    width: int = 1
    memory_bytes: int = 0
    pins: tuple[str, ...] = ()
    host: str | None = None
    fresh: bool = False
    choice: str = ""
    places: tuple[str, ...] = ()
    milli: int = field(init=False)
    hosts: int = field(init=False)

    def __post_init__(self) -> None:
        choice = choice_in(self.choice)
        object.__setattr__(self, "milli", choice.fraction_milli)
        object.__setattr__(self, "hosts", choice.hosts)

    @property
    def is_fraction(self) -> bool:
        """True if the task leaves a part of its device to others."""
        return self.milli < WHOLE_MILLI

    @property
    def pin(self) -> str | None:
        """The first of the only suitable devices; None if any device will do."""
        return self.pins[0] if self.pins else None


def lane(
    kind: str,
    width: int = 1,
    memory_bytes: int = 0,
    pins: tuple[str, ...] = (),
    host: str | None = None,
    fresh: bool = False,
    choice: str = "",
) -> Lane:
    # the cache needs one form of the arguments
    return _lane(kind, width, memory_bytes, pins, host, fresh, choice)


def on_host(here: Lane, host: str) -> Lane:
    return _like(here, here.pins, host, here.fresh)


def on_places(here: Lane, places: tuple[str, ...]) -> Lane:
    """Return the lane with the only devices that suit it now.

    Such lanes are as many as there are choices of devices, so they are not kept.
    """
    return replace(here, places=places)


def unpinned(here: Lane) -> Lane:
    return _like(here, (), here.host, here.fresh)


def with_choice(here: Lane, choice: str) -> Lane:
    return _lane(here.kind, here.width, here.memory_bytes, here.pins, here.host, here.fresh, choice)


def both_of(here: Lane) -> tuple[Lane, Lane]:
    """Return the lane of fresh tasks and the lane of other tasks, both with this lane's need."""
    return _like(here, here.pins, here.host, True), _like(here, here.pins, here.host, False)


def _like(here: Lane, pins: tuple[str, ...], host: str | None, fresh: bool) -> Lane:
    return _lane(here.kind, here.width, here.memory_bytes, pins, host, fresh, here.choice)


_lane = cache(Lane)


_NO_LIFTS: Mapping[str, int] = {}
_NOTHING: Mapping[str, int] = {}
_UNTIL_IT_CHANGES = 1 << 62  # a version that never comes: the score is valid until a change
_RIGHT = -1  # stands for the index in the heap, for a key that was checked
_SLACK = 16  # stale entries that are kept in a heap of any size


class _Account:
    """Holds the fields of a branch that a charge changes; a class of its own keeps them close in
    memory.
    """

    __slots__ = ("changed", "faded", "rate", "scored", "scored_at", "weight")

    def __init__(self) -> None:
        self.weight, self.faded, self.rate = 1, 0, 0
        self.scored, self.scored_at = 0, -1
        # tree version at which the rank of this branch, or of one below it, last changed
        self.changed = 0


class Branch(_Account):
    """Represents a tenant or a user: its usage, what it holds, and a queue for each lane with
    waiting tasks.

    The usage now is `faded + rate * (the tree's integral - since)`: what was booked, plus what
    running tasks add continuously. After a change of weight, guarantee or limits, set `scored_at =
    -1` and call `refresh`. `lifts` are idle-credit floors by kind of device: faded usage that
    counts in comparisons only, for the time in which the branch had no work
    (`core.scheduling.idle_credit`). `carried` is the part of `faded` that counts in comparisons
    only, after a change of the branch's weight (`carried_over`); the branches above do not have it.
    """

    __slots__ = (
        "carried", "children", "depth", "exhausted", "grown", "guarantee", "held", "inner", "lifts",
        "limit", "lines", "most_running", "name", "parent", "path", "running", "since", "top",
    )  # fmt: skip

    def __init__(self, path: Path, parent: Branch | None) -> None:
        super().__init__()
        self.path, self.parent, self.depth = path, parent, len(path)
        self.name = path[-1] if path else ""
        self.top: Branch = self if parent is None or parent.parent is None else parent.top
        self.carried = 0
        self.since = 0  # the tree's integral up to which the usage of running tasks is booked
        self.guarantee: Mapping[str, int] = {}
        self.limit: Mapping[str, int] = {}
        self.most_running: int | None = None
        # what its budget has put in force by kind; `limit` is 0 where that stops new work
        self.exhausted: Mapping[str, str] = {}
        # devices that running tasks need, by kind, and in total under ALL
        self.held: Counter[str] = Counter()
        # devices held beyond the need, by kind and under ALL: lent until other tasks need them
        self.grown: Mapping[str, int] = _NOTHING
        self.running = 0  # number of tasks on devices
        self.inner = False  # True: holds branches; False: holds items
        self.children = 0
        self.lifts: Mapping[str, int] = _NO_LIFTS
        self.lines: dict[Lane, _Line] = {}

    def room(self, lane: Lane) -> bool:
        """True if one more task of this lane stays within the branch's limits (rule F4)."""
        if self.most_running is not None and self.running >= self.most_running:
            return False
        limit = self.limit
        if not limit:
            return True
        held, width = self.held, lane.width
        return all(held[k] + width <= limit[k] for k in (lane.kind, ALL) if k in limit)

    @property
    def exceeds(self) -> bool:
        """True if the branch holds more than its limits, because these were lowered (rule F4)."""
        if self.most_running is not None and self.running > self.most_running:
            return True
        return any(self.held[kind] > most for kind, most in self.taken_back())

    def taken_back(self) -> Iterator[tuple[str, int]]:
        """Yield each kind with its limit, except kinds whose holders a budget lets go on."""
        kept = self.exhausted
        return ((kind, most) for kind, most in self.limit.items() if kept.get(kind) != "hold")

    @property
    def is_demoted(self) -> bool:
        """True if a budget has put the branch behind its siblings."""
        return "demote" in self.exhausted.values()

    def borrows(self, lane: Lane) -> bool:
        """True if the branch exceeds its guarantee with one more task of this lane (rule F4)."""
        guarantee = self.guarantee
        return not guarantee or self.held[lane.kind] + lane.width > guarantee.get(lane.kind, 0)

    def in_line(self, kind: str) -> bool:
        """True if a task below the branch waits for a device of this kind."""
        return any(lane.kind == kind for lane in self.lines)


def above(leaf: Branch | None) -> Iterator[Branch]:
    """Yield the branches from a leaf up to the root, both included."""
    branch = leaf
    while branch is not None:
        yield branch
        branch = branch.parent


class _Line:
    """Queues the waiting items of one branch and one lane; it exists only while something waits.

    At a leaf the entries are items: (-priority, 0, submitted, id, serial, item, line). At other
    branches they are the lines of children: (borrows, score, submission time of its first item,
    line). The lowest entry is the `head`. The others are in the `heap`, except items that arrived
    in order: these are in the `queue`. An item's entry is stale once the item no longer waits; the
    head is never stale. For a child line, all entries except its `entry` are stale.
    """

    __slots__ = (
        "above", "below", "branch", "entry", "head", "heap", "inner", "lane", "lift", "queue",
        "right", "stale",
    )  # fmt: skip

    def __init__(self, branch: Branch, lane: Lane, above: _Line | None) -> None:
        self.branch, self.lane, self.above = branch, lane, above
        self.inner = branch.inner
        self.lift = branch.lifts.get(lane.kind, 0)
        self.below = 0  # number of child lines or of waiting items
        self.stale = 0  # number of stale entries of items
        # this line's entry in the line above; None while the branch has no room
        self.entry: Any = None
        # tree version at which `entry` was last known to be right; -1 if that is not known
        self.right = -1
        self.head: Any = None
        self.heap: list[Any] | None = None  # None until it is needed, to touch less memory
        self.queue: deque[Any] | None = None

    def __lt__(self, other: _Line) -> bool:
        """Order two lines by the name of their branch, if all earlier fields of their entries are
        equal. Two lines of one branch count as equal.
        """
        return self.branch.name < other.branch.name

    def push(self, entry: Any) -> None:
        """Insert an entry at its place in the order."""
        if self.head is None:
            self.head = entry
            return
        if entry < self.head:
            self.head, entry = entry, self.head
        if self.heap is None:
            self.heap = []
        heappush(self.heap, entry)

    def append(self, entry: Any) -> None:
        """Insert an item's entry; faster than `push`, because most items are last in order."""
        last = self.queue[-1] if self.queue else self.head
        if last is None or entry < last:
            self.push(entry)
        elif self.queue is None:
            self.queue = deque((entry,))
        else:
            self.queue.append(entry)

    def behead(self) -> None:
        """Replace the head by the next entry, stale or not."""
        queue, heap = self.queue, self.heap
        if queue and not (heap and heap[0] < queue[0]):
            self.head = queue.popleft()
        else:
            self.head = heappop(heap) if heap else None

    def replace_head(self, entry: Any) -> None:
        heap = self.heap
        self.head = heappushpop(heap, entry) if heap else entry

    def keep(self, current: Callable[[Any], bool]) -> None:
        """Remove the stale entries; the head is never stale."""
        self.stale = 0
        if self.heap:
            self.heap = [entry for entry in self.heap if current(entry)]
            heapify(self.heap)
        if self.queue:
            self.queue = deque(entry for entry in self.queue if current(entry))


class FairTree(Generic[Item]):
    """Keeps items in lanes under a tree of branches; `first` picks by rules F3 and F4.

    A path names a branch from the top: ("tenant", "tenant below", "user"). A branch holds branches
    or items, never both. Only siblings with work in an open lane, and with room for it, are
    compared. A sibling that would stay within its guarantee goes first; then the lower score, the
    older first item, and the name decide.

    A key in a heap may be too low, because usage and holdings grow meanwhile; it is never too high.
    So an entry that reaches the top is checked again if it changed, and put back where it belongs.
    A change that may lower a key corrects the key at once, from the bottom up.

    At a leaf, `fresh_first(fresh, older)` may put the first item of its fresh lanes before an older
    item of equal priority in another lane (rule F8).
    """

    def __init__(
        self,
        *,
        half_life_s: float = 0.0,
        since_s: float = 0.0,
        fresh_first: Callable[[Item, Item], bool] = lambda fresh, older: False,
    ) -> None:
        self._half_life_s, self._since_s = half_life(half_life_s), since_s
        self._fresh_first = fresh_first
        self.root = Branch((), None)
        self.root.inner = True
        self.branches: dict[Path, Branch] = {(): self.root}
        self._where: dict[str, Any] = {}  # item's id -> its entry
        # the lines that led to the last `first` when several lanes were open
        self._led: list[_Line] = []
        self._led_at = -1  # the version at which `_led` was set
        self._serial = 0  # makes all entries of items different
        # grows with every change that may affect ranks; `changed`, `right` refer to it
        self.version = 0
        self._tick = 0  # grows with every call of `at`
        self._ticked = 0  # the version at the last tick
        # Branches that began or ceased to wait for a kind of device since the last look.
        self.came: dict[tuple[Branch, str], None] = {}
        self.left: dict[tuple[Branch, str], None] = {}
        self.at(since_s)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, id: str) -> bool:
        return id in self._where

    @property
    def lanes(self) -> Collection[Lane]:
        """The lanes in which anything waits; a live view."""
        return self.root.lines.keys()

    # --- time ---

    def at(self, now_s: float) -> None:
        """Advance the tree to `now_s`: branches that hold devices have used more."""
        self.now_s = now_s
        elapsed_s = now_s - self._since_s
        self._mantissa, self._doublings = growth_over(elapsed_s, self._half_life_s)
        self._integral = integral_over(elapsed_s, self._half_life_s)
        self._tick += 1
        self.version += 1
        self._ticked = self.version

    @property
    def moved(self) -> int:
        """A counter that grows with every change but the passing of time."""
        return self.version - self._tick

    def faded(self, charge_us: int) -> int:
        """Return a charge made now, as it is added to a sum."""
        grown, doublings = charge_us * self._mantissa, self._doublings
        return grown << doublings if doublings >= 0 else grown >> -doublings

    # --- branches ---

    def add(
        self,
        path: Path,
        *,
        weight: int = 1,
        faded: int = 0,
        guarantee: Mapping[str, int] = MappingProxyType({}),
        limit: Mapping[str, int] = MappingProxyType({}),
        most_running: int | None = None,
    ) -> Branch:
        """Add a branch with its usage so far; the parent must exist and hold no items.

        `guarantee` and `limit` are devices by kind; a limit may also cover all kinds, under `ALL`.
        """
        if weight <= 0:
            raise ValueError(f"{'/'.join(path)}: weight {weight} is not above 0")
        parent = self.branches[path[:-1]]
        parent.inner = True
        parent.children += 1
        branch = self.branches[path] = Branch(path, parent)
        branch.weight, branch.faded, branch.since = weight, faded, self._integral
        branch.guarantee, branch.limit, branch.most_running = guarantee, limit, most_running
        return branch

    def usage(self, branch: Branch) -> int:
        """Return the branch's faded usage now, including what running tasks have added, and what is
        carried.
        """
        if not branch.rate:
            return branch.faded
        return branch.faded + branch.rate * (self._integral - branch.since)

    def score(self, branch: Branch, extra: int = 0, *, kind: str = "") -> int:
        """Return how well served the branch is, or would be with `extra` usage; lower goes first.

        In a comparison about devices of a `kind`, the branch's idle-credit floor counts, too.
        """
        if branch.lifts:
            extra += branch.lifts.get(kind, 0)
        if extra:
            return score(self.usage(branch) + extra, branch.weight)
        if branch.scored_at < self._tick:
            branch.scored = (self.usage(branch) << SCORE_BITS) // branch.weight
            branch.scored_at = self._tick if branch.rate else _UNTIL_IT_CHANGES
        return branch.scored

    def lift(self, branch: Branch, kind: str, faded: int) -> None:
        """Set the idle-credit floor of a branch for a kind of device.

        If the new floor is lower, call `refresh` afterwards.
        """
        branch.lifts = {**branch.lifts, kind: faded}
        for lane, line in branch.lines.items():
            if lane.kind == kind:
                line.lift = faded
        self.version = version = self.version + 1
        above: Branch | None = branch
        while above is not None:
            above.changed = version
            above = above.parent

    def waiting_children(self, branch: Branch, kind: str) -> Iterator[Branch]:
        """Yield each child that waits for devices of a kind and has room; once for each of its
        lanes.
        """
        for lane, line in branch.lines.items():
            if lane.kind == kind and line.inner and line.head is not None:
                entries = chain((line.head,), line.heap or ())
                yield from (entry[3].branch for entry in entries if _stands(entry))

    def overtakes_s(self, one: Branch, other: Branch, fee_us: int, *, kind: str = "") -> float:
        """Return when `one`, with a charge of `fee_us`, scores higher than `other`; that may be
        now.

        Usage grows with q = 2^(t / half-life), and so does the fee. The scores cross where q - 1 =
        (other's + fee - one's) / (how much faster one's grows). Infinity if they never cross.
        """
        own, others = (
            self._now_us(self.usage(branch) + branch.lifts.get(kind, 0)) for branch in (one, other)
        )
        behind = (others + fee_us) * one.weight - own * other.weight
        faster = one.rate * other.weight - other.rate * one.weight
        if behind < 0:
            return self.now_s
        if self._half_life_s <= 0:
            return self.now_s + behind / faster / 1e6 if faster > 0 else math.inf
        mean_us = self._half_life_s * 1e6 / math.log(2)
        faster_each_q = mean_us * faster - fee_us * one.weight
        if faster_each_q <= 0:
            return math.inf
        return self.now_s + self._half_life_s * math.log1p(behind / faster_each_q) / math.log(2)

    def accrued_s(self, faded: int) -> float:
        """Return when a branch that uses one device of cost 1 will have added `faded` to its
        usage.
        """
        if self._half_life_s <= 0:
            return self.now_s + faded / (1 << FIXED_POINT_BITS) / 1e6
        mean_us = self._half_life_s * 1e6 / math.log(2)
        growth = self._now_us(faded) / mean_us
        return self.now_s + self._half_life_s * math.log1p(growth) / math.log(2)

    def _now_us(self, faded: int) -> float:
        """Return how many decayed device-microseconds a faded sum is worth now; 0 if all has faded.

        Both integers may be far larger than any float; their quotient is not, unless the clock was
        set back by many half-lives after the charges. Then the usage counts as MOST_US.
        """
        amount, unit = faded << max(0, -self._doublings), self._mantissa << max(0, self._doublings)
        try:
            return max(-MOST_US, min(MOST_US, amount / unit))
        except OverflowError:
            return MOST_US if amount > 0 else -MOST_US

    def charge(self, branch: Branch, faded: int) -> None:
        """Book usage to the branch and those above it; a negative charge is a refund."""
        if not faded:
            return
        self.version = version = self.version + 1
        above: Branch | None = branch
        while above is not None:
            above.faded += faded
            above.scored_at = -1
            above.changed = version
            above = above.parent
        if faded < 0:
            self.refresh(branch)

    def carry(self, branch: Branch, carried: int) -> None:
        """Set what the branch carries over from changes of its weight."""
        branch.faded += carried - branch.carried
        branch.carried, branch.scored_at = carried, -1
        self.refresh(branch)

    def accrue(self, branch: Branch, rate: int, *, from_s: float | None = None) -> None:
        """Add `rate` to the speed at which the branch uses devices, from now on or since `from_s`.

        The speed is in µs of usage per µs; a negative `rate` lowers it.
        """
        missed = 0
        if from_s is not None and from_s < self.now_s:
            then = integral_over(from_s - self._since_s, self._half_life_s)
            missed = rate * (self._integral - then)
        self.version = version = self.version + 1
        above: Branch | None = branch
        while above is not None:
            above.faded = self.usage(above) + missed
            above.since = self._integral
            above.rate += rate
            above.scored_at = -1
            above.changed = version
            above = above.parent
        if missed < 0:
            self.refresh(branch)

    def hold(self, branch: Branch, lane: Lane, sign: int = 1) -> None:
        """Count the devices that a lane needs as held; with `sign` -1, as released."""
        self.version += 1
        above: Branch | None = branch
        narrow = False
        while above is not None:
            above.held[lane.kind] += sign * lane.width
            above.held[ALL] += sign * lane.width
            above.running += sign
            narrow |= bool(above.guarantee or above.limit or above.most_running is not None)
            above = above.parent
        if narrow:
            self.refresh(branch)

    def grow(self, branch: Branch, kind: str, devices: int) -> None:
        """Count devices that are held beyond the need.

        They affect neither the order nor the limits.
        """
        self.version += 1
        above: Branch | None = branch
        while above is not None:
            grown = Counter(above.grown)
            grown[kind] += devices
            grown[ALL] += devices
            above.grown = +grown
            above = above.parent

    def refresh(self, branch: Branch) -> None:
        """Update the keys of a branch and those above it after a change that may lower them."""
        self.version = version = self.version + 1
        below = branch
        while below.parent is not None:
            below.changed = version
            for line in below.lines.values():
                self._place(line)
            below = below.parent

    # --- items ---

    def push(
        self,
        path: Path,
        item: Item,
        *,
        lane: Lane,
        id: str,
        priority: int,
        submitted_s: float,
        returns: bool = False,
    ) -> None:
        """Let an item wait at the end of a path; it must not be waiting already.

        `returns` says that the item was preempted: its branches then count as if they had waited
        all the time.
        """
        line = self._line(self.branches[path], lane, returns)
        self._serial += 1
        entry = (-priority, 0, submitted_s, id, self._serial, item, line)
        line.append(entry)
        line.below += 1
        self._where[id] = entry
        if line.head is entry:
            self.version += 1
            self._settle(line)

    def drop(self, id: str) -> Item | None:
        """Remove a waiting item and return it; None if it does not wait."""
        entry = self._where.get(id)
        if entry is None:
            return None
        line: _Line = entry[6]
        self.version += 1
        del self._where[id]
        line.below -= 1
        if not line.below:
            self._unlink(line)
        elif line.head is entry:
            self._behead(line)
            if line.head[2] < entry[2]:
                self._settle(line)
            else:
                self._doubt(line)
        else:
            line.stale += 1
            if line.stale > line.below + _SLACK:
                line.keep(self._waits)
        item: Item = entry[5]
        return item

    def take(self, id: str, faded: int) -> Item | None:
        """`drop` an item and `charge` its branch in one step; None if the item does not wait.

        If the item was first, its branches get their new places now, so that the next `first` finds
        its pick on top.
        """
        entry = self._where.pop(id, None)
        if entry is None:
            return None
        line: _Line = entry[6]
        queue = line.queue
        if faded > 0 and line.head is entry and queue and not (line.heap or line.stale):
            line.below -= 1
            line.head = queue.popleft()
            self._charge_first(line, faded)
        else:
            self._where[id] = entry
            self.charge(line.branch, faded)
            self.drop(id)
        item: Item = entry[5]
        return item

    def first(self, lanes: Collection[Lane]) -> tuple[Branch, Lane, Item] | None:
        """Return the item that goes next among those that wait in these lanes; it stays in its
        queue.
        """
        return self.first_below(self.root, lanes)

    def first_below(
        self, branch: Branch, lanes: Collection[Lane]
    ) -> tuple[Branch, Lane, Item] | None:
        """Return the item that goes next below a branch; the branch itself may be at its limits.

        A branch that goes first because of its guarantee does so only in lanes that keep it within
        the guarantee.
        """
        lines = branch.lines
        if len(lines) == 1:
            (line,) = lines.values()
            return self._first_in(line) if line.lane in lanes else None
        found = [lines.get(lane) for lane in lanes]
        open_ = [line for line in found if line is not None and self._top(line) is not None]
        self._led, self._led_at = (led := list[_Line]()), self.version
        while len(open_) > 1:
            best = min(line.head for line in open_)
            if not branch.inner:
                best = self._first_at_leaf(best, open_)
                return branch, best[6].lane, best[5]
            led.append(best[3])
            branch = best[3].branch
            open_ = self._open_below(branch, open_, borrows=best[0])
        return self._first_in(open_[0]) if open_ else None

    def _first_at_leaf(self, oldest: Any, open_: list[_Line]) -> Any:
        """Return the heap entry of the task that goes first at a leaf.

        `oldest` is the entry with the lowest key.  A fresh task of the same priority may go before
        it.
        """
        if oldest[6].lane.fresh:
            return oldest
        fresh = (line.head for line in open_ if line.lane.fresh and line.head[0] == oldest[0])
        return min((e for e in fresh if self._fresh_first(e[5], oldest[5])), default=oldest)

    def led(self) -> list[Item]:
        """Return the items that made the branches above the last pick of `first` go first, one for
        each branch. Such an item may differ from the pick, and be in another lane.
        """
        return [self._head(line) for line in self._led] if self._led_at == self.version else []

    def _head(self, line: _Line) -> Item:
        while line.inner:
            line = line.head[3]
        item: Item = line.head[5]
        return item

    def _first_in(self, line: _Line) -> tuple[Branch, Lane, Item] | None:
        """Return the first item below a line.

        If a line's head is right, the heads of all lines below are right.
        """
        if self._top(line) is None:
            return None
        while line.inner:
            line = line.head[3]
        return line.branch, line.lane, line.head[5]

    def _open_below(self, branch: Branch, above: list[_Line], *, borrows: bool) -> list[_Line]:
        """Return those lines of a branch that may go first, in the same lanes as the lines
        `above`.
        """
        narrow = branch.guarantee or branch.limit or branch.most_running is not None
        open_ = []
        for wide in above:
            line, lane = branch.lines.get(wide.lane), wide.lane
            if line is None:
                continue
            if narrow and not (branch.room(lane) and branch.borrows(lane) == borrows):
                continue
            if self._top(line) is not None:
                open_.append(line)
        return open_

    def heads(self, branch: Branch, lane: Lane) -> Iterator[tuple[Branch, Lane, Item]]:
        """Yield the items that may become first below a branch merely because time passes.

        They are the first item of each child with growing usage, and the first item of the least
        served other child: the order of these other children does not change. The first of all
        comes first.
        """
        line = branch.lines.get(lane)
        if line is None or not line.inner or self._top(line) is None:
            return
        heap = line.heap or []
        # (key, index in the heap or _RIGHT)
        frontier = [(line.head, _RIGHT), *((entry, 0) for entry in heap[:1])]
        heapify(frontier)
        while frontier:
            entry, at = heappop(frontier)
            child: _Line = entry[3]
            if at == _RIGHT:
                while child.inner:
                    child = child.head[3]
                yield child.branch, child.lane, child.head[5]
                if not entry[3].branch.rate:
                    return
                continue
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heappush(frontier, (heap[below], below))
            if child.entry is entry and (key := self._key(child)) is not None:
                heappush(frontier, (key, _RIGHT))

    def lowest(self, branch: Branch, lane: Lane) -> list[tuple[bool, int, Branch | None]]:
        """Return the lowest key as `keys` does, and a second key that may be too low.

        No other child has a key below the second one. If the second key is out of date, it comes
        with None instead of a child: the child that had it may be the first by now.
        """
        line = branch.lines.get(lane)
        if line is None or not line.inner or self._top(line) is None:
            return []
        entries = (line.head, line.heap[0]) if line.heap else (line.head,)
        return [
            (entry[0], entry[1], entry[3].branch if entry[3].entry is entry else None)
            for entry in entries
        ]

    def keys(self, branch: Branch, lane: Lane) -> Iterator[tuple[bool, int, Branch]]:
        """Yield (does it borrow, its score, the child) for each waiting child that has room."""
        line = branch.lines.get(lane)
        if line is None or not line.inner or line.head is None:
            return
        for entry in (line.head, *(line.heap or ())):
            child: _Line = entry[3]
            if child.entry is entry and (key := self._key(child)) is not None:
                yield key[0], key[1], child.branch

    def _line(self, branch: Branch, lane: Lane, returns: bool) -> _Line:
        line = branch.lines.get(lane)
        if line is None:
            above = None if branch.parent is None else self._line(branch.parent, lane, returns)
            if not branch.in_line(lane.kind):
                self._come(branch, lane.kind, returns)
            line = branch.lines[lane] = _Line(branch, lane, above)
            if above is not None:
                above.below += 1
        return line

    def _come(self, branch: Branch, kind: str, returns: bool) -> None:
        if (branch, kind) in self.left:
            del self.left[branch, kind]
        elif not returns:
            self.came[branch, kind] = None

    def _gone(self, branch: Branch, kind: str) -> None:
        if (branch, kind) in self.came:
            del self.came[branch, kind]
        else:
            self.left[branch, kind] = None

    def _behead(self, line: _Line) -> None:
        """Remove the first item, which is no longer counted, and the stale entries behind it."""
        line.behead()
        while line.stale and not self._waits(line.head):
            line.stale -= 1
            line.behead()

    def _waits(self, entry: Any) -> bool:
        return self._where.get(entry[3]) is entry

    # --- keys ---

    def _charge_first(self, line: _Line, faded: int) -> None:
        """Charge the branches from a line up, and correct the keys of those that are first.

        Every score grows, so no key becomes lower, and branches with running tasks may be left as
        they are. A charge changes only the score in a key.
        """
        self.version = version = self.version + 1
        head, above = line.head, line.above
        while above is not None:
            branch, entry = line.branch, line.entry
            branch.faded = used = branch.faded + faded
            if head is None or entry is not above.head or branch.rate:
                branch.scored_at, head = -1, None
            elif above.below == 1:
                branch.scored_at = -1  # without siblings the key may be left too low
            else:
                branch.scored = key = (used << SCORE_BITS) // branch.weight
                if line.lift:
                    key = ((used + line.lift) << SCORE_BITS) // branch.weight
                line.entry = entry = (entry[0], key, head[2], line)
                line.right = version
                heap = above.heap
                above.head = head = heappushpop(heap, entry) if heap else entry
                if head is not entry and above.above is not None:
                    head = self._top(above)
            branch.changed = version
            line, above = above, above.above
        root = line.branch
        root.faded += faded
        root.changed = version
        root.scored_at = -1

    def _settle(self, line: _Line) -> None:
        """Correct the keys of a line whose first entry is new, and of the lines above."""
        above: _Line | None = line
        while above is not None:
            self._place(above)
            above = above.above

    def _doubt(self, line: _Line) -> None:
        """Record that the keys of a line, and of the lines above, may have grown."""
        above: _Line | None = line
        while above is not None:
            above.right = -1
            above = above.above

    def _unlink(self, line: _Line) -> None:
        """Remove an empty line, and lines above that are empty without it."""
        above: _Line | None = line
        while above is not None:
            branch = above.branch
            del branch.lines[above.lane]
            if not branch.in_line(above.lane.kind):
                self._gone(branch, above.lane.kind)
            above.entry = None
            above = above.above
            if above is not None:
                above.below -= 1
                if above.below:
                    self._settle(above)
                    return

    def _place(self, line: _Line) -> None:
        """Correct a line's key in the heap above, if the key became lower or is on top there."""
        above, old = line.above, line.entry
        if above is None:
            return
        new = self._key(line)
        line.right = self.version
        if new is None:
            line.entry, line.right = None, -1
        elif old is not None and above.head is old:
            line.entry = new
            above.replace_head(new)
        elif old is None or new < old:
            line.entry = new
            above.push(new)
            if above.heap and len(above.heap) > 2 * above.below + _SLACK:
                self._top(above)
                above.keep(_stands)
        else:
            # The key has grown, so the old entry is too early; it is corrected when it comes to the
            # top.
            line.right = -1

    def _key(self, line: _Line) -> Any:
        """Return a line's entry with its present key; None if the branch has no room."""
        top, branch, lane = self._top(line), line.branch, line.lane
        if top is None or not branch.room(lane):
            return None
        return branch.borrows(lane), self.score(branch, kind=lane.kind), top[2], line

    def _top(self, line: _Line) -> Any:
        """Return the corrected head of a line; None if there is none."""
        entry = line.head
        while entry is not None and line.inner:
            child: _Line = entry[3]
            branch, right = child.branch, child.right
            if child.entry is not entry:
                line.behead()
            elif right >= branch.changed and (right >= self._ticked or not branch.rate):
                return entry
            else:
                child.entry = key = self._key(child)
                if key is None:
                    child.right = -1
                    line.behead()
                else:
                    child.right = self.version
                    line.replace_head(key)
            entry = line.head
        return entry


def _stands(entry: Any) -> bool:
    """True if the entry of a line is not stale."""
    return entry[3].entry is entry
