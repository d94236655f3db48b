"""Reads `start.after_requests`: the other requests that a task comes after.

`core.model.request_needs` decides when it may start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.core.model.fields import NAME, NAME_RULE, Fields
from app.core.model.request_needs import AWAITED, DONE, FAIL, OTHERWISE

JSON = dict[str, Any]

MOST_REQUESTS = 100  # that a task may come after


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterRequest:
    """Names a request that a task comes after, what it awaits of it, and what is to become of the
    task if that can no longer happen.

    `request` is a name or an id; once the request is accepted, an id.
    """

    request: str
    on: str = DONE
    otherwise: str = FAIL

    def as_json(self) -> JSON:
        return {"request": self.request, "on": self.on, "else": self.otherwise}


def read_after_requests(start: Fields) -> tuple[AfterRequest, ...]:
    """Read the list; entries may not name one request twice."""
    found, seen = [], set[str]()
    for where, body in start.items(
        "after_requests", least=0, most=MOST_REQUESTS, is_required=False
    ):
        fields = Fields(body, where, start.faults)
        fields.require("request")
        one = AfterRequest(
            request=fields.text("request", "", NAME, f"the id of a request or a name: {NAME_RULE}"),
            on=fields.one_of("on", AWAITED, DONE),
            otherwise=fields.one_of("else", OTHERWISE, FAIL),
        )
        fields.close()
        if one.request and one.request in seen:
            fields.fault("request", f"the request {one.request!r} is named twice", "twice")
        seen.add(one.request)
        found.append(one)
    return tuple(found)
