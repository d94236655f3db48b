"""Reads the values that differ between the members of a lot."""

from __future__ import annotations

import re
from collections.abc import Sequence

from app.core.model.fields import WORD, WORD_RULE, Fields, escaped

Scalar = str | int | float | bool

MOST_COMBINATIONS = 10_000  # members of a matrix, before `exclude`, and of a search
MOST_KEYS = 16
MOST_VALUES = 1000  # of a key
MOST_TEXT = 1000  # characters of a value
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")


def read_values(fields: Fields, group: str, key: str, given: object) -> Sequence[Scalar]:
    """Read the values of a key: a list, or a range such as "0-9"."""
    where = f"{group}/{escaped(key)}"
    check_key(fields, group, key)
    if isinstance(given, str) and (found := _RANGE.fullmatch(given)):
        first, last = int(found[1]), int(found[2])
        values: Sequence[object] = range(first, last + 1)
    elif isinstance(given, list):
        values = given
    else:
        fields.fault(where, 'must be a list of values, or a range such as "0-9"', "type")
        return [""]
    if not 1 <= len(values) <= MOST_VALUES:
        told = f"must have from 1 to {MOST_VALUES} values; got {len(values)}"
        fields.fault(where, told, "range")
        return [""]
    return [_read_scalar(fields, f"{where}/{n}", value) for n, value in enumerate(values)]


def check_key(fields: Fields, group: str, key: str) -> None:
    if not WORD.fullmatch(key):
        fields.fault(f"{group}/{escaped(key)}", f"the name of a key must be {WORD_RULE}")


def _read_scalar(fields: Fields, where: str, value: object) -> Scalar:
    if not isinstance(value, str | int | float):
        fields.fault(where, "must be a text, a number, true or false", "type")
    elif isinstance(value, str) and len(value) > MOST_TEXT:
        told = f"must have at most {MOST_TEXT} characters; got {len(value)}"
        fields.fault(where, told, "range")
    else:
        return value
    return ""
