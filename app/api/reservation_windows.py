"""Decides which windows a reservation has: when it is made, and after its times were changed.

Windows that have begun stay as they are, so nobody loses a past or present one by a change of the
rule. The only thing that can change about the present one is its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from app.api.times import unknown_zone
from app.errors import BadInput
from app.intake import recurrences

Windows = list[tuple[datetime, datetime]]


class Times(NamedTuple):
    """Says when the first window is, and how it repeats in which zone; "": not at all."""

    begins_at: datetime
    ends_at: datetime
    rule: str
    timezone: str


def first_windows(times: Times, now: datetime) -> Windows:
    """Return the windows of a new reservation that have not ended; raises BadInput."""
    _check(times, now)
    return _ahead(_expanded(times), now)


def changed_windows(
    times: Times, given: Mapping[str, Any], known: Windows, now: datetime
) -> tuple[Times, Windows]:
    """Return the times of a reservation after a change, and its windows that have not ended.

    `given` are the times that change, by name; `known` are all its windows in order. Raises
    BadInput if they cannot change so.
    """
    ahead = _ahead(known, now)
    if not given:
        return times, ahead
    present = ahead[:1] if ahead and ahead[0][0] <= now else []
    if known and known[0][0] <= now:
        if set(given) == {"ends_at"}:
            return _present_changed(times, given["ends_at"], ahead, now)
        _check_later(times, given, present, now)
    changed = times._replace(**given)
    if {"begins_at", "ends_at"} & given.keys():
        _check(changed, now)
    planned = _ahead(_expanded(changed), now)
    if present:
        planned = [window for window in planned if window[0] > now]
    if present and planned and planned[0][0] < present[0][1]:
        told = "must not be before the end of the present window"
        raise BadInput.at(f"/{_first_of(given)}", told, "window")
    if not (present or planned):
        told = "no window would be left; remove the reservation instead"
        raise BadInput.at(f"/{_first_of(given)}", told, "window")
    return changed, [*present, *planned]


def _present_changed(
    times: Times, ends_at: datetime, ahead: Windows, now: datetime
) -> tuple[Times, Windows]:
    """Move the end of the present window only."""
    if not ahead or ahead[0][0] > now:
        told = "give begins_at, too: the first window is over, so say which is the next"
        raise BadInput.at("/ends_at", told, "window")
    if ends_at <= now:
        told = "must be in the future; remove the reservation to end it now"
        raise BadInput.at("/ends_at", told, "window")
    if ends_at > now + 2 * recurrences.HORIZON:
        raise BadInput.at("/ends_at", "must lie within two years from now", "window")
    if ahead[1:] and ends_at > ahead[1][0]:
        raise BadInput.at("/ends_at", "must not be after the begin of the next window", "window")
    if not times.rule:
        times = times._replace(ends_at=ends_at)
    return times, [(ahead[0][0], ends_at), *ahead[1:]]


def _check_later(times: Times, given: Mapping[str, Any], present: Windows, now: datetime) -> None:
    """Raise BadInput unless a change of a reservation that has begun is about later windows."""
    if "begins_at" not in given:
        if "ends_at" in given:
            told = "give begins_at, too: the first window has begun, so say which is the next"
            raise BadInput.at("/ends_at", told, "window")
        return
    if present and not times.rule:
        told = "the window has begun: only its end can change"
        raise BadInput.at("/begins_at", told, "window")
    if given["begins_at"] <= now:
        told = "must be in the future, as the first window has begun"
        raise BadInput.at("/begins_at", told, "window")
    if "ends_at" not in given:
        raise BadInput.at("/ends_at", "is needed with begins_at", "required")


def _first_of(given: Mapping[str, Any]) -> str:
    return next(name for name in (*Times._fields, *given) if name in given)


def _ahead(windows: Sequence[tuple[datetime, datetime]], now: datetime) -> Windows:
    return [(begins_at, ends_at) for begins_at, ends_at in windows if ends_at > now]


def _check(times: Times, now: datetime) -> None:
    if times.ends_at <= max(times.begins_at, now):
        raise BadInput.at("/ends_at", "must be after begins_at and in the future", "window")
    latest = now + recurrences.HORIZON
    if times.begins_at > latest or times.ends_at > latest + recurrences.HORIZON:
        raise BadInput.at("/begins_at", "must lie within two years from now", "window")


def _expanded(times: Times) -> Windows:
    if told := unknown_zone(times.timezone):
        raise BadInput.at("/timezone", told, "timezone")
    try:
        return recurrences.windows(
            times.begins_at, times.ends_at, rule=times.rule, zone=ZoneInfo(times.timezone)
        )
    except ValueError as error:
        raise BadInput.at("/rule", str(error), "rule") from error
