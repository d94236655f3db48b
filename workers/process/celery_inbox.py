"""Handles Celery messages as hints: in the thread that reads them, and without acknowledgement.

A hint only puts something into an inbox. So it needs neither Celery's pool nor the request object
that Celery makes for a task. The sender repeats a lost hint, so Redis need not keep a hint until it
was handled. A hint then takes one Redis call instead of four.

Every worker that imports this module runs without gossip, mingle and Celery's own heartbeats. These
send events, which the serializer of Roundhouse refuses, over queues that its protocol does not
have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import celery
from celery import Celery
from celery.signals import celeryd_after_setup, celeryd_init
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown

from app.messaging import broker

log = logging.getLogger(__name__)

CONNECT_AGAIN_S = 1.0


class Hint(celery.Task):
    Strategy = f"{__name__}:passed_on"


def hears(app: Celery, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a quick function that gets all hints of this name, in the reading
    thread.

    The function is called with the text of the message, or without arguments if the message has
    none. Its errors are only logged, and repeated errors not each time: no code could handle them.
    """
    complaint = broker.Complaint(log, f"{name} was not heard")

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        def hear(text: str) -> None:
            try:
                function(*((text,) if text else ()))
            except Exception as error:
                complaint.say(repr(error), exc_info=True)

        broker.HEARD[name] = hear
        app.task(function, name=name, base=Hint)
        return function

    return mark


def hears_all(function: Callable[[], None]) -> Callable[[], None]:
    """Mark a function that the reading thread calls after it has handed over all waiting hints.

    Its errors are only logged.
    """
    complaint = broker.Complaint(log, f"{function.__name__} failed")

    def hear_all() -> None:
        try:
            function()
        except Exception as error:
            complaint.say(repr(error), exc_info=True)

    broker.HEARD_ALL.append(hear_all)
    return function


def passed_on(task: celery.Task, app: Celery, consumer: object) -> Callable[..., None]:
    """Return the handler of a task's messages, as Celery's `Strategy`."""

    def pass_on(message: Any, *_: object) -> None:
        # Kombu returns an empty body unparsed; a nudge has no arguments.
        broker.HEARD[task.name](message.payload[0][0] if message.payload else "")

    return pass_on


class QuietConsumer(Consumer):
    """Starts without gossip, mingle and heartbeats, whatever the command line says.

    While Redis is away or refuses, it tries again every CONNECT_AGAIN_S and says so now and then.
    Celery's own waits grow to 30 s, longer than a lease.
    """

    def __init__(self, *args: Any, worker_options: dict[str, Any] | None = None, **kw: Any) -> None:
        quiet = {"without_gossip": True, "without_mingle": True, "without_heartbeat": True}
        self._complaint = broker.Complaint(log, "Redis is away or refuses; trying again")
        super().__init__(*args, worker_options={**(worker_options or {}), **quiet}, **kw)

    def connect(self) -> Any:
        """Connect, and close a connection whose first commands Redis refuses.

        Celery would forget that connection and leave it open, one for each try.
        """
        connection = self.connection_for_read(heartbeat=self.amqheartbeat)
        try:
            if self.hub:
                connection.transport.register_with_event_loop(connection.connection, self.hub)
        except Exception:
            connection.close()
            raise
        return connection

    def ensure_connected(self, conn: Any) -> Any:
        connected = conn.ensure_connection(
            lambda error, _: self._complaint.say(error),
            max_retries=None,
            interval_start=CONNECT_AGAIN_S,
            interval_step=0,
            callback=maybe_shutdown,
        )
        self.first_connection_attempt = False
        return connected

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        super().on_connection_error_after_connected(exc)
        time.sleep(CONNECT_AGAIN_S)

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        self._complaint.say(exc)
        time.sleep(CONNECT_AGAIN_S)


@celeryd_init.connect
def _take_quiet_consumer(conf: Any, **_: object) -> None:
    conf.worker_consumer = QuietConsumer


@celeryd_after_setup.connect
def _acknowledge_nothing(instance: Any, **_: object) -> None:
    for queue in instance.app.amqp.queues.consume_from.values():
        queue.no_ack = True
