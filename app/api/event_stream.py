"""Counts open streams of server-sent events, and rejects further streams above a limit.

A stream that waits costs only a connection to the client and some memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api import problems
from app.api.access.auth import Caller
from app.errors import AppError, TooManyCalls, Unavailable
from app.settings import settings

FULL_S = 5  # seconds after which a caller with too many streams may try again


class OpenStreams:
    """Counts the streams open in this process, per key and in total."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    def refusal(self, key_id: str) -> AppError | None:
        """Return why this key may not open another stream; None if it may."""
        if self._of[key_id] >= settings().key_streams_max:
            detail = (
                f"This key has {self._of[key_id]} open streams, which is its limit; close one first"
            )
            return TooManyCalls(detail, retry_after_s=FULL_S)
        if self._of.total() >= settings().streams_max:
            return Unavailable("too many open streams; try again, or read page by page")
        return None

    @contextmanager
    def one(self, key_id: str) -> Iterator[None]:
        """Count one more open stream while the context lasts."""
        self._of[key_id] += 1
        try:
            yield
        finally:
            self._of[key_id] -= 1
            if not self._of[key_id]:
                del self._of[key_id]


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
        refusal = open_streams.refusal(self.caller.key_id)
        if refusal is not None:
            return await problems.of_error(Request(scope), refusal)(scope, receive, send)
        with open_streams.one(self.caller.key_id):
            await super().__call__(scope, receive, send)
