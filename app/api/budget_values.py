"""Turns the budget of a call into a `Budget`, with every fault at its place, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from app.api.schemas.budgets import BudgetIn, Days
from app.api.times import unknown_zone
from app.core.fairness.budget import HOUR_US, MOST_PERCENT, Budget, budget_of
from app.core.model.fields import Fault
from app.errors import BadInput


def budget_from(
    given: BudgetIn, *, now: datetime, channels: Collection[str], where: str = "/budget"
) -> Budget:
    """Return the budget that a call gives; raises BadInput with all of its faults.

    `channels` are the names of the channels that the tenant has; `where` is its place in the call.
    """
    found = (*_faults(given), *_unknown_channels(given, channels))
    if found:
        faults = tuple(replace(fault, pointer=f"{where}{fault.pointer}") for fault in found)
        raise BadInput(f"{faults[0].pointer}: {faults[0].detail}", errors=faults)
    period = given.period.days if isinstance(given.period, Days) else given.period
    return Budget(
        grants_us={kind: round(hours * HOUR_US) for kind, hours in given.device_hours.items()},
        period=period,
        timezone=given.timezone,
        at={int(percent): action for percent, action in given.at.items()},
        carry_milli=round(given.carry * 1000),
        to=tuple(dict.fromkeys(given.to)),
        since=now.astimezone(ZoneInfo(given.timezone)).date(),
    )


def _faults(given: BudgetIn) -> Iterator[Fault]:
    for percent in given.at:
        if int(percent) > MOST_PERCENT:
            told = f"must be a percentage of 1 to {MOST_PERCENT}"
            yield Fault(f"/at/{percent}", told, "percent")
    if told := unknown_zone(given.timezone):
        yield Fault("/timezone", told, "timezone")


def _unknown_channels(given: BudgetIn, channels: Collection[str]) -> Iterator[Fault]:
    for n, name in enumerate(given.to):
        if name not in channels:
            has = f"it has: {', '.join(channels)}" if channels else "it has none"
            told = f"the tenant has no channel {name}; {has}"
            yield Fault(f"/to/{n}", told, "unknown-channel")


def shown(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a budget as answers show it, from its form in a row."""
    if row is None:
        return None
    it = budget_of(row)
    return {
        "device_hours": {kind: hours(us) for kind, us in it.grants_us.items()},
        "period": it.period if isinstance(it.period, str) else {"days": it.period},
        "timezone": it.timezone,
        "at": {str(percent): action for percent, action in sorted(it.at.items())},
        "carry": it.carry_milli / 1000,
        "to": list(it.to),
    }


def hours(us: int) -> float:
    """Return micro-device-seconds as device-hours."""
    return us / HOUR_US
