"""Reads times in the input: ISO 8601 only; plain numbers are rejected."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from app.core.fairness.budget import timezones
from app.errors import BadInput


def _written(text: Any) -> Any:
    """Reject numbers, since 2026 would be read as 2026 seconds after the beginning of 1970."""
    if text is None or (isinstance(text, str) and re.match(r"\d{4}-\d\d-\d\d", text)):
        return text
    raise ValueError("write a time as 2026-11-21T12:00:00Z")


# Years that leave room to subtract a day or to convert to another zone.
YEARS = (1970, 9998)


def _aware(at: datetime | None) -> datetime | None:
    """Take a time without a zone as UTC."""
    if at is not None and not YEARS[0] <= at.year <= YEARS[1]:
        raise ValueError(f"expected a year from {YEARS[0]} to {YEARS[1]}; got {at.year}")
    return at if at is None or at.tzinfo else at.replace(tzinfo=UTC)


Time = Annotated[
    datetime | None, Field(strict=False), AfterValidator(_aware), BeforeValidator(_written)
]


#: A time that must be given.
Instant = Annotated[
    datetime, Field(strict=False), AfterValidator(_aware), BeforeValidator(_written)
]


def unknown_zone(name: str) -> str:
    """Return why there is no such time zone, with the name that may be meant; "" if there is."""
    if name in timezones():
        return ""
    told = f"there is no time zone {name!r}"
    near = get_close_matches(name, timezones(), 1)
    return f"{told}; did you mean {near[0]}?" if near else told


def day(text: str, where: str) -> datetime | None:
    """Return the beginning of a day in UTC; None for an empty text; raises BadInput."""
    if not text:
        return None
    try:
        return _aware(datetime.strptime(text, "%Y-%m-%d"))
    except ValueError as error:
        raise BadInput.at(where, "write a day as 2026-11-21, from 1970 on", "time") from error
