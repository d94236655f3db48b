"""Runs the Celery worker of a host. It serves the host's devices, and its messages only wake them.

    celery -A workers.device.worker worker --pool threads -c 2 -Q device.<host>,device.<id>,...

Orders and answers that the island signed go into the inbox of the device's supervisor
(`workers.device.supervisor`).  Nothing else happens in this module.  The reports of the devices are
proved by a key of their host.  This module imports no torch and opens no database.

The island sends the news of all devices in one message, to the queue of the host, if the worker
reads this queue.  The queues of the devices get what other islands and the API send.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from dataclasses import replace
from typing import Any, NoReturn

from celery import bootsteps

from app.core.model.protocol.messages import Alive, HostPulses, Pulse
from app.core.model.protocol.wellformed import BadMessage
from app.messaging import broker
from app.messaging.message_keys import MessageKeys
from app.messaging.signed_messages import Mail, sealed_heartbeat
from app.settings import Settings, settings
from app.storage.signing import BadSignature, Signer, public_key
from workers.device.device_check import find_device
from workers.device.heartbeat import PulseGatherer
from workers.device.host_devices import HostDevice, HostDevices
from workers.process.celery_inbox import hears
from workers.process.host_allocations import HostAllocations
from workers.process.isolation.device_access import FoundDevice
from workers.transfer.host_context import CannotServe, House

log = logging.getLogger(__name__)

celery = broker.make_celery("device", settings().redis_url.get_secret_value(), settings().redis_tls)


class ToIsland:
    """Sends the heartbeats of a host to the island's queue, sealed, as hints that may be lost."""

    def __init__(self, island: str, mail: Mail, *, devices: int) -> None:
        self.queue, self.mail = broker.island_queue(island), mail
        self.pulses = PulseGatherer(self._publish, most=devices)

    def send(self, heartbeat: Alive | Pulse) -> None:
        if isinstance(heartbeat, Pulse):
            self.pulses.send(heartbeat)
        else:
            self._publish(heartbeat)

    def _publish(self, heartbeat: Alive | Pulse | HostPulses) -> None:
        text = sealed_heartbeat(self.mail.keys, heartbeat, to=self.mail.addressee())
        broker.send(celery, broker.ISLAND_ALIVE, self.queue, text)


class Serve(bootsteps.StartStopStep):
    """Starts and stops the devices with the Celery worker, so that they outlive any loss of
    Redis.
    """

    requires = {"celery.worker.components:Pool"}
    host: HostDevices | None = None

    def start(self, parent: Any) -> None:
        if not (devices := settings().each_device):
            raise RuntimeError("ROUNDHOUSE_DEVICES must name the devices of this worker")
        try:
            island_key = _island_key()
        except CannotServe as error:
            log.critical("%s", error)
            _end()
        mail = Mail(MessageKeys(Signer.at(settings().host_key_file)), island_key)
        to_island = ToIsland(settings().island, mail, devices=len(devices))
        reads = parent.app.amqp.queues.consume_from
        allocations = HostAllocations()
        served = [_device(one, reads, to_island, allocations) for one in devices]
        Serve.host = HostDevices(served, mail, end_process=_end)
        Serve.host.start()

    def stop(self, parent: Any) -> None:
        if Serve.host is not None:
            Serve.host.stop()

    def terminate(self, parent: Any) -> None:
        self.stop(parent)


def _device(
    settings: Settings, reads: Container[str], to_island: ToIsland, allocations: HostAllocations
) -> HostDevice:
    """Describe a device of this worker, which reads these queues."""

    def house(found: FoundDevice) -> House:
        made = House.of(settings, found)
        reads_host = broker.device_queue(made.host) in reads
        return replace(made, host_news=reads_host, allocations=allocations)

    return HostDevice(
        id=settings.device,
        find=lambda: house(find_device(settings)),
        describe=lambda: house(FoundDevice()),
        transport=to_island,
    )


def _island_key() -> str:
    """Return the public key of the island.  Without it the device obeys no orders."""
    try:
        return public_key(settings().its_island_key)
    except ValueError as error:
        raise CannotServe(
            f"cannot read the public key of island {settings().island}: {error}; set "
            "ROUNDHOUSE_ISLAND_PUBLIC_KEY to the key that `roundhouse device island-key` prints"
        ) from error


def _end() -> NoReturn:
    os._exit(1)  # the worker's service manager starts it again; no state is worth keeping


celery.steps["worker"].add(Serve)
refused = broker.Complaint(log, "rejected a message")


@hears(celery, broker.DEVICE_NEWS)
def news(text: str) -> None:
    if Serve.host is None:
        return
    try:
        Serve.host.receive(text)
    except (BadSignature, BadMessage) as error:
        refused.say(error)
