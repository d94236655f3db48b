"""Answers a call with a blob of the store: all of it, or the range that is requested.

The `ETag` is the blob's SHA-256. The whole blob is verified while it is sent: if it is damaged, the
answer ends before its `Content-Length`. A caller that joins ranges must verify the result itself.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Header, Response
from fastapi.responses import StreamingResponse

from app.api.problems import declared
from app.errors import BadRange, Gone, Unavailable
from app.settings import settings
from app.storage.store import Damaged, Store

BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole file.", "content": BINARY},
    206: {"description": "The byte range that `Range` names.", "content": BINARY},
    304: {"description": "Not modified: the file still matches `If-None-Match`."},
    **declared(404, 410, 416),
}
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class AskedRange:
    """Holds the headers of a call that say which range of a blob it wants, and on which
    conditions.
    """

    def __init__(
        self,
        range: Annotated[str | None, Header(description="One byte range: `bytes=FROM-TO`.")] = None,
        if_range: Annotated[
            str | None,
            Header(
                description="The file's `ETag`. If it no longer matches, the whole file is sent."
            ),
        ] = None,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> None:
        self.range, self.if_range, self.if_none_match = range, if_range, if_none_match

    def part(self, etag: str, size: int) -> tuple[int, int]:
        """Return start and end of the range; without a valid range, the whole (RFC 9110, 14.2).

        Raises BadRange.
        """
        wanted = self.range if self.if_range in (None, etag) else None
        found = _RANGE.fullmatch(wanted or "")
        if found is None or found.groups() == ("", ""):
            return 0, size
        first, last = found.groups()
        if not first:
            start, end = max(0, size - int(last)), size
        else:
            start, end = int(first), min(size, int(last) + 1) if last else size
            if last and int(last) < int(first):
                return 0, size
        if start >= end:
            raise BadRange(size)
        return start, end


Download = Annotated[AskedRange, Depends()]


def headers_of(sha256: str, filename: str) -> dict[str, str]:
    return {
        "ETag": f'"{sha256}"',
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{filename}"',
    }


def answer(sha256: str, size: int, headers: dict[str, str], asked: AskedRange) -> Response:
    """Build the answer; raises BadRange, Gone, Unavailable."""
    etag = headers["ETag"]
    if asked.if_none_match is not None and etag in asked.if_none_match.split(", "):
        return Response(status_code=304, headers=headers)
    start, end = asked.part(etag, size)
    whole = (start, end) == (0, size)
    try:
        pieces = Store.at(settings().store_address).read(sha256, start, end, whole=whole)
    except Damaged as error:
        raise Gone(str(error)) from error
    except OSError as error:
        raise Unavailable(str(error)) from error
    headers = {**headers, "Content-Length": str(end - start)}
    if not whole:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(
        pieces, 200 if whole else 206, headers, media_type="application/octet-stream"
    )
