"""Packs the files that CRIU wrote about a command's processes into one image, and unpacks them for
CRIU.

The image goes into the manifest of the task's checkpoint, beside the working folder of the same
moment. It lies in memory that no process of the task can reach, since its bytes say which rights
the restored processes have. Files of pages are divided by the pages' addresses (`page_chunks`);
every other file of CRIU is one part.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

from workers.criu import image_folder, page_chunks
from workers.criu.image_records import BadRecord

FORMAT = "roundhouse processes 1"
_FEATURES = ("flags", "Features")  # the features of a processor, as /proc/cpuinfo names them
_HEAD_BYTES = 2**20
_MAPPED_MOST = 256  # most files of one image; each mapping keeps its file open


class BadProcessImage(Exception):
    """Raised when an image is not a process image, or cannot be restored on this host; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraits:
    """Lists the traits of a host that must be equal on the host where the processes are
    restored.
    """

    criu: str
    kernel: str
    machine: str
    processor: str
    python: str
    accelerator: str = ""  # model and driver of the device; "" for a CPU device

    @property
    def mark(self) -> str:
        """A word that is equal on two hosts if all traits are equal."""
        said = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    @classmethod
    def of_this_host(cls, criu: str, python: str, accelerator: str = "") -> HostTraits:
        uname = os.uname()
        return cls(
            criu=criu,
            kernel=uname.release,
            machine=platform.machine(),
            processor=_features(Path("/proc/cpuinfo").read_text()),
            python=python,
            accelerator=accelerator,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Adds what CRIU's files do not say: the users of the processes, and the pipes to the host."""

    pid: int  # id of the first process, as seen inside the sandbox
    uid: int
    pipes: Mapping[str, str]  # "stdout" -> its name in /proc/PID/fd
    secrets_mark: str = ""  # differs if a secret of the task has another value
    started_as: str = ""  # differs if the task is another program, or has other parameters
    traits: HostTraits
    # "stdout" -> the incomplete line that it was printing, as Latin-1 text; the rest of the line
    # comes later
    begun: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImage:
    """Holds an image in memory that only this process can reach; its first part is its
    description.
    """

    parts: tuple[memoryview, ...]


class StoredParts(Protocol):
    """Gives the parts of a stored image: each is read on request, and checked before it is
    given.
    """

    @property
    def sizes(self) -> Sequence[int]: ...

    def read(self, part: int) -> bytes: ...

    def read_into(self, write: Callable[[int, int, memoryview], None]) -> None:
        """Call `write` with (part, offset in it, bytes) until all bytes were given, each once.

        Several threads call `write`.
        """


def _features(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _FEATURES:
            return hashlib.sha256(" ".join(sorted(value.split())).encode()).hexdigest()[:16]
    return ""


# --- packing --------------------------------------------------------------------------------------


def pack(folder: Path, facts: ProcessFacts) -> PackedImage:
    """Map the image in a folder; the folder may be removed afterwards. Raises BadProcessImage,
    OSError.
    """
    files = image_folder.read(folder)
    mapped = [name for name in files if name.startswith(image_folder.PAGES)][:_MAPPED_MOST]
    memory = {name: _in_memory(folder / name, is_mapped=name in mapped) for name in files}
    try:
        parts = dict(_parts(files, {name: len(its) for name, its in memory.items()}))
    except BadRecord as error:
        raise BadProcessImage(str(error)) from error
    listed = [[name, cut] for name, cut in parts.items()]
    head = json.dumps({"format": FORMAT, **asdict(facts), "files": listed}).encode()
    if len(head) > _HEAD_BYTES:
        raise BadProcessImage(f"its memory lies in too many pieces, in {len(listed)} files of CRIU")
    found = [memoryview(head)]
    for name, cut in parts.items():
        ends = [*accumulate(cut, initial=0)]
        found += [memory[name][start:end] for start, end in pairwise(ends)]
    return PackedImage(parts=tuple(found))


def _in_memory(path: Path, *, is_mapped: bool) -> memoryview:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size or not is_mapped:
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))


def _parts(files: Mapping[str, bytes], sizes: Mapping[str, int]) -> Iterator[tuple[str, list[int]]]:
    """Yield each file with the sizes of its parts."""
    maps = {
        f"{image_folder.PAGES}{page_chunks.pages_of(data)}.img": data
        for name, data in files.items()
        if name.startswith("pagemap-")
    }
    for name, size in sizes.items():
        if name not in maps:
            yield name, [size]
        else:
            yield name, page_chunks.sizes(page_chunks.cuts(maps[name], size))


# --- unpacking ------------------------------------------------------------------------------------


def read_facts(image: StoredParts) -> ProcessFacts:
    """Return what the image says of its processes; raises BadProcessImage."""
    return _head(image)[0]


def unpack(image: StoredParts, folder: Path) -> None:
    """Write the files of the image into a folder for CRIU; raises BadProcessImage, OSError.

    Each byte is written once, to its place in its file, as soon as its chunk has arrived.
    """
    _, listed = _head(image)
    if [size for _, cut in listed for size in cut] != [*image.sizes[1:]]:
        raise BadProcessImage("its parts are not those of its files")
    places: list[tuple[Path, int]] = []  # file of each part, and where the part begins there
    for name, cut in listed:
        if "/" in name or name in (".", ".."):
            raise BadProcessImage(f"it has a file {name!r:.100}")
        # the file grows as it is written, which is fastest with large pages
        (folder / name).open("xb").close()
        places += [(folder / name, at) for at in [*accumulate(cut, initial=0)][:-1]]

    def write(part: int, at: int, body: memoryview) -> None:
        if part:  # part 0 is the description
            path, begin = places[part - 1]
            with path.open("r+b", buffering=0) as file:
                file.seek(begin + at)
                while body:
                    body = body[file.write(body) :]

    image.read_into(write)


def _head(image: StoredParts) -> tuple[ProcessFacts, list[tuple[str, list[int]]]]:
    if image.sizes[0] > _HEAD_BYTES:
        raise BadProcessImage("its list of files is too large")
    with _as_bad():
        body = json.loads(image.read(0))
        if body.pop("format") != FORMAT:
            raise BadProcessImage("the file does not begin like an image of processes")
        listed = [(str(name), [int(size) for size in cut]) for name, cut in body.pop("files")]
        traits = HostTraits(**body.pop("traits"))
        return ProcessFacts(traits=traits, **body), listed


@contextmanager
def _as_bad() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadProcessImage(f"its description cannot be read: {error!r:.200}") from error


def why_not_here(found: HostTraits, here: HostTraits) -> str:
    """Return the traits of this host that prevent a restore of the processes here; "" if none
    does.
    """
    ours = asdict(here)
    other = [name for name, value in asdict(found).items() if value != ours[name]]
    return f"this host has another {' and '.join(other)}" if other else ""
