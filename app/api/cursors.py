"""Keyset pagination: an opaque cursor names the last item seen, and the next page starts after it.

A list takes a `Paged` and reads with `paging.read`.  If its rows come from elsewhere, it takes up
to `paging.most` of them after `paging.cursor` and cuts them with `paging.cut`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from sqlalchemy import ColumnElement, FromClause, any_, func, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session
from starlette.datastructures import URL

from app.db.transactions import AnySelect
from app.errors import BadInput

MAX_LIMIT = 200

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of items per page.")]
Cursor = Annotated[
    str | None, Query(max_length=200, description="`next_cursor` of the previous page.")
]


# --- cursors ------------------------------------------------------------------------------------


def seal(*key: Any) -> str:
    text = ".".join(str(part) for part in key)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def opened(cursor: str, parts: int = 1, *, where: str = "?cursor") -> list[str]:
    """Return the key in a cursor; raises BadInput."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        text = ""
    key = text.split(".", parts - 1)
    if len(key) != parts or not text.isprintable() or not all(key):
        raise bad_cursor(where)
    return key


def opened_numbers(cursor: str, parts: int = 1, *, where: str = "?cursor") -> list[int]:
    key = opened(cursor, parts, where=where)
    if not all(part.isdecimal() and part.isascii() and len(part) < 19 for part in key):
        raise bad_cursor(where)
    return [int(part) for part in key]


def bad_cursor(where: str = "?cursor") -> BadInput:
    given_by = "list" if where.startswith("?") else "stream"
    return BadInput.at(where, f"must be a cursor that a {given_by} returned", "cursor")


# --- pages --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPage:
    """Holds the rows of one page, and the cursor of the next page, if there is one."""

    rows: list[Any]
    next_cursor: str | None

    def page(self, shown: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return the answer: the rows, or what is `shown` for each of them."""
        items = self.rows if shown is None else list(shown)
        return {"items": items, "next_cursor": self.next_cursor}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageParts:
    """Divides the rows of a list into parts; for each part, an index has the rows in order.

    A row belongs to the row of `table` for which the condition `holds` is true. A page then costs a
    page of each part, however many rows there are. Otherwise Postgres may read all rows in order
    until a page is full, since it cannot know that few rows match.
    """

    table: FromClause
    holds: ColumnElement[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """The requested page.  `marked`: other lists reject its cursors."""

    http: Request
    response: Response
    limit: int
    given: str | None
    marked: bool = True

    @property
    def cursor(self) -> str | None:
        """The key of the last item of the previous page, as given to `cut`; raises BadInput."""
        if self.given is None:
            return None
        if not self.given.startswith(self._mark):
            raise bad_cursor()
        return self.given.removeprefix(self._mark)

    @property
    def _mark(self) -> str:
        """A short hash of the route, so that another list's cursor is rejected."""
        if not self.marked:
            return ""
        path = str(self.http.scope["route"].path)
        return base64.urlsafe_b64encode(hashlib.sha256(path.encode()).digest()[:3]).decode()

    @property
    def most(self) -> int:
        """The number of rows to read: one more than are shown, to know if there is a next page."""
        return self.limit + 1

    def read(
        self,
        session: Session,
        query: AnySelect,
        *,
        by: InstrumentedAttribute[Any],
        newest_first: bool = False,
        parts: PageParts | None = None,
    ) -> FoundPage:
        """Read the page in the order of `by`, a column with a different value in every row.

        A row is what the query selects; a single value is given as itself.  `parts` divide the
        rows.  Raises BadInput.
        """
        if (cursor := self.cursor) is not None:
            open_ = opened_numbers if by.type.python_type is int else opened
            [key] = open_(cursor)
            query = query.where(by < key if newest_first else by > key)
        if parts is not None:
            query = query.where(by == any_(self._keys(query, by, newest_first, parts)))
        single = len(query.column_descriptions) == 1
        keyed = query.add_columns(by.label("page_key"))
        order = by.desc() if newest_first else by
        found = session.execute(keyed.order_by(order).limit(self.most)).all()
        rows = [row[0] if single else row for row in found]
        return self.cut(rows, [seal(row.page_key) for row in found])

    def _keys(
        self,
        query: AnySelect,
        by: InstrumentedAttribute[Any],
        newest_first: bool,
        parts: PageParts,
    ) -> ColumnElement[Any]:
        """Return an array with the keys of the page. Each part gives its first keys, and the page
        takes the first of all these.
        """
        its = query.with_only_columns(by.label("key")).where(parts.holds)
        its = its.order_by(by.desc() if newest_first else by).limit(self.most)
        of_part = its.correlate(parts.table).lateral("of_part")
        key = of_part.c.key
        keys = select(key).select_from(parts.table).join(of_part, true())
        keys = keys.order_by(key.desc() if newest_first else key).limit(self.most)
        return func.array(keys.scalar_subquery())

    def cut(self, rows: list[Any], cursors: list[str]) -> FoundPage:
        """Make a page of the first `limit` of at most `most` rows, each with its cursor."""
        following = self._mark + cursors[self.limit - 1] if len(rows) > self.limit else None
        if following:
            url: URL = self.http.url.include_query_params(cursor=following)
            self.response.headers["Link"] = f'<{url.path}?{url.query}>; rel="next"'
        return FoundPage(rows=rows[: self.limit], next_cursor=following)


def of_at_most(default: int, *, marked: bool = True) -> Any:
    """Return a dependency that reads the paging of a list with `default` items per page."""

    def paging(
        http: Request, response: Response, limit: Limit = default, cursor: Cursor = None
    ) -> Paging:
        return Paging(http=http, response=response, limit=limit, given=cursor, marked=marked)

    return Depends(paging)


Paged = Annotated[Paging, of_at_most(50)]
PagedBy100 = Annotated[Paging, of_at_most(100)]
PagedBy200 = Annotated[Paging, of_at_most(200)]
#: For lists in which each item shows its cursor.
PagedByItem = Annotated[Paging, of_at_most(200, marked=False)]
