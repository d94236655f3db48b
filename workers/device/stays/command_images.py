"""Stores and restores the processes of commands, if the trial at the device's start succeeded.

Everything that takes long runs in other threads than the supervisor's.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from app.core.model import codec
from app.core.model.protocol.messages import Launch
from app.core.model.protocol.wellformed import SENTENCE_MOST
from app.core.model.provisions.process_images import OFFER, marked
from app.storage.chunk_cipher import ChunkCipher
from workers.criu.probe import Found, Trial
from workers.criu.process_image import ProcessFacts
from workers.criu.process_tree_mover import CannotRestore, CannotStore, StubAccess, TreeMover
from workers.device import store_io
from workers.device.processes.resident import Adoption, Resident, below, memory_to_dump
from workers.device.stays.listening import read_printed
from workers.device.stays.spawning import Spawner
from workers.device.supervision.reports import DeviceReports
from workers.device.supervision.side_work import SideWork
from workers.process import untrusted
from workers.process.isolation.device_access import driver_version
from workers.process.untrusted import Nonsense
from workers.transfer.checkpoint import BesideImage
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]

PROCESSES_MOST = 1024


@dataclass(frozen=True, slots=True)
class StoredTree:
    """Holds the image of a command's processes, or why there is none (`lost`).

    Both are empty if none was wanted.
    """

    beside: Sequence[memoryview] = ()
    lost: str = ""
    is_damaged: bool = False  # the processes may not run on


@contextmanager
def no_tree() -> Iterator[StoredTree]:
    yield StoredTree()


@contextmanager
def not_encrypted() -> Iterator[StoredTree]:
    yield StoredTree(lost="there is no key to encrypt its memory")


class CommandImages:
    """Runs the trial when the layers of the sandbox are known; after that, stores and restores
    processes.
    """

    def __init__(
        self, house: House, spawner: Spawner, reports: DeviceReports, side: SideWork
    ) -> None:
        self.house = house
        self.spawner = spawner
        self.reports = reports
        self.side = side
        self.version = ""  # version of the CRIU that passed the trial
        self.mover: TreeMover | None = None  # the mover, once the trial has passed
        self._trial: Trial | None = None
        spawner.on_layers = self.start

    # --- the trial ---

    def start(self) -> None:
        """Start the trial, once for each device worker: a later zygote finds the same host.

        The device reports only after the trial, so each of its commands can be told whether it can
        move.
        """
        if self._trial is not None:
            return
        room = self.spawner.room("criu")
        self._trial = Trial(self.house.criu, room, self.spawner.walls)
        self.side.aside(self._trial.run, self._found)

    def _found(self, found: Found | BaseException) -> None:
        self.reports.is_trial_over = self.reports.rhythm.happened = True
        if isinstance(found, BaseException):  # a fault of this program: then nothing is offered
            found = Found(missing=f"{type(found).__name__}: {found}")
        if found.missing or self._trial is None or self._trial.program is None:
            log.warning("processes of commands cannot be stored here: %s", found.missing)
            return
        self.version = found.version
        house, accelerator = self.house, ""
        if house.kind != "cpu":
            accelerator = f"{house.model}, driver {driver_version(house.kind)}"
        self.mover = TreeMover(
            self._trial.program, house.host_memory_bytes, accelerator=accelerator
        )
        facts = self.reports.facts
        offers = [*facts.get("offers", []), OFFER, marked(self.mover.traits.mark)]
        self.reports.facts = facts | {"offers": offers}

    def end(self) -> None:
        if self._trial is not None:
            self._trial.end()

    # --- commands ---

    def may_store(self, launch: Launch) -> bool:
        """True if images of such a task have its processes."""
        return launch.spec.run.kind == "command" and not self.why_not(launch)

    def why_not(self, launch: Launch) -> str:
        """Return why images of this command have no processes; "" if they have them.

        A connection to another host would be lost when the processes are restored. Memory holds
        secrets, so none of it is stored without a key to encrypt it.
        """
        spec, key = launch.spec, launch.image_key
        if len(launch.seats) > 1:
            return "the processes of ranks on several hosts are not stored"
        if spec.image is not None:
            return "it runs in a container image"
        if (kind := self.house.kind) != "cpu":
            if not self.house.can_checkpoint:
                return f"the driver of its {kind} device cannot move memory off the device"
            if launch.guests:
                return "the memory of several devices is not stored with its processes"
        if spec.network.allow:
            return "it may use the network, and its connections would end in nothing elsewhere"
        if self.mover is None:
            return "its device cannot store processes"  # the log tells operators why
        if "sealed" not in key:
            refused = key.get("refused", "its launch had none")
            return f"there is no key to encrypt its memory: {refused}"[:SENTENCE_MOST]
        return ""

    def cipher_of(self, launch: Launch) -> ChunkCipher | None:
        """Return the cipher for images of the task, with or without its processes; None if they are
        not encrypted.
        """
        if not self.may_store(launch):
            return None
        return next(iter(store_io.opened_image_key(launch, self.house).values()), None)

    def tree_of(
        self, resident: Resident, message: JSON, dumped: Callable[[], None]
    ) -> Callable[[], AbstractContextManager[StoredTree]]:
        """Return a function that stores the processes that a stub announced; another thread calls
        it.

        The stub keeps the processes stopped until that thread calls `dumped`, or until the image is
        stored.
        """
        mover = self.mover
        if mover is None or not resident.is_command or "first_pid" not in message:
            return no_tree
        first, pids = untrusted.number(message, "first_pid"), _pids(message)
        pipes = {name: f"pipe:[{os.fstat(fd).st_ino}]" for fd, name in resident.pipes.items()}
        if resident.pidfd is None or len(pipes) < 2:
            return no_tree
        if self.cipher_of(resident.stay.launch) is None:  # the task had a key when it began
            return not_encrypted
        read_printed(resident)  # everything that the command printed until it was stopped
        resident.stay.log.take_tails()
        begun = resident.stay.log.begun
        resident.printed = resident.stay.launch.epoch, resident.stay.log.next_line
        stub = StubAccess(pidfd=os.dup(resident.pidfd), room=resident.room)
        pid, launch = resident.pid, resident.stay.launch
        marks = _secrets_mark(launch), _started_as(launch)

        @contextmanager
        def stored() -> Iterator[StoredTree]:
            try:
                image = mover.store(stub, first, pids, pipes, begun, _memory_to_dump(pid), *marks)
            except CannotStore as error:
                log.info("task %s: its processes are not stored: %s", resident.task, error)
                yield StoredTree(lost=str(error), is_damaged=error.is_damaged)
                return
            finally:
                os.close(stub.pidfd)
            dumped()
            yield StoredTree(beside=image.parts)

        return stored

    def adopt(self, resident: Resident, message: JSON) -> None:
        """Restore the processes of the task's image below a stub that waits for them."""
        mover, adoption = self.mover, resident.adoption
        if mover is None or adoption is None or resident.pidfd is None:
            raise Nonsense("it adopts what was not offered")
        stub = StubAccess(pidfd=os.dup(resident.pidfd), room=resident.room)
        pid, launch = resident.pid, resident.stay.launch
        resident.adoption = None
        self.side.aside(
            lambda: self._restored(mover, stub, pid, adoption, launch),
            lambda found: self._adopted(resident, found),
        )

    def _restored(
        self, mover: TreeMover, stub: StubAccess, pid: int, adoption: Adoption, launch: Launch
    ) -> ProcessFacts:
        """Restore the tree of an image; return what the image says of it."""
        try:
            ciphers = store_io.opened_image_key(launch, self.house)
            manifest = adoption.manifest
            image = BesideImage.of(
                manifest, store=self.house.store, ciphers=ciphers, held=adoption.held
            )
            started_as = _started_as(launch) if manifest.about.task != launch.task else ""
            marks = _secrets_mark(launch), started_as
            return mover.restore(stub, image, adoption.pipes, lambda: iter(below(pid)), *marks)
        finally:
            adoption.close()
            os.close(stub.pidfd)

    def _adopted(self, resident: Resident, found: ProcessFacts | BaseException) -> None:
        if isinstance(found, BaseException):
            if not isinstance(found, CannotRestore):
                log.error("task %s: cannot restore it", resident.task, exc_info=found)
            resident.send("adopted", pid=0, error=str(found) or type(found).__name__)
            return
        resident.stay.resumed = "image"
        resident.processes_step = resident.record.saved_step
        resident.stay.log.begin_with(found.begun)
        resident.send("adopted", pid=found.pid, error="")


def _secrets_mark(launch: Launch) -> str:
    return str(launch.secrets.get("mark", ""))


def _started_as(launch: Launch) -> str:
    """Return a hash of the program, parameters and inputs with which a task was started."""
    spec = launch.spec
    said = [
        *(spec.type, spec.run.argv, dict(spec.params), dict(spec.env), spec.world_size),
        *(launch.bundle, spec.image, dict(spec.mounts), codec.to_json(spec.environment)),
        {port: source["sha256"] for port, source in launch.inputs.items()},
    ]
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _pids(message: JSON) -> list[int]:
    listed = message.get("pids")
    if not isinstance(listed, list) or len(listed) > PROCESSES_MOST:
        raise Nonsense("pids must be a list of processes")
    return [untrusted.number({"pid": pid}, "pid") for pid in listed]


def _memory_to_dump(pid: int) -> int:
    try:
        return memory_to_dump(pid)
    except (OSError, ValueError) as error:
        raise CannotStore(f"its memory cannot be counted: {error}") from error
