"""Reads the forms of limits per user and of budgets, on the pages of members and tenants.

Each form says the whole of what it is about: a field that is left empty takes the limit away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends

from app.api.schemas.budgets import AdjustmentIn
from app.db.user_limits import LIMITS
from app.errors import BadInput
from app.pages import forms
from app.pages.forms import Field

#: The limits of a user on numbers, in words.
BOUNDS = {
    "max_running": "Tasks that run, at most",
    "max_queued": "Tasks in the queue, at most",
    "max_sessions": "Sessions, at most",
    "max_duration_s": "Longest task, in seconds",
}
#: What the buttons of the forms change: the limits, or the budget.
ACTS = ("limits", "budget", "no-budget")


def _typed(
    limit: Field = "",
    max_running: Field = "",
    max_queued: Field = "",
    max_sessions: Field = "",
    max_duration_s: Field = "",
    device_hours: Field = "",
    period: Field = "",
    timezone: Field = "",
    at: Field = "",
    carry: Field = "",
    to: Field = "",
    kind: Field = "",
    hours: Field = "",
    why: Field = "",
) -> dict[str, str]:
    """Return the fields of the forms."""
    return {field: text.strip() for field, text in locals().items()}


Typed = Annotated[dict[str, str], Depends(_typed)]


def values(do: str, typed: Mapping[str, str]) -> dict[str, Any]:
    """Return what a button of these forms changes; raises BadInput."""
    if do == "no-budget":
        return {"budget": None}
    return {"budget": _budget(typed)} if do == "budget" else _limits(typed)


def adjustment(typed: Mapping[str, str]) -> AdjustmentIn:
    """Return what is added to a budget for this period; raises RequestValidationError."""
    hours = forms.number(typed["hours"])
    return forms.filled(AdjustmentIn, kind=typed["kind"], device_hours=hours, why=typed["why"])


def _limits(typed: Mapping[str, str]) -> dict[str, Any]:
    numbers = {name: forms.number(typed[name]) if typed[name] else None for name in BOUNDS}
    return {"limit": forms.numbers_by_kind("limit", typed["limit"]) or None, **numbers}


def _budget(typed: Mapping[str, str]) -> dict[str, Any]:
    period = typed["period"]
    days = forms.whole_number(period.removesuffix("d"))
    if not isinstance(days, int) and period not in ("month", "week"):
        told = f"must be month, week, or days such as 14d; got {period!r:.20}"
        raise BadInput.at("/period", told, "form")
    return {
        "device_hours": forms.pairs(
            "device_hours", typed["device_hours"], "cuda=1000, *=2000", forms.number
        ),
        "period": {"days": days} if isinstance(days, int) else period,
        "timezone": typed["timezone"],
        "at": forms.pairs("at", typed["at"], "80=notify, 100=pause", str),
        "carry": forms.number(typed["carry"] or "0"),
        "to": [name.strip() for name in typed["to"].split(",") if name.strip()],
    }


# --- what they show -----------------------------------------------------------------------------


def shown_limits(limits: Mapping[str, Any]) -> dict[str, str]:
    """Return limits as the form shows them."""
    numbers = {name: limits.get(name) for name in LIMITS if name != "limit"}
    texts = {name: "" if it is None else forms.number_text(it) for name, it in numbers.items()}
    return {"limit": forms.pairs_text(limits.get("limit") or {}), **texts}


def shown_budget(budget: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a budget as the form shows it, or what the form offers where there is none."""
    if budget is None:
        return {
            "device_hours": "", "period": "month", "timezone": "UTC", "at": "80=notify, 100=pause",
            "carry": "0", "to": "",
        }  # fmt: skip
    period = budget["period"]
    hours = {kind: forms.number_text(hours) for kind, hours in budget["device_hours"].items()}
    return {
        "device_hours": forms.pairs_text(hours),
        "period": period if isinstance(period, str) else f"{period['days']}d",
        "timezone": budget["timezone"],
        "at": forms.pairs_text(budget["at"]),
        "carry": forms.number_text(budget["carry"]),
        "to": ", ".join(budget["to"]),
    }
