"""One device's Celery worker: it hosts the supervisor, and its messages only wake it.

    celery -A workers.device worker --pool threads -c 2 -Q device.<id>

Orders and answers go into the supervisor's inbox (`workers.supervisor`), and nothing else happens
here.  No torch, no database.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from celery import bootsteps

from app import broker
from app.core.messages import Alive, BadMessage, decode, encode
from app.settings import settings
from workers.hints import hears
from workers.house import House
from workers.supervisor import Supervisor

log = logging.getLogger(__name__)

JSON = dict[str, Any]

celery = broker.make_celery("device", settings().redis_url.get_secret_value())


class ToIsland:
    """Reports go to the island's queue, as hints that may be lost."""

    def __init__(self, island: str) -> None:
        self.queue = broker.island_queue(island)

    def send(self, alive: Alive) -> None:
        broker.send(celery, broker.ISLAND_ALIVE, self.queue, encode(alive))


class Serve(bootsteps.StartStopStep):
    """Owned by the worker, not by its connection: the supervisor outlives any loss of Redis."""

    requires = {"celery.worker.components:Pool"}
    supervisor: Supervisor | None = None

    def start(self, parent: Any) -> None:
        house = House.of(settings())
        if not house.device:
            raise RuntimeError("ROUNDHOUSE_DEVICE is not set: which device does this worker serve?")
        Serve.supervisor = Supervisor(house, ToIsland(house.island), on_fatal=_end_worker)
        Serve.supervisor.start()

    def stop(self, parent: Any) -> None:
        if Serve.supervisor is not None:
            Serve.supervisor.stop()

    def terminate(self, parent: Any) -> None:
        self.stop(parent)


def _end_worker() -> None:
    os._exit(1)  # whoever started us starts us again; nothing here is worth keeping


celery.steps["worker"].add(Serve)


@hears(celery, broker.DEVICE_NEWS)
def news(*bodies: JSON) -> None:
    for body in bodies:
        _pass_on(body)


def _pass_on(body: JSON) -> None:
    try:
        message = decode(body)
    except BadMessage as error:
        log.warning("not a message for a device: %s", error)
        return
    if Serve.supervisor is not None:
        Serve.supervisor.receive(message)
