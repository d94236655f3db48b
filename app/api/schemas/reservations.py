"""Models of reservations."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from app.api.schemas.base import (
    BY_KIND,
    EXAMPLE_AT,
    EXAMPLE_TENANT,
    In,
    Kind,
    Line,
    Out,
    example,
)
from app.api.times import Instant, Time
from app.core.model.fields import NAME, NAME_RULE

_Number = Annotated[int, Field(ge=1, le=1_000_000)]
_Devices = Annotated[dict[Kind, _Number], Field(max_length=32, json_schema_extra=BY_KIND)]
_DEVICES = "The number of devices by kind."
DeviceId = Annotated[str, Field(max_length=128)]
DeviceLabel = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
_Ids = Annotated[list[DeviceId], Field(max_length=1000)]
_IDS = "These very devices, instead of a number of them. For maintenance: those that take no work."
_Labels = Annotated[list[DeviceLabel], Field(max_length=16)]
_LABELS = "The labels of all devices that `devices` counts, as tasks ask for them."
_TENANT = "The tenant for which the devices are guaranteed; default: that of `user_id`."
_USER = "The only user of the tenant for whom they are guaranteed."
_RULE = (
    "How the window repeats, as in RFC 5545: `FREQ` (DAILY, WEEKLY, MONTHLY), `INTERVAL`, `BYDAY`, "
    "`BYMONTHDAY`, and `COUNT` or `UNTIL`; at most 1,000 windows in two years. The first window is "
    "the first that the rule names. Windows keep the hours of the time zone's clock."
)
_ZONE = "The time zone in which the window repeats, such as Europe/Berlin."
_Rule = Annotated[str, Field(max_length=300)]
_Zone = Annotated[str, Field(max_length=64)]
_NOTE = "What it is for."
_ISLAND = "The island whose devices are meant; default: the one with most of them."
_NAME = "workshop"
_FROM, _TO = "2026-12-07T08:00:00Z", "2026-12-07T16:00:00Z"


class ReservationIn(In):
    """Reserves devices for a tenant or user, or takes devices out of service."""

    model_config = example(
        name=_NAME,
        tenant_id=EXAMPLE_TENANT,
        devices={"cuda": 8},
        begins_at=_FROM,
        ends_at=_TO,
        rule="FREQ=WEEKLY;BYDAY=MO;COUNT=10",
        timezone="Europe/Berlin",
    )
    name: str = Field(description=f"{NAME_RULE}.", pattern=f"^{NAME.pattern}$")
    island: Annotated[str, Field(max_length=63)] | None = Field(None, description=_ISLAND)
    tenant_id: Annotated[str, Field(max_length=64)] | None = Field(None, description=_TENANT)
    user_id: Annotated[str, Field(max_length=64)] | None = Field(None, description=_USER)
    devices: _Devices = Field({}, description=_DEVICES)
    maintenance: bool = Field(False, description="Take `device_ids` out of service instead.")
    device_ids: _Ids = Field([], description=_IDS)
    labels: _Labels = Field([], description=_LABELS)
    begins_at: Instant = Field(description="When the first window begins.")
    ends_at: Instant = Field(description="When the first window ends.")
    rule: _Rule = Field("", description=_RULE)
    timezone: _Zone = Field("UTC", description=_ZONE)
    note: Line | None = Field(None, description=_NOTE)


class ReservationPatch(In):
    """A change of a reservation; fields that are left out or null stay unchanged, except that null
    removes `note`.

    Windows that have begun stay. `ends_at` alone, inside a window, moves the end of that window
    only. Once the first window has begun, other times need `begins_at` and `ends_at` of the next
    window.
    """

    model_config = example(ends_at=_TO, devices={"cuda": 4})
    devices: _Devices | None = Field(None, description=_DEVICES)
    device_ids: _Ids | None = Field(None, description=_IDS)
    labels: _Labels | None = Field(None, description=_LABELS)
    begins_at: Time = Field(None, description="When the first window begins.")
    ends_at: Time = Field(None, description="When the first window ends, or the present one.")
    rule: _Rule | None = Field(None, description=_RULE)
    timezone: _Zone | None = Field(None, description=_ZONE)
    note: Line | None = Field(None, description=_NOTE)


class WindowOut(Out):
    begins_at: datetime
    ends_at: datetime


class ReservationOut(Out):
    """A reservation with its windows that have not ended, the next first; at most 100 of them.

    `state`: `active` inside a window, and `ended` after the last one.
    """

    model_config = example(
        id="rsv_0192f0c1b7e97d3e9a4c5b6d7e8f9a24",
        name=_NAME,
        island="local",
        tenant_id=EXAMPLE_TENANT,
        user_id=None,
        devices={"cuda": 8},
        maintenance=False,
        device_ids=[],
        labels=["nvlink"],
        kept_device_ids=[],
        state="planned",
        available={"cuda": 8},
        windows=[{"begins_at": _FROM, "ends_at": _TO}],
        windows_ahead=10,
        rule="FREQ=WEEKLY;BYDAY=MO;COUNT=10",
        timezone="Europe/Berlin",
        note=None,
        created_by="root",
        created_at=EXAMPLE_AT,
    )
    id: str
    name: str
    island: str
    tenant_id: str | None = Field(description="Null for maintenance.")
    user_id: str | None = Field(description=_USER)
    devices: dict[str, int] = Field(description=_DEVICES)
    maintenance: bool
    device_ids: list[str] = Field(description=_IDS)
    labels: list[str] = Field(description=_LABELS)
    kept_device_ids: list[str] = Field(
        description="Of a reservation with `device_ids` or `labels`, inside its windows: the "
        "devices that are kept for it now."
    )
    state: Literal["planned", "active", "ended"]
    available: dict[str, int] = Field(
        description="How many devices of each kind that suit it serve now, for this reservation "
        "and all others; if these are fewer than reserved, it is filled in part."
    )
    windows: list[WindowOut]
    windows_ahead: int = Field(description="The number of windows that have not ended.")
    rule: str = Field(description=_RULE)
    timezone: str = Field(description=_ZONE)
    note: str | None
    created_by: str = Field(description="Name of the administrator.")
    created_at: datetime


class FreeTimesOut(Out):
    """The times in which so many devices of a kind can be reserved, the next first."""

    model_config = example(
        island="local",
        kind="cuda",
        devices=8,
        reservable=16,
        windows=[{"begins_at": _FROM, "ends_at": _TO}],
    )
    island: str
    kind: str
    devices: int
    reservable: int = Field(
        description="Devices of the kind, without those that are guaranteed to tenants for ever."
    )
    windows: list[WindowOut]
