"""Handles webhooks: messages about requests, kept until they are delivered or given up.

A message is written by `announce` in the transaction that ends the request, or that holds its lot,
so it exists if and only if that has happened. Control takes it (`take`), sends it outside any
transaction, and records the result (`record`). The sender that takes a message has a lease on it.
If the sender dies, the next one sends the message again with the same id: at-least-once delivery.
`core.webhooks.retries` decides when a message is sent again.

A webhook without an address of its own stands for the addresses that requests of its tenant name in
`notify`; they share its secret. A webhook with a name is a channel (`messaging.channels`); what is
told there is grouped first (`messaging.notifications`).
"""

from __future__ import annotations

import base64
import random
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from standardwebhooks import Webhook as Signer

from app.core.model.provisions.notify import HELD
from app.core.webhooks import channel_texts, message_bodies, retries
from app.core.webhooks.message_bodies import TaskEnd
from app.core.webhooks.retries import AttemptAnswer, Verdict
from app.db import transactions
from app.db.ids import new_id
from app.db.models import Delivery, Task, Webhook
from app.messaging import channels
from app.messaging.channels import SealedAddress

SECRET_BYTES = 32
ATTEMPTS_KEPT = 30  # most attempts that are recorded for a message, the newest
PER_TENANT = 4  # most messages of a tenant that are sent at the same time
RESOLVING_S = 30.0  # time for the resolution of a name, in addition to the time of a call


def new_secret() -> str:
    return f"whsec_{base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()}"


# --- writing messages ---------------------------------------------------------------------------


def expect_addresses(session: Session, tenant_id: str) -> None:
    """Make sure that the tenant has a secret to sign with, because a request names an address.

    The row is inserted by a statement, because the audit log records the objects of a session, and
    a submit must not take the log's lock.
    """
    row = {"id": new_id("whk"), "tenant_id": tenant_id, "secret": new_secret()}
    session.execute(insert(Webhook).values(row).on_conflict_do_nothing())


_TOLD = text(
    """
    select w.id as webhook_id, w.url, w.events, r.tenant_id, r.id, r.name, r.state, r.labels,
        r.submitted_at, r.ended_at, r.descriptor -> 'notify' as notify
    from requests r
    join webhooks w on w.tenant_id = r.tenant_id and w.disabled_at is null and w.name is null
    where r.id = any(:ids) order by r.id, w.id for key share of w
    """
)


def announce(session: Session, ended: Sequence[str]) -> None:
    """Write a message to each address that wants the end of one of these requests."""
    rows = session.execute(_TOLD, {"ids": list(ended)}).all()
    _write(session, [(row, row.state) for row in rows], {})


def announce_held(session: Session, request: str, message: str) -> None:
    """Write a message to each address that wants to know that a lot of the request is held."""
    rows = session.execute(_TOLD, {"ids": [request]}).all()
    _write(session, [(row, HELD) for row in rows], {"message": message})


def _write(session: Session, told: Sequence[tuple[Any, str]], more: Mapping[str, str]) -> None:
    rows = [(row, f"request.{what}") for row, what in told if _wanted(row, what)]
    if not rows:
        return
    ends = _ends(session, {row.id for row, _ in rows})
    session.add_all(
        Delivery(
            id=new_id("msg"),
            webhook_id=row.webhook_id,
            tenant_id=row.tenant_id,
            request_id=row.id,
            url=row.url or row.notify["webhook"],
            type=type_,
            body=message_bodies.message_body(
                type_,
                row.ended_at or transactions.now(session),
                {**_data(row, ends[row.id]), **more},
            ),
        )
        for row, type_ in rows
    )


def _wanted(row: Any, what: str) -> bool:
    if row.url is None:
        return message_bodies.wants(row.notify, what)
    return f"request.{what}" in row.events


def _ends(session: Session, ids: set[str]) -> dict[str, list[TaskEnd]]:
    query = select(Task.request_id, Task.name, Task.state, Task.cause, Task.message)
    found = defaultdict[str, list[TaskEnd]](list)
    mine = (Task.request_id.in_(ids), Task.lot_index.is_(None))  # a lot stands for its members
    rows = session.execute(query.where(*mine).order_by(Task.ordinal))
    for id, name, state, cause, message in rows:
        found[id].append(TaskEnd(name=name, state=state, cause=cause, message=message))
    return found


def _data(row: Any, ends: Sequence[TaskEnd]) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "state": row.state,
        "tenant_id": row.tenant_id,
        "labels": row.labels,
        "submitted_at": row.submitted_at.isoformat(),
        "ended_at": row.ended_at.isoformat() if row.ended_at is not None else None,
        **message_bodies.count_ends(ends),
    }


def try_out(session: Session, hook: Webhook) -> Delivery:
    """Write a test message."""
    now = transactions.now(session)
    if hook.name is None:
        body = message_bodies.message_body(message_bodies.TEST, now, {"webhook_id": hook.id})
    else:
        body = channel_texts.body(str(hook.kind), message_bodies.TEST, [], at=now, since=None)
    whose = {"webhook_id": hook.id, "tenant_id": hook.tenant_id, "url": hook.url}
    delivery = Delivery(id=new_id("msg"), type=message_bodies.TEST, body=body, **whose)
    session.add(delivery)
    session.flush()
    return delivery


# --- sending messages ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Holds a message that must be sent at once; `attempt` fences the record of the result."""

    id: str
    attempt: int
    at: datetime
    url: str
    body: str
    secrets: tuple[str, ...]
    kind: str
    sealed: SealedAddress | None  # of a channel; `url` only names it


# Looks only at the first few messages of each webhook, so a long queue of one costs the others
# nothing. The tenant with the fewest messages in progress comes first.
_TAKE = text(
    """
    with held as (
        select tenant_id, count(*) as n from deliveries
        where state = 'pending' and taken_until > now() group by tenant_id
    ), due as (
        select d.id, d.due_at, coalesce(h.n, 0)
            + row_number() over (partition by w.tenant_id order by d.due_at, d.id) as nth
        from webhooks w left join held h on h.tenant_id = w.tenant_id cross join lateral (
            select id, due_at from deliveries
            where webhook_id = w.id and state = 'pending' and due_at <= now()
                and coalesce(taken_until <= now(), true)
            order by due_at, id limit :per_tenant
        ) d
    ), mine as (
        select id from deliveries
        where id in (
            select id from due where nth <= :per_tenant order by nth, due_at, id limit :most
        ) and state = 'pending' and coalesce(taken_until <= now(), true)
        for update skip locked
    )
    update deliveries d
    set attempt = d.attempt + 1, taken_until = now() + make_interval(secs => :lease_s)
    from mine, webhooks w where d.id = mine.id and w.id = d.webhook_id
    returning d.id as message, d.attempt, now() as at, d.url, d.body, w.secret,
        w.id, w.tenant_id, w.name, coalesce(w.kind, 'webhook') as kind, w.key_id, w.encrypted,
        case when w.old_secret_until > now() then w.old_secret end as old_secret
    """
)


def take(session: Session, most: int, *, call_s: float) -> list[Taken]:
    """Take up to `most` messages that are due; they are leased for as long as a call can last."""
    given = {"most": most, "per_tenant": PER_TENANT, "lease_s": call_s + RESOLVING_S}
    return [
        Taken(
            id=row.message,
            attempt=row.attempt,
            at=row.at,
            url=row.url,
            body=row.body,
            kind=row.kind,
            sealed=channels.sealed(row),
            secrets=tuple(one for one in (row.secret, row.old_secret) if one is not None),
        )
        for row in session.execute(_TAKE, given)
    ]


def headers(taken: Taken) -> dict[str, str]:
    """Return the HTTP headers of a message.  While a secret is rotated, there is a signature by
    each of the two.
    """
    at = taken.at.astimezone(UTC)
    signed = [Signer(secret).sign(taken.id, at, taken.body) for secret in taken.secrets]
    return {
        "Content-Type": "application/json",
        "User-Agent": "roundhouse-webhooks/1",
        "webhook-id": taken.id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signed),
    }


def record(session: Session, taken: Taken, answer: AttemptAnswer) -> None:
    """Record the result of an attempt, unless another sender has taken the message over
    meanwhile.
    """
    same = select(Delivery).where(Delivery.id == taken.id, Delivery.attempt == taken.attempt)
    fresh = same.with_for_update().execution_options(populate_existing=True)
    delivery = session.scalar(fresh)
    if delivery is None:
        return
    now = transactions.now(session)
    tried = {
        "at": now.isoformat(),
        "status": answer.status,
        "error": answer.error,
        "took_us": answer.took_us,
    }
    delivery.attempts = [*delivery.attempts, tried][-ATTEMPTS_KEPT:]
    delivery.taken_until = None
    found = retries.verdict(answer.status)
    wait_s = retries.wait_s(delivery.attempt - delivery.round_from, random.random())
    if found == Verdict.delivered:
        delivery.state, delivery.ended_at = "delivered", now
    elif found == Verdict.unwanted:
        delivery.state, delivery.ended_at = "given_up", now
        _disable(session, session.get_one(Webhook, delivery.webhook_id), now)
    elif wait_s is None:
        delivery.state, delivery.ended_at = "given_up", now
    else:
        delivery.due_at = now + timedelta(seconds=wait_s)


def _disable(session: Session, hook: Webhook, now: datetime) -> None:
    """Disable a webhook after its receiver refused further messages.

    If a request named the address, the answer says nothing about other addresses, so nothing is
    done.
    """
    if hook.url is None:
        return
    hook.disabled_at = hook.disabled_at or now
    waiting = update(Delivery).where(Delivery.webhook_id == hook.id, Delivery.state == "pending")
    session.execute(waiting.values(state="given_up", ended_at=now))


def send_again(session: Session, delivery: Delivery) -> None:
    """Send the same message again, at once; the record of its earlier attempts stays."""
    delivery.state, delivery.ended_at = "pending", None
    delivery.round_from, delivery.due_at = delivery.attempt, func.now()
    session.flush()
    session.refresh(delivery)
