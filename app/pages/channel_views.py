"""Shows the page of channels: their names and last messages, and forms to add, try and remove one.

No address is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.access.gate import GatedRoute
from app.api.cursors import Paging
from app.api.routes import channels as of_channels
from app.db import transactions
from app.db.transactions import Db
from app.messaging import channels, mail
from app.pages import forms, views
from app.pages.admin_views import Admin, SendingAdmin, tenant_names
from app.pages.forms import Field

ON_A_PAGE = 200
KINDS = {"slack": "Slack", "teams": "Teams", "mail": "mail", "webhook": "webhook"}

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


@router.get("/ui/channels")
def list_channels(request: Request, session: Db, caller: Admin, cursor: str = "") -> Response:
    paging = Paging(http=request, response=Response(), limit=ON_A_PAGE, given=cursor or None)
    found = of_channels.list_channels(paging, caller, session)
    ids = [one["id"] for one in found["items"]]
    return views.page(
        request,
        "channels.html",
        caller,
        now=transactions.now(session),
        section="channels",
        channels=found["items"],
        newest=channels.newest_deliveries(session, ids),
        next_cursor=found["next_cursor"],
        tenants=tenant_names(session, caller),
        kinds=KINDS,
        sends_mail=mail.is_possible(),
    )


@router.post("/ui/channels")
def change_channels(
    request: Request,
    session: Db,
    caller: SendingAdmin,
    do: Field = "",
    channel: Field = "",
    name: Field = "",
    kind: Field = "",
    address: Field = "",
    tenant_id: Field = "",
) -> Response:
    known: dict[str, Callable[..., Any]] = {
        "add": of_channels.create_channel,
        "test": of_channels.test_channel,
        "remove": of_channels.delete_channel,
    }
    operation = forms.chosen(do, known)
    views.acts_as(request, session, caller, operation)
    if do == "add":
        given = {"name": name.strip(), "kind": kind, "address": address.strip()}
        body = forms.filled(of_channels.ChannelIn, **given, tenant_id=tenant_id or None)
        made = of_channels.create_channel(body, caller, session)
        told = _added(made)
    elif do == "test":
        of_channels.test_channel(channel, Response(), caller, session)
        told = forms.Told(words="A test message is on its way.")
    else:
        of_channels.delete_channel(channel, caller, session)
        told = forms.Told(words="The channel and its messages are removed.")
    return views.answered(request, told, partial(list_channels, request, session, caller))


def _added(made: dict[str, Any]) -> forms.Told:
    if made["kind"] != "webhook":
        return forms.Told(words=f"{made['name']} is added. Requests name it in notify.")
    words = f"{made['name']} is added. Its messages are signed with this secret:"
    return forms.Told(words=words, secret=made["secret"])
