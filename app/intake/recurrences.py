"""Expands a rule of repetition (RFC 5545, such as FREQ=WEEKLY;BYDAY=MO) into windows.

Only rules of days, weeks and months are taken, and none goes on for more than two years: so an
expansion has an end. `python-dateutil` does the counting. A window keeps the hours of its zone's
clock: one at nine begins at nine, in summer, too. A window whose hours a change of the clock skips
is left out; where an hour comes twice, the first one is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

from dateutil import rrule

HORIZON = timedelta(days=731)  # no window begins later than so long after the first
MOST_WINDOWS = 1000
_FREQUENCIES = {"DAILY": rrule.DAILY, "WEEKLY": rrule.WEEKLY, "MONTHLY": rrule.MONTHLY}
_DAYS = {str(day): day for day in (rrule.MO, rrule.TU, rrule.WE, rrule.TH, rrule.FR, rrule.SA)}
_DAYS["SU"] = rrule.SU
_KNOWN = ("FREQ", "INTERVAL", "COUNT", "UNTIL", "BYDAY", "BYMONTHDAY")


def windows(
    begins_at: datetime, ends_at: datetime, *, rule: str, zone: ZoneInfo
) -> list[tuple[datetime, datetime]]:
    """Return the (begin, end) of each window in UTC.

    Without a rule it is the one given. With a rule they are those that the rule names from its
    begin on, so the given one is the first of them only if the rule names it.

    Raises ValueError if the rule is not one that can be taken, or gives more than MOST_WINDOWS.
    """
    if not rule:
        return [(begins_at.astimezone(UTC), ends_at.astimezone(UTC))]
    first, lasts = begins_at.astimezone(zone), ends_at.astimezone(zone).replace(tzinfo=None)
    local = first.replace(tzinfo=None)
    found = []
    for at in _starts(rule, local, zone):
        begin, end = (each.replace(tzinfo=zone) for each in (at, at + (lasts - local)))
        if _exists(begin) and begin.astimezone(UTC) < end.astimezone(UTC):
            found.append((begin.astimezone(UTC), end.astimezone(UTC)))
        if len(found) > MOST_WINDOWS:
            raise ValueError(f"the rule gives more than {MOST_WINDOWS} windows in two years")
    if not found:
        raise ValueError("the rule gives no window")
    if any(later[0] < earlier[1] for earlier, later in pairwise(found)):
        raise ValueError("the windows of the rule overlap: each must end before the next begins")
    return found


def _exists(at: datetime) -> bool:
    """True if the zone's clock ever shows this time."""
    back = at.astimezone(UTC).astimezone(at.tzinfo)
    return back.replace(tzinfo=None) == at.replace(tzinfo=None)


def _starts(rule: str, local: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    """Return the local times at which windows begin."""
    parts = _parts(rule)
    until = local + HORIZON
    if "UNTIL" in parts:
        until = min(until, _until(parts["UNTIL"], zone))
    days = [_weekday(text) for text in parts["BYDAY"].split(",")] if "BYDAY" in parts else None
    month_days = None
    if "BYMONTHDAY" in parts:
        month_days = [_number("BYMONTHDAY", text, 31) for text in parts["BYMONTHDAY"].split(",")]
    starts = rrule.rrule(
        _FREQUENCIES[parts["FREQ"]],
        dtstart=local,
        interval=_number("INTERVAL", parts.get("INTERVAL", "1"), 366),
        until=until,
        byweekday=days,
        bymonthday=month_days,
    )
    count = _number("COUNT", parts["COUNT"], MOST_WINDOWS) if "COUNT" in parts else None
    return islice(starts, count)


def _parts(rule: str) -> dict[str, str]:
    """Return the values of a rule by name; raises ValueError for one that is not known."""
    parts = dict[str, str]()
    for part in rule.upper().removeprefix("RRULE:").split(";"):
        name, _, value = part.partition("=")
        if name not in _KNOWN or not value:
            raise ValueError(f"{part!r} is not known; a rule consists of {', '.join(_KNOWN)}")
        if name in parts:
            raise ValueError(f"{name} is given twice")
        parts[name] = value
    if parts.get("FREQ") not in _FREQUENCIES:
        raise ValueError(f"FREQ must be one of {', '.join(_FREQUENCIES)}")
    if "COUNT" in parts and "UNTIL" in parts:
        raise ValueError("give COUNT or UNTIL, not both")
    return parts


def _number(name: str, text: str, most: int) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text) or int(text) > most:
        raise ValueError(f"{name} must be a number from 1 to {most}; got {text!r}")
    return int(text)


def _weekday(text: str) -> rrule.weekday:
    """Return a day of the week, as MO, or the n-th of a month, as 2MO or -1FR."""
    found = re.fullmatch(r"(?P<nth>[+-]?[1-5])?(?P<day>[A-Z]{2})", text)
    if found is None or found["day"] not in _DAYS:
        raise ValueError(f"BYDAY must name days such as MO, or 2MO for the second; got {text!r}")
    day = _DAYS[found["day"]]
    return day(int(found["nth"])) if found["nth"] else day


def _until(text: str, zone: ZoneInfo) -> datetime:
    """Return the local time up to which windows begin; a day means all of it."""
    try:
        if "T" not in text:
            return datetime.strptime(text, "%Y%m%d").replace(hour=23, minute=59, second=59)
        at = datetime.strptime(text.removesuffix("Z"), "%Y%m%dT%H%M%S")
    except ValueError:
        told = f"UNTIL must be a day such as 20271231, or 20271231T120000Z; got {text!r}"
        raise ValueError(told) from None
    return at.replace(tzinfo=UTC).astimezone(zone).replace(tzinfo=None) if text[-1] == "Z" else at
