"""Words, base classes and lists that all models of the API share."""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Scope = Literal[
    "work:read",
    "work:write",
    "usage:read",
    "devices:read",
    "devices:write",
    "admin:read",
    "admin:write",
]
Role = Literal["platform_admin", "tenant_admin", "member", "viewer"]
RequestState = Literal["queued", "running", "done", "failed", "cancelled"]
TaskState = Literal[
    "blocked",
    "waiting",
    "starting",
    "running",
    "splicing",
    "pausing",
    "stopping",
    "done",
    "failed",
    "cancelled",
]

PhaseWord = Literal[
    "queued", "starting", "running", "paused", "preempted", "done", "failed", "cancelled"
]
PHASE_TEXT = (
    "The state in one word, as the pages and the CLI show it. `paused`: a user or an "
    "administrator paused the task. `preempted`: the scheduler paused it and resumes it "
    "automatically."
)

KIND = r"[a-z0-9][a-z0-9._-]{0,62}"  # pattern of device kinds

EXAMPLE_REQUEST, EXAMPLE_TASK = (
    "req_0192f0c1b7e97d3e9a4c5b6d7e8f9a0b",
    "tsk_0192f0c1b7e97d3e9a4c5b6d7e8f9a0c",
)
EXAMPLE_TENANT, EXAMPLE_USER = (
    "ten_0192f0c1b7e97d3e9a4c5b6d7e8f9a01",
    "usr_0192f0c1b7e97d3e9a4c5b6d7e8f9a02",
)
EXAMPLE_AT = "2026-11-21T12:00:00Z"
EXAMPLE_SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def _word(text: str) -> str:
    if text != text.strip() or not text.isprintable():
        raise ValueError("must have no spaces at its ends and no control characters")
    return text


Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_word)]
Line = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_word)]
Tier = Literal["premium", "standard", "basic"]
Weight = Annotated[float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]


def _kind(name: str) -> str:
    if name == "*":
        raise ValueError("must name one device kind; only limits and budgets may be for all (`*`)")
    if not re.fullmatch(KIND, name):
        raise ValueError(
            "must be a device kind: 1 to 63 of a-z, 0-9, '.', '_' and '-', such as cuda"
        )
    return name


def _kind_or_all(name: str) -> str:
    return name if name == "*" else _kind(name)


#: A device kind as the key of an object, or `*` for all of them; the devices need not exist.
Kind = Annotated[str, AfterValidator(_kind)]
KindOrAll = Annotated[str, AfterValidator(_kind_or_all)]
BY_KIND: dict[str, Any] = {"propertyNames": {"pattern": f"^{KIND}$"}}
BY_KIND_OR_ALL: dict[str, Any] = {"propertyNames": {"pattern": rf"^({KIND}|\*)$"}}
_Devices = Annotated[int, Field(ge=0, le=1_000_000)]
Guarantee = Annotated[dict[Kind, _Devices], Field(max_length=32, json_schema_extra=BY_KIND)]
DeviceLimit = Annotated[
    dict[KindOrAll, _Devices], Field(max_length=32, json_schema_extra=BY_KIND_OR_ALL)
]
Labels = dict[
    Annotated[str, Field(min_length=1, max_length=63), AfterValidator(_word)],
    Annotated[str, Field(max_length=255)],
]


class In(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Out(BaseModel):
    model_config = ConfigDict(from_attributes=True)


def example(**values: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [values]})


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    extra: Any = model.model_config["json_schema_extra"]
    found: dict[str, Any] = extra["examples"][0]
    return found


# --- problems and lists -------------------------------------------------------------------------


class FaultOut(Out):
    pointer: str = Field(description="JSON Pointer into the body; `?name` names a query parameter.")
    detail: str
    code: str


class Problem(Out):
    """An error (RFC 9457)."""

    type: str = Field(description="URL of a page that explains the problem and what to do.")
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[FaultOut] = []


Item = TypeVar("Item")


class Page(Out, Generic[Item]):
    """One page of a list; `next_cursor` is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None
