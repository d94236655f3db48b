"""Channels: named addresses in Slack, Teams or elsewhere that requests tell of their events.

Administrators make them. An address is stored encrypted, and no operation returns it: whoever knows
the address of a chat can write to it. Members see the names, and name them in `notify`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Response
from pydantic import Field, SecretStr
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.api.access.auth import AnyAdmin, Authed, Submitter, check_role
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.routes.webhooks import DeliveryOut, DeliveryState, deliveries_of, tried_out
from app.api.schemas.base import EXAMPLE_AT, EXAMPLE_TENANT, In, Out, Page, example, example_of
from app.core.model.fields import NAME, NAME_RULE
from app.core.model.provisions.notify import EVENTS, MOST_CHANNELS, ChannelWish
from app.core.security.addresses import networks
from app.core.webhooks.channel_texts import MAIL
from app.core.webhooks.urls import refusal
from app.db.models import Tenant, User, Webhook
from app.db.transactions import Db
from app.errors import BadInput, Conflict, NotFound, Unavailable
from app.identity import secret_store
from app.messaging import channels, mail, webhooks
from app.settings import settings
from app.storage.sealing import NoKey

router = v1_router("channels")

MOST = 50  # channels of a tenant
_MAIL_ADDRESS = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
_MAIL_LENGTH = 254

ChannelKind = Literal["webhook", "slack", "teams", "mail"]
ChannelEvent = Literal[
    "started",
    "preempted",
    "resumed",
    "moved",
    "stalled",
    "retrying",
    "failed",
    "done",
    "cancelled",
    "held",
]
_NAME, _CHANNEL = "ml-alerts", "chn_0192f0c1b7e97d3e9a4c5b6d7e8f9a23"


class ChannelIn(In):
    model_config = example(
        name=_NAME, kind="slack", address="https://hooks.slack.com/services/T0/B0/x"
    )
    name: str = Field(
        description=f"What requests call it: {NAME_RULE}.", pattern=f"^{NAME.pattern}$"
    )
    kind: ChannelKind = Field(
        description="`webhook` gets JSON, signed by Standard Webhooks; `slack` and `teams` what "
        "their incoming webhooks take; `mail` a mail."
    )
    address: SecretStr = Field(
        description="A public http or https address, or a mail address. It is stored encrypted and "
        "never shown."
    )
    tenant_id: str | None = Field(None, description="The tenant; default: your own.")


class ChannelOut(Out):
    model_config = example(
        id=_CHANNEL,
        tenant_id=EXAMPLE_TENANT,
        name=_NAME,
        kind="slack",
        created_at=EXAMPLE_AT,
        disabled_at=None,
    )
    id: str
    tenant_id: str
    name: str
    kind: ChannelKind
    created_at: datetime
    disabled_at: datetime | None = Field(
        description="The receiver answered 410, so nothing more is sent."
    )


class ChannelMade(ChannelOut):
    model_config = example(**example_of(ChannelOut), secret="whsec_…")
    secret: str = Field(
        description="The secret that signs messages, for a receiver of the kind `webhook`. It is "
        "shown only once."
    )


@router.post(
    "/channels",
    status_code=201,
    response_model=ChannelMade,
    summary="Add a channel",
    responses=declared(403, 409, 503),
)
def create_channel(body: ChannelIn, caller: AnyAdmin, session: Db) -> dict[str, Any]:
    """Adds a channel, which requests of the tenant name in `notify`.  To change its address, remove
    it and add it again.
    """
    tenant_id = body.tenant_id or caller.tenant_id
    tenant = select(Tenant.id).where(Tenant.id == tenant_id, of_caller(caller, Tenant.id))
    # Lock the tenant, so that two concurrent calls cannot make the same channel.
    if session.scalar(tenant.with_for_update(key_share=True)) is None:
        raise BadInput.at("/tenant_id", f"there is no tenant with id {tenant_id}", "unknown-tenant")
    address = body.address.get_secret_value()
    _check_address(body.kind, address)
    known = channels.names(session, tenant_id)
    if body.name in known:
        raise Conflict(f"the tenant already has a channel {body.name}; remove it first")
    if len(known) >= MOST:
        raise Conflict(f"the tenant already has {MOST} channels; remove one first")
    try:
        keys = secret_store.keyring()
    except NoKey as error:
        raise Unavailable(f"this service cannot store addresses: {error}") from error
    channel = Webhook(
        tenant_id=tenant_id, name=body.name, kind=body.kind, secret=webhooks.new_secret()
    )
    channels.add(session, channel, address, keys)
    return {**_shown(channel), "secret": channel.secret}


@router.get("/channels", response_model=Page[ChannelOut], summary="List channels")
def list_channels(
    paging: Paged, caller: Authed, session: Db, tenant_id: str | None = None
) -> dict[str, Any]:
    """Lists the channels of the tenants that you see; never an address."""
    query = select(Webhook).where(of_caller(caller, Webhook.tenant_id), Webhook.name.is_not(None))
    if tenant_id is not None:
        query = query.where(Webhook.tenant_id == tenant_id)
    found = paging.read(session, query, by=Webhook.id)
    return found.page([_shown(row) for row in found.rows])


@router.delete(
    "/channels/{id}", status_code=204, summary="Remove a channel", responses=declared(403, 404)
)
def delete_channel(id: str, caller: Authed, session: Db) -> None:
    """Removes the channel with all its deliveries, sent or not.  Requests that name it go on."""
    session.delete(_channel(session, caller, id))


@router.post(
    "/channels/{id}/test",
    status_code=202,
    response_model=DeliveryOut,
    summary="Send a test message to a channel",
    responses=declared(403, 404, 409),
)
def test_channel(id: str, response: Response, caller: Authed, session: Db) -> dict[str, Any]:
    """Sends a message that says only that it is a test.  `Location` leads to its delivery."""
    channel = _channel(session, caller, id)
    if channel.disabled_at is not None:
        raise Conflict("the receiver answered 410, so nothing more is sent; add a new channel")
    return tried_out(session, response, channel)


@router.get(
    "/channels/{id}/deliveries",
    response_model=Page[DeliveryOut],
    summary="List the deliveries of a channel",
    responses=declared(403, 404),
)
def list_channel_deliveries(
    id: str,
    paging: Paged,
    caller: Authed,
    session: Db,
    state: Annotated[DeliveryState | None, Query()] = None,
) -> dict[str, Any]:
    """Lists messages, newest first, with every attempt.  Ended ones are kept for 30 days."""
    return deliveries_of(session, paging, _channel(session, caller, id, lock=False), state)


# --- what a user usually wants ------------------------------------------------------------------


class UsualChannel(In):
    to: str = Field(description="Name of a channel of your tenant.", max_length=63)
    on: list[ChannelEvent] = Field(
        ["done", "failed", "cancelled"],
        description="What is told there.",
        min_length=1,
        max_length=len(EVENTS),
    )


class NotificationsIn(In):
    model_config = example(notify=[{"to": _NAME, "on": ["failed", "preempted"]}])
    notify: list[UsualChannel] = Field(
        description="The channels that are told of your requests without `notify`; [] for none.",
        max_length=MOST_CHANNELS,
    )


class NotificationsOut(Out):
    model_config = example(notify=[{"to": _NAME, "on": ["failed", "preempted"]}])
    notify: list[UsualChannel]


@router.get(
    "/me/notifications", response_model=NotificationsOut, summary="Show what your requests tell"
)
def get_my_notifications(caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the channels that are told of your requests, unless a request has `notify`."""
    notify = session.scalar(select(User.notify).where(User.id == caller.user_id))
    return {"notify": notify or []}


@router.put(
    "/me/notifications",
    response_model=NotificationsOut,
    summary="Set what your requests tell",
    responses=declared(403),
)
def set_my_notifications(body: NotificationsIn, caller: Submitter, session: Db) -> dict[str, Any]:
    """Sets the channels for requests that you submit from now on, unless a request has `notify`.  A
    channel that is removed later is passed over.
    """
    wishes = [ChannelWish(to=each.to, on=tuple(dict.fromkeys(each.on))) for each in body.notify]
    twice = [n for n, wish in enumerate(wishes) if wish.to in {each.to for each in wishes[:n]}]
    for n in twice:
        raise BadInput.at(f"/notify/{n}/to", f"the channel {wishes[n].to!r} is named twice")
    for fault in channels.faults(session, caller.tenant_id, wishes, "/notify"):
        raise BadInput.at(fault.pointer, fault.detail, fault.code)
    notify = [{"to": wish.to, "on": list(wish.on)} for wish in wishes]
    # a statement, as the audit log records the objects of a session, and this is the user's own
    session.execute(update(User).where(User.id == caller.user_id).values(notify=notify))
    return {"notify": notify}


# --- shared -------------------------------------------------------------------------------------


def _check_address(kind: str, address: str) -> None:
    if kind != MAIL:
        if (told := refusal(address, networks(settings().webhook_networks))) is not None:
            raise BadInput.at("/address", told, "address")
        return
    if not mail.is_possible():
        told = "this service sends no mail; its operator can set ROUNDHOUSE_SMTP_URL and"
        raise BadInput.at("/kind", f"{told} ROUNDHOUSE_MAIL_FROM", "no-mail")
    if len(address) > _MAIL_LENGTH or not _MAIL_ADDRESS.fullmatch(address):
        raise BadInput.at("/address", "must be a mail address such as team@example.org", "address")


def _channel(session: Session, caller: Caller, id: str, *, lock: bool = True) -> Webhook:
    query = select(Webhook).where(
        Webhook.id == id, Webhook.name.is_not(None), of_caller(caller, Webhook.tenant_id)
    )
    found = session.scalar(query.with_for_update(key_share=True) if lock else query)
    if found is None:
        raise NotFound("channel", id)
    check_role(caller, "platform_admin", "tenant_admin")
    return found


def _shown(channel: Webhook) -> dict[str, Any]:
    return {name: getattr(channel, name) for name in ChannelOut.model_fields}
