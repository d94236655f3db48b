"""Decides about webhooks: message bodies, retries, and which URLs may be called.

Format and times follow Standard Webhooks (https://www.standardwebhooks.com), version 1. A message
keeps its id whenever it is sent again. Only an answer of 2xx accepts it; 410 asks for no more
messages. Other modules sign and send.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from app.core.model.descriptor import ENDS
from app.core.security.addresses import Network, literal_address, may_call

TYPES = tuple(f"request.{end}" for end in ENDS)
TEST = "webhook.test"

#: seconds before each attempt, in all a little more than three days; after the last attempt a
#: message is given up
WAITS_S = (0, 5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER = 0.2  # the largest part of each wait that is added at random, so that retries spread out

URL_LENGTH = 2000
MESSAGE_LENGTH = 500  # most characters of a failed task's message

# --- the message body ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnd:
    name: str
    state: str
    cause: str | None
    message: str | None


def message(type_: str, at: datetime, data: Mapping[str, Any]) -> str:
    """Return the message body, with exactly the characters that are signed and sent each time."""
    body = {"type": type_, "timestamp": at.isoformat(), "data": data}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def of_tasks(ends: Sequence[TaskEnd]) -> dict[str, Any]:
    """Count the tasks per end state, and describe the first failure."""
    found: dict[str, Any] = {"tasks": dict(Counter(end.state for end in ends)), "failure": None}
    for end in ends:
        if end.state == "failed":
            said = (end.message or "")[:MESSAGE_LENGTH]
            found["failure"] = {"task": end.name, "cause": end.cause, "message": said}
            break
    return found


def wants(notify: Mapping[str, Any] | None, state: str) -> bool:
    """True if a request's `notify` field, as it was submitted, asks for a message about this
    end.
    """
    return notify is not None and state in (notify.get("on") or ENDS)


# --- retries ------------------------------------------------------------------------------------

Verdict = StrEnum("Verdict", ["delivered", "again", "unwanted"])


def verdict(status: int | None) -> Verdict:
    """Judge an answer by its status; None means no answer.  A redirect is not followed."""
    if status is not None and 200 <= status < 300:
        return Verdict.delivered
    return Verdict.unwanted if status == 410 else Verdict.again


def wait_s(tries: int, luck: float) -> float | None:
    """Return the seconds to wait after `tries` attempts, or None to give up.

    `luck` is a random number from [0, 1).
    """
    if tries >= len(WAITS_S):
        return None
    return WAITS_S[tries] * (1 + JITTER * luck)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAnswer:
    """Describes the answer to an attempt; `status` is None if there was none, and `error`
    says why.
    """

    status: int | None
    error: str
    took_us: int


# --- which URLs may be called -------------------------------------------------------------------


def refusal(url: str, allowed: Iterable[Network] = ()) -> str | None:
    """Return what is wrong with a URL as it is written; None if nothing is.

    The addresses of its host are checked later.
    """
    if len(url) > URL_LENGTH or not url.isascii() or not url.isprintable() or " " in url:
        return f"must be at most {URL_LENGTH} ASCII characters without spaces"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"must be a valid URL: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return "must begin with http:// or https:// and have a host"
    if "@" in parts.netloc:
        return "must not contain a user name or password; receivers verify the signature instead"
    if "#" in url:
        return "must not contain a fragment (#), which is never sent"
    literal = literal_address(host)
    if literal is not None and not may_call(literal, allowed):
        return (
            f"must be a public address; {host} is not one, and this deployment does not allow its "
            "network"
        )
    return None
