"""Keyset pages: an opaque cursor names the last item seen, and the next page starts after it."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

from fastapi import Query, Request, Response
from starlette.datastructures import URL

from app.errors import BadInput

MAX_LIMIT = 200

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="items on a page")]
Cursor = Annotated[
    str | None, Query(max_length=200, description="`next_cursor` of the page before")
]


def seal(*key: Any) -> str:
    text = ".".join(str(part) for part in key)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def opened(cursor: str, parts: int = 1, *, where: str = "?cursor") -> list[str]:
    """The key in a cursor; raises BadInput."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        text = ""
    key = text.split(".", parts - 1)
    if len(key) != parts or not text.isprintable() or not all(key):
        raise _bad(where)
    return key


def opened_numbers(cursor: str, parts: int = 1, *, where: str = "?cursor") -> list[int]:
    key = opened(cursor, parts, where=where)
    if not all(part.isdecimal() and part.isascii() and len(part) < 19 for part in key):
        raise _bad(where)
    return [int(part) for part in key]


def _bad(where: str) -> BadInput:
    given_by = "list" if where.startswith("?") else "stream"
    return BadInput.at(where, f"this is not a cursor that a {given_by} gave out", "cursor")


def page(
    request: Request, response: Response, found: list[Any], limit: int, cursors: list[str]
) -> dict[str, Any]:
    """A page of at most `limit` of the `found`, of which there is one more if there is a next."""
    following = cursors[limit - 1] if len(found) > limit else None
    if following:
        url: URL = request.url.include_query_params(cursor=following)
        target = f"{url.path}?{url.query}"
        response.headers["Link"] = f'<{target}>; rel="next"'
    return {"items": found[:limit], "next_cursor": following}
