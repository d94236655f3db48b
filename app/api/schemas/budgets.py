"""Models of budgets."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from app.api.schemas.base import BY_KIND_OR_ALL, In, KindOrAll, Line, Name, Out, example
from app.core.fairness.budget import MOST_DAYS, MOST_HOURS, MOST_PERCENT, Action

Hours = Annotated[float, Field(ge=0, le=MOST_HOURS, allow_inf_nan=False)]
Percent = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}$")]
_GRANTS = (
    "Device-hours in each period by kind of device, as charged: hours times the device's cost; "
    "`*`: all kinds together."
)
_PERIOD = "A month; a week from Monday on; or days, counted from the day on which it was set."
_ZONE = "The time zone in which a period begins at midnight, such as Europe/Berlin."
_AT = (
    f"What follows when so many percent (1 to {MOST_PERCENT}) are used. `notify`: the audit log "
    "tells it. `demote`: its tasks get only devices that nobody else wants. `hold`: nothing new "
    "starts. `pause`: running tasks are paused, too, until the next period begins."
)
_TO = "Names of channels of the tenant that are told of each percentage in `at`."
_CARRY = "The part of what is left that is added to the next period."
_IN_FORCE = "What is in force now: `demote`, `hold` or `pause`; null: nothing."


class Days(In):
    model_config = example(days=14)
    days: Annotated[int, Field(ge=1, le=MOST_DAYS)]


class BudgetIn(In):
    """Says what may be charged in each period, and what follows when it is used."""

    model_config = example(
        device_hours={"cuda": 1000.0},
        period="month",
        timezone="Europe/Berlin",
        at={"80": "notify", "100": "pause"},
        carry=0.5,
    )
    device_hours: Annotated[
        dict[KindOrAll, Hours],
        Field(min_length=1, max_length=32, json_schema_extra=BY_KIND_OR_ALL),
    ] = Field(description=_GRANTS)
    period: Literal["month", "week"] | Days = Field("month", description=_PERIOD)
    timezone: Annotated[str, Field(max_length=64)] = Field("UTC", description=_ZONE)
    at: Annotated[dict[Percent, Action], Field(min_length=1, max_length=8)] = Field(
        {"100": "pause"}, description=_AT
    )
    carry: float = Field(0.0, ge=0, le=1, allow_inf_nan=False, description=_CARRY)
    to: Annotated[list[Name], Field(max_length=20)] = Field([], description=_TO)


class BudgetSet(Out):
    """A budget as it was set."""

    device_hours: dict[str, float] = Field(description=_GRANTS)
    period: Literal["month", "week"] | Days = Field(description=_PERIOD)
    timezone: str = Field(description=_ZONE)
    at: dict[str, Action] = Field(description=_AT)
    carry: float = Field(description=_CARRY)
    to: list[str] = Field(description=_TO)


class AdjustmentIn(In):
    """Device-hours that are added to the present period, or taken away if below 0."""

    model_config = example(kind="cuda", device_hours=40.0, why="deadline of the workshop")
    kind: Annotated[str, Field(max_length=63)] = Field(
        description="A kind of the budget, or `*` if it has one for all kinds together."
    )
    device_hours: float = Field(ge=-MOST_HOURS, le=MOST_HOURS, allow_inf_nan=False)
    why: Line


class AdjustmentOut(Out):
    device_hours: float
    why: str
    by: str = Field(description="Name of the administrator.")
    at: datetime


class BudgetKind(Out):
    """One kind of device in the present period.

    What is spent and left is what was granted, carried and adjusted.
    """

    kind: str
    granted_hours: float
    carried_hours: float = Field(description="What the period before has left.")
    adjusted_hours: float = Field(description="Sum of the adjustments in this period.")
    spent_hours: float
    left_hours: float = Field(description="Below 0 if more was charged than there was.")
    in_force: Literal["demote", "hold", "pause"] | None = Field(description=_IN_FORCE)
    last_day_hours: float = Field(description="Device-hours charged in the last 24 hours.")
    runs_out_at: datetime | None = Field(
        description="When nothing is left, if as much is charged as in the last 24 hours; null: "
        "not in this period."
    )
    adjustments: list[AdjustmentOut]


class BudgetOut(Out):
    """A budget, and what is spent of it in the present period."""

    model_config = example(
        budget={
            "device_hours": {"cuda": 1000.0},
            "period": "month",
            "timezone": "Europe/Berlin",
            "at": {"80": "notify", "100": "pause"},
            "carry": 0.5,
            "to": ["ml-alerts"],
        },
        is_default=False,
        begins_at="2026-10-31T23:00:00Z",
        ends_at="2026-11-30T23:00:00Z",
        kinds=[
            {
                "kind": "cuda",
                "granted_hours": 1000.0,
                "carried_hours": 120.0,
                "adjusted_hours": 40.0,
                "spent_hours": 812.5,
                "left_hours": 347.5,
                "in_force": None,
                "last_day_hours": 62.0,
                "runs_out_at": "2026-11-27T02:00:00Z",
                "adjustments": [
                    {
                        "device_hours": 40.0,
                        "why": "deadline of the workshop",
                        "by": "root",
                        "at": "2026-11-20T09:00:00Z",
                    }
                ],
            }
        ],
    )
    budget: BudgetSet | None = Field(description="Null: there is none, and nothing is bounded.")
    is_default: bool = Field(
        description="True: the user has no own budget, and this is that of the tenant's "
        "`user_defaults`."
    )
    begins_at: datetime | None
    ends_at: datetime | None
    kinds: list[BudgetKind]
