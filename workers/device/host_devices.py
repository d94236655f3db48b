"""Serves the devices of one host in one process: a supervisor for each of them.

A fault of one device stays there. If its supervisor fails, or its device cannot be found, what ran
on this device ends; the supervisor is started again a little later, and the other devices go on.
The process ends, so that its service manager starts it again, only if

* a supervisor hangs: its thread cannot be ended (`workers.device.supervisor_watchdog`);
* a supervisor failed and could not release all that it held;
* each device of the host has failed, and none is served again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.model.protocol.messages import Alive
from app.core.model.protocol.wellformed import SENTENCE_MOST, BadMessage
from app.messaging.signed_messages import Mail
from workers.device.heartbeat import HeartbeatTransport, now_us
from workers.device.supervisor import LEAVE_S, Supervisor
from workers.transfer.host_context import CannotServe, House

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_MOST_S = 1.0, 60.0  # wait before a device is tried again; doubled each time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevice:
    """A device of the host: how its context is made, which tries the device out, and what takes its
    heartbeats to its island.
    """

    id: str
    find: Callable[[], House]  # raises CannotServe
    describe: Callable[[], House]  # without the device, which was not found
    transport: HeartbeatTransport


class HostDevices:
    """Keeps all devices of a host served. Each method may be called by any thread."""

    def __init__(
        self, devices: Sequence[HostDevice], mail: Mail, *, end_process: Callable[[], None]
    ) -> None:
        self.mail, self.end_process = mail, end_process
        self.stopping = threading.Event()
        self.services: Mapping[str, ServedDevice] = {
            device.id: ServedDevice(device, self) for device in devices
        }

    def start(self) -> None:
        for device in self.services.values():
            device.start()

    def stop(self) -> None:
        """Let all devices save their tasks and leave, at the same time, and wait for that."""
        self.stopping.set()
        for device in self.services.values():
            device.ask_to_leave()
        for device in self.services.values():
            device.wait_until_left()

    def receive(self, text: str) -> None:
        """Pass news on to the devices for which they are. Raises BadSignature or BadMessage."""
        news = self.mail.opened(text)
        for name in self.services.keys() & news.keys():
            self.services[name].receive(news[name])
        if others := sorted(news.keys() - self.services.keys()):
            raise BadMessage(f"the message is for {others[0]}, which this worker does not serve")

    def note_failure(self) -> None:
        """End the process if no device is served any more."""
        if self.stopping.is_set() or not all(device.is_lost for device in self.services.values()):
            return
        log.critical("no device of this worker can be served; it ends")
        self.end_process()


class ServedDevice(threading.Thread):
    """Keeps one device served: starts its supervisor, and starts it again after a fault."""

    def __init__(self, device: HostDevice, host: HostDevices) -> None:
        super().__init__(name=f"service of {device.id}", daemon=True)
        self.device, self.host = device, host
        self.has_failed = False
        self._served: Supervisor | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        again_s = AGAIN_S
        while not self.host.stopping.is_set():
            began_s = time.monotonic()
            if not (failure := self._serve()):
                return
            self._tell(failure)
            if time.monotonic() - began_s > AGAIN_MOST_S:
                again_s = AGAIN_S
            self.has_failed = True
            self.host.note_failure()
            self.host.stopping.wait(again_s)
            again_s = min(2 * again_s, AGAIN_MOST_S)

    @property
    def is_lost(self) -> bool:
        """True if the device has failed and is not served again."""
        served = self._served
        return self.has_failed and not (served is not None and served.serves)

    def _serve(self) -> str:
        """Serve the device until its supervisor ends; return why it failed, or "" if it left
        because it was asked to.
        """
        try:
            supervisor = self._begin()
        except CannotServe as error:
            log.critical("%s: %s", self.device.id, error)
            return str(error)
        except Exception as error:  # whatever is wrong with one device is no fault of the others
            log.exception("%s cannot be served", self.device.id)
            return f"{type(error).__name__}: {error}"
        if supervisor is None:
            return ""
        supervisor.join()
        if not supervisor.has_left:
            log.critical("%s could not release what it held; the process ends", self.device.id)
            self.host.end_process()
        with self._lock:
            self._served = None
        return supervisor.failure

    def _tell(self, failure: str) -> None:
        """Tell the island why the device is not served.

        The report changes no lease: what the device held is lost when its lease ends.  A device
        that is served again says so by its next report.
        """
        told = " ".join(failure.split())[: SENTENCE_MOST - 1].rstrip(".")
        try:
            house = self.device.describe()
            facts = {**house.facts, "failed": f"{told}.", "leaving": True}
            self.device.transport.send(
                Alive(
                    device=house.device,
                    incarnation=house.incarnation,
                    sent_us=now_us(),
                    facts=facts,
                    residents=[],
                    events=[],
                    logs=[],
                )
            )
        except Exception as error:  # the next trial tells it again
            log.warning("%s: the island was not told why it failed: %s", self.device.id, error)

    def _begin(self) -> Supervisor | None:
        """Find the device and start a supervisor; None if the host is to stop."""
        house = self.device.find()
        transport = self.device.transport
        supervisor = Supervisor(house, transport, on_fatal=lambda: self._note_fault(supervisor))
        with self._lock:
            if self.host.stopping.is_set():
                return None
            supervisor.start()
            self._served = supervisor
            return supervisor

    def _note_fault(self, supervisor: Supervisor) -> None:
        if not supervisor.failure:  # it hangs
            self.host.end_process()

    def receive(self, news: Sequence[Any]) -> None:
        if (supervisor := self._served) is None:
            return  # the island says it again
        for message in news:
            supervisor.receive(message)

    def ask_to_leave(self) -> None:
        with self._lock:
            if self._served is not None:
                self._served.ask_to_leave()

    def wait_until_left(self) -> None:
        if (served := self._served) is not None:
            served.join(served.house.drain_s + LEAVE_S)
