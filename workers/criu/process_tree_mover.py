"""Stores the processes below a stub as an image, and restores them below another stub.

Both run outside the supervisor's thread and outside the sandbox. Meanwhile the stub keeps its
processes stopped. What CRIU writes and reads lies in memory, in a file system without a name: no
other process reaches it, and nothing of it is left when the device worker ends.

Invariant: no process runs unchecked. An image is checked when it is made, so that no useless image
is kept, and again before CRIU reads it. The restored processes are checked while they are still
stopped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from workers.criu import (
    confinement,
    dump_and_restore,
    image_check,
    image_folder,
    linked_files,
    process_image,
)
from workers.criu.dump_and_restore import CriuFailed, Inherited, Target
from workers.criu.image_check import Allowed, BadImage
from workers.criu.image_records import BadRecord
from workers.criu.linked_files import NoName
from workers.criu.pids import RESERVED
from workers.criu.process_image import HostTraits, PackedImage, ProcessFacts, StoredParts
from workers.criu.program import CriuProgram
from workers.process.isolation import sandbox
from workers.process.isolation.detached_mounts import memory_folder
from workers.process.isolation.sandbox import Room

DUMP_S, RESTORE_S = 60.0, 60.0  # time limits of CRIU, in addition to the time for the memory
BYTES_PER_S = 32 * 2**20  # of memory; the slowest dump that is allowed
MIB = 2**20
_SPARE_BYTES = 64 * MIB  # free space in a folder for what CRIU writes beside an image
DUMPS_MOST = 3  # tries per tree, as a dump may fail by chance
#: What CRIU says of a thread that was interrupted or ended just as CRIU seized it.
_BY_CHANCE = re.compile(r"task interruption|No such process|Can't seize|Unable to interrupt")


class CannotStore(Exception):
    """Raised when processes cannot be stored; `is_damaged`: they may not run on."""

    def __init__(self, told: str, *, is_damaged: bool = False) -> None:
        super().__init__(told)
        self.is_damaged = is_damaged


class CannotRestore(Exception):
    """Raised when processes cannot be restored here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StubAccess:
    """Describes the stub of a command to the device worker.

    The user of this object closes `pidfd`.
    """

    pidfd: int
    room: Room


class TreeMover:
    """Stores and restores trees with the CRIU that passed the trial of this device."""

    def __init__(
        self,
        program: CriuProgram,
        most_bytes: int,
        folder: Callable[[int], AbstractContextManager[Path]] = memory_folder,
        accelerator: str = "",
    ) -> None:
        """Set up the mover.

        `folder` makes an empty folder for a number of bytes, which no other user reaches.
        `accelerator` names the model and driver of the device; "" for a CPU.
        """
        self.program = program
        self.most_bytes = most_bytes
        self.folder = folder
        self.traits = HostTraits.of_this_host(program.version, sys.prefix, accelerator)

    def store(
        self,
        stub: StubAccess,
        first_pid: int,
        pids: Sequence[int],
        pipes: Mapping[str, str],
        begun: Mapping[str, str],
        memory_bytes: int,
        secrets_mark: str = "",
        started_as: str = "",
    ) -> PackedImage:
        """Return the image of a stopped tree; `first_pid` is its first process's id inside the
        sandbox.

        `pids` are all processes that the stub sees; `pipes` are those that lead to the host, and
        `begun` the incomplete last lines that came through them. `memory_bytes` is the sum of what
        each process has in memory.
        """
        if min([first_pid, *pids]) <= RESERVED:
            raise CannotStore("its process ids are those of the helpers of a restore")
        self._must_fit(memory_bytes)
        with self._dumped(stub, first_pid, DUMP_S + memory_bytes / BYTES_PER_S) as images:
            try:
                # the files include deleted ones, for example
                self._must_fit(image_folder.size_bytes(images))
                linked_files.name(images, linked_files.root_of(stub.pidfd), pids)
                self._check(images, stub.room, pids)
                facts = ProcessFacts(
                    pid=first_pid,
                    uid=stub.room.uid,
                    pipes=pipes,
                    secrets_mark=secrets_mark,
                    started_as=started_as,
                    traits=self.traits,
                    begun=begun,
                )
                return process_image.pack(images, facts)
            except (BadImage, BadRecord, NoName, process_image.BadProcessImage, OSError) as error:
                raise CannotStore(str(error)) from error

    def _must_fit(self, size_bytes: int) -> None:
        """Raise CannotStore if the image would take memory that other tasks need."""
        most_bytes = min(self.most_bytes, available_bytes() // 2)
        if size_bytes > most_bytes:
            raise CannotStore(
                f"its processes have {size_bytes // MIB} MiB in memory, and this host can store "
                f"{most_bytes // MIB} MiB of them now"
            )

    @contextmanager
    def _dumped(self, stub: StubAccess, first_pid: int, limit_s: float) -> Iterator[Path]:
        """Yield the folder of a dump; a dump that fails by chance is tried again."""
        for left in reversed(range(DUMPS_MOST)):
            with ExitStack() as made:
                try:
                    images = made.enter_context(self.folder(self.most_bytes + _SPARE_BYTES))
                    target = Target(pidfd=stub.pidfd, images=images, limit_s=limit_s)
                    dump_and_restore.dump(
                        self.program, target, pid=first_pid, file_bytes=self.most_bytes
                    )
                except CriuFailed as error:
                    is_by_chance = _BY_CHANCE.search(str(error)) and not error.is_damaged
                    if left and is_by_chance:
                        continue
                    raise CannotStore(str(error), is_damaged=error.is_damaged) from error
                except OSError as error:
                    raise CannotStore(str(error)) from error
                yield images
                return

    def _check(self, images: Path, room: Room, pids: Iterable[int]) -> None:
        tree = image_check.check(image_folder.read(images), self._allowed(room, room.uid))
        if outside := {*pids} - {*tree.threads_of}:
            raise CannotStore(f"process {min(outside)} has outlived its parent")

    def restore(
        self,
        stub: StubAccess,
        image: StoredParts,
        pipes: Mapping[str, int],
        family: Callable[[], Iterator[int]],
        secrets_mark: str = "",
        started_as: str = "",
    ) -> ProcessFacts:
        """Restore the tree below a stub that has no processes; return what its image says of it.

        `family` yields the ids of the restored processes, as this process sees them.  The image of
        another task must have the same `started_as`; "" for an image of the task itself.
        """
        size_bytes = sum(image.sizes)
        limit_s = RESTORE_S + size_bytes / BYTES_PER_S
        with self.folder(size_bytes + _SPARE_BYTES) as images:
            target = Target(pidfd=stub.pidfd, images=images, limit_s=limit_s)
            is_entered = False
            try:
                facts = process_image.read_facts(image)
                if why := process_image.why_not_here(facts.traits, self.traits):
                    raise CannotRestore(why)
                if facts.secrets_mark != secrets_mark:
                    raise CannotRestore("one of its secrets has another value now")
                if started_as and facts.started_as != started_as:
                    raise CannotRestore("the checkpoint is of another program or other parameters")
                process_image.unpack(image, images)
                image_folder.admit(images, self._allowed(stub.room, facts.uid), stub.room.uid)
                given = [Inherited(fd=pipes[name], name=its) for name, its in facts.pipes.items()]
                is_entered = True
                dump_and_restore.restore(self.program, target, given, stub.room.groups)
                self._look_at(family(), stub.room.uid)
            except (
                BadImage,
                process_image.BadProcessImage,
                CriuFailed,
                OSError,
                KeyError,
            ) as error:
                raise CannotRestore(str(error)) from error
            finally:
                if not is_entered:  # refused: the command begins again, and may be stored later
                    with suppress(CriuFailed):
                        dump_and_restore.reserve_pids(self.program, target)
            return facts

    def _look_at(self, family: Iterator[int], uid: int) -> None:
        for pid in family:
            status = Path(f"/proc/{pid}/status").read_text()
            if "State:\tZ" in status:
                continue
            if odd := confinement.oddities(status, uid):
                raise CannotRestore(f"a restored process is not confined: {odd[0]}")

    def _allowed(self, room: Room, uid: int) -> Allowed:
        return Allowed(
            uid=uid,
            machine=self.traits.machine,
            filter_programs=tuple(
                sandbox.filter_program(has_own_network=own) for own in (True, False)
            ),
            shown=tuple(map(str, sandbox.shown_paths(room))),
        )


def available_bytes() -> int:
    """Return how much memory the host can give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CannotStore("its host does not say how much memory is free")
