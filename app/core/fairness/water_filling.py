"""Computes fair amounts to hold now: weighted max-min with guarantees and limits (rules F3, F4).

The whole module rests on the *level*: what each party holds per weight. The level rises from zero.
A party that reaches its ceiling (its demand or its limit) stays there. A party whose floor (its
guarantee) is above the level stays at the floor until the level reaches it. When the parts add up
to what there is to divide, the level stops. It is found exactly, by sorting the points at which a
party starts or stops rising; there is no search, and no float is compared.

The following always holds. The parts add up to min(capacity, all ceilings). No party is above its
ceiling. No party is below its floor while all floors fit. No party could get more without taking
from a party that holds less per weight, or from a floor.

The scheduler does not use this module. The scheduler picks by usage, and this is what such picks
lead to over time. `tests.oracles.formulas_shares` shows how other systems divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

Amount = int | float | Fraction
"""A number as someone wrote it; `exact` says what it is."""

Path = tuple[str, ...]


def exact(amount: Amount) -> Fraction:
    """Return the number exactly as it was written: 0.1 is one tenth, not the nearest float.

    Raises ValueError for infinity and nan.
    """
    if isinstance(amount, float) and not math.isfinite(amount):
        raise ValueError(f"{amount} is not a finite number")
    return Fraction(repr(amount)) if isinstance(amount, float) else Fraction(amount)


# --- the level ----------------------------------------------------------------------------------


class ShareRange(NamedTuple):
    """Describes how much a party of `weight` may hold: from `floor` to `ceiling` (None: no
    ceiling).
    """

    weight: Fraction
    floor: Fraction
    ceiling: Fraction | None

    def at(self, level: Fraction) -> Fraction:
        """Return the part at a level: `weight * level`, kept within the span; the ceiling wins."""
        part = max(self.floor, self.weight * level)
        return part if self.ceiling is None else min(part, self.ceiling)


def level(total: Fraction, spans: Iterable[ShareRange]) -> Fraction:
    """Return the lowest level at which the parts of all spans add up to `total`.

    The level is 0 if the floors alone add up to `total`. If all ceilings together are less than
    `total`, it is the level at which the last party reaches its ceiling. This is the ratio R of
    YARN's fair scheduler, without its bisection.
    """
    fixed, rising, turns = _turns(spans)
    for at, part, weight in turns:
        if fixed + rising * at >= total:
            break
        fixed, rising = fixed + part, rising + weight
    else:
        if not rising:
            return turns[-1][0] if turns else Fraction(0)
    return max(Fraction(0), (total - fixed) / rising) if rising else Fraction(0)


def _turns(
    spans: Iterable[ShareRange],
) -> tuple[Fraction, Fraction, list[tuple[Fraction, Fraction, Fraction]]]:
    """Return the sum at level 0, the weight that rises there, and the points of change.

    Between two points the parts add up to `fixed + rising * level`.  A point is (level, what it
    adds to fixed, what it adds to rising), lowest first.
    """
    fixed, rising = Fraction(0), Fraction(0)
    turns: list[tuple[Fraction, Fraction, Fraction]] = []
    for weight, floor, ceiling in spans:
        lowest = floor if ceiling is None else min(floor, ceiling)
        fixed += lowest
        if not weight or lowest == ceiling:
            continue
        turns.append((lowest / weight, -lowest, weight))
        if ceiling is not None:
            turns.append((ceiling / weight, ceiling, -weight))
    return fixed, rising, sorted(turns)


# --- flat division ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Describes a party's demand and rights, in devices (or any one unit).

    `demand` is what the party could use now, `guarantee` what it gets whenever it wants it, and
    `limit` the most that it may ever hold (None: no limit). `weight` is positive. Other values
    raise ValueError.
    """

    weight: Amount = 1
    demand: Amount = 0
    guarantee: Amount = 0
    limit: Amount | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def ceiling(self) -> Fraction:
        """min(demand, limit): more is of no use, or not allowed."""
        demand = exact(self.demand)
        return demand if self.limit is None else min(demand, exact(self.limit))

    @property
    def floor(self) -> Fraction:
        """The part of the guarantee that is wanted; the rest is lent."""
        return min(exact(self.guarantee), self.ceiling)


Claims = Mapping[str, Claim]


def _check(claim: Claim | Claimant) -> None:
    if not claim.weight > 0:
        raise ValueError(f"weight {claim.weight} is not above 0: leave out who has no share")
    if claim.weight == math.inf:
        raise ValueError("weight inf is not a finite number")
    for word in ("demand", "guarantee", "limit"):
        if (amount := getattr(claim, word)) is not None and not amount >= 0:
            raise ValueError(f"{word} {amount} is below 0")
        if amount == math.inf:
            raise ValueError(f"{word} inf is not a finite number")


def divide(capacity: Amount, claims: Claims) -> dict[str, Fraction]:
    """Divide by weighted max-min: each party gets clamp(weight * level, floor, ceiling).

    A guarantee is a floor under the *whole* part, so it is not paid twice: a party with more by
    guarantee than by weight gets nothing in addition. If the floors do not fit, the floors are
    divided by weighted max-min, and no party gets more than its floor. The result is exact, in the
    unit of the claims; the parts add up to min(capacity, all ceilings).
    """
    total = _total(capacity, claims)
    spans = _floors(claims) if _short(total, claims) else _whole_spans(claims)
    return _parts(total, spans)


def _total(capacity: Amount, claims: Claims) -> Fraction:
    if not capacity >= 0:
        raise ValueError(f"capacity {capacity} is below 0: there is nothing to divide")
    return min(exact(capacity), sum((claim.ceiling for claim in claims.values()), Fraction(0)))


def _short(total: Fraction, claims: Claims) -> bool:
    return sum(claim.floor for claim in claims.values()) > total


def _floors(claims: Claims) -> dict[str, ShareRange]:
    return {name: ShareRange(exact(c.weight), Fraction(0), c.floor) for name, c in claims.items()}


def _whole_spans(claims: Claims) -> dict[str, ShareRange]:
    return {name: ShareRange(exact(c.weight), c.floor, c.ceiling) for name, c in claims.items()}


def _parts(total: Fraction, spans: Mapping[str, ShareRange]) -> dict[str, Fraction]:
    found = level(total, spans.values())
    return {name: span.at(found) for name, span in spans.items()}


# --- a tree of tenants --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """Describes a tenant in a tree: what it claims itself, and its children.

    Only a leaf has a demand of its own. The fields are those of `Claim`.
    """

    weight: Amount = 1
    demand: Amount = 0
    guarantee: Amount = 0
    limit: Amount | None = None
    children: Mapping[str, Claimant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)


Tree = Mapping[str, Claimant]


def divide_tree(capacity: Amount, tree: Tree) -> dict[Path, Fraction]:
    """Return each branch's part by its path from the top, ("lab", "vision"), parents first.

    Every branch divides its own part among its children by `divide`.  Seen from above, a branch
    demands what its children could hold (each up to its limit).  It is owed its own guarantee or
    the sum of its children's, whichever is more.  Of a child's guarantee only what the child can
    use now counts, so an idle guarantee is lent to the whole tree and not to the siblings first.
    """
    below = dict(_families(tree))
    claims = _claims(below)
    parts: dict[Path, Fraction] = {(): exact(capacity)}
    for path, children in below.items():
        family = {name: claims[*path, name] for name in children}
        for name, part in divide(parts[path], family).items():
            parts[*path, name] = part
    del parts[()]
    return parts


def _families(tree: Tree) -> Iterator[tuple[Path, Tree]]:
    """Yield every branch with children, the root as () first, parents before children."""
    ahead: list[tuple[Path, Tree]] = [((), tree)]
    for path, children in ahead:  # the list grows while it is read
        yield path, children
        ahead += [((*path, name), b.children) for name, b in children.items() if b.children]


def _claims(below: dict[Path, Tree]) -> dict[Path, Claim]:
    """Return what each branch claims from its parent, computed from the leaves up."""
    claims: dict[Path, Claim] = {}
    for path, children in reversed(below.items()):
        for name, branch in children.items():
            lower = [claims[(*path, name, child)] for child in branch.children]
            if lower and branch.demand:
                raise ValueError(
                    f"branch {'/'.join((*path, name))} has children and a demand of its own, "
                    f"{branch.demand}: give the demand to a child"
                )
            claims[*path, name] = Claim(
                weight=branch.weight,
                demand=sum((c.ceiling for c in lower), Fraction(0)) if lower else branch.demand,
                guarantee=max(exact(branch.guarantee), sum((c.floor for c in lower), Fraction(0))),
                limit=branch.limit,
            )
    return claims
