"""Reads what makes a task a lot, which is many tasks from one description: `array`, `matrix` and
`search`.

An array counts its members. A matrix has a member for each combination of its values, without those
that `exclude` names; its `array` may bound how many members there are at once. The index of a
member is its place among all, and its name for ever. Keys are taken in the order of the alphabet,
the last one varies fastest: tables keep no other order of the keys of an object.
A search draws the values of its members (`provisions.searches`). `core.model.lot_members` makes the
members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from app.core.model.fields import Fields, escaped
from app.core.model.provisions.lot_values import (
    MOST_COMBINATIONS,
    MOST_KEYS,
    Scalar,
    read_values,
)
from app.core.model.provisions.searches import LotSearch, read_search

JSON = dict[str, Any]

MOST_MEMBERS = 100_000  # of an array
MOST_EXCLUDED = 32  # entries of `exclude`
MOST_AT_ONCE = 10_000
USUAL_AT_ONCE = 1000
USUAL_PROPOSED = 4  # `at_once` of a search that learns: what is made at once knows less
EXCLUDE = "exclude"
INDEX_VARIABLE = "ROUNDHOUSE_ARRAY_INDEX"  # the environment of a member has its index in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """Says how many members a lot has; `at_once` of them may be unended at any time, 0 holds it.

    More failures than `max_failures` hold the lot. Below 1 it is a share of `count`; None never
    holds the lot.
    """

    count: int
    at_once: int = USUAL_AT_ONCE
    max_failures: float | None = None

    @property
    def failures_allowed(self) -> int | None:
        """The most members that may fail before the lot is held."""
        if self.max_failures is None:
            return None
        share = self.max_failures < 1
        return int(self.max_failures * self.count + 1e-9) if share else int(self.max_failures)

    def as_json(self) -> JSON:
        return {"count": self.count, "at_once": self.at_once, "max_failures": self.max_failures}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Lists the values of each key, and the combinations that have no member."""

    GROUP = "matrix"

    values: Mapping[str, Sequence[Scalar]]
    exclude: Sequence[Mapping[str, Scalar]] = ()

    def combinations(self) -> Iterator[dict[str, Scalar]]:
        """Yield the values of each member, in the order of the members' indices."""
        for each in product(*self.values.values()):
            found = dict(zip(self.values, each, strict=True))
            if not any(out.items() <= found.items() for out in self.exclude):
                yield found

    def by_index(self) -> Callable[[int], dict[str, Scalar]]:
        """Return the function that gives the values of the member with an index."""
        return [*self.combinations()].__getitem__

    def count(self) -> int:
        if self.exclude:
            return sum(1 for _ in self.combinations())
        return prod(len(each) for each in self.values.values())

    @property
    def examples(self) -> Mapping[str, Sequence[Scalar]]:
        return self.values

    def as_json(self) -> JSON:
        said: JSON = {key: [*values] for key, values in self.values.items()}
        return {**said, EXCLUDE: [dict(out) for out in self.exclude]}


# --- from JSON ------------------------------------------------------------------------------------


def read_lot(fields: Fields) -> tuple[Array | None, Matrix | None, LotSearch | None]:
    """Read `array`, `matrix` and `search` of a task."""
    matrix, search = _read_matrix(fields), read_search(fields)
    if matrix is not None and search is not None:
        told = "a task has a matrix or a search; move the values of the matrix into its space"
        fields.fault("search", told)
    inside = fields.inside("array")
    if matrix is not None or search is not None:
        at_once = USUAL_PROPOSED if search is not None and search.learns else USUAL_AT_ONCE
        count = _count(fields, inside, matrix, search)
        return _read_array(inside, count, at_once=at_once), matrix, search
    if not inside.given:
        return None, None, None
    inside.require("count")
    return _read_array(inside, 1), None, None


def _count(fields: Fields, array: Fields, matrix: Matrix | None, search: LotSearch | None) -> int:
    if matrix is not None:
        count, of = matrix.count(), "matrix has {} combinations"
        if not count:
            fields.fault("matrix/exclude", "leaves no combination; exclude fewer", "range")
    else:
        assert search is not None
        count, of = search.count(), "search has {} trials"
    if array.body.get("count") not in (None, count):
        told = f"the {of.format(count)}, which count its members; leave it out"
        array.fault("count", told, "range")
    return max(1, count)


def _read_array(fields: Fields, usual: int, *, at_once: int = USUAL_AT_ONCE) -> Array:
    count = fields.integer("count", usual, least=1, most=MOST_MEMBERS)
    most_failures = None
    if fields.body.get("max_failures") is not None:
        most_failures = fields.number("max_failures", 0.0, above=-1e-9, most=float(MOST_MEMBERS))
        if most_failures >= 1 and not most_failures.is_integer():
            told = f"must be a share below 1 or a whole number; got {most_failures:g}"
            fields.fault("max_failures", told, "range")
    else:
        fields.number("max_failures", 0.0, above=0, most=1)  # the field is known
    array = Array(
        count=count,
        at_once=fields.integer("at_once", at_once, least=0, most=MOST_AT_ONCE),
        max_failures=most_failures,
    )
    fields.close()
    return array


def _read_matrix(fields: Fields) -> Matrix | None:
    given = fields.mapping("matrix")
    if fields.body.get("matrix") is None:
        return None
    keys = sorted(key for key in given if key != EXCLUDE)
    if not 1 <= len(keys) <= MOST_KEYS:
        told = f"must have from 1 to {MOST_KEYS} keys beside exclude; got {len(keys)}"
        fields.fault("matrix", told, "range")
        keys = []
    values = {key: read_values(fields, "matrix", key, given[key]) for key in keys}
    size = prod(len(each) for each in values.values())
    if size > MOST_COMBINATIONS:
        told = f"must have at most {MOST_COMBINATIONS} combinations; got {size}"
        fields.fault("matrix", told, "range")
        values = {key: each[:1] for key, each in values.items()}
    return Matrix(values=values, exclude=_read_excluded(fields, given.get(EXCLUDE), values))


def _read_excluded(
    fields: Fields, given: object, values: Mapping[str, Sequence[Scalar]]
) -> list[dict[str, Scalar]]:
    where = f"matrix/{EXCLUDE}"
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MOST_EXCLUDED:
        fields.fault(where, f"must be a list of at most {MOST_EXCLUDED} objects", "type")
        return []
    excluded = []
    for n, out in enumerate(given):
        if not isinstance(out, dict) or not out or out.keys() - values.keys():
            told = f"must be an object with some of the keys {', '.join(values)}"
            fields.fault(f"{where}/{n}", told, "unknown-key")
        elif missing := [key for key, value in out.items() if value not in values[key]]:
            told = f"{missing[0]} has no such value, so this excludes nothing"
            fields.fault(f"{where}/{n}/{escaped(missing[0])}", told, "unknown-value")
        else:
            excluded.append(out)
    return excluded
