"""Stores what residents hand over: images and outputs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.core.device.device_events import ImageKept
from app.core.model.protocol import messages
from app.core.model.protocol.messages import CheckpointRef, Launch
from app.core.model.protocol.wellformed import as_sentence
from workers.device import store_io
from workers.device.heartbeat import Rhythm, now_us
from workers.device.processes.process_ends import close_all
from workers.device.processes.resident import Leaving, Resident, Saving
from workers.device.stay import Stay
from workers.device.stays.command_images import CommandImages, StoredTree, no_tree
from workers.device.stays.device_stays import DeviceStays
from workers.device.store_io import OutOfStep
from workers.device.supervision.side_work import SideWork
from workers.process import untrusted
from workers.process.untrusted import Nonsense
from workers.transfer.checkpoint import Written
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]

SAVE_AGAIN_US = 5_000_000
REMEMBERED = 10_000  # most tasks whose newest image is known
SAVES_AT_ONCE = 2  # most outputs per process: one being read, one becoming durable
LIES_BYTES = 1 << 20  # in bytes: outputs of at least this size go back to their producer as a file


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStored:
    """A durable image, and what happened to the processes of its command.

    If the processes were damaged, `older` is the image before it, which was stored again instead.
    """

    written: Written
    tree: StoredTree
    older: Saving | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDumped:
    """Says why processes were not dumped. They may have died, so nothing was stored."""

    because: str


class DamagedAndNotStored(Exception):
    """Raised when the processes of a command are damaged by a dump, and no image could be
    stored.
    """


class ResultStore:
    """Stores images and outputs of residents in other threads, and reports them."""

    def __init__(
        self,
        receive: Callable[[Any], None],
        house: House,
        stays: DeviceStays,
        rhythm: Rhythm,
        side: SideWork,
    ) -> None:
        self._receive = receive
        self.house = house
        self.stays = stays
        self.rhythm = rhythm
        self.side = side
        # residents that have ended, but whose data a thread still stores
        self.read_from: list[Resident] = []
        self.images: CommandImages | None = None  # set if processes of commands can be stored
        self.kept: dict[str, tuple[int, CheckpointRef]] = {}  # task -> epoch and its newest image

    def with_newest_image(self, launch: Launch) -> Launch:
        """Return the launch with the image that its previous epoch stored here, if that image is
        newer.

        The island may have sent the launch before it heard of that image.  The process that made
        the image is gone by now.
        """
        if launch.host or launch.task not in self.kept:
            return launch
        epoch, image = self.kept[launch.task]
        is_next = launch.epoch == epoch + 1 and image.step > newest_step(launch)
        return replace(launch, images=[image, *launch.images]) if is_next else launch

    def saving(self, resident: Resident, message: JSON) -> None:
        what, step = untrusted.text(message, "what"), untrusted.number(message, "at_step")
        launch = resident.stay.launch
        if what.startswith("output:") and resident.may_give(what[7:]):
            self._says_output(resident, what[7:], message)
            return
        if resident.is_saving or what != "image":
            raise Nonsense(f"it saves {what!r:.100}")
        is_command = resident.stay.spec.run.kind == "command"
        ranked = untrusted.ranked(message, None if is_command else step)
        began_us = now_us()
        resident.saves += 1
        resident.measure()
        size = untrusted.number(message, "index_bytes")
        held, known, house = resident.slab, resident.known, self.house
        awaited = resident.stay.record.is_moving
        images = self.images
        dumped = partial(self._receive, partial(resident.send, "dumped", lost=""))
        older = _image_with_processes(resident)
        tree = images.tree_of(resident, message, dumped) if images is not None else no_tree
        told = as_sentence(untrusted.text({"bound_because": "", **message}, "bound_because"))

        def keep() -> ImageStored | NotDumped:
            cipher = images.cipher_of(launch) if images is not None else None
            with tree() as found:
                if found.lost and not found.is_damaged:
                    return NotDumped(because=found.lost)
                try:
                    if found.is_damaged and older is not None:
                        written = store_io.keep_marked(older, launch, house)
                        return ImageStored(written=written, tree=found, older=older)
                    written = store_io.keep(
                        *(held, size, launch, step),
                        known=known,
                        house=house,
                        awaited=awaited,
                        beside=found.beside,
                        dump_damaged=resident.dump_damaged or found.is_damaged,
                        cipher=cipher,
                    )
                except Exception as error:
                    if found.is_damaged:
                        raise DamagedAndNotStored(f"{found.lost}; {error}") from error
                    raise
            return ImageStored(written=written, tree=found)

        self.side.aside(
            keep, lambda stored: self._image_stored(resident, step, began_us, stored, told, ranked)
        )

    def _says_output(self, resident: Resident, name: str, message: JSON) -> None:
        size = untrusted.number(message, "size_bytes")
        head = untrusted.number({"head_bytes": 0, **message}, "head_bytes")
        if head > size:
            raise Nonsense(f"an output of {size} bytes with a head of {head}")
        if size > 2 * self.house.memory_bytes + 2**30:
            raise Nonsense(f"an output of {size} bytes")
        if any(one.name == name for one in resident.leaving):
            raise Nonsense(f"it gives {name!r:.100} twice")
        leaving = Leaving(
            name=name,
            size_bytes=size,
            head_bytes=head,
            early=message.get("early") is True and resident.is_awaited(name),
        )
        resident.leaving.append(leaving)
        self._store_next(resident)

    def _store_next(self, resident: Resident) -> None:
        """Store the resident's next output.

        It is read while the last one is still being made durable.
        """
        if resident.is_gone or resident.kill_reason:
            return
        if resident.is_read or not resident.leaving or resident.saves >= SAVES_AT_ONCE:
            return
        resident.saves += 1
        resident.is_read = True
        resident.measure()
        bulk, house = resident.bulk, self.house
        one = resident.leaving.popleft()
        published = one.name in resident.stay.spec.publish
        keep = store_io.publish if published else store_io.store

        def read() -> None:
            self._receive(lambda: self._output_read(resident))

        pieces = store_io.received(bulk, one.size_bytes, read)
        self.side.aside(
            lambda: {**keep(pieces, one.size_bytes, house), "head_bytes": one.head_bytes},
            lambda stored: self._output_stored(resident, one, stored),
        )

    def _output_read(self, resident: Resident) -> None:
        resident.is_read = False
        self._store_next(resident)

    def _image_stored(
        self,
        resident: Resident,
        step: int,
        began_us: int,
        stored: ImageStored | NotDumped | BaseException,
        told: str,
        ranked: JSON,
    ) -> None:
        """Tell the resident and the island how the writing of its image to the store ended.

        `told` is the stub's reason why a command's image holds no processes; empty if it does.
        """
        resident.saves -= 1
        if isinstance(stored, BaseException):
            self._not_stored(resident, "image", stored)
        elif isinstance(stored, NotDumped):
            resident.send("dumped", lost=stored.because)
        else:
            # done before its stub is told, which lets the command run on
            if stored.tree.is_damaged:
                self.stays.kill(resident, "damaged")
            self._taken(resident, "image")
            resident.send("kept", what="image")
            self._tell_stored(resident, step, now_us() - began_us, stored, told, ranked)
        self._close_if_gone(resident)

    def _tell_stored(
        self,
        resident: Resident,
        step: int,
        took_us: int,
        stored: ImageStored,
        told: str,
        ranked: JSON,
    ) -> None:
        written, printed = stored.written, resident.printed
        if (older := stored.older) is not None:
            step, printed, ranked = older.step, older.printed, older.ranked
        has_processes = older is not None or bool(stored.tree.beside)
        bound_because = "" if has_processes else stored.tree.lost or told
        bound_because = as_sentence(resident.stay.redactor.text(bound_because))
        if has_processes:
            resident.processes_step = step
        if has_processes or bound_because:
            resident.bound_because = bound_because
        resident.saved = Saving(
            step=step,
            sha256=written.sha256,
            key=self.house.signer.public,
            size_bytes=written.size_bytes,
            took_us=took_us,
            new_bytes=written.new_bytes,
            has_processes=has_processes,
            bound_because=bound_because,
            printed=printed if has_processes else (),
            ranked=ranked,
        )
        self._remember_image(resident, resident.saved.ref)
        self.tell_saved(resident.stay, resident.saved)
        self.stays.give(ImageKept(process=resident.id, step=step))

    def _remember_image(self, resident: Resident, image: CheckpointRef) -> None:
        """Remember the image as the newest of its task.

        Only the last REMEMBERED tasks are kept.
        """
        launch = resident.stay.launch
        self.kept.pop(launch.task, None)
        self.kept[launch.task] = launch.epoch, image
        if len(self.kept) > REMEMBERED:
            del self.kept[next(iter(self.kept))]

    def _close_if_gone(self, resident: Resident) -> None:
        if resident.is_gone and not resident.is_saving:
            self.read_from.remove(resident)
            self.side.close(resident.close_stores)

    def _output_stored(
        self, resident: Resident, one: Leaving, stored: JSON | BaseException
    ) -> None:
        resident.saves -= 1
        if isinstance(stored, BaseException):
            self._not_stored(resident, f"output:{one.name}", stored)
        else:
            self._taken(resident, f"output:{one.name}")
            files = self._lies(resident, one, stored["sha256"])
            resident.send("kept", files, what=f"output:{one.name}", files=len(files))
            close_all(files)
            resident.outputs[one.name] = stored
            if one.early and not resident.is_gone:
                resident.stay.tell(messages.Stored, now_us(), output=one.name, kept=stored)
                self.rhythm.happened = True
        self._store_next(resident)
        self._close_if_gone(resident)

    def _lies(self, resident: Resident, one: Leaving, sha256: str) -> list[int]:
        """Return the descriptor of the cache file of a large output; [] if there is none.

        It goes to the part of a graph that made the output and still holds it in memory.
        """
        if not one.early or one.size_bytes < LIES_BYTES or resident.stay.spec.world_size > 1:
            return []
        if one.name in resident.stay.spec.publish:
            return []  # a published output is stored in another format
        fd = self.house.cache.held(sha256)
        return [] if fd is None else [fd]

    def _not_stored(self, resident: Resident, what: str, error: BaseException) -> None:
        if resident.is_gone or resident.kill_reason:
            return
        log.error("task %s: cannot store its %s: %s", resident.task, what, error)
        if isinstance(error, OutOfStep):
            self.stays.kill(resident, "nonsense")
            return
        if isinstance(error, DamagedAndNotStored):
            self.stays.kill(resident, "damaged")
            return
        why = as_sentence(refusal(error))
        if not resident.refusals:
            self.rhythm.happened = True
        resident.refusals.setdefault(what, why)
        resident.send("kept", what=what, error=why, files=0)
        if what == "image":
            resident.save_again_us = now_us() + SAVE_AGAIN_US

    def _taken(self, resident: Resident, what: str) -> None:
        if resident.refusals.pop(what, ""):
            self.rhythm.happened = True

    def tell_saved(self, stay: Stay, saved: Saving) -> None:
        stay.tell(
            messages.Saved,
            now_us(),
            step=saved.step,
            sha256=saved.sha256,
            size_bytes=saved.size_bytes,
            took_us=saved.took_us,
            new_bytes=saved.new_bytes,
            has_processes=saved.has_processes,
            bound_because=saved.bound_because,
            printed=[*saved.printed],
            ranked=saved.ranked,
        )
        # While co-located tasks take turns, the next report comes soon and includes this event.
        self.rhythm.chatter = True
        self.rhythm.happened |= self.stays.holder is None


def _image_with_processes(resident: Resident) -> Saving | None:
    """Return the newest durable image, if it has the processes of the command.

    An image that this process began from counts as made before the first line of its epoch.
    """
    saved = resident.saved
    if saved is None or not resident.are_processes_stored:
        return None
    return replace(saved, printed=saved.printed or (resident.stay.launch.epoch, 0))


def newest_step(launch: Launch) -> int:
    """Return the step of the newest checkpoint that the launch names; 0 if it names none."""
    return launch.images[0].step if launch.images else 0


def refusal(error: BaseException) -> str:
    """Say in a sentence for the tenant why the store did not take something.

    Whatever the error is, the store refuses; paths and object names of the store are left out.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror or os.strerror(error.errno)}."
    return f"It answered with {type(error).__name__}; the log of the device says more."
