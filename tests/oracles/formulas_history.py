"""What was used before: how other systems turn a history into an order (for comparing with F2, F3).

Slurm's classic fairshare, Fair Tree and TRES billing, HTCondor's user priority, Kueue's admission
fair sharing, KAI's time-based weight: the published formulas, with plain arguments.  Shares, usage
and ranks are exact fractions, so that true ties tie; only a power of 2 is a float.

Nothing here decides in Roundhouse: that is `core.fairness.fair_tree`.  Dividing what is there now
is `tests.oracles.formulas_shares`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Literal

from app.core.fairness.water_filling import Amount, exact
from tests.oracles.amounts import above_0

Parents = Mapping[str, str | None]
"""Every name in a tree with the name above it; None stands right below the root.

Names are unique: a user of two accounts is two names, as it is two associations.
"""

# --- a Slurm association tree -------------------------------------------------------------------


class _Associations:
    """Accounts and users with their shares and usage; an account's usage is its users' together."""

    def __init__(
        self, parents: Parents, shares: Mapping[str, Amount], usage: Mapping[str, Amount]
    ) -> None:
        self.parents = parents
        self.children: dict[str | None, list[str]] = {None: []} | {name: [] for name in parents}
        for name, parent in parents.items():
            if parent not in self.children:
                raise ValueError(f"{name}: parent {parent!r} is not in the tree, add it")
            self.children[parent].append(name)
        self.ordered = self._from_the_top()
        self.shares = {name: exact(shares[name]) for name in parents}
        self.usage = {name: Fraction(0) for name in parents}
        self._sum_up(usage)

    def _from_the_top(self) -> list[str]:
        """Parents before children."""
        found = list(self.children[None])
        for name in found:  # grows while it is read
            found += self.children[name]
        if len(found) < len(self.parents):
            stray = sorted(set(self.parents) - set(found))
            raise ValueError(f"{', '.join(stray)}: a circle of parents that never ends at the root")
        return found

    def _sum_up(self, usage: Mapping[str, Amount]) -> None:
        for name, used in usage.items():
            if self.children[name] and used:
                raise ValueError(f"{name}: usage is given for users only, accounts are summed up")
            self.usage[name] = exact(used)
        for name in reversed(self.ordered):
            if (parent := self.parents[name]) is not None:
                self.usage[parent] += self.usage[name]

    def part(self, name: str, of: Mapping[str, Fraction]) -> Fraction:
        """`of` a name over that of itself and its siblings; 0 if they all have none."""
        level = sum(of[sibling] for sibling in self.children[self.parents[name]])
        return of[name] / level if level else Fraction(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicFairshare:
    """One row of Slurm's table: S, UA, UE as parts of the whole cluster, and F from 0 to 1."""

    norm_shares: Fraction
    actual_usage: Fraction
    effective_usage: Fraction
    fairshare: float


def slurm_classic(
    parents: Parents,
    shares: Mapping[str, Amount],
    usage: Mapping[str, Amount],
    *,
    damping: Amount = 1,
) -> dict[str, ClassicFairshare]:
    """Slurm's classic fairshare of every account and user: F = 2^(-(UE / S) / damping).

    `shares` are raw, of every name.  `usage` is a user's part of the cluster's usage, 0 to 1;
    who is not named used nothing.  S is the product of share ratios down the tree.  UE is UA on the
    first tier, and below UA + (UE of the parent - UA) * shares / siblings' shares.  No shares: F 0.
    FairShare=parent is not covered.

    Source: Slurm, classic_fair_share.html (PriorityFlags=NO_FAIR_TREE).
    """
    damps = above_0("damping", damping)
    tree = _Associations(parents, shares, usage)
    rows: dict[str, ClassicFairshare] = {}
    for name in tree.ordered:
        above, ratio = parents[name], tree.part(name, tree.shares)
        norm, actual = ratio, tree.usage[name]
        effective = actual
        if above is not None:
            norm *= rows[above].norm_shares
            effective += (rows[above].effective_usage - actual) * ratio
        rows[name] = ClassicFairshare(
            norm_shares=norm,
            actual_usage=actual,
            effective_usage=effective,
            fairshare=2.0 ** -float(effective / norm / damps) if norm else 0.0,
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FairTree:
    """A place in Slurm's Fair Tree; `level_fs` is infinite for who has shares and no usage.

    `rank` counts down from the number of users and is 0 for accounts; `fairshare` is rank over
    that number: 1 goes first.
    """

    level_fs: Fraction | float
    rank: int
    fairshare: Fraction


def slurm_fair_tree(
    parents: Parents,
    shares: Mapping[str, Amount],
    usage: Mapping[str, Amount],
    *,
    users: Collection[str] | None = None,
) -> dict[str, FairTree]:
    """Slurm's Fair Tree: LF = S / U at each level, depth first, the highest LF first.

    S and U are parts of what a name and its siblings have together; `usage` is raw, of users only,
    in any one unit.  `users` says who is a user; by default everyone without children.  No shares
    make LF 0, no usage makes it infinite.

    Ties are exact.  Sibling users with equal LF share a rank, and the next rank is as far down as
    if they did not.  Sibling accounts with equal LF have their children merged and ranked together,
    each by its LF under its own parent.  A user with the LF of a sibling account shares the rank of
    that account's best user.  FairShare=parent is not covered.

    Source: Slurm, fair_tree.html (the default since 19.05).
    """
    tree = _Associations(parents, shares, usage)
    leaves = {name for name in parents if not tree.children[name]}
    named = leaves if users is None else leaves & set(users)
    level_fs = {name: _level_fs(tree, name) for name in parents}
    ranks: dict[str, int] = {}
    rank = 0
    for place, (name, tied) in enumerate(_in_order(tree, level_fs, named, tree.children[None])):
        rank = rank if tied else len(named) - place
        ranks[name] = rank
    return {
        name: FairTree(
            level_fs=level_fs[name],
            rank=ranks.get(name, 0),
            fairshare=Fraction(ranks.get(name, 0), max(1, len(named))),
        )
        for name in parents
    }


def _level_fs(tree: _Associations, name: str) -> Fraction | float:
    shares, used = tree.part(name, tree.shares), tree.part(name, tree.usage)
    if not shares:
        return Fraction(0)
    return shares / used if used else math.inf


def _in_order(
    tree: _Associations,
    level_fs: Mapping[str, Fraction | float],
    users: Collection[str],
    siblings: list[str],
    tied: bool = False,
) -> Iterator[tuple[str, bool]]:
    """Users from first to last, each with whether it shares the rank of the one before it.

    `tied`: the first of these siblings shares the rank of who came before them.
    """
    ordered = sorted(siblings, key=lambda name: -level_fs[name])
    for _, group in groupby(ordered, key=lambda name: level_fs[name]):
        names = list(group)
        for name in filter(users.__contains__, names):
            yield name, tied
            tied = True
        merged = [child for name in names for child in tree.children[name]]
        yield from _in_order(tree, level_fs, users, merged, tied)
        tied = False


# --- Slurm's billing ----------------------------------------------------------------------------


def slurm_billing(
    tres: Mapping[str, Amount],
    weights: Mapping[str, Amount],
    *,
    mode: Literal["sum", "max_tres", "max_tres_gres"] = "sum",
    cluster_wide: Collection[str] = (),
) -> Fraction:
    """Billable TRES of a job: what its trackable resources weigh.

    `tres` are amounts by name ("cpu", "mem", "gres/gpu"), `weights` per unit of the same amounts;
    what has no weight is free.  "sum" adds all up.  "max_tres" takes the heaviest of a node's
    resources plus all that are `cluster_wide` (licences).  "max_tres_gres" adds all "gres/..." to
    that instead of letting them compete.

    Source: Slurm, TRESBillingWeights in priority_multifactor.html and slurm.conf(5).
    """
    weighed = {name: exact(tres[name]) * exact(weights.get(name, 0)) for name in tres}
    if mode == "sum":
        return sum(weighed.values(), Fraction(0))
    added = {
        name
        for name in weighed
        if name in cluster_wide or (mode == "max_tres_gres" and name.startswith("gres/"))
    }
    heaviest = max((weighed[name] for name in weighed if name not in added), default=Fraction(0))
    return heaviest + sum((weighed[name] for name in added), Fraction(0))


# --- averages that fade -------------------------------------------------------------------------

CONDOR_FLOOR = 0.5  # HTCondor's best real user priority


def kept(elapsed_s: float, half_life_s: float) -> float:
    """What is left of 1 after `elapsed_s`: 0.5^(elapsed / half-life).  A half-life of 0: all."""
    if elapsed_s < 0 or half_life_s < 0:
        raise ValueError(f"time runs forward: {elapsed_s} s elapsed, half-life {half_life_s} s")
    return 0.5 ** (elapsed_s / half_life_s) if half_life_s else 1.0


def condor_priority(
    priority: float, used: float, *, elapsed_s: float, half_life_s: float = 86400.0
) -> float:
    """HTCondor's real user priority after `elapsed_s` of holding `used` (weighted) cores.

    b * priority + (1 - b) * used with b = 0.5^(elapsed / half-life), never below 0.5; lower is
    better.  Source: HTCondor manual, User Priorities and Negotiation (PRIORITY_HALFLIFE).
    """
    b = kept(elapsed_s, half_life_s)
    return max(CONDOR_FLOOR, b * priority + (1 - b) * used)


def condor_effective(priority: float, factor: float = 1000.0) -> float:
    """HTCondor's effective user priority: real priority times the user's factor."""
    return priority * factor


def kueue_consumed(consumed: float, usage: float, *, elapsed_s: float, half_life_s: float) -> float:
    """Kueue's admission fair sharing: one resource of a local queue, sampled after `elapsed_s`.

    (1 - A) * consumed + A * usage with A = 1 - 0.5^(elapsed / half-life).  Source: KEP-4136.
    """
    b = kept(elapsed_s, half_life_s)
    return b * consumed + (1 - b) * usage


def kueue_entry_penalty(request: float, *, sampling_s: float, half_life_s: float) -> float:
    """What a workload is charged on admission, before any sample has seen it: A * request.

    It is what one sampling interval of running would have added.  Source: KEP-4136.
    """
    return (1 - kept(sampling_s, half_life_s)) * request


def kueue_usage(
    consumed: Mapping[str, Amount],
    penalty: Mapping[str, Amount] | None = None,
    *,
    weight: Amount = 1,
    resource_weights: Mapping[str, Amount] | None = None,
) -> Fraction | float:
    """What orders local queues, lower first: sum of w_r * (consumed_r + penalty_r) over `weight`.

    A resource without a weight counts once; a queue of weight 0 or less comes last (infinity).
    Source: KEP-4136.
    """
    if not weight > 0:
        return math.inf
    owed, by_resource = penalty or {}, resource_weights or {}
    total = sum(
        exact(by_resource.get(name, 1)) * (exact(consumed.get(name, 0)) + exact(owed.get(name, 0)))
        for name in consumed.keys() | owed.keys()
    )
    return total / exact(weight)


def kai_time_weights(
    weights: Mapping[str, Amount], usage: Mapping[str, Amount], *, k: Amount = 1
) -> dict[str, Fraction]:
    """KAI's time-based weights of over-quota: max(0, W + k * (W - U)).

    W are `weights` (over-quota, of the queues that still want something) over their sum, U is
    `usage`: what a queue used in the window over what the whole cluster could have given in it,
    0 to 1.  With k = 0 history does not count.  Over-quota goes by these over their sum.

    Source: KAI-Scheduler, docs/time-based-fairshare.
    """
    total = sum((exact(weight) for weight in weights.values()), Fraction(0))
    parts = {name: exact(weight) / total for name, weight in weights.items() if total}
    return {
        name: max(Fraction(0), part + exact(k) * (part - exact(usage.get(name, 0))))
        for name, part in parts.items()
    }
