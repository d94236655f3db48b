"""Makes the bodies of webhook messages, and decides what they tell of requests.

The format follows Standard Webhooks (https://www.standardwebhooks.com), version 1.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from app.core.model.provisions.notify import ENDS, TOLD

TYPES = tuple(f"request.{what}" for what in TOLD)
TEST = "webhook.test"

MESSAGE_LENGTH = 500  # most characters of a failed task's message


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnd:
    name: str
    state: str
    cause: str | None
    message: str | None


def message_body(type_: str, at: datetime, data: Mapping[str, Any]) -> str:
    """Return the message body, with exactly the characters that are signed and sent each time."""
    body = {"type": type_, "timestamp": at.isoformat(), "data": data}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def count_ends(ends: Sequence[TaskEnd]) -> dict[str, Any]:
    """Count the tasks per end state, and describe the first failure."""
    found: dict[str, Any] = {"tasks": dict(Counter(end.state for end in ends)), "failure": None}
    for end in ends:
        if end.state == "failed":
            said = (end.message or "")[:MESSAGE_LENGTH]
            found["failure"] = {"task": end.name, "cause": end.cause, "message": said}
            break
    return found


def wants(notify: Mapping[str, Any] | None, what: str) -> bool:
    """True if a request's `notify` field, as it was submitted, asks for a message about this."""
    return notify is not None and what in (notify.get("on") or ENDS)
