"""Who goes next: the least served tenant, in it the least served user, then priority, then age.

Three things always hold.

* Usage fades lazily (rule F2).  A charge made at time t is stored as charge * 2^((t - T0) / H), and
  never touched again.  The common factor 2^-((now - T0) / H) turns the sum into today's usage; it
  is the same for everyone, so the *order* never changes by waiting and is kept without it.
* Order is exact (rule F3).  Faded usage is an integer in units of 2^-40 µs, a score an integer that
  orders exactly as usage / weight does; no float is ever compared.  True ties go to the oldest.
* A pick costs O(depth * log fan-out): every branch of the tree keeps a heap of its own children.

Rule F1 (what is charged) is `app.ledger`'s; what running tasks owe meanwhile is `core.decide`'s.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

# --- usage that fades (rule F2) -----------------------------------------------------------------

FIXED_POINT_BITS = 40


def faded(charge_us: int, *, at_s: float, since_s: float, half_life_s: float) -> int:
    """`charge_us` made at `at_s`, as it is added to a sum that starts at T0 = `since_s`.

    Linear in the charge for `at_s >= since_s`.  A half-life of 0 means that usage never fades.
    """
    growth, doublings = _growth(at_s - since_s, half_life_s)
    return _shifted(charge_us * growth, doublings)


def usage_us(faded: int, *, now_s: float, since_s: float, half_life_s: float) -> int:
    """The decayed device-microseconds that a faded sum stands for now; for display."""
    growth, doublings = _growth(now_s - since_s, half_life_s)
    numerator = faded << max(0, -doublings)
    denominator = growth << max(0, doublings)
    return (2 * numerator + denominator) // (2 * denominator)


def rebase(faded: int, halvings: int) -> int:
    """The same sum for a T0 that lies `halvings` half-lives later; the order of sums is kept."""
    return _shifted(faded, -halvings)


def _growth(elapsed_s: float, half_life_s: float) -> tuple[int, int]:
    """2^(elapsed / half-life) as (mantissa in units of 2^-40, whole doublings)."""
    if half_life_s <= 0:
        return 1 << FIXED_POINT_BITS, 0
    half_lives = elapsed_s / half_life_s
    doublings = math.floor(half_lives)
    return round(math.ldexp(2.0 ** (half_lives - doublings), FIXED_POINT_BITS)), doublings


def _shifted(value: int, bits: int) -> int:
    return value << bits if bits >= 0 else value >> -bits


# --- scores that compare exactly (rule F3) ------------------------------------------------------

_SCORE_BITS = 128  # twice the bits of a weight


def score(faded: int, weight: int) -> int:
    """An integer that orders exactly as `faded / weight` does; weights lie below 2^64.

    Two different fractions a/v and b/w lie at least 1/(v*w) apart.  Times 2^128 they are more than
    1 apart, so rounding down neither swaps them nor makes them equal; equal ones stay equal.
    """
    return (faded << _SCORE_BITS) // weight


def unscored(score: int, weight: int) -> int:
    """The faded usage that would give someone of `weight` this score; for display."""
    return (score * weight) >> _SCORE_BITS


# --- the queue ----------------------------------------------------------------------------------

Item = TypeVar("Item")
Path = tuple[str, ...]


class _Branch:
    """A tenant or a user: its usage, and a heap of what lies below it.

    Entries of a heap are (what ranks it, age, name, what it stands for).  `entry` is the one that
    stands for this branch in its parent's heap; any other there is stale.
    """

    __slots__ = ("entry", "faded", "heap", "inner", "name", "parent", "weight")

    def __init__(self, name: str, parent: _Branch | None, weight: int, faded: int) -> None:
        self.name, self.parent, self.weight, self.faded = name, parent, weight, faded
        self.heap: list[Any] = []
        self.entry: Any = None
        self.inner = False  # does it hold branches, or items?

    def head(self) -> Any:
        """The first entry below it that is not stale; None if it is empty."""
        heap = self.heap
        if self.inner:
            while heap and heap[0][3].entry is not heap[0]:
                heappop(heap)
        return heap[0] if heap else None


class FairQueue(Generic[Item]):
    """Items under a tree of branches; `first` is what rule F3 picks, `take` removes and charges it.

    A path names a branch from the top: ("tenant",) or ("tenant", "user").  Items lie in branches
    that hold no branch.
    """

    def __init__(self) -> None:
        self._root = _Branch("", None, 1, 0)
        self._root.inner = True
        self._branches: dict[Path, _Branch] = {(): self._root}
        self._items = 0

    def __len__(self) -> int:
        return self._items

    def add(self, path: Path, *, weight: int = 1, faded: int = 0) -> None:
        """A branch with its usage so far; its parent was added before."""
        parent = self._branches[path[:-1]]
        parent.inner = True
        self._branches[path] = _Branch(path[-1], parent, weight, faded)

    def push(self, path: Path, item: Item, *, id: str, priority: int, submitted_s: float) -> None:
        branch = self._branches[path]
        heappush(branch.heap, (-priority, submitted_s, id, item))
        self._items += 1
        _enter(branch)

    def first(self) -> Item | None:
        """What goes next, left in its place; None if nothing waits."""
        if not self._items:
            return None
        item: Item = self._first_branch().head()[3]
        return item

    def take(self, fee: int = 0) -> Item:
        """Remove what goes next and charge its branches a faded `fee`."""
        branch = self._first_branch()
        item: Item = heappop(branch.heap)[3]
        self._items -= 1
        _charge(branch, fee)
        return item

    def charge(self, path: Path, fee: int) -> None:
        """Charge a branch, and those above it, a faded `fee`."""
        _charge(self._branches[path], fee)

    def score(self, path: Path, extra: int = 0) -> int:
        """How well served a branch is, or would be with `extra` faded usage; lower goes first."""
        branch = self._branches[path]
        return score(branch.faded + extra, branch.weight)

    def _first_branch(self) -> _Branch:
        branch = self._root
        while branch.inner:
            branch = branch.head()[3]
        return branch


def _charge(branch: _Branch, fee: int) -> None:
    above: _Branch | None = branch
    while above is not None and above.parent is not None:
        above.faded += fee
        above = above.parent
    _enter(branch)


def _enter(branch: _Branch) -> None:
    """Give a branch, and those above it, their right entries in the heaps above them."""
    while branch.parent is not None:
        head, heap, old = branch.head(), branch.parent.heap, branch.entry
        new = head and (score(branch.faded, branch.weight), head[1], branch.name, branch)
        if new and old and new[:2] == old[:2]:
            return  # whatever lies above has not changed either
        branch.entry = new
        if old and heap[0] is old:
            _replace_first(heap, new)
        elif new:
            heappush(heap, new)
        branch = branch.parent


def _replace_first(heap: list[Any], new: Any) -> None:
    if new:
        heapreplace(heap, new)
    else:
        heappop(heap)
