"""Makes messages to channels, and sends messages to webhooks, each in a thread of its own.

It runs in control. Several senders may run: each takes a lease on the message that it sends.
`app.core.webhooks.retries` decides when a message is sent again.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from app.core.security.addresses import networks
from app.core.webhooks.channel_texts import MAIL
from app.core.webhooks.retries import AttemptAnswer
from app.db import transactions
from app.messaging import guarded_post, mail, notifications, webhooks
from app.messaging.webhooks import Taken
from app.settings import settings
from app.storage.sealing import CannotOpen, NoKey
from workers.control.loop import Loop

SLOTS = 16  # messages being sent at once
CHANNEL_FAILED = "the channel's address does not answer"

log = logging.getLogger(__name__)


class Deliverer(Loop):
    def __init__(self) -> None:
        super().__init__("deliverer")
        self._lock = threading.Lock()
        self._busy = 0

    def look(self) -> float:
        with transactions.transaction() as session:
            has_more = notifications.write_messages(session)
        with self._lock:
            free = SLOTS - self._busy
        if free:
            with transactions.transaction() as session:
                taken = webhooks.take(session, free, call_s=settings().webhook_timeout_s)
            for one in taken:
                self._start(one)
        return 0.0 if has_more else settings().tick_s

    def _start(self, taken: Taken) -> None:
        with self._lock:
            self._busy += 1
        threading.Thread(target=self._deliver, args=(taken,), name=taken.id, daemon=True).start()

    def _deliver(self, taken: Taken) -> None:
        try:
            deliver(taken)
        except Exception:
            log.exception("the outcome of %s is unknown; it is sent again later", taken.id)
        finally:
            with self._lock:
                self._busy -= 1
            self.wake.set()  # a slot is free for another message


def deliver(taken: Taken) -> None:
    """Send the message once and record the result."""
    try:
        address = taken.url if taken.sealed is None else taken.sealed.opened()
    except (NoKey, CannotOpen) as error:
        answer = AttemptAnswer(status=None, error=f"its address is sealed: {error}", took_us=0)
    else:
        answer = _answer(taken, address)
    with transactions.transaction() as session:
        webhooks.record(session, taken, answer)


def _answer(taken: Taken, address: str) -> AttemptAnswer:
    timeout_s = settings().webhook_timeout_s
    if taken.kind == MAIL:
        return mail.send(taken.id, address, taken.body, timeout_s=timeout_s)
    answer = guarded_post.post(
        address,
        taken.body,
        webhooks.headers(taken),
        timeout_s=timeout_s,
        allowed=networks(settings().webhook_networks),
    )
    if taken.sealed is not None and answer.error:
        # members read this, and the text of a failure may repeat a part of the address
        return replace(answer, error=CHANNEL_FAILED)
    return answer
