"""Messages of Celery as hints: called where they are read, and never acknowledged.

A hint puts something into an inbox and is done, so it needs neither Celery's pool nor the request
that Celery makes of a task.  One that is lost is said again by its owner, so nobody needs to keep
it until it has been heard: Redis is asked once for each instead of four times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import celery
from celery import Celery
from celery.signals import celeryd_after_setup

from app import broker

log = logging.getLogger(__name__)


class Hint(celery.Task):
    Strategy = f"{__name__}:passed_on"


def hears(app: Celery, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The function hears all hints of that name, in the thread that reads them: it must be quick.

    It is called with the text of the message, or with nothing if that has none.  What it raises is
    logged now and then, for nobody could do anything about it.
    """
    broker.HEARD.add(name)

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        app.task(function, name=name, base=Hint)
        return function

    return mark


def passed_on(task: celery.Task, app: Celery, consumer: object) -> Callable[..., None]:
    """How Celery is told to handle a task's messages (its `Strategy`)."""

    complaint = broker.Complaint(log, f"{task.name} was not heard")

    def pass_on(message: Any, *_: object) -> None:
        try:
            if not _is_stale(message.headers.get("expires")):
                # Kombu gives an empty body as it is, whatever reads it: a nudge has no arguments.
                task.run(*(message.payload[0] if message.payload else ()))
        except Exception as error:
            complaint.say(repr(error), exc_info=True)

    return pass_on


def _is_stale(expires: str | None) -> bool:
    return expires is not None and datetime.fromisoformat(expires) < datetime.now(UTC)


@celeryd_after_setup.connect
def _acknowledge_nothing(instance: Any, **_: object) -> None:
    for queue in instance.app.amqp.queues.consume_from.values():
        queue.no_ack = True
