"""Wake coroutines that wait for changes of a request.

Islands and control execute `NOTIFY roundhouse, '<tenant id> <request id>'` in their transactions.
One thread for each API process listens, and wakes the coroutines that subscribed to that request or
tenant.  A wake-up has no content and may be spurious: the woken coroutine reads the database.  It
may also be lost (Postgres restarts), so no wait is longer than `LONGEST_WAIT_S`.

Changes by the API itself do not use Postgres' NOTIFY, which would serialize its commits; `tell`
wakes the waiters of this process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import Engine

log = logging.getLogger(__name__)

CHANNEL = "roundhouse"
ALL = "*"  # the topic of every change
LONGEST_WAIT_S = 15.0
_RECONNECT_S = 1.0
_LOOK_UP_S = 5.0  # interval at which the listening thread checks whether it should stop


class Subscription:
    """A wait for changes.  It belongs to the event loop in which it was created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    async def wait(self, timeout_s: float = LONGEST_WAIT_S) -> bool:
        """True if there may be changes, including those since the last wait."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def wake(self) -> None:
        """Wake the waiting coroutine; may be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:
            log.debug("the loop of a subscription has ended before it")


class Changes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: dict[str, set[Subscription]] = defaultdict(set)
        self._listener: _Listener | None = None
        self.closing = False  # True when the server shuts down: open streams end

    @contextmanager
    def subscribe(self, topic: str) -> Iterator[Subscription]:
        """Subscribe to a request's id, a tenant's id, or ALL, inside a coroutine.  Then read, then
        wait.
        """
        subscription = Subscription()
        with self._lock:
            self._subscriptions[topic].add(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                self._subscriptions[topic].discard(subscription)
                if not self._subscriptions[topic]:
                    del self._subscriptions[topic]

    def tell(self, tenant_id: str, request_id: str) -> None:
        with self._lock:
            woken = [s for topic in (tenant_id, request_id, ALL) for s in self._of(topic)]
        for subscription in woken:
            subscription.wake()

    def tell_all(self) -> None:
        with self._lock:
            woken = [s for topic in self._subscriptions for s in self._of(topic)]
        for subscription in woken:
            subscription.wake()

    def _of(self, topic: str) -> set[Subscription]:
        return self._subscriptions.get(topic, set())

    def start(self, engine: Engine) -> None:
        self.closing = False
        self._listener = _Listener(self, engine)
        self._listener.start()

    def close(self) -> None:
        """End all streams; may be called from a signal handler, and twice."""
        self.closing = True
        threading.Thread(target=self.tell_all, name="closing streams").start()

    def stop(self) -> None:
        self.closing = True
        self.tell_all()
        if self._listener is not None:
            self._listener.stop()
            self._listener = None


class _Listener(threading.Thread):
    def __init__(self, changes: Changes, engine: Engine) -> None:
        super().__init__(name="changes", daemon=True)
        self._changes, self._stopping = changes, threading.Event()
        url = engine.url.set(drivername="postgresql")
        self._conninfo = url.render_as_string(hide_password=False)

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    self._listen(connection)
            except psycopg.Error as error:
                log.warning("cannot listen for changes: %s", error)
                self._stopping.wait(_RECONNECT_S)

    def _listen(self, connection: psycopg.Connection) -> None:
        connection.execute(f"listen {CHANNEL}")
        self._changes.tell_all()  # changes may have been missed
        while not self._stopping.is_set():
            for notice in connection.notifies(timeout=_LOOK_UP_S):
                tenant_id, _, request_id = notice.payload.partition(" ")
                self._changes.tell(tenant_id, request_id)
                if self._stopping.is_set():
                    return

    def stop(self) -> None:
        self._stopping.set()


changes = Changes()
