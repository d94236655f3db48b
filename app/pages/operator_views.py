"""Shows pages on the whole system: decisions, as far as each user may see them, and devices.

On the page of devices, platform admins drain devices and let them take work again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import select

from app.api.access.auth import Caller, check_role
from app.api.access.gate import GatedRoute
from app.api.cursors import Paging
from app.api.routes import devices as of_devices
from app.api.routes import shares as of_shares
from app.db.models import Device, Host
from app.db.transactions import Db
from app.insight import reports
from app.pages import forms, views
from app.pages.forms import Field
from app.pages.views import Sender, Visitor

ON_A_PAGE = 50

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


def platform_admin(caller: Visitor) -> Caller:
    check_role(caller, "platform_admin")
    return caller


PlatformAdmin = Annotated[Caller, Depends(platform_admin, scope="function")]


# --- devices ------------------------------------------------------------------------------------


@router.get("/ui/devices")
def list_devices(request: Request, session: Db, caller: PlatformAdmin) -> Response:
    now = reports.clock(session)
    cordoned = set(session.scalars(select(Device.id).where(Device.cordoned)))
    return views.page(
        request,
        "devices.html",
        caller,
        now=now,
        section="devices",
        devices=reports.devices(session, None, now),
        cordoned=cordoned,
        hosts=session.scalars(select(Host).order_by(Host.name)).all(),
    )


@router.post("/ui/devices")
def change_devices(
    request: Request, session: Db, caller: Sender, do: Field = "", of: Field = ""
) -> Response:
    """Cordon or uncordon the device `of`; for `drain` and `open`, `of` is a host."""
    platform_admin(caller)
    known: dict[str, tuple[Callable[..., Any], str]] = {
        "cordon": (of_devices.cordon_device, "{} takes no new work; its tasks move away."),
        "uncordon": (of_devices.uncordon_device, "{} takes work again, if need be after a check."),
        "drain": (of_devices.drain_host, "{} is drained: its tasks move away."),
        "open": (of_devices.uncordon_host, "{} takes work again."),
    }
    operation, words = forms.chosen(do, known)
    views.acts_as(request, session, caller, operation)
    answer = [Response()] if do in ("cordon", "uncordon") else []
    operation(of, *answer, caller, session)
    told = forms.Told(words=words.format(of))
    return views.answered(request, told, partial(list_devices, request, session, caller))


# --- decisions ----------------------------------------------------------------------------------


@router.get("/ui/decisions")
def list_decisions(request: Request, session: Db, caller: Visitor, cursor: str = "") -> Response:
    paging = Paging(http=request, response=Response(), limit=ON_A_PAGE, given=cursor or None)
    found = of_shares.list_decisions(paging, session, caller)
    return views.page(
        request,
        "decisions.html",
        caller,
        now=reports.clock(session),
        section="decisions",
        decisions=found["items"],
        next_cursor=found["next_cursor"],
    )
