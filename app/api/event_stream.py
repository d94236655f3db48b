"""Counts open streams of server-sent events, and rejects further streams above a limit.

A stream that waits costs only a connection to the client and some memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api import problems
from app.api.access.caller import Caller
from app.errors import AppError, TooManyCalls, Unavailable
from app.settings import settings

FULL_S = 5  # seconds after which a caller with too many streams may try again


class OpenStreams:
    """Counts the streams open in this process, per key, per tenant and in total."""

    def __init__(self) -> None:
        self._of_key: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()

    def refusal(self, key_id: str, tenant_id: str) -> AppError | None:
        """Return why this key may not open another stream; None if it may."""
        of_key, of_tenant = self._of_key[key_id], self._of_tenant[tenant_id]
        most = settings().streams_max
        if of_key >= settings().key_streams_max:
            detail = f"This key has {of_key} open streams, which is its limit; close one first"
            return TooManyCalls(detail, retry_after_s=FULL_S)
        if of_tenant >= math.ceil(most / 2):
            detail = (
                f"Your tenant has {of_tenant} open streams, which is its limit; close one first"
            )
            return TooManyCalls(detail, retry_after_s=FULL_S)
        if self._of_key.total() >= most:
            return Unavailable("too many open streams; try again, or read page by page")
        return None

    @contextmanager
    def one(self, key_id: str, tenant_id: str) -> Iterator[None]:
        """Count one more open stream while the context lasts."""
        counted = (self._of_key, key_id), (self._of_tenant, tenant_id)
        for of, name in counted:
            of[name] += 1
        try:
            yield
        finally:
            for of, name in counted:
                of[name] -= 1
                if not of[name]:
                    del of[name]


open_streams = OpenStreams()


class EventStream(StreamingResponse):
    """Sends server-sent events to one caller. The stream is counted while open, and rejected above
    the limits.
    """

    def __init__(self, events: AsyncIterator[Any], caller: Caller, cache: str = "no-cache") -> None:
        headers = {"Cache-Control": cache, "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self.caller.key_id, self.caller.tenant_id
        refusal = open_streams.refusal(*owner)
        if refusal is not None:
            return await problems.of_error(Request(scope), refusal)(scope, receive, send)
        with open_streams.one(*owner):
            await super().__call__(scope, receive, send)
