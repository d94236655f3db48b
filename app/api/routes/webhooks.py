"""Webhooks: the addresses notified when a request ends, their secrets, and all deliveries.

Only tenant admins manage webhooks, because an address may contain a secret (as with chat services).
Deliveries to a request's own `notify` address are shown to all callers who see the request.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Body, Query, Response
from pydantic import Field
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from app.api.access.auth import AnyAdmin, Authed, check_role
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller, visible, visible_request
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import In, Out, Page, example, example_of
from app.core.security.addresses import networks
from app.core.webhooks.message_bodies import TYPES
from app.core.webhooks.urls import refusal
from app.db import transactions
from app.db.ids import new_id
from app.db.models import Delivery, Tenant, Webhook
from app.db.transactions import Db
from app.errors import BadInput, Conflict, NotFound
from app.identity import audit
from app.messaging import webhooks
from app.settings import settings

router = v1_router("webhooks")

MOST = 20  # most addresses per tenant
OVERLAP_S = 86_400.0  # seconds that an old secret still signs besides the new one, by default

EventType = Literal["request.done", "request.failed", "request.cancelled", "request.held"]
DeliveryState = Literal["pending", "delivered", "given_up"]

_ID, _TENANT = "whk_0192f0c1b7e97d3e9a4c5b6d7e8f9a20", "ten_0192f0c1b7e97d3e9a4c5b6d7e8f9a01"
_AT = "2026-11-21T12:00:00Z"
_URL = "https://hooks.example.org/roundhouse"


class WebhookIn(In):
    model_config = example(url=_URL, events=["request.failed"])
    url: str = Field(description="A public http or https address.")
    events: list[EventType] = Field(list(get_args(EventType)), min_length=1, max_length=len(TYPES))
    tenant_id: str | None = Field(
        None, description="Notify of all requests of this tenant; null: only of your own requests."
    )


class RotateSecretIn(In):
    model_config = example(overlap_s=3600)
    overlap_s: float = Field(
        OVERLAP_S,
        ge=0,
        le=30 * 86_400.0,
        allow_inf_nan=False,
        strict=False,
        description="How long messages are also signed with the old secret.",
    )


class WebhookOut(Out):
    model_config = example(
        id=_ID,
        tenant_id=_TENANT,
        url=_URL,
        events=["request.failed"],
        created_at=_AT,
        rotated_at=None,
        overlap_until=None,
        disabled_at=None,
    )
    id: str
    tenant_id: str
    url: str | None = Field(
        description="null: the webhook of the addresses that requests name in `notify`."
    )
    events: list[str]
    created_at: datetime
    rotated_at: datetime | None
    overlap_until: datetime | None = Field(
        description="Until this time each message has two signatures."
    )
    disabled_at: datetime | None = Field(
        description="The receiver answered 410, so nothing more is sent."
    )


class WebhookMade(WebhookOut):
    model_config = example(**example_of(WebhookOut), secret="whsec_…")
    secret: str = Field(description="The signing secret. It is shown only once.")


class AttemptOut(Out):
    at: datetime
    status: int | None = Field(description="null: no response was received.")
    error: str
    took_us: int


class DeliveryOut(Out):
    model_config = example(
        id="msg_0192f0c1b7e97d3e9a4c5b6d7e8f9a21",
        webhook_id=_ID,
        request_id="req_0192f0c1b7e97d3e9a4c5b6d7e8f9a0b",
        url=_URL,
        type="request.failed",
        state="pending",
        attempts=[{"at": _AT, "status": 503, "error": "", "took_us": 41_000}],
        due_at="2026-11-21T12:00:05Z",
        created_at=_AT,
        ended_at=None,
    )
    id: str = Field(description="The message's `webhook-id`; the same for each attempt.")
    webhook_id: str
    request_id: str | None = Field(description="null: a test message.")
    url: str = Field(description="The address; of a channel `channel:` and its name.")
    type: str
    state: DeliveryState
    attempts: list[AttemptOut] = Field(description="The newest 30 attempts.")
    due_at: datetime | None = Field(
        description="Earliest time of the next attempt; null: the delivery has ended."
    )
    created_at: datetime
    ended_at: datetime | None


class FailureOut(Out):
    task: str
    cause: str | None
    message: str = Field(description="The first 500 characters of the response.")


class EndOut(Out):
    id: str
    name: str
    state: Literal["done", "failed", "cancelled"]
    tenant_id: str
    labels: dict[str, str]
    submitted_at: datetime
    ended_at: datetime
    tasks: dict[str, int] = Field(description="Number of tasks by final state.")
    failure: FailureOut | None = Field(description="The first task that failed.")


class MessageOut(Out):
    model_config = example(
        type="request.failed",
        timestamp=_AT,
        data={
            "id": "req_0192f0c1b7e97d3e9a4c5b6d7e8f9a0b",
            "name": "sweep-7",
            "state": "failed",
            "tenant_id": _TENANT,
            "labels": {"exp": "a1"},
            "submitted_at": "2026-11-21T11:00:00Z",
            "ended_at": _AT,
            "tasks": {"done": 1, "failed": 1},
            "failure": {"task": "train", "cause": "exception", "message": "ValueError: no data"},
        },
    )
    type: EventType
    timestamp: datetime
    data: EndOut


#: The message that is sent, for the OpenAPI document; it is not an operation of this API.
sent = APIRouter()


@sent.post(
    "request",
    operation_id="requestEnded",
    tags=["webhooks"],
    summary="A request has ended",
    status_code=204,
    responses={
        422: {"description": "The delivery failed: every status except 2xx and 410 is retried."}
    },
)
def request_ended(body: MessageOut) -> None:
    """Tells that a request has ended, signed by Standard Webhooks (`webhook-id`,
    `webhook-timestamp`, `webhook-signature`).  Answer with 2xx within 15 s.  A message may come
    twice, with the same `webhook-id`.  Answer with 410 to get no more messages.
    """


# --- webhooks -----------------------------------------------------------------------------------


@router.post(
    "/webhooks",
    status_code=201,
    response_model=WebhookMade,
    summary="Add a webhook",
    responses=declared(403, 409),
)
def create_webhook(
    body: WebhookIn, response: Response, caller: AnyAdmin, session: Db
) -> dict[str, Any]:
    """Adds a webhook: it gets a POST, by Standard Webhooks, for every request of the tenant that
    ends in one of these ways.  Verify the message with a Standard Webhooks library and the secret,
    which only this answer ever shows.
    """
    tenant_id = body.tenant_id or caller.tenant_id
    tenant = select(Tenant.id).where(Tenant.id == tenant_id, of_caller(caller, Tenant.id))
    # Lock the tenant, so that two concurrent calls cannot exceed the limit together.
    if session.scalar(tenant.with_for_update(key_share=True)) is None:
        raise BadInput.at("/tenant_id", f"there is no tenant with id {tenant_id}", "unknown-tenant")
    if (told := refusal(body.url, networks(settings().webhook_networks))) is not None:
        raise BadInput.at("/url", told, "address")
    mine = (Webhook.tenant_id == tenant_id, Webhook.url.is_not(None), Webhook.name.is_(None))
    of_tenant = select(func.count()).where(*mine)
    if session.execute(of_tenant).scalar_one() >= MOST:
        raise Conflict(f"the tenant already has {MOST} webhooks; delete one first")
    hook = Webhook(
        id=new_id("whk"),
        tenant_id=tenant_id,
        url=body.url,
        events=sorted(set(body.events)),
        secret=webhooks.new_secret(),
    )
    session.add(hook)
    session.flush()
    response.headers["Location"] = f"/v1/webhooks/{hook.id}"
    return {**_shown(hook), "secret": hook.secret}


@router.get(
    "/webhooks", response_model=Page[WebhookOut], summary="List webhooks", responses=declared(403)
)
def list_webhooks(
    paging: Paged, caller: AnyAdmin, session: Db, tenant_id: str | None = None
) -> dict[str, Any]:
    """Lists the webhooks of the tenants that you see.  The webhook without an address stands for
    all addresses that requests name in `notify`.
    """
    query = select(Webhook).where(of_caller(caller, Webhook.tenant_id), Webhook.name.is_(None))
    if tenant_id is not None:
        query = query.where(Webhook.tenant_id == tenant_id)
    found = paging.read(session, query, by=Webhook.id)
    return found.page([_shown(hook) for hook in found.rows])


@router.get(
    "/webhooks/{id}",
    response_model=WebhookOut,
    summary="Show a webhook",
    responses=declared(403, 404),
)
def get_webhook(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the webhook without its secret; if the secret is lost, rotate it."""
    return _shown(_webhook(session, caller, id))


@router.post(
    "/webhooks/{id}/rotate",
    response_model=WebhookMade,
    summary="Replace the secret of a webhook",
    responses=declared(403, 404),
)
def rotate_webhook(
    id: str,
    caller: Authed,
    session: Db,
    body: Annotated[RotateSecretIn, Body()] = RotateSecretIn(),
) -> dict[str, Any]:
    """Makes a new secret, which only this answer ever shows.  For `overlap_s` messages are signed
    with both secrets, so that none is rejected while the receiver changes over.
    """
    hook = _webhook(session, caller, id, lock=True)
    now = transactions.now(session)
    overlap = timedelta(seconds=body.overlap_s)
    hook.old_secret, hook.old_secret_until = hook.secret, now + overlap
    hook.secret, hook.rotated_at = webhooks.new_secret(), now
    session.flush()
    return {**_shown(hook), "secret": hook.secret}


@router.post(
    "/webhooks/{id}/test",
    status_code=202,
    response_model=DeliveryOut,
    summary="Send a test message",
    responses=declared(403, 404, 409),
)
def test_webhook(id: str, response: Response, caller: Authed, session: Db) -> dict[str, Any]:
    """Sends a message of the type `webhook.test`, signed and retried like any other.

    `Location` leads to its delivery.
    """
    hook = _webhook(session, caller, id, lock=True)  # its delivery refers to it
    if hook.url is None:
        raise Conflict(
            "this webhook has no address of its own; submit a request with `notify` instead"
        )
    _check_enabled(hook)
    return tried_out(session, response, hook)


def tried_out(session: Session, response: Response, hook: Webhook) -> dict[str, Any]:
    """Send a test message to a webhook or channel, and return its delivery."""
    audit.asked(session, hook)
    delivery = webhooks.try_out(session, hook)
    response.headers["Location"] = f"/v1/deliveries/{delivery.id}"
    return delivery_shown(delivery)


# --- deliveries ---------------------------------------------------------------------------------


@router.get(
    "/webhooks/{id}/deliveries",
    response_model=Page[DeliveryOut],
    summary="List the deliveries of a webhook",
    responses=declared(403, 404),
)
def list_deliveries(
    id: str,
    paging: Paged,
    caller: Authed,
    session: Db,
    state: Annotated[DeliveryState | None, Query()] = None,
) -> dict[str, Any]:
    """Lists deliveries, newest first, with every attempt.  Ended ones are kept for 30 days."""
    return deliveries_of(session, paging, _webhook(session, caller, id), state)


def deliveries_of(
    session: Session, paging: Paged, hook: Webhook, state: DeliveryState | None
) -> dict[str, Any]:
    """Return a page of the deliveries of a webhook or channel, newest first."""
    query = select(Delivery).where(Delivery.webhook_id == hook.id)
    if state is not None:
        query = query.where(Delivery.state == state)
    found = paging.read(session, query, by=Delivery.id, newest_first=True)
    return found.page([delivery_shown(row) for row in found.rows])


@router.get(
    "/requests/{id}/deliveries",
    response_model=Page[DeliveryOut],
    summary="List the deliveries of a request's notification",
    responses=declared(404),
)
def list_request_deliveries(id: str, paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists deliveries to the address or the channels of `notify`, newest first, without those to
    the tenant's webhooks.  A message to a channel may tell of several requests; it is listed for
    one of them.
    """
    request = visible_request(session, caller, id)
    query = select(Delivery).join(Webhook, Webhook.id == Delivery.webhook_id)
    is_named = or_(Webhook.url.is_(None), Webhook.name.is_not(None))
    query = query.where(Delivery.request_id == request.id, is_named)
    found = paging.read(session, query, by=Delivery.id, newest_first=True)
    return found.page([delivery_shown(row) for row in found.rows])


@router.get(
    "/deliveries/{id}",
    response_model=DeliveryOut,
    summary="Show a delivery",
    responses=declared(403, 404),
)
def get_delivery(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows every attempt (the newest 30), and when the next one is due."""
    delivery, _ = _delivery(session, caller, id)
    return delivery_shown(delivery)


@router.post(
    "/deliveries/{id}/redeliver",
    status_code=202,
    response_model=DeliveryOut,
    summary="Send a message again",
    responses=declared(403, 404, 409),
)
def redeliver(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Sends the message at once, with the same id and a fresh count of attempts.  It may have been
    delivered or given up before.
    """
    delivery, hook = _delivery(session, caller, id, lock=True)
    _check_enabled(hook)
    audit.asked(session, hook)
    webhooks.send_again(session, delivery)
    return delivery_shown(delivery)


@router.delete(
    "/webhooks/{id}",
    status_code=204,
    summary="Delete a webhook",
    responses=declared(403, 404, 409),
)
def delete_webhook(id: str, caller: Authed, session: Db) -> None:
    """Deletes the webhook with all its deliveries, sent or not."""
    hook = _webhook(session, caller, id, lock=True)
    if hook.url is None:
        raise Conflict(
            "requests name the addresses of this webhook; it cannot be deleted, but its secret "
            "can be rotated"
        )
    session.delete(hook)


# --- shared -------------------------------------------------------------------------------------


def _webhook(session: Session, caller: Caller, id: str, *, lock: bool = False) -> Webhook:
    # An island that ends a request may refer to the row while it is locked.
    hook = visible(session, caller, Webhook, id, lock=lock)
    if hook.name is not None:  # a channel (`api.routes.channels`)
        raise NotFound("webhook", id)
    check_role(caller, "platform_admin", "tenant_admin")
    return hook


def _delivery(
    session: Session, caller: Caller, id: str, *, lock: bool = False
) -> tuple[Delivery, Webhook]:
    delivery = visible(session, caller, Delivery, id, lock=lock)
    check_role(caller, "platform_admin", "tenant_admin")
    return delivery, session.get_one(Webhook, delivery.webhook_id)


def _check_enabled(hook: Webhook) -> None:
    if hook.disabled_at is not None:
        raise Conflict(
            "the receiver answered 410, so nothing more is sent to this webhook; create a new "
            "webhook"
        )


def _shown(hook: Webhook) -> dict[str, Any]:
    shown = {name: getattr(hook, name, None) for name in WebhookOut.model_fields}
    return {**shown, "overlap_until": hook.old_secret_until}


def delivery_shown(delivery: Delivery) -> dict[str, Any]:
    shown = {name: getattr(delivery, name) for name in DeliveryOut.model_fields}
    return shown if delivery.state == "pending" else {**shown, "due_at": None}
