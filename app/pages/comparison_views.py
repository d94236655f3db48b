"""Shows runs side by side: what they were asked to do where it differs, and their metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import not_, select
from sqlalchemy.orm import Session

from app.api.access.caller import Caller
from app.api.access.gate import GatedRoute
from app.api.access.visibility import visible_request, visible_task
from app.core.model import run_comparison
from app.core.model.run_comparison import RUNS_MOST
from app.db.models import Task
from app.db.transactions import Db
from app.errors import BadInput
from app.insight import reports
from app.pages import charts, views
from app.pages.views import Visitor
from app.scheduling.journal.lots import IS_LOT

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


@router.get("/ui/compare")
def compare_runs(
    request: Request,
    session: Db,
    caller: Visitor,
    run: Annotated[list[str] | None, Query(max_length=RUNS_MOST)] = None,
    alike: str = "",
    form: str = "",
) -> Response:
    """Compare tasks and requests by id; a lot stands for its members.  `form=csv` sends CSV."""
    tasks = [task for id in dict.fromkeys(run or ()) for task in _tasks(session, caller, id)]
    if not 2 <= len(tasks) <= RUNS_MOST:
        told = f"choose between 2 and {RUNS_MOST} runs; these are {len(tasks)}"
        raise BadInput.at("?run", told, "number")
    runs = reports.compared_runs(session, tasks)
    rows = run_comparison.compared(runs, alike=bool(alike))
    if form == "csv":
        kept = {"Content-Disposition": 'attachment; filename="comparison.csv"'}
        return Response(run_comparison.as_csv(runs, rows), media_type="text/csv", headers=kept)
    return views.page(
        request,
        "compare.html",
        caller,
        now=reports.clock(session),
        section="requests",
        runs=runs,
        requests={task.id: task.request_id for task in tasks},
        rows=rows,
        as_text=run_comparison.as_text,
        alike=bool(alike),
        asked="&".join(f"run={task.id}" for task in tasks),
        curves=charts.curve_charts(_curves(session, {each.id: each.heading for each in runs})),
    )


def _tasks(session: Session, caller: Caller, id: str) -> list[Task]:
    """Return the task of this id, the members of the lot, or the tasks of the request: up to one
    more than can be compared.
    """
    if id.startswith("req_"):
        which = Task.request_id == visible_request(session, caller, id).id
    else:
        task = visible_task(session, caller, id)
        which = Task.lot_id == id if task.lot_id == id else Task.id == id
    query = select(Task).where(which, not_(IS_LOT)).order_by(Task.ordinal, Task.lot_index)
    return list(session.scalars(query.limit(RUNS_MOST + 1)))


def _curves(session: Session, headings: dict[str, str]) -> list[reports.Curve]:
    """Return the metrics of the runs, each under its heading, in the order of the headings."""
    found = reports.curves(session, "", members=[*headings])
    order = {id: place for place, id in enumerate(headings)}
    found.sort(key=lambda curve: (curve.name, order[curve.task_id]))
    return [replace(curve, task=headings[curve.task_id]) for curve in found]
