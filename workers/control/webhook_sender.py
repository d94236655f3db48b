"""Sends messages to webhooks, each in a thread of its own.

It runs in control. Several senders may run: each takes a lease on the message that it sends.
`app.core.webhooks.retries` decides when a message is sent again.
"""

from __future__ import annotations

import logging
import threading

from app.core.security.addresses import networks
from app.db import transactions
from app.messaging import guarded_post, webhooks
from app.messaging.webhooks import Taken
from app.settings import settings
from workers.control.loop import Loop

SLOTS = 16  # messages being sent at once

log = logging.getLogger(__name__)


class Deliverer(Loop):
    def __init__(self) -> None:
        super().__init__("deliverer")
        self._lock = threading.Lock()
        self._busy = 0

    def look(self) -> float:
        with self._lock:
            free = SLOTS - self._busy
        if free:
            with transactions.transaction() as session:
                taken = webhooks.take(session, free, call_s=settings().webhook_timeout_s)
            for one in taken:
                self._start(one)
        return settings().tick_s

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
    answer = guarded_post.post(
        taken.url,
        taken.body,
        webhooks.headers(taken),
        timeout_s=settings().webhook_timeout_s,
        allowed=networks(settings().webhook_networks),
    )
    with transactions.transaction() as session:
        webhooks.record(session, taken, answer)
