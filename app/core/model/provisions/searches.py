"""Draws the values of a lot's members from a space: `search`.

A member's values depend on the search and on its index alone, so that each process draws the same.
A `random` search draws each key for itself: another key, or more trials, changes no value that was
drawn before. A `grid` search takes combinations in an order that the seed shuffles, none twice.

The values of a `tpe` search depend on the results of the members before it, too
(`scheduling.journal.proposals`). Its first ones are drawn as by a random search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from math import exp, log, prod
from typing import Any

from app.core.model.fields import Fields, escaped
from app.core.model.provisions.lot_values import (
    MOST_COMBINATIONS,
    MOST_KEYS,
    MOST_VALUES,
    Scalar,
    check_key,
    read_values,
)

JSON = dict[str, Any]

RANDOM, GRID, TPE = METHODS = ("random", "grid", "tpe")
MOST_PROPOSED = 1000  # trials of a search whose values depend on results
SCALES = ("uniform", "log", "int", "log_int")
MOST_SEED = 2**53
MOST_BOUND = 1e15  # of an interval
_DIGITS = 6  # significant digits of a drawn number


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInterval:
    """Ranges from `low` to `high`, both included, on one of the SCALES."""

    scale: str
    low: float
    high: float

    def at(self, share: float) -> Scalar:
        """Return the value below which this share of all draws lies; 0 <= `share` < 1."""
        low, high = self.low, self.high
        if self.scale == "uniform":
            value = low + share * (high - low)
        elif self.scale == "log":
            value = exp(log(low) + share * (log(high) - log(low)))
        elif self.scale == "int":
            value = low + int(share * (high - low + 1))
        else:
            value = exp(log(low) + share * (log(high + 1) - log(low)))
        return self.rounded(value)

    def rounded(self, value: float) -> Scalar:
        """Return the value inside the interval, as a member gets it."""
        if self.is_whole:
            return int(min(max(value, self.low), self.high))
        # rounded, so that the last bits of a logarithm do not matter
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

    @property
    def is_whole(self) -> bool:
        return self.scale in ("int", "log_int")

    @property
    def examples(self) -> Sequence[Scalar]:
        """Return the two bounds, and a value between them with as many digits as any."""
        return [self.at(0.0), self.at(1 / 3), self.at(1 - 2**-53)]

    def as_json(self) -> JSON:
        return {self.scale: [self.low, self.high]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LotSearch:
    """Has `trials` members; `space` has for each key its values, or an interval."""

    GROUP = "search"

    method: str
    trials: int
    seed: int
    space: Mapping[str, Sequence[Scalar] | ValueInterval]

    def by_index(self) -> Callable[[int], dict[str, Scalar]]:
        """Return the function that gives the values of the member with an index."""
        if self.method != GRID:
            return lambda index: {
                key: self._drawn(key, of, index) for key, of in self.space.items()
            }
        every = [dict(zip(self.space, each, strict=True)) for each in product(*self._columns())]
        order = sorted(range(len(every)), key=lambda n: self._digest("grid", n))
        return lambda index: every[order[index]]

    @property
    def learns(self) -> bool:
        """True if the values of a member depend on the results of others."""
        return self.method == TPE

    def combinations(self) -> Iterator[dict[str, Scalar]]:
        """Yield the values of each member, in the order of the members' indices."""
        return map(self.by_index(), range(self.trials))

    def count(self) -> int:
        return self.trials

    @property
    def examples(self) -> Mapping[str, Sequence[Scalar]]:
        return {
            key: each.examples if isinstance(each, ValueInterval) else each
            for key, each in self.space.items()
        }

    def _columns(self) -> list[Sequence[Scalar]]:
        return [
            range(int(each.low), int(each.high) + 1) if isinstance(each, ValueInterval) else each
            for each in self.space.values()
        ]

    def _drawn(self, key: str, of: Sequence[Scalar] | ValueInterval, index: int) -> Scalar:
        number = int.from_bytes(self._digest(key, index)[:7]) >> 3  # 53 bits
        share = number / 2**53
        return of.at(share) if isinstance(of, ValueInterval) else of[int(share * len(of))]

    def _digest(self, key: str, index: int) -> bytes:
        return sha256(f"{self.seed}/{key}/{index}".encode()).digest()

    def as_json(self) -> JSON:
        space = {
            key: each.as_json() if isinstance(each, ValueInterval) else [*each]
            for key, each in self.space.items()
        }
        head = {"method": self.method, "trials": self.trials, "seed": self.seed}
        return {**head, "space": space}


def read_search(fields: Fields) -> LotSearch | None:
    inside = fields.inside("search")
    if not inside.given:
        return None
    method = inside.one_of("method", METHODS, RANDOM)
    space = _read_space(inside, method)
    inside.require("space", *([] if method == GRID else ["trials"]))
    usual, most = 1, MOST_PROPOSED if method == TPE else MOST_COMBINATIONS
    if method == GRID:
        usual = most = prod(_size(each) for each in space.values())
        if most > MOST_COMBINATIONS:
            told = f"a grid must have at most {MOST_COMBINATIONS} combinations; got {most}"
            inside.fault("space", f"{told}. Use fewer values, or method: random", "range")
            space = {key: [""] for key in space}
    search = LotSearch(
        method=method,
        trials=inside.integer("trials", usual, least=1, most=most),
        seed=inside.integer("seed", 0, least=0, most=MOST_SEED),
        space=space,
    )
    inside.close()
    return search


def _size(each: Sequence[Scalar] | ValueInterval) -> int:
    return int(each.high - each.low) + 1 if isinstance(each, ValueInterval) else len(each)


def _read_space(fields: Fields, method: str) -> dict[str, Sequence[Scalar] | ValueInterval]:
    given = fields.mapping("space")
    if not 1 <= len(given) <= MOST_KEYS and fields.body.get("space") is not None:
        told = f"must have from 1 to {MOST_KEYS} keys; got {len(given)}"
        fields.fault("space", told, "range")
    keys = sorted(given)[:MOST_KEYS]
    return {key: _read_one(fields, method, key, given[key]) for key in keys}


def _read_one(
    fields: Fields, method: str, key: str, given: object
) -> Sequence[Scalar] | ValueInterval:
    if not isinstance(given, dict):
        return read_values(fields, "space", key, given)
    check_key(fields, "space", key)
    where = f"space/{escaped(key)}"
    scale = next(iter(given), "")
    if len(given) != 1 or scale not in SCALES:
        told = f"must be a list of values, or one of {', '.join(SCALES)} with its two bounds"
        fields.fault(where, f"{told}, such as {{log: [1e-5, 1e-2]}}", "type")
        return [""]
    found = _read_interval(fields, f"{where}/{scale}", scale, given[scale])
    if found is None:
        return [""]
    if method == GRID and not found.is_whole:
        told = "a grid needs a list of values or whole numbers; method: random draws from intervals"
        fields.fault(where, told, "type")
        return [""]
    if method == GRID and _size(found) > MOST_VALUES:
        told = f"must have at most {MOST_VALUES} values in a grid; got {_size(found)}"
        fields.fault(where, told, "range")
        return [""]
    return found


def _read_interval(fields: Fields, where: str, scale: str, given: object) -> ValueInterval | None:
    numbers = given if isinstance(given, list) else []
    if len(numbers) != 2 or any(isinstance(n, bool) or not _is_number(n) for n in numbers):
        fields.fault(where, "must be two numbers: the lowest and the highest value", "type")
        return None
    low, high = numbers
    if not -MOST_BOUND <= low < high <= MOST_BOUND:
        told = f"must rise, between -{MOST_BOUND:g} and {MOST_BOUND:g}; got {low:g} and {high:g}"
        fields.fault(where, told, "range")
    elif scale in ("log", "log_int") and low <= 0:
        fields.fault(where, f"must start above 0 on a logarithmic scale; got {low:g}", "range")
    elif scale in ("int", "log_int") and not (float(low).is_integer() and float(high).is_integer()):
        fields.fault(where, f"must be whole numbers; got {low:g} and {high:g}", "type")
    else:
        return ValueInterval(scale=scale, low=low, high=high)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
