"""Sends what was committed: nudges to workers, orders to devices.

Messages to devices are proved by a key of this island, once for each message.

Nothing here decides or changes a state. A message may be lost: orders stay in the table until the
device shows that it has received them, and are sent again after `order_resend_s`; a lost nudge only
delays the work until the next tick. Nothing is sent inside a transaction, and the API never waits
for Redis.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from sqlalchemy import Select, func, or_, select, update
from sqlalchemy.orm import Session

from app.core.model.protocol.messages import JSON, Answer, encode
from app.db.models import OutboxOrder
from app.messaging import broker
from app.messaging.message_keys import MessageKeys
from app.messaging.signed_messages import sealed_host_news, sealed_news
from app.settings import settings
from app.storage.signing import Signer

log = logging.getLogger(__name__)

# in seconds, between two nudges of a queue: after each nudge the worker reads all that is new
NUDGE_GAP_S = 0.1
AT_ONCE = 256  # messages to devices that are sealed and published together


class NewsRoute(NamedTuple):
    """Tells how the news for a device are sent.

    The key shared with the host whose public key is `key` proves them; without one they are signed.
    They go to the queue of `host`, or to the device's own.
    """

    key: str = ""
    host: str = ""


NO_ROUTE = NewsRoute()


@lru_cache
def celery() -> Celery:
    """A bare client: it sends by name and imports no worker."""
    ours = settings()
    return broker.make_celery("roundhouse", ours.redis_url.get_secret_value(), ours.redis_tls)


@lru_cache
def message_keys() -> MessageKeys:
    """The keys of this island, from a file that only its own processes can read; the public key
    lies beside it.

    The file is created if it does not exist.
    """
    file = settings().island_key_file
    made = Signer.at(file)
    made.publish(file.with_suffix(".pub"))
    return MessageKeys(made)


class Nudger(threading.Thread):
    """Publishes nudges from a thread of its own: one for any number of requested actions.

    The first nudge is sent at once, further ones with at least NUDGE_GAP_S between them.
    """

    def __init__(self, name: str, queue: str) -> None:
        super().__init__(name=f"nudge {queue}", daemon=True)
        self.message, self.queue = name, queue
        self.wanted, self.over = threading.Event(), threading.Event()

    def run(self) -> None:
        while True:
            self.wanted.wait()
            if self.over.is_set():
                return
            self.wanted.clear()
            hint(self.message, self.queue)
            self.over.wait(NUDGE_GAP_S)

    def stop(self) -> None:
        """End the thread, once what it is publishing has been published."""
        self.over.set()
        self.wanted.set()
        self.join()


_nudgers: dict[str, Nudger] = {}  # by queue
_making_nudgers = threading.Lock()


def _nudge(message: str, queue: str) -> None:
    with _making_nudgers:
        if queue not in _nudgers:
            _nudgers[queue] = Nudger(message, queue)
            _nudgers[queue].start()
        _nudgers[queue].wanted.set()


def stop_nudging() -> None:
    """End the threads that publish nudges; the next nudge starts a new one.

    A nudge that was asked for and not yet published is dropped, as any hint may be.
    """
    with _making_nudgers:
        for nudger in _nudgers.values():
            nudger.stop()
        _nudgers.clear()


def nudge_control() -> None:
    """Tell control that something was submitted or asked for; returns at once."""
    _nudge(broker.CONTROL_NUDGE, broker.CONTROL_QUEUE)


def nudge_island(island: str) -> None:
    """Tell an island to look again; returns at once."""
    _nudge(broker.ISLAND_NUDGE, broker.island_queue(island))


def hint(message: str, queue: str, text: str = "") -> bool:
    """Publish one message.

    False if Redis did not take it; that only delays its effect.
    """
    try:
        broker.send(celery(), message, queue, text)
    except (OperationalError, OSError, RedisError) as error:
        log.warning("could not send %s to %s: %s", message, queue, error)
        return False
    return True


def tell(device: str, message: Any) -> None:
    """Send one message to a device.  It may be lost, because answers repeat its content."""
    text = sealed_news(message_keys(), device, [encode(message)])
    hint(broker.DEVICE_NEWS, broker.device_queue(device), text)


def reachable() -> bool:
    """True if Redis takes messages and gives them back.  If not, silence of devices means
    nothing.
    """
    ours = settings()
    return not broker.refusal(ours.redis_url.get_secret_value(), ours.redis_tls)


def take_unsent(
    session: Session, live: Sequence[str] | Select[str], *, resend_s: float
) -> list[OutboxOrder]:
    """Take, in order, the orders of `live` devices that were never sent, or sent long ago without
    an answer.

    They count as sent from the end of this transaction, which is before they are sent: if the
    process dies in between, they are sent again later. Orders that another island has locked (a
    gang uses both islands) are left to it.
    """
    stale = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, resend_s)
    due = or_(OutboxOrder.sent_at.is_(None), OutboxOrder.sent_at < stale)
    mine = select(OutboxOrder.id).where(
        OutboxOrder.answered_at.is_(None), OutboxOrder.device_id.in_(live), due
    )
    free = mine.order_by(OutboxOrder.id).with_for_update(skip_locked=True)
    sent = {"sent_at": func.now(), "sends": OutboxOrder.sends + 1}
    taken = update(OutboxOrder).where(OutboxOrder.id.in_(free)).values(sent).returning(OutboxOrder)
    fresh = {"synchronize_session": False, "populate_existing": True}
    return sorted(session.scalars(taken.execution_options(**fresh)), key=lambda order: order.id)


def send(
    answers: Iterable[Answer], orders: Sequence[OutboxOrder], routes: Mapping[str, NewsRoute]
) -> list[int]:
    """Publish the answers, and then the orders, of each device.

    Returns the ids of the orders that Redis may not have taken.  Call it outside any transaction.
    """
    news = defaultdict[str, list[JSON]](list)
    for answer in answers:
        news[answer.device].append(encode(answer))
    for order in orders:
        news[order.device_id].append(order.body)
    sent = post_news(news, routes)
    return [order.id for order in orders if order.device_id not in sent]


def post_news(news: Mapping[str, Sequence[JSON]], routes: Mapping[str, NewsRoute]) -> set[str]:
    """Publish the news of each device, those of a host in one message where it takes that.

    A device without a route gets a signed message of its own.  Returns the devices whose queues
    took theirs.
    """
    # A device of a host may be enrolled with a key of its own: its news go in another message.
    together = defaultdict[tuple[str, NewsRoute], dict[str, Sequence[JSON]]](dict)
    for device, bodies in news.items():
        route = routes.get(device, NO_ROUTE)
        together[route.host or device, route][device] = bodies
    messages, sent = list(together.items()), set[str]()
    for first in range(0, len(messages), AT_ONCE):
        part = messages[first : first + AT_ONCE]
        taken = post([(name, _sealed(route, said)) for (name, route), said in part])
        if taken is None:
            break  # each of the rest would run into the same timeout
        sent.update(device for (name, _), said in part if name in taken for device in said)
    return sent


def _sealed(route: NewsRoute, news: Mapping[str, Sequence[JSON]]) -> str:
    """Seal the news of the devices that share this route: of one, if it has no host."""
    if route.host:
        return sealed_host_news(message_keys(), news, to=route.key)
    [(device, bodies)] = news.items()
    return sealed_news(message_keys(), device, bodies, to=route.key)


def post(texts: Sequence[tuple[str, str]]) -> set[str] | None:
    """Publish texts, each (host or device, text); returns the names whose queues took theirs.

    None if Redis does not answer.
    """
    hints = [(broker.device_queue(name), text) for name, text in texts]
    try:
        refused = broker.send_all(celery(), broker.DEVICE_NEWS, hints)
    except (OperationalError, OSError, RedisError) as error:
        log.warning("could not send news to %d queues: %s", len(texts), error)
        return None
    if refused:
        queue, reason = min(refused.items())
        log.warning("Redis refused news in %d queues; in %s: %s", len(refused), queue, reason)
    return {name for name, _ in texts if broker.device_queue(name) not in refused}


def mark_unsent(session: Session, ids: list[int]) -> None:
    """Mark orders that Redis did not take, so that the next round sends them again."""
    values = {"sent_at": None, "sends": OutboxOrder.sends - 1}
    session.execute(update(OutboxOrder).where(OutboxOrder.id.in_(ids)).values(values))
