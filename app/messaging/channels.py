"""Keeps channels: named addresses that requests tell of their events.

A channel is a webhook with a name. Its address is sealed with the key of secrets, as a chat's
address is a password, and it is opened only to send a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from app.core.model.fields import Fault
from app.core.model.provisions.notify import ChannelWish
from app.db.ids import new_id
from app.db.models import Delivery, Webhook
from app.settings import settings
from app.storage.sealing import Keyring


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedAddress:
    """Holds the address of a channel; `about` binds it to the channel."""

    encrypted: bytes
    key_id: str
    about: str

    def opened(self) -> str:
        """Return the address; raises NoKey, and CannotOpen if the row was tampered with."""
        keys = Keyring.read(settings().secrets_key_file)
        return keys.decrypted(self.encrypted, self.about, key_id=self.key_id)


def add(session: Session, channel: Webhook, address: str, keys: Keyring) -> None:
    """Add a channel, which has its tenant, name, kind and secret."""
    channel.id, channel.url = new_id("chn"), f"channel:{channel.name}"
    _seal(channel, address, keys)
    session.add(channel)
    session.flush()


def sealed(channel: Any) -> SealedAddress | None:
    """Return the sealed address of a row of webhooks; None if it is no channel."""
    if channel.name is None:
        return None
    return SealedAddress(encrypted=channel.encrypted, key_id=channel.key_id, about=_about(channel))


def encrypt_again(session: Session) -> int:
    """Encrypt again, with the newest key, all addresses that are encrypted with an older one;
    return how many.
    """
    keys = Keyring.read(settings().secrets_key_file)
    older = select(Webhook).where(Webhook.key_id != keys.newest).with_for_update(key_share=True)
    rows = session.scalars(older).all()
    for row in rows:
        if (address := sealed(row)) is not None:
            _seal(row, address.opened(), keys)
    return len(rows)


def _seal(channel: Webhook, address: str, keys: Keyring) -> None:
    channel.key_id = keys.newest
    channel.encrypted = keys.encrypted(address, _about(channel))


def _about(channel: Any) -> str:
    return "\n".join(("channel", channel.id, channel.tenant_id, channel.name))


def newest_deliveries(session: Session, ids: Sequence[str]) -> dict[str, Delivery]:
    """Return the newest delivery of each of these channels that has one."""
    newest = select(Delivery.id).where(Delivery.webhook_id == Webhook.id)
    newest = newest.order_by(Delivery.id.desc()).limit(1)
    query = select(Delivery).where(
        Delivery.id.in_(select(newest.scalar_subquery()).where(Webhook.id.in_(ids)))
    )
    return {row.webhook_id: row for row in session.scalars(query)}


# --- what requests want -------------------------------------------------------------------------


def names(session: Session, tenant_id: str) -> Sequence[str]:
    """Return the names of the tenant's channels, in alphabetical order."""
    query = select(Webhook.name).where(Webhook.tenant_id == tenant_id, Webhook.name.is_not(None))
    return [str(name) for name in session.scalars(query.order_by(Webhook.name))]


def wishes(stored: Iterable[Any]) -> tuple[ChannelWish, ...]:
    """Read what a user usually wants, as `users.notify` has it."""
    return tuple(ChannelWish(to=each["to"], on=tuple(each["on"])) for each in stored)


def faults(
    session: Session, tenant_id: str, wishes: Iterable[ChannelWish], pointer: str
) -> Iterator[Fault]:
    """Yield a fault for each channel that the tenant does not have."""
    known = names(session, tenant_id)
    has = f"it has: {', '.join(known)}" if known else "it has none"
    for n, wish in enumerate(wishes):
        if wish.to not in known:
            told = f"your tenant has no channel {wish.to}; {has}. Its administrators add channels"
            yield Fault(f"{pointer}/{n}/to", told, "unknown-channel")


def subscribe(
    session: Session, tenant_id: str, request_id: str, wishes: Iterable[ChannelWish]
) -> None:
    """Note what the request tells to which channel; a channel that is gone by now gets nothing."""
    types = json.dumps({wish.to: wish.types for wish in wishes})
    given = {"tenant": tenant_id, "request": request_id, "types": types}
    session.execute(_SUBSCRIBE, given)


_SUBSCRIBE = text(
    """
    insert into request_channels (request_id, webhook_id, events)
    select :request, w.id, wish.value
    from jsonb_each(cast(:types as jsonb)) wish
    join webhooks w on w.tenant_id = :tenant and w.name = wish.key and w.disabled_at is null
    order by w.id for key share of w
    """
)
