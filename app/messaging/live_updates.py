"""Wakes coroutines that wait for changes of a request.

Islands and control execute `NOTIFY roundhouse, '<tenant id> <request id>'` in their transactions.
(A notification may have several changes, one on a line.) One thread for each API process listens,
and wakes the coroutines that subscribed to that request or tenant. A wake-up has no content and may
be spurious: the woken coroutine reads the database. It may also be lost (Postgres restarts), so no
wait is longer than `LONGEST_WAIT_S`.

A call of the API does not execute NOTIFY in its own transaction, which would serialize commits.
`tell` wakes the waiters of this process. If there are several API processes (`api_processes`), a
thread of its own tells the other processes, from time to time, of all changes since the last time.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
from sqlalchemy import Engine

log = logging.getLogger(__name__)

CHANNEL = "roundhouse"
ALL = "*"  # the topic of every change
LONGEST_WAIT_S = 15.0
_RECONNECT_S = 1.0
_GAP_S = 0.1  # between two announcements, because each wakes every API process
# most changes in one notification; each has some 80 bytes, and Postgres takes 8,000 bytes
_TOLD_AT_ONCE = 64
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
        self._announcer: _Announcer | None = None
        self.closing = False  # True when the server shuts down: open streams end

    @contextmanager
    def subscribe(self, topic: str) -> Iterator[Subscription]:
        """Subscribe to a request's id, a tenant's id, or ALL; call it in a coroutine.

        First subscribe, then read the database, then wait: so no change is missed.
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
        """Wake the waiters of all API processes."""
        self.wake(tenant_id, request_id)
        if self._announcer is not None:
            self._announcer.add(f"{tenant_id} {request_id}")

    def wake(self, tenant_id: str, request_id: str) -> None:
        """Wake the waiters of this process."""
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

    def start(self, engine: Engine, *, processes: int = 1) -> None:
        """Listen; of several API `processes` each tells the others."""
        self.closing = False
        self._listener = _Listener(self, engine)
        self._listener.start()
        if processes > 1:
            self._announcer = _Announcer(engine)
            self._announcer.start()

    def close(self) -> None:
        """End all streams; may be called from a signal handler, and twice."""
        self.closing = True
        threading.Thread(target=self.tell_all, name="closing streams").start()

    def stop(self) -> None:
        self.closing = True
        self.tell_all()
        if self._announcer is not None:
            self._announcer.stop()
            self._announcer = None
        if self._listener is not None:
            self._listener.stop()
            self._listener = None


class _Listener(threading.Thread):
    def __init__(self, changes: Changes, engine: Engine) -> None:
        super().__init__(name="changes", daemon=True)
        self._changes, self._stopping = changes, threading.Event()
        self._conninfo = _conninfo(engine)

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
                for change in notice.payload.splitlines():
                    tenant_id, _, request_id = change.partition(" ")
                    self._changes.wake(tenant_id, request_id)
                if self._stopping.is_set():
                    return

    def stop(self) -> None:
        self._stopping.set()


class _Announcer(threading.Thread):
    """Tells the other API processes of changes; a lost change is noticed at the next look."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="announced changes", daemon=True)
        self._conninfo = _conninfo(engine)
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: stop

    def add(self, change: str) -> None:
        self._news.put(change)

    def stop(self) -> None:
        self._news.put(None)

    def run(self) -> None:
        while (first := self._news.get()) is not None:
            try:
                # A lost announcement does no harm, so its commit need not wait for the disk.
                options = "-c synchronous_commit=off"
                with psycopg.connect(
                    self._conninfo, autocommit=True, options=options
                ) as connection:
                    self._announce(connection, first)
                    return
            except psycopg.Error as error:
                log.warning("cannot announce changes: %s", error)

    def _announce(self, connection: psycopg.Connection, first: str) -> None:
        """Announce changes until the end, those that came meanwhile together."""
        told: str | None = first
        while told is not None:
            together = {told}
            while not self._news.empty() and (told := self._news.get()) is not None:
                together.add(told)
            for some in _batched(sorted(together)):
                connection.execute("select pg_notify(%s, %s)", (CHANNEL, "\n".join(some)))
            time.sleep(_GAP_S)
            if told is not None:
                told = self._news.get()


def _batched(changes: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(changes), _TOLD_AT_ONCE):
        yield changes[at : at + _TOLD_AT_ONCE]


def _conninfo(engine: Engine) -> str:
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


changes = Changes()
