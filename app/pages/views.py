"""Serves the pages that only show something: each reads values from `app.insight.reports`, and
renders a template.

A page is sent as a whole, or, when htmx requests it after a change, only its live part.  So all
values on a page come from one transaction.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Cookie, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.templating import Jinja2Templates
from jinja2 import StrictUndefined
from markupsafe import Markup, escape
from sqlalchemy.orm import Session

from app.api import problems
from app.api.access import rate_limiting
from app.api.access.auth import (
    COOKIE,
    call_of,
    caller_of_cookie,
)
from app.api.access.caller import Caller
from app.api.access.gate import GatedRoute
from app.api.access.scoped import operation_named
from app.api.access.visibility import visible_request
from app.api.event_stream import EventStream
from app.core import units
from app.core.model.fields import Fault
from app.core.model.phase import Phase
from app.core.model.provisions import network_policy
from app.core.model.provisions.mounts import IMAGE
from app.data import datablocks, mounts
from app.db import tenant_tree, transactions
from app.db.transactions import Db, transaction
from app.errors import AppError, BadInput, NotFound, Unauthenticated
from app.identity import audit
from app.insight import reports
from app.insight.time_spent import time_spent
from app.messaging.live_updates import ALL, changes
from app.pages import charts, forms, task_actions
from app.pages.request_chart import request_chart
from app.settings import settings

STATIC = Path(__file__).parent / "static"
HOME = "/ui/"
CHANGED_EVERY_S = 1.0  # shortest time in s between two notices of changes to a page
QUEUE_SHOWN = 10  # tasks shown on the overview, by place, among the QUEUE_READ oldest
QUEUE_READ = 50
QUEUE_ON_A_PAGE = 200
RUNNING_SHOWN = 12
LOG_SHOWN = 200
TASKS_SHOWN = 200
MEMBERS_SHOWN = 50  # of a lot
DATABLOCKS_SHOWN = 50
ENVIRONMENTS_SHOWN = 50

router = APIRouter(include_in_schema=False, route_class=GatedRoute)
templates = Jinja2Templates(directory=Path(__file__).parent / "templates")
templates.env.trim_blocks = templates.env.lstrip_blocks = True
templates.env.undefined = StrictUndefined  # a wrong name is an error, not an empty place
templates.env.filters.update(
    duration=charts.duration,
    about=charts.about,
    age=charts.age,
    counted=units.counted,
    thousands=lambda count: f"{count:,}",
    sparkline=charts.sparkline,
    held=charts.held,
    size=units.size,
    figure=charts.figure,
    part=reports.number,
    breakable=lambda code: Markup(str(escape(code)).replace("_", "_<wbr>")),
    utc=charts.utc,
    told_at=lambda written: charts.utc(datetime.fromisoformat(written)),
    changes=charts.changes,
)


@lru_cache
def asset(name: str) -> str:
    """Return a static file's address, which changes with the file, so that no cache is stale."""
    return f"/static/{name}?v={hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:10]}"


templates.env.globals["asset"] = asset


# --- the visitor --------------------------------------------------------------------------------


class NotSignedIn(Exception):
    """Raised when a page was requested without a browser session."""


def visitor(
    request: Request, session: Db, cookie: Annotated[str | None, Cookie(alias=COOKIE)] = None
) -> Caller:
    if cookie is None:
        raise NotSignedIn
    try:
        with transaction() as its:
            caller = caller_of_cookie(its, cookie)
    except Unauthenticated as error:
        raise NotSignedIn from error
    rate_limiting.remember(cookie, key_id=caller.key_id, tenant_id=caller.tenant_id)
    audit.begin(session, call_of(request, caller, "page"))
    request.state.caller = caller
    if any(
        "\x00" in str(value)
        for value in (*request.path_params.values(), *request.query_params.values())
    ):
        raise BadInput("the address holds a NUL")
    return caller


Visitor = Annotated[Caller, Depends(visitor, scope="function")]


def sender(request: Request, caller: Visitor, _: Annotated[None, Depends(forms.check)]) -> Caller:
    """Return the caller that sends a form; the form counts as a change in the rate limits."""
    cookie = request.cookies[COOKIE]
    if not rate_limiting.count_known(request, cookie):
        rate_limiting.count_new(request, cookie, key_id=caller.key_id, tenant_id=caller.tenant_id)
    return caller


Sender = Annotated[Caller, Depends(sender, scope="function")]


def acts_as(
    request: Request, session: Session, caller: Caller, operation: Callable[..., Any]
) -> None:
    """Record for the audit log that the API's `operation` does what follows."""
    audit.begin(session, call_of(request, caller, operation_named(operation.__name__)))


def to_sign_in(request: Request, error: Exception) -> Response:
    if "hx-request" in request.headers:
        return Response(status_code=200, headers={"HX-Refresh": "true"})
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    address = request.url_for("show_sign_in").include_query_params(next=path)
    return RedirectResponse(f"{address.path}?{address.query}", status_code=303)


# --- the pages ----------------------------------------------------------------------------------


@router.get("/")
def to_home() -> Response:
    return RedirectResponse(HOME)


@router.get(HOME)
def overview(request: Request, session: Db, caller: Visitor, window: str = "15m") -> Response:
    transactions.see_one_snapshot(session)
    now = reports.clock(session)
    tenant = None if caller.sees_all else caller.tenant_id
    shares = reports.fair_share(session, now)
    mine = next((share for share in shares if share.id == tenant), None)
    below = caller.role == "tenant_admin"
    read = reports.queue(session, tenant, below=below, limit=QUEUE_READ + 1)
    queue = charts.own_reasons_first(charts.by_place(read[:QUEUE_READ]))
    waiting = mine.waiting if mine else sum(s.waiting for s in shares if not s.depth)
    running = reports.running(session, tenant)
    devices = reports.devices(session, tenant, now)
    window = window if window in charts.WINDOWS else "15m"
    return page(
        request,
        "overview.html",
        caller,
        now=now,
        section="overview",
        verdict=reports.verdict(mine, shares) if mine else reports.verdict_of_all(shares),
        half_life=charts.duration(settings().half_life_s) if settings().half_life_s else "",
        shares=shares if caller.sees_all else [],
        parts=charts.parts_of_level(shares),
        mine=mine,
        rest=reports.others(shares, caller.tenant_id),
        busy=sum(1 for share in shares if share.held or share.waiting),
        queue=queue,
        queue_shown=QUEUE_SHOWN,
        queue_is_longer=len(read) > QUEUE_READ,
        queued_words=charts.queued_words(queue, waiting if len(read) > QUEUE_READ else None),
        next_start=charts.next_start(queue),
        median_wait_s=reports.median_wait_s(session, tenant),
        running=running,
        running_shown=RUNNING_SHOWN,
        paces=reports.paces(session, [task.id for task in running[:RUNNING_SHOWN]]),
        devices=devices,
        network=_may_reach(session, caller.tenant_id) if mine else "",
        budgets=reports.burn_downs(session, caller.tenant_id, caller.user_id) if mine else [],
        happened=reports.events(session, tenant, without=charts.ROUTINE, limit=10),
        **_usage(session, tenant, window, now, devices=len(devices)),
    )


def _may_reach(session: Session, tenant: str) -> str:
    """Return what tasks of the tenant may reach over the network; "" for nothing."""
    allow = tenant_tree.network_of(tenant_tree.path(session, tenant))
    return network_policy.listed(allow) if allow else ""


@router.get("/ui/queue")
def show_queue(request: Request, session: Db, caller: Visitor, after: str = "") -> Response:
    tenant = None if caller.sees_all else caller.tenant_id
    below = caller.role == "tenant_admin"
    limit = QUEUE_ON_A_PAGE
    found = reports.queue(session, tenant, below=below, after=after or None, limit=limit + 1)
    return page(
        request,
        "queue.html",
        caller,
        now=reports.clock(session),
        section="overview",
        queue=charts.own_reasons_first(charts.by_place(found[:limit])),
        after=found[limit - 1].id if len(found) > limit else "",
    )


def _usage(
    session: Db, tenant: str | None, window: str, now: datetime, *, devices: int
) -> dict[str, Any]:
    """Return the overview's figures of usage: a chart by user (for all tenants: by tenant), totals,
    and the week.
    """
    look = charts.WINDOWS[window]
    by = "user" if tenant else "tenant"
    since, interval_s = now - timedelta(seconds=look.span_s), reports.INTERVALS[look.interval]
    rows = reports.usage(
        session,
        tenant,
        since=since,
        until=now,
        group_by=("bucket", by),
        interval_s=interval_s,
    )
    week = reports.usage(
        session, tenant, since=now - timedelta(days=7), until=now, group_by=(), interval_s=86400
    )
    return {
        "window": window,
        "windows": {name: each.words for name, each in charts.WINDOWS.items()},
        "interval_words": look.interval_words,
        "chart": charts.usage_chart(
            rows, by=by, since=since, until=now, interval_s=interval_s, devices=devices
        ),
        "csv": f"/v1/usage?format=csv&group_by=bucket,{by}&interval={look.interval}"
        f"&since={since.isoformat(timespec='seconds').replace('+00:00', 'Z')}",
        "week_us": sum(row.held_us for row in week),
    }


@router.get("/ui/requests/{id}")
def show_request(
    request: Request,
    session: Db,
    caller: Visitor,
    id: str,
    grep: str = "",
    members: str = "",
    after: int = -1,
    sort: str = "",
) -> Response:
    """Show a request; of its lots the members in the phase `members`, from behind the index `after`
    on, or those with the lowest values of the metric `sort`.
    """
    asked_for = visible_request(session, caller, id)
    found = reports.request(session, None, id)
    assert found is not None
    now = reports.clock(session)
    tasks = reports.tasks(session, id, limit=TASKS_SHOWN)
    members = members if members in list(Phase) else ""
    which: Any = {"phase": members, "after": after, "metric": sort, "limit": MEMBERS_SHOWN + 1}
    lots = {task.id: reports.members(session, task.id, **which) for task in tasks if task.lot}
    shown = [row.id for rows in lots.values() for row in rows[:MEMBERS_SHOWN]]
    stays = reports.stays(session, id, members=shown)
    acts = task_actions.choices(session, caller, asked_for)
    log = reports.log_tail(session, id, members=shown, grep=grep, limit=LOG_SHOWN + 1)
    return page(
        request,
        "request.html",
        caller,
        now=now,
        section="requests",
        topic=id,
        item=found,
        row=asked_for,
        acts=acts,
        may_submit=task_actions.may_submit(caller),
        after=request_chart(reports.request_graph(session, id)),
        inside=None if found.ended_at else task_actions.look_inside(session, caller, asked_for),
        tasks=tasks,
        lots=lots,
        members=members,
        members_shown=MEMBERS_SHOWN,
        sort=sort,
        metric_names=charts.metric_names,
        not_shown=0 if lots else sum(found.tasks.values()) - len(tasks),
        spent=time_spent(session, [task.id for task in tasks if not task.lot]),
        times=charts.TIMES,
        breakdown=charts.breakdown,
        not_numbers=charts.not_numbers,
        paces=reports.paces(session, [task.id for task in tasks if task.phase == Phase.running]),
        checkpoints=reports.checkpoints(session, id, members=shown),
        curves=charts.curve_charts(reports.curves(session, id, members=shown)),
        stays=stays,
        line=charts.time_line(stays, since=found.submitted_at, until=found.ended_at or now),
        grep=grep,
        log=log[-LOG_SHOWN:],
        log_goes_on=len(log) > LOG_SHOWN,
        happened=charts.folded(reports.events(session, None, request=id, limit=100)),
    )


@router.get("/ui/datablocks")
def list_datablocks(request: Request, session: Db, caller: Visitor, before: str = "") -> Response:
    tenant = None if caller.sees_all else caller.tenant_id
    found = reports.datablocks(session, tenant, before=before or None, limit=DATABLOCKS_SHOWN + 1)
    path = [above.id for above in tenant_tree.path(session, caller.tenant_id)]
    usable = mounts.usable(session, path)
    images = mounts.usable(session, path, IMAGE)
    return page(
        request,
        "datablocks.html",
        caller,
        now=reports.clock(session),
        section="datablocks",
        datablocks=found[:DATABLOCKS_SHOWN],
        mounts=mounts.hosts(session, usable.values()) if usable else {},
        images=mounts.hosts(session, images.values()) if images else {},
        more=len(found) > DATABLOCKS_SHOWN,
        kept_bytes=None if tenant is None else datablocks.kept_bytes(session, tenant),
        quota_bytes=settings().datablock_quota_bytes,
    )


@router.get("/ui/environments")
def list_environments(request: Request, session: Db, caller: Visitor, before: str = "") -> Response:
    tenant = None if caller.sees_all else caller.tenant_id
    limit = ENVIRONMENTS_SHOWN + 1
    found = reports.newest_environments(session, tenant, before=before or None, limit=limit)
    return page(
        request,
        "environments.html",
        caller,
        now=reports.clock(session),
        section="environments",
        environments=found[:ENVIRONMENTS_SHOWN],
        more=len(found) > ENVIRONMENTS_SHOWN,
    )


def address_with(asked: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    """Return the query of a page's address with other choices; empty ones are left out."""
    chosen = {**asked, **changed}
    given = {name: value for name, value in chosen.items() if value not in ("", None, [])}
    return "?" + urlencode(given, doseq=True)


def nothing_here(request: Request, caller: Caller, said: str) -> Response:
    heading = NotFound.title
    return page(request, "message.html", caller, status=404, heading=heading, said=said, back="")


def page(
    request: Request, template: str, caller: Caller, *, status: int = 200, **values: Any
) -> Response:
    cookie = request.cookies.get(COOKIE, "")
    told = getattr(request.state, "told", None) or forms.opened(
        cookie, request.cookies.get(forms.TOLD, "")
    )
    context = {
        "caller": caller,
        "everyone": caller.sees_all,
        "partial": "hx-request" in request.headers,
        "address": request.url.path,
        "here": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
        "form_token": forms.token(cookie),
        "told": told,
        "section": "",  # the entry of the navigation under which the page stands
        "topic": "",  # id of the request whose changes the page follows; "": of all that it may see
        "still": False,  # True: the page follows no changes
        **values,
    }
    answer = templates.TemplateResponse(request, template, context, status_code=status)
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Vary"] = "HX-Request"
    if forms.TOLD in request.cookies:
        answer.delete_cookie(forms.TOLD)
    return answer


def answered(
    request: Request,
    told: forms.Told,
    show: Callable[[], Response] | None = None,
    *,
    at: str = "",
) -> Response:
    """Show the page again, or the page `at`, with the result of the form above it.

    Without htmx the page is loaded by a redirect, so that a reload does not send the form again.  A
    secret is shown only in this answer.
    """
    request.state.told = told
    by_htmx = "hx-request" in request.headers
    if show is not None and (told.secret or by_htmx):
        return show()
    to = at or request.url.path
    answer = (
        Response(status_code=204, headers={"HX-Redirect": to})
        if by_htmx
        else RedirectResponse(to, status_code=303)
    )
    answer.set_cookie(
        forms.TOLD,
        forms.sealed(request.cookies[COOKIE], told.words),
        max_age=forms.TOLD_FOR_S,
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )
    return answer


Answer = Callable[[Request, Any], Any]


def for_browsers(answer: Answer) -> Answer:
    """Wrap an answer to errors, so that a browser that asked for a page is shown one."""

    def shown(request: Request, error: Exception) -> Response:
        problem: Response = answer(request, error)
        told = json.loads(bytes(problem.body))
        said = told["detail"].rstrip(".")
        if told["status"] >= 500:
            said += f". Try again; if it goes on, tell an administrator: {told['request_id']}"
        page = _error_page(request, told["title"], f"{said}.", told["status"])
        if page is None:
            return problem
        for name in ("Allow", "Retry-After", "X-Request-ID"):
            if name in problem.headers:
                page.headers[name] = problem.headers[name]
        return page

    return shown


def refused(request: Request, error: Exception) -> Response:
    """Show an error of a page or a form to a browser, and a problem to others."""
    said = problems.bad_input(error) if isinstance(error, RequestValidationError) else error
    assert isinstance(said, AppError)
    problem = problems.of_error(request, said)
    shown = _error_page(request, said.title, said.detail, said.status, said.errors)
    return shown or problem


def _error_page(
    request: Request, heading: str, said: str, status: int, faults: Sequence[Fault] = ()
) -> Response | None:
    """Return an error as a page or, for htmx, above the present page; None if no page is wanted."""
    caller = getattr(request.state, "caller", None)
    is_browser = caller is not None or "text/html" in request.headers.get("accept", "")
    if not is_browser or not request.url.path.startswith(HOME):
        return None
    context = {"heading": heading, "said": _sentence(said)}
    if request.method == "POST" and "hx-request" in request.headers:
        beside = [(fault.pointer.strip("/?:{}"), _sentence(fault.detail)) for fault in faults]
        answer = templates.TemplateResponse(
            request, "refused.html", {**context, "faults": beside}, status_code=status
        )
        answer.headers.update({"HX-Retarget": "#told", "HX-Reswap": "innerHTML"})
        return answer
    back = request.url.path if request.method == "POST" else ""
    if caller is None:
        return templates.TemplateResponse(request, "problem.html", context, status_code=status)
    return page(request, "message.html", caller, status=status, back=back, **context)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" if text else ""


# --- live ---------------------------------------------------------------------------------------


@router.get("/ui/stream")
def stream(session: Db, caller: Visitor, request: str = "") -> Response:
    """Send "changed" whenever the page that listens may be out of date."""
    tenant = None if caller.sees_all else caller.tenant_id
    if request:
        visible_request(session, caller, request)
    return EventStream(_changed(request or tenant or ALL), caller, cache="no-store")


async def _changed(topic: str) -> AsyncIterator[str]:
    with changes.subscribe(topic) as news:
        yield CHANGED  # covers changes between the page's answer and this stream
        while not changes.closing:
            if await news.wait():
                yield CHANGED
                await asyncio.sleep(CHANGED_EVERY_S)
            else:
                yield ": still here\n\n"


CHANGED = "event: changed\ndata:\n\n"


# --- any other address (this must stay the last route) ------------------------------------------


@router.get("/ui/{rest:path}")
def show_nothing(request: Request, caller: Visitor, rest: str) -> Response:
    if rest.endswith("/"):
        return RedirectResponse(request.url.path.rstrip("/"))
    return nothing_here(request, caller, f"No page has the address {request.url.path}.")
