"""Models of tenants, users and keys."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from app.api.schemas.base import (
    EXAMPLE_AT,
    EXAMPLE_TENANT,
    EXAMPLE_USER,
    Count,
    DeviceLimit,
    Guarantee,
    In,
    Name,
    Out,
    Role,
    Scope,
    Tier,
    Weight,
    example,
    example_of,
)
from app.api.schemas.budgets import BudgetIn, BudgetSet
from app.api.times import Time
from app.core.model.descriptor import MAX_DURATION_S
from app.core.model.provisions.network_policy import MAX_DESTINATIONS
from app.core.model.provisions.session import LEAST_PAUSE_S

_WEIGHT = "Relative share among siblings: the child tenants and the users of the same parent."
_PAST = (
    "True: the weight counts for usage of the past too, as if it had always been so. False: a new "
    "weight counts from now on, and the place in the order stays."
)
_GUARANTEE = (
    "Guaranteed devices by kind. They are lent to others while unused. The guarantees of the "
    "child tenants must not exceed this in total. The number of installed devices is not checked."
)
_LIMIT = "Maximum number of devices by kind, including child tenants; `*`: all kinds together."
_MAX_RUNNING = (
    "Maximum number of tasks that hold devices at once, including child tenants; null: no limit."
)
_MAX_QUEUED = (
    "Maximum number of queued tasks, including child tenants; further submissions are rejected; "
    "null: no limit."
)
_IDLE = (
    "A task that computes nothing on its device for so many seconds is paused, and warned after "
    "half of them; null: as the parent tenant says, or never. Needs devices with a monitor; a "
    "session gives its device back after so long on every device, whatever its own limit."
)
_SESSION = (
    "A session into which nobody types for so many seconds is cancelled, and warned after 80 % of "
    "them; null: as the parent tenant says, or never."
)
_NETWORK = (
    "What tasks of this tenant and its child tenants may reach, as HOST:PORT; `*.pypi.org:443` "
    "stands for the names below pypi.org, `*:443` for every name. null: as the parent tenant says, "
    "or nothing; []: nothing."
)
Network = Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=MAX_DESTINATIONS)]
IdlePause = Annotated[int, Field(ge=LEAST_PAUSE_S, le=30 * 86400)]
_USER_DEFAULTS = (
    "Limits, and a budget, of each user of this tenant that has no own ones; left out: none."
)
_USER_LIMIT = "Maximum number of devices of the user by kind; `*`: all kinds together."
_USER_RUNNING = "Maximum number of the user's tasks that hold devices at once."
_USER_QUEUED = "Maximum number of the user's queued tasks; further submissions are rejected."
_USER_SESSIONS = "Maximum number of the user's sessions that have not ended."
_USER_DURATION = "Maximum of `max_duration_s` of the user's tasks, and the default if it is less."
_ELSE = " Null: as the tenant's `user_defaults` say, or no limit."
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S, allow_inf_nan=False, strict=False)]
_BUDGET = (
    "Device-hours that may be charged in a period, and what follows when they are used; null: no "
    "budget."
)
_USER_BUDGET = (
    "The budget of each user of this tenant that has no own one: each may be charged so much alone."
)
_TIER = "The highest tier for requests of this tenant and its child tenants."


class UserDefaults(In):
    """Limits for each user of a tenant; a limit that is left out or null is none."""

    model_config = example(limit={"cuda": 2}, max_running=8, max_queued=1000)
    limit: DeviceLimit | None = Field(None, description=_USER_LIMIT)
    max_running: Count | None = Field(None, description=_USER_RUNNING)
    max_queued: Count | None = Field(None, description=_USER_QUEUED)
    max_sessions: Count | None = Field(None, description=_USER_SESSIONS)
    max_duration_s: Seconds | None = Field(None, description=_USER_DURATION)
    budget: BudgetIn | None = Field(None, description=_USER_BUDGET)


class TenantIn(In):
    model_config = example(
        name="vision",
        weight=2.0,
        guarantee={"cuda": 4},
        limit={"cuda": 8, "*": 16},
        max_running=32,
        max_queued=10_000,
        idle_pause_s=1800,
        session_end_s=86400,
        network=["huggingface.co:443", "*.pypi.org:443"],
        tier="standard",
    )
    name: Name
    weight: Weight = Field(1.0, description=_WEIGHT)
    parent_id: str | None = Field(
        None, description="Default: the root tenant; for a tenant admin, the own tenant."
    )
    guarantee: Guarantee = Field({}, description=_GUARANTEE)
    limit: DeviceLimit = Field({}, description=_LIMIT)
    max_running: Count | None = Field(None, description=_MAX_RUNNING)
    max_queued: Count | None = Field(None, description=_MAX_QUEUED)
    idle_pause_s: IdlePause | None = Field(None, description=_IDLE)
    session_end_s: IdlePause | None = Field(None, description=_SESSION)
    network: Network | None = Field(None, description=_NETWORK)
    user_defaults: UserDefaults = Field(UserDefaults(), description=_USER_DEFAULTS)
    tier: Tier = Field("standard", description=_TIER)
    budget: BudgetIn | None = Field(None, description=_BUDGET)


class TenantPatch(In):
    """A change of a tenant; fields that are left out stay unchanged.  `guarantee`, `limit`,
    `network` and `user_defaults` are replaced as a whole; null removes `max_running`, `max_queued`,
    `idle_pause_s`, `session_end_s`, `network` and `budget`.
    """

    model_config = example(weight=3.0, limit={"cuda": 6}, max_queued=None)
    name: Name | None = None
    weight: Weight | None = Field(None, description=_WEIGHT)
    for_past_usage: bool = Field(False, description=_PAST)
    parent_id: str | None = None
    guarantee: Guarantee | None = Field(None, description=_GUARANTEE)
    limit: DeviceLimit | None = Field(None, description=_LIMIT)
    max_running: Count | None = Field(None, description=_MAX_RUNNING)
    max_queued: Count | None = Field(None, description=_MAX_QUEUED)
    idle_pause_s: IdlePause | None = Field(None, description=_IDLE)
    session_end_s: IdlePause | None = Field(None, description=_SESSION)
    network: Network | None = Field(None, description=_NETWORK)
    user_defaults: UserDefaults | None = Field(None, description=_USER_DEFAULTS)
    tier: Tier | None = Field(None, description=_TIER)
    budget: BudgetIn | None = Field(None, description=_BUDGET)


class TenantOut(Out):
    model_config = example(
        id=EXAMPLE_TENANT,
        name="vision",
        parent_id="platform",
        weight=2.0,
        guarantee={"cuda": 4},
        limit={"cuda": 8, "*": 16},
        max_running=32,
        max_queued=None,
        idle_pause_s=1800,
        session_end_s=86400,
        network=["huggingface.co:443", "*.pypi.org:443"],
        user_defaults={"max_running": 8},
        tier="standard",
        budget=None,
        version=1,
        created_at=EXAMPLE_AT,
    )
    id: str
    name: str
    parent_id: str | None
    weight: float = Field(description=_WEIGHT)
    guarantee: dict[str, int] = Field(description=_GUARANTEE)
    limit: dict[str, int] = Field(description=_LIMIT)
    max_running: int | None = Field(description=_MAX_RUNNING)
    max_queued: int | None = Field(description=_MAX_QUEUED)
    idle_pause_s: int | None = Field(description=_IDLE)
    session_end_s: int | None = Field(description=_SESSION)
    network: list[str] | None = Field(description=_NETWORK)
    user_defaults: UserDefaults = Field(description=_USER_DEFAULTS)
    tier: Tier = Field(description=_TIER)
    budget: BudgetSet | None = Field(description=_BUDGET)
    version: int
    created_at: datetime


class RequestsTaken(Out):
    model_config = example(requests=37, more=False)
    requests: int = Field(description="Requests that this call changed; at most 50.")
    more: bool = Field(description="True: others are left, so call again.")


_USER_WEIGHT = "Relative share among the users of the tenant."

_SERVICE = "A service account: a user that is a program and cannot sign in."
_SCOPES = "The scopes to which the key is restricted; null: everything that its role permits."


class UserIn(In):
    model_config = example(name="ada", weight=1.0, tenant_id=EXAMPLE_TENANT)
    name: Name
    weight: Weight = Field(1.0, description=_USER_WEIGHT)
    tenant_id: str | None = Field(None, description="Default: the caller's tenant.")
    service: bool = Field(False, description=_SERVICE)
    limit: DeviceLimit | None = Field(None, description=_USER_LIMIT + _ELSE)
    max_running: Count | None = Field(None, description=_USER_RUNNING + _ELSE)
    max_queued: Count | None = Field(None, description=_USER_QUEUED + _ELSE)
    max_sessions: Count | None = Field(None, description=_USER_SESSIONS + _ELSE)
    max_duration_s: Seconds | None = Field(None, description=_USER_DURATION + _ELSE)
    budget: BudgetIn | None = Field(None, description=_BUDGET)


class UserPatch(In):
    """A change of a user; fields that are left out stay unchanged, and null removes a limit."""

    model_config = example(weight=2.0, limit={"cuda": 2}, max_running=None)
    name: Name | None = None
    weight: Weight | None = Field(None, description=_USER_WEIGHT)
    for_past_usage: bool = Field(False, description=_PAST)
    limit: DeviceLimit | None = Field(None, description=_USER_LIMIT + _ELSE)
    max_running: Count | None = Field(None, description=_USER_RUNNING + _ELSE)
    max_queued: Count | None = Field(None, description=_USER_QUEUED + _ELSE)
    max_sessions: Count | None = Field(None, description=_USER_SESSIONS + _ELSE)
    max_duration_s: Seconds | None = Field(None, description=_USER_DURATION + _ELSE)
    budget: BudgetIn | None = Field(None, description=_BUDGET)


class UserOut(Out):
    model_config = example(
        id=EXAMPLE_USER,
        tenant_id=EXAMPLE_TENANT,
        name="ada",
        weight=1.0,
        service=False,
        limit={"cuda": 2},
        max_running=None,
        max_queued=None,
        max_sessions=None,
        max_duration_s=None,
        budget=None,
        version=1,
        created_at=EXAMPLE_AT,
    )
    id: str
    tenant_id: str
    name: str
    weight: float = Field(description=_USER_WEIGHT)
    service: bool = Field(description=_SERVICE)
    limit: dict[str, int] | None = Field(description=_USER_LIMIT + _ELSE)
    max_running: int | None = Field(description=_USER_RUNNING + _ELSE)
    max_queued: int | None = Field(description=_USER_QUEUED + _ELSE)
    max_sessions: int | None = Field(description=_USER_SESSIONS + _ELSE)
    max_duration_s: float | None = Field(description=_USER_DURATION + _ELSE)
    budget: BudgetSet | None = Field(description=_BUDGET)
    version: int
    created_at: datetime


class KeyIn(In):
    model_config = example(
        user_id=EXAMPLE_USER, role="member", name="laptop", scopes=["work:write"]
    )
    user_id: str
    role: Role
    name: Name
    scopes: list[Scope] | None = Field(None, min_length=1, max_length=7, description=_SCOPES)
    expires_at: Time = None


class RotateKeyIn(In):
    """A new key's terms; without `expires_at` its lifetime is that of the old key."""

    model_config = example(overlap_s=3600)
    overlap_s: float = Field(
        86_400.0,
        ge=0,
        le=30 * 86_400.0,
        allow_inf_nan=False,
        strict=False,
        description="How long the old key stays valid.",
    )
    expires_at: Time = None


class KeyOut(Out):
    model_config = example(
        id="x7Kq29Zb",
        user_id=EXAMPLE_USER,
        tenant_id=EXAMPLE_TENANT,
        role="member",
        scopes=["work:write"],
        name="laptop",
        replaced_by=None,
        created_at=EXAMPLE_AT,
        expires_at=None,
        revoked_at=None,
        last_used_at=EXAMPLE_AT,
    )
    id: str
    user_id: str
    tenant_id: str
    role: Role
    scopes: list[Scope] | None = Field(description=_SCOPES)
    name: str
    replaced_by: str | None = Field(description="The id of the key that replaced this key.")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class KeyMade(KeyOut):
    model_config = example(
        **example_of(KeyOut),
        key="rh_x7Kq29Zb_…",
    )
    key: str = Field(description="The secret key. It is shown only once.")


class KeysRevoked(Out):
    model_config = example(revoked=3)
    revoked: int = Field(description="Keys that were valid, and give no access from now on.")


class MeOut(Out):
    model_config = example(
        user_id=EXAMPLE_USER,
        user="ada",
        tenant_id=EXAMPLE_TENANT,
        tenant="vision",
        role="member",
        scopes=None,
        key_id="x7Kq29Zb",
    )
    user_id: str
    user: str
    tenant_id: str
    tenant: str
    role: Role
    scopes: list[Scope] | None = Field(description=_SCOPES)
    key_id: str
