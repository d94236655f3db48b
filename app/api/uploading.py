"""Receives the bytes of datablocks and bundles.

An upload names what it will become, so it can break at any byte and resume:

    PUT /v1/datablocks/corpus?sha256=…    Content-Range: bytes */TOTAL        how far is it? (202)
    PUT /v1/datablocks/corpus?sha256=…    Content-Range: bytes FROM-TO/TOTAL  the next bytes (202)

The last bytes are answered with the finished item (201).  Without `Content-Range` the body is the
whole upload.  Bytes that have already arrived are skipped; a gap is rejected (409).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import Header, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from app.api.schemas.data import UploadOut
from app.data import uploads
from app.data.uploads import PART_BYTES, Begun, Done, WantedUpload
from app.errors import BadInput, Conflict, Unavailable
from app.storage.backend import Bytes

THREADS = 6  # fewer than the database connections that the pool has beyond the gate

ContentRange = Annotated[
    str | None,
    Header(
        description="`bytes FROM-TO/TOTAL`; or `bytes */TOTAL` to ask for the progress of the "
        "upload."
    ),
]
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")


@dataclass(frozen=True, slots=True)
class SentRange:
    """Says which bytes are in the body: `start` to `end` of `total`; none if the call only
    `asks`.
    """

    start: int
    end: int
    total: int
    asks: bool = False

    @classmethod
    def of(cls, content_range: str | None, length: str | None) -> SentRange:
        """Parse the headers Content-Range and Content-Length of an upload; raises BadInput."""
        if content_range is None:
            if length is None or not length.isdecimal() or int(length) == 0:
                told = "missing length: send a Content-Length or a Content-Range"
                raise BadInput.at("Content-Length:", told, "missing")
            return cls(0, int(length), int(length))
        found = _CONTENT_RANGE.fullmatch(content_range)
        if found is None:
            told = "must be `bytes FROM-TO/TOTAL` or `bytes */TOTAL`"
            raise BadInput.at("Content-Range:", told)
        first, last, total = (None if part is None else int(part) for part in found.groups())
        assert total is not None, "every form has one"
        if total == 0 or (first is not None and last is not None and not first <= last < total):
            raise BadInput.at("Content-Range:", "there are no such bytes", "range")
        if first is None or last is None:
            return cls(0, 0, total, asks=True)
        return cls(first, last + 1, total)


async def received(http: Request, wanted: WantedUpload, sent: SentRange) -> Begun | Done:
    """Receive the body of this call; return the progress of the upload, or the finished item."""
    at, whole = await _begun(wanted), None
    if isinstance(at, Begun) and not sent.asks:
        at, whole = await _receive(http, at, sent)
    if isinstance(at, Begun) and at.received_bytes == sent.total:
        return await _finished(at, whole)
    return at


async def received_whole(wanted: WantedUpload, body: Iterable[Bytes]) -> Done:
    """Receive the whole upload from `body`; returns the finished item."""
    at = await _begun(wanted)
    return await _finished(at, body) if isinstance(at, Begun) else at


async def _begun(wanted: WantedUpload) -> Begun | Done:
    at: Begun | Done = await in_thread(lambda: uploads.begin(wanted))
    return at


async def _finished(begun: Begun, body: Iterable[Bytes] | None) -> Done:
    done: Done = await in_thread(lambda: uploads.finish(begun, body))
    return done


async def _receive(
    http: Request, begun: Begun, sent: SentRange
) -> tuple[Begun, list[Bytes] | None]:
    """Store the body part by part; if the client disconnects, the parts that have arrived stay.

    An upload that fits in one part is not stored but returned.
    """
    at = begun.received_bytes
    if sent.start > at:
        told = (
            f"{at} bytes were received: continue from there; got a part that starts at {sent.start}"
        )
        raise Conflict(told)
    skip, body = at - sent.start, bytearray()
    try:
        async for piece in http.stream():
            body += piece[skip:]
            skip = max(0, skip - len(piece))
            if at + len(body) > sent.end:
                raise BadInput.at(
                    "Content-Range:", "the body is longer than its Content-Range", "range"
                )
            if len(body) >= PART_BYTES:
                at = await _keep(begun, at, body)
    except ClientDisconnect:
        pass  # the client is gone and cannot read an answer
    if at == 0 and len(body) == sent.total:
        return replace(begun, received_bytes=sent.total), [bytes(body)]
    if body:
        at = await _keep(begun, at, body)
    return replace(begun, received_bytes=at), None


async def _keep(begun: Begun, at: int, body: bytearray) -> int:
    """Store `body` and empty it; returns the offset of the next bytes."""
    part = bytes(body)
    body.clear()
    await in_thread(lambda: uploads.keep(begun, at, part))
    return at + len(part)


_limiter: RunVar[CapacityLimiter] = RunVar("uploads")


async def in_thread(act: Callable[[], Any]) -> Any:
    """Run `act` in one of the THREADS reserved for uploads: a slow store delays no other calls."""
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = CapacityLimiter(THREADS)
        _limiter.set(limiter)
    try:
        return await to_thread.run_sync(act, limiter=limiter)
    except OSError as error:
        raise Unavailable(str(error)) from error


def progress(begun: Begun) -> JSONResponse:
    wanted = begun.wanted
    shown = UploadOut(
        name=wanted.name,
        sha256=wanted.sha256,
        size_bytes=wanted.size_bytes,
        received_bytes=begun.received_bytes,
    )
    return JSONResponse(shown.model_dump(mode="json"), 202)
