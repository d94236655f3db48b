"""How other systems share several resources at once: the dominant share, and the order by it.

A share of several resources is the largest of its parts: a user with 1 of 9 CPUs and 4 of 18 GB
holds 4/18, and memory is dominant.  Dominant resource fairness serves the lowest dominant share
first.  Kueue looks only at what was borrowed; Armada calls the same figure a cost.  All parts are
exact fractions of a capacity, so that ties are ties.

Nothing here decides in Roundhouse, which uses one figure of it: the cost of a task by its dominant
resource, `core.fairness.dominant_resource`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heapreplace

from app.core.fairness.water_filling import Amount, exact
from tests.oracles.amounts import above_0

Resources = Mapping[str, Amount]
"""Amounts by resource; a resource that is not named counts as 0."""


def dominant_share(held: Resources, capacity: Resources) -> tuple[Fraction, str]:
    """Return the largest part of any capacity that is held, and its resource (ties: by name).

    Raises ValueError if a held resource has no capacity.  Returns (0, "") if nothing is held.
    """
    parts = {name: _part(name, held[name], capacity) for name in held if held[name]}
    if not parts:
        return Fraction(0), ""
    name = min(parts, key=lambda name: (-parts[name], name))
    return parts[name], name


def _part(name: str, amount: Amount, capacity: Resources) -> Fraction:
    if not exact(capacity.get(name, 0)) > 0:
        raise ValueError(f"{amount} of {name}, of which there is none: add it to the capacity")
    return exact(amount) / exact(capacity[name])


# --- dominant resource fairness -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FillingStep:
    """A further task for `user`, with all dominant shares and all usage after it."""

    user: str
    shares: Mapping[str, Fraction]
    used: Mapping[str, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """The end of progressive filling: tasks by user, shares (not by weight) and usage."""

    steps: tuple[FillingStep, ...]
    tasks: Mapping[str, int]
    shares: Mapping[str, Fraction]
    used: Mapping[str, Fraction]


def progressive_filling(
    capacity: Resources,
    tasks: Mapping[str, Resources],
    *,
    weights: Mapping[str, Amount] | None = None,
    most: Mapping[str, int] | None = None,
    order: Sequence[str] = (),
    stop_at_misfit: bool = False,
) -> Filling:
    """Fill by dominant resource fairness: one task at a time for the lowest share over weight.

    `tasks` is what one task of each user needs, `most` how many tasks a user wants (default: no
    end).  Ties go by `order`, then by the order of `tasks`.  A user whose task does not fit, or who
    has enough, is out, and the others continue.  With `stop_at_misfit` the first misfit ends the
    filling (Algorithm 1 to the letter).  Numbers of tasks are whole; `divisible_filling` is the
    fluid form.  A weight is above 0.

    Source: Ghodsi et al., Dominant Resource Fairness, NSDI 2011, section 4.
    """
    each = {user: _share(user, need, capacity) for user, need in tasks.items()}
    weighs = {user: above_0(f"{user}: weight", (weights or {}).get(user, 1)) for user in tasks}
    pool, ends = _Pool(capacity), most or {}
    places = {user: place for place, user in enumerate(dict.fromkeys((*order, *tasks)))}
    counts = dict.fromkeys(tasks, 0)
    shares = dict.fromkeys(tasks, Fraction(0))
    steps: list[FillingStep] = []
    heap = [(Fraction(0), places[user], user) for user in tasks]
    heapify(heap)
    while heap:
        user = heap[0][2]
        enough = user in ends and counts[user] >= ends[user]
        if enough or not pool.take(tasks[user]):
            if stop_at_misfit and not enough:
                break
            heappop(heap)
            continue
        counts[user] += 1
        shares[user] += each[user]
        by_weight = shares[user] / weighs[user]
        heapreplace(heap, (by_weight, places[user], user))
        steps.append(FillingStep(user=user, shares=dict(shares), used=dict(pool.used)))
    return Filling(steps=tuple(steps), tasks=counts, shares=shares, used=pool.used)


def _share(user: str, need: Resources, capacity: Resources) -> Fraction:
    part = dominant_share(need, capacity)[0]
    if not part:
        raise ValueError(f"{user}: a task that needs nothing never fills anything")
    return part


class _Pool:
    """The capacity, and how much of it is used."""

    def __init__(self, capacity: Resources) -> None:
        self.capacity = {name: exact(amount) for name, amount in capacity.items()}
        self.used = dict.fromkeys(self.capacity, Fraction(0))

    def take(self, need: Resources) -> bool:
        """Use what a task needs, all of it or nothing; False if it does not fit."""
        after = {name: self.used[name] + exact(amount) for name, amount in need.items() if amount}
        if any(amount > self.capacity[name] for name, amount in after.items()):
            return False
        self.used.update(after)
        return True


def divisible_filling(
    capacity: Resources,
    tasks: Mapping[str, Resources],
    *,
    weights: Mapping[str, Amount] | None = None,
    most: Mapping[str, Amount] | None = None,
) -> dict[str, Fraction]:
    """Return how many divisible tasks each user gets by dominant resource fairness, exactly.

    All dominant shares over weight rise together.  When a resource is full, the users who need it
    stop rising, and so do users who have `most`.  The others rise on until no user is left.

    Source: as `progressive_filling`; the paper's linear programme, saturated one by one.
    """
    free = {name: exact(amount) for name, amount in capacity.items()}
    # The cost of one unit of level for each user: tasks per level, and resources per level.
    pace = {
        user: above_0(f"{user}: weight", (weights or {}).get(user, 1))
        / _share(user, need, capacity)
        for user, need in tasks.items()
    }
    counts = dict.fromkeys(tasks, Fraction(0))
    rising = set(tasks)
    while rising:
        drain = {
            name: sum(
                (exact(tasks[user].get(name, 0)) * pace[user] for user in rising), Fraction(0)
            )
            for name in free
        }
        ends = [free[name] / drain[name] for name in free if drain[name]]
        ends += [(exact(most[u]) - counts[u]) / pace[u] for u in rising if most and u in most]
        step = min(ends)
        for user in rising:
            counts[user] += step * pace[user]
        for name in free:
            free[name] -= step * drain[name]
        rising -= {user for user in rising if _stays(user, tasks[user], free, counts, most or {})}
    return counts


def _stays(
    user: str,
    need: Resources,
    free: Mapping[str, Fraction],
    counts: Mapping[str, Fraction],
    most: Mapping[str, Amount],
) -> bool:
    if user in most and counts[user] >= exact(most[user]):
        return True
    return any(amount and not free[name] for name, amount in need.items())


# --- Kueue: the dominant share of borrowed resources --------------------------------------------

Quantities = Mapping[tuple[str, str], Amount]
"""Amounts by (flavor, resource), such as ("a100", "gpu")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KueueShare:
    """A queue's or cohort's dominant share of what it borrows.

    `ratio` is the largest share of its resources, in thousandths of what its parent could lend.
    `share` is the ratio over weight; lower is served first, higher is preempted first.
    """

    resource: str
    ratio: Fraction
    weight: Fraction
    borrowing: bool

    @property
    def share(self) -> Fraction | float:
        """Ratio over weight; infinite for borrowing with weight 0; 0 without borrowing."""
        if self.borrowing and not self.weight:
            return math.inf
        return self.ratio / self.weight if self.ratio else Fraction(0)

    @property
    def rank(self) -> tuple[Fraction | float, Fraction]:
        """Sort key of shares; nodes with weight 0 that borrow are ordered by their ratios."""
        return self.share, self.ratio if self.share == math.inf else Fraction(0)


def kueue_share(
    usage: Quantities,
    quota: Quantities,
    lendable: Resources,
    *,
    weight: Amount = 1,
    request: Quantities | None = None,
) -> KueueShare:
    """Return Kueue's dominant resource share of a node, as if `request` were admitted already.

    borrowed_r = sum over flavors of max(0, usage + request - quota); ratio = the largest borrowed_r
    * 1000 / lendable_r (ties: by name).  A resource of which nothing can be lent does not count.
    `quota` is the node's subtree quota, `lendable` what its parent could make available.

    Source: Kueue, pkg/cache/scheduler/fair_sharing.go (dominantResourceShare).
    """
    asked = request or {}
    borrowed: dict[str, Fraction] = {}
    for key, nominal in quota.items():
        over = exact(usage.get(key, 0)) + exact(asked.get(key, 0)) - exact(nominal)
        if over > 0:
            borrowed[key[1]] = borrowed.get(key[1], Fraction(0)) + over
    ratios = {
        name: over * 1000 / exact(lendable[name])
        for name, over in borrowed.items()
        if lendable.get(name, 0) > 0
    }
    worst = min(ratios, key=lambda name: (-ratios[name], name), default="")
    return KueueShare(
        resource=worst,
        ratio=ratios.get(worst, Fraction(0)),
        weight=exact(weight),
        borrowing=bool(borrowed),
    )


# --- Armada: a cost -----------------------------------------------------------------------------


def armada_cost(
    held: Resources, capacity: Resources, *, multipliers: Resources | None = None
) -> Fraction:
    """Return Armada's unweighted cost: the largest multiplier_r * held_r / capacity_r.

    Without `multipliers` every resource counts once; with `multipliers` only the named ones count.
    A queue's cost over its weight (1 / priority factor) is what Armada balances.  In a pool without
    capacity every demand is 1.

    Source: Armada, docs/scheduling_and_preempting_jobs.md.
    """
    if not any(exact(amount) > 0 for amount in capacity.values()):
        return Fraction(1)
    counted = multipliers if multipliers is not None else dict.fromkeys(capacity, 1)
    costs = (
        exact(factor) * exact(held.get(name, 0)) / exact(capacity[name])
        for name, factor in counted.items()
        if capacity.get(name, 0) > 0
    )
    return max(costs, default=Fraction(0))
