"""Shows a table of requests: found by words, with chosen columns, sorted, to be compared.

All that a reader chose is in the address, so a view can be kept as a bookmark and sent to others.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api.access.gate import GatedRoute
from app.core.model.phase import Phase
from app.db.transactions import Db
from app.errors import BadInput
from app.insight import reports
from app.pages import views
from app.pages.views import Visitor

ON_A_PAGE = 50
SORTED_MOST = 500  # the newest requests that match are sorted, up to so many
COLUMNS_MOST = 12
OFFERED_MOST = 200
DEVICE_TIME = "device time"
_ORDER = ("label", "params", "metrics")  # of the columns; then those without a dot

router = APIRouter(include_in_schema=False, route_class=GatedRoute)

Word = Annotated[str, Query(max_length=300)]


@router.get("/ui/requests")
def list_requests(
    request: Request,
    session: Db,
    caller: Visitor,
    state: Word = "",
    q: Word = "",
    show: Annotated[list[Word] | None, Query(max_length=OFFERED_MOST + COLUMNS_MOST)] = None,
    sort: Word = "",
    before: Word = "",
) -> Response:
    state = state if state in list(Phase) else ""
    columns = [each for each in dict.fromkeys(show or ()) if each]
    if len(columns) > COLUMNS_MOST:
        told = f"choose {COLUMNS_MOST} columns at most; {len(columns)} are chosen"
        raise BadInput.at("?show", told, "length")
    found = reports.requests(
        session,
        None if caller.sees_all else caller.tenant_id,
        phase=state or None,
        search=reports.read_search(q),
        before=None if sort else before or None,
        limit=SORTED_MOST if sort else ON_A_PAGE + 1,
    )
    lines = {line.id: line for line in found}
    values = reports.run_values(session, list(lines))
    offered = _in_order({column for each in values.values() for column in each})
    if sort:
        timed = {id: {**values[id], DEVICE_TIME: lines[id].total_held_us} for id in lines}
        lines = {id: lines[id] for id in reports.in_order(list(lines), timed, sort)}
    asked = {"state": state, "q": q, "show": columns, "sort": sort}
    return views.page(
        request,
        "requests.html",
        caller,
        now=reports.clock(session),
        section="requests",
        requests=list(lines.values())[:ON_A_PAGE],
        more=not sort and len(found) > ON_A_PAGE,
        of_many=len(found) if sort and len(found) > ON_A_PAGE else 0,
        state=state,
        states=list(Phase),
        q=q,
        values=values,
        columns=columns,
        offered=[*dict.fromkeys([*columns, *offered[:OFFERED_MOST]])],
        not_offered=len({*offered[OFFERED_MOST:]} - {*columns}),
        sort=sort,
        device_time=DEVICE_TIME,
        heading=heading,
        address_with=lambda **changed: views.address_with(asked, changed),
    )


def heading(column: str) -> str:
    """Return the column's name without the kind of value, which its place says."""
    kind, dot, name = column.partition(".")
    return name if dot and kind in _ORDER else column


def _in_order(columns: set[str]) -> list[str]:
    kinds = {kind: number for number, kind in enumerate(_ORDER)}
    return sorted(columns, key=lambda each: (kinds.get(each.partition(".")[0], len(kinds)), each))
