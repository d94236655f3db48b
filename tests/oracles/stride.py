"""Stride scheduling: tickets make exact proportions, one quantum at a time (for comparing with F3).

A client with t tickets has the stride K / t.  The lowest pass runs and moves on by its stride.  The
global pass moves by K / all tickets with every pick: it is where a client would stand that always
had exactly its due.  Who leaves keeps its distance to it, and has it again when it comes back, so
that neither leaving nor joining gains anything.

Values in, values out; all passes are exact fractions.  Roundhouse's own order is
`core.fairness.fair_tree`.  Source: Waldspurger, Weihl, Stride Scheduling, MIT/LCS/TM-528 (1995);
OSTEP, chapter 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from app.core.fairness.water_filling import Amount, exact

K = 10_000
"""The usual large constant; only ratios of strides matter."""


def stride(tickets: Amount, *, k: Amount = K) -> Fraction:
    """K / tickets: how far a pick moves a client on."""
    if not tickets > 0:
        raise ValueError(f"{tickets} tickets: a client that takes part has more than 0")
    return exact(k) / exact(tickets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """All clients at one moment; ties of passes go to who stands first in `passes`."""

    tickets: Mapping[str, Fraction]
    passes: Mapping[str, Fraction]
    global_pass: Fraction = Fraction(0)
    k: Fraction = Fraction(K)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """Who ran, and where all passes stood afterwards."""

    name: str
    passes: Mapping[str, Fraction]


def start(
    tickets: Mapping[str, Amount], *, k: Amount = K, passes: Mapping[str, Amount] | None = None
) -> Race:
    """Clients at pass 0, or where `passes` says; the order of `tickets` breaks ties."""
    for amount in tickets.values():
        stride(amount, k=k)
    stand = passes or {}
    return Race(
        tickets=MappingProxyType({name: exact(amount) for name, amount in tickets.items()}),
        passes=MappingProxyType({name: exact(stand.get(name, 0)) for name in tickets}),
        k=exact(k),
    )


def pick(race: Race) -> tuple[str, Race]:
    """Who runs next, and the race after it."""
    if not race.passes:
        raise ValueError("nobody takes part: join a client first")
    name = min(race.passes, key=lambda name: race.passes[name])
    moved = {**race.passes, name: race.passes[name] + stride(race.tickets[name], k=race.k)}
    due = race.global_pass + race.k / sum(race.tickets.values())
    return name, replace(race, passes=MappingProxyType(moved), global_pass=due)


def join(race: Race, name: str, tickets: Amount, *, remain: Amount | None = None) -> Race:
    """The race with one client more, at the global pass plus `remain`; it stands last in ties.

    `remain` is what `leave` returned; a new client has one whole stride to go, as in the paper.
    """
    if name in race.passes:
        raise ValueError(f"{name} takes part already: let it leave first")
    ahead = stride(tickets, k=race.k) if remain is None else exact(remain)
    return replace(
        race,
        tickets=MappingProxyType({**race.tickets, name: exact(tickets)}),
        passes=MappingProxyType({**race.passes, name: race.global_pass + ahead}),
    )


def leave(race: Race, name: str) -> tuple[Fraction, Race]:
    """How far the client stood ahead of the global pass (below 0: it was owed), and the rest."""
    remain = race.passes[name] - race.global_pass
    return remain, replace(
        race,
        tickets=MappingProxyType({n: t for n, t in race.tickets.items() if n != name}),
        passes=MappingProxyType({n: p for n, p in race.passes.items() if n != name}),
    )


def picks(race: Race, count: int) -> list[Pick]:
    """The next `count` picks."""
    found = []
    for _ in range(count):
        name, race = pick(race)
        found.append(Pick(name=name, passes=race.passes))
    return found
