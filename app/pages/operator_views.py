"""Shows pages on the whole system: decisions, as far as each user may see them, and devices.

On the page of devices, platform admins drain devices and let them take work again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.api.access.auth import check_role
from app.api.access.caller import Caller
from app.api.access.gate import GatedRoute
from app.api.cursors import Paging
from app.api.routes import devices as of_devices
from app.api.routes import shares as of_shares
from app.db.models import Device, Host
from app.db.transactions import Db
from app.insight import reports
from app.insight.reports.fleet import DeviceView
from app.pages import charts, forms, views
from app.pages.device_lanes import DeviceLanes, device_lanes, held_bars
from app.pages.forms import Field
from app.pages.views import Sender, Visitor

ON_A_PAGE = 50
LANES_SHOWN = 50
WINDOWS = ("1h", "24h", "7d")  # of `charts.WINDOWS`; the first unless another is chosen

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


def platform_admin(caller: Visitor) -> Caller:
    check_role(caller, "platform_admin")
    return caller


PlatformAdmin = Annotated[Caller, Depends(platform_admin, scope="function")]


# --- devices ------------------------------------------------------------------------------------


@router.get("/ui/devices")
def list_devices(
    request: Request, session: Db, caller: PlatformAdmin, window: str = "", q: str = ""
) -> Response:
    """Show all devices, and who held those that match `q` in the window."""
    now = reports.clock(session)
    devices = reports.devices(session, None, now)
    matching = _matching(devices, q)
    window = window if window in WINDOWS else WINDOWS[0]
    cordoned = set(session.scalars(select(Device.id).where(Device.cordoned)))
    return views.page(
        request,
        "devices.html",
        caller,
        now=now,
        section="devices",
        devices=devices,
        cordoned=cordoned,
        hosts=session.scalars(select(Host).order_by(Host.name)).all(),
        window=window,
        windows={name: charts.WINDOWS[name].words for name in WINDOWS},
        q=q,
        matching=len(matching),
        held=_lanes(session, matching[:LANES_SHOWN], window, now),
    )


def _matching(devices: Sequence[DeviceView], q: str) -> list[str]:
    """Return the devices whose id, host or kind contains the word; all if there is none."""
    word = q.strip().casefold()
    return [
        device.id
        for device in devices
        if any(word in name.casefold() for name in (device.id, device.host, device.kind))
    ]


def _lanes(session: Session, devices: Sequence[str], window: str, now: datetime) -> DeviceLanes:
    since = now - timedelta(seconds=charts.WINDOWS[window].span_s)
    histories = reports.device_histories(session, devices, since)
    bars = held_bars(histories, since, now)
    names = reports.task_names(session, {bar.only_task for bar in bars if bar.only_task})
    return device_lanes(histories, bars, names, since=since, until=now)


@router.post("/ui/devices")
def change_devices(
    request: Request,
    session: Db,
    caller: Sender,
    do: Field = "",
    of: Field = "",
    window: str = "",
    q: str = "",
) -> Response:
    """Cordon or uncordon the device `of`; for `drain` and `open`, `of` is a host.

    The page is shown again with the same window and the same word.
    """
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
    return views.answered(request, told, partial(list_devices, request, session, caller, window, q))


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
