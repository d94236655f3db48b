"""Shows the whole log of a request, a page of lines at a time."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import select

from app.api.access.gate import GatedRoute
from app.api.access.visibility import visible_request
from app.db.models import Task
from app.db.transactions import Db
from app.insight import reports
from app.pages import views
from app.pages.views import Visitor
from app.scheduling.journal.lots import IS_NO_MEMBER

LINES_ON_A_PAGE = 1000
TASKS_OFFERED = 200
ID_MOST = 2**63 - 1

router = APIRouter(include_in_schema=False, route_class=GatedRoute)

Line = Annotated[int | None, Query(ge=0, le=ID_MOST)]


@router.get("/ui/requests/{id}/log")
def show_log(
    request: Request,
    session: Db,
    caller: Visitor,
    id: str,
    task: Annotated[str, Query(max_length=100)] = "",
    grep: Annotated[str, Query(max_length=500)] = "",
    before: Line = None,
    after: Line = None,
    times: str = "",
    long: str = "",
) -> Response:
    """Show the last lines, those before the line `before`, or those after `after`; only those of
    the `task`, and with the text `grep`.  `long=yes` does not wrap long lines.
    """
    found = visible_request(session, caller, id)
    limit = LINES_ON_A_PAGE + 1
    asked: dict[str, Any] = {"task": task, "grep": grep, "times": times, "long": long}
    if after is not None:
        lines = reports.log_head(session, id, task=task, grep=grep, after=after, limit=limit)
        shown, has_earlier = lines[:LINES_ON_A_PAGE], after > 0
        has_later = len(lines) > LINES_ON_A_PAGE
    else:
        lines = reports.log_tail(session, id, task=task, grep=grep, before=before, limit=limit)
        shown, has_earlier = lines[-LINES_ON_A_PAGE:], len(lines) > LINES_ON_A_PAGE
        has_later = before is not None
    names = select(Task.name).where(Task.request_id == id, IS_NO_MEMBER).order_by(Task.ordinal)
    return views.page(
        request,
        "log.html",
        caller,
        now=reports.clock(session),
        section="requests",
        topic=id,
        still=has_later or found.ended_at is not None,
        item=found,
        lines=shown,
        names=session.scalars(names.limit(TASKS_OFFERED)).all(),
        earlier=has_earlier and bool(shown),
        later=has_later and bool(shown),
        **asked,
        address_with=lambda **changed: views.address_with(asked, changed),
    )
