"""Checks the image of a command before CRIU reads it.

CRIU is root and trusts an image: the image says which user, which capabilities and which system
call filter a process gets, and which files it has open. So an image passes only if a process of
this command could have had all of this.

Whatever is not listed here is refused. A check never repairs. An error (`BadImage`) names the file
and the reason, for the event of the task.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from workers.criu.image_records import INVENTORY, BadRecord, ImageFile, ImageRecord
from workers.criu.pids import RESERVED

PSTREE, CORE, IDS, FS, FILES = 0x50273030, 0x55053847, 0x54432030, 0x51403912, 0x56303138
SECCOMP, GHOST, MEMFD = 0x64413049, 0x52583605, 0x48453499

#: The files of an image, by the form of their names.  Anything else is refused: images of
#: namespaces, mounts, devices and filters of the network would act on the host.
_NAMES = re.compile(
    r"(inventory|pstree|files|seccomp|remap-fpath|filelocks|pipes-data|fifo-data|sk-queues|memfd"
    r"|(core|mm|pagemap|ids|fs|fdinfo|pages|timens)-(0|[1-9][0-9]{0,9})|pagemap-shmem-[0-9]{1,20}"
    r"|(ghost-file|tcp-stream)-[0-9a-f]{1,8})\.img"
)
# CRIU puts this id into a command for nft
_RUN_ID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VERSION = 1
_MACHINES = {"x86_64": 1, "aarch64": 3}

_ALIVE, _DEAD, _STOPPED, _ZOMBIE = 1, 2, 3, 6
_PERSONALITIES = (0, 0x0040000)  # ADDR_NO_RANDOMIZE
_FILTER_MODE, _FOR_ALL_THREADS = 2, 1
_POLICIES = (0, 3, 5)  # normal, batch and idle; all other policies are of real time
_MAX_PROCESSES = 1024  # threads included, as the layer `limits` sets it
_MOST = {6: 1024, 7: 4096, 4: 0}  # hard limits of RLIMIT_NPROC, RLIMIT_NOFILE, RLIMIT_CORE

_REG, _PIPE, _FIFO, _INETSK, UNIX_SOCKET, _EVENTFD, _EVENTPOLL, _INOTIFY, _SIGNALFD = range(1, 10)
_NETLINK, _TIMERFD, _MEMFD, _PIDFD = 13, 17, 18, 20
_ROUTE = 0  # the protocol of netlink that the sandbox allows
#: Kind of an open file -> (the field of its entry, the field in the entry that has its owner; 0 if
#: none).
KINDS = {
    _REG: (3, 5),
    _PIPE: (18, 4),
    _FIFO: (17, 0),
    _INETSK: (4, 13),
    UNIX_SOCKET: (16, 9),
    _EVENTFD: (8, 3),
    _EVENTPOLL: (9, 3),
    _INOTIFY: (13, 4),
    _NETLINK: (7, 11),
    _SIGNALFD: (10, 3),
    _TIMERFD: (12, 3),
    _MEMFD: (20, 4),
    _PIDFD: (22, 5),
}
_WRITABLE = ("/scratch", "/tmp", "/dev/shm")
_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_ACCESS_MODE = 0o3
_OUTSIDE = 0b111  # flags of a Unix socket whose other end is not in the image
_PROC = re.compile(r"/proc/([1-9][0-9]*)(/.*)?")


class BadImage(Exception):
    """Raised when an image cannot be that of a process of its command; names the file and the
    reason.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Lists what the processes of a command may be and what they may have open.

    `shown` are the paths of the host that every resident sees, read-only; `filter_programs` are the
    system call filters of the sandbox, with and without a network of its own.
    """

    uid: int
    machine: str
    filter_programs: Collection[bytes]
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckedTree:
    """Describes the processes of an image that passed: the root's id, and the threads of each
    process.
    """

    root: int
    threads_of: Mapping[int, tuple[int, ...]]

    @property
    def threads(self) -> frozenset[int]:
        return frozenset(thread for own in self.threads_of.values() for thread in own)


def check(files: Mapping[str, bytes], allowed: Allowed) -> CheckedTree:
    """Check all files of an image except its pages; raises BadImage.

    `files` has every file of the image by name. The content of pages is not read, so it may be
    empty.
    """
    for name in files:
        if not _NAMES.fullmatch(name):
            raise BadImage(name[:100], "an image of a command has no such file")
    reader = _Reader(files)
    tree = _check_tree(reader)
    namespaces = _check_inventory(reader)
    filters = _check_filters(reader, allowed)
    for pid, threads in tree.threads_of.items():
        is_shared = _check_core(reader, pid, allowed, filters)
        for thread in threads[1:]:
            _check_other_core(reader, thread, allowed, None if is_shared else filters)
    paths = _check_files(reader, tree, allowed)
    for pid in tree.threads_of:
        if not _has_ended(reader, pid):
            _check_place(reader, pid, namespaces, paths)
    _check_kept_files(reader, allowed)
    return tree


class _Reader:
    """Reads files of the image; every error names its file."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def records(self, name: str, magic: int, most: int | None = None) -> tuple[ImageRecord, ...]:
        try:
            file = ImageFile.read(self.files[name], magic, records_most=most)
        except KeyError:
            raise BadImage(name, "it is missing") from None
        except BadRecord as error:
            raise BadImage(name, str(error)) from error
        if not file.records:
            raise BadImage(name, "it is empty")
        return file.records

    def names(self, prefix: str) -> Iterator[str]:
        return (name for name in sorted(self.files) if name.startswith(prefix))


# --- processes ------------------------------------------------------------------------------------


def _check_tree(reader: _Reader) -> CheckedTree:
    name = "pstree.img"
    parents: dict[int, int] = {}
    threads_of: dict[int, tuple[int, ...]] = {}
    for record in reader.records(name, PSTREE):
        with _reading(name):
            pid, own = record.number(1), record.numbers(5)
            if len(own) == 1 and _has_ended(reader, pid):
                own = [pid]  # CRIU writes a number that it did not set
            if not own or own[0] != pid or pid in parents:
                raise BadRecord(f"process {pid} is not its own first thread")
            parents[pid], threads_of[pid] = record.number(2), tuple(own)
            # 0 is a session or group that began outside the tree
            groups = {record.number(3), record.number(4)} - {0}
            if any(group <= RESERVED for group in groups):
                raise BadRecord(f"process {pid} is in a group of the stub")
    threads = [thread for own in threads_of.values() for thread in own]
    with _reading(name):
        _check_ids(parents, threads)
    (root,) = (pid for pid, parent in parents.items() if not parent)
    cores = {int(core[5:-4]) for core in reader.names("core-")}
    if cores != {*threads}:
        raise BadImage(name, "its threads are not those of the core files")
    return CheckedTree(root, threads_of)


def _has_ended(reader: _Reader, pid: int) -> bool:
    """True if a process has ended and only waits to be reaped.

    CRIU restores nothing else of such a process.
    """
    name = f"core-{pid}.img"
    (core,) = reader.records(name, CORE)[:1]
    with _reading(name):
        return core.message(3).number(1) in (_DEAD, _ZOMBIE) and not core.has(5)


def _check_ids(parents: dict[int, int], threads: list[int]) -> None:
    if len({*threads}) != len(threads) or len(threads) > _MAX_PROCESSES:
        raise BadRecord("it has too many threads, or one of them twice")
    if any(thread <= RESERVED for thread in threads):
        raise BadRecord(f"an id is not above {RESERVED}")
    if sum(not parent for parent in parents.values()) != 1:
        raise BadRecord("it is not one tree")
    seen: set[int] = set()  # CRIU makes a process after it has read the parent
    for pid, parent in parents.items():
        if parent and parent not in seen:
            raise BadRecord(f"the parent of process {pid} is not there before it")
        seen.add(pid)


def _check_core(reader: _Reader, pid: int, allowed: Allowed, filters: Mapping[int, bool]) -> bool:
    """Check the first thread of a process.

    True if the system call filter is set for all its threads.
    """
    name = f"core-{pid}.img"
    core = _core(reader, name, allowed)
    with _reading(name):
        state = _check_task(core.message(3))
        if state in (_DEAD, _ZOMBIE) and not core.has(5):
            return False
        thread = core.message(5)
        _check_thread(thread, allowed.uid)
        _check_filter(thread, filters)
        return filters[thread.number(12)]


def _check_other_core(
    reader: _Reader, thread: int, allowed: Allowed, filters: Mapping[int, bool] | None
) -> None:
    """Check another thread; without `filters` the first thread sets its filter too."""
    name = f"core-{thread}.img"
    core = _core(reader, name, allowed)
    with _reading(name):
        _check_thread(core.message(5), allowed.uid)
        if filters is not None or core.message(5).has(11):
            _check_filter(core.message(5), filters or {})


def _core(reader: _Reader, name: str, allowed: Allowed) -> ImageRecord:
    records = reader.records(name, CORE)
    with _reading(name):
        if len(records) != 1 or records[0].number(1) != _MACHINES.get(allowed.machine):
            raise BadRecord("it is of another kind of processor")
        return records[0]


def _check_task(task: ImageRecord) -> int:
    """Check what the threads of a process share; return its state."""
    state = task.number(1)
    if state not in (_ALIVE, _DEAD, _STOPPED, _ZOMBIE):
        raise BadRecord(f"its state is {state}")
    if task.number(3) not in _PERSONALITIES:
        raise BadRecord(f"its personality is {task.number(3):#x}")
    if task.number(14, 0) >> 31:
        raise BadRecord("the kernel would rather end other processes when memory is short")
    if task.number(11, _FILTER_MODE) != _FILTER_MODE:
        raise BadRecord("it has no system call filter")
    for limits in task.messages(8):
        for number, limit in enumerate(limits.messages(1)):
            if limit.long_number(2) > _MOST.get(number, 2**64):
                raise BadRecord(f"its limit {number} is above that of the sandbox")
    return state


def _check_thread(thread: ImageRecord, uid: int) -> None:
    creds = thread.message(10)
    if users := {creds.number(field) for field in range(1, 9)} - {uid}:
        raise BadRecord(f"it is of user or group {min(users)} instead of {uid}")
    if any(value for field in (9, 10, 11, 12, 19) for value in creds.numbers(field)):
        raise BadRecord("it has capabilities")
    if groups := creds.numbers(14):
        raise BadRecord(f"it is in group {groups[0]}")
    if creds.number(18, 0) != 1 or creds.number(13):
        raise BadRecord("it could gain privileges")
    if any(creds.has(field) and creds.text(field) for field in (15, 16, 17)):
        raise BadRecord("it has a profile of a security module")
    if thread.number(4, 0) not in _POLICIES or thread.number(5, 0):
        raise BadRecord(f"its scheduling policy is {thread.number(4, 0)}")
    nice = thread.number(3, 0)
    if nice & 1:  # zigzag: an odd number is a negative one
        raise BadRecord("it is scheduled before others")


def _check_filter(thread: ImageRecord, filters: Mapping[int, bool]) -> None:
    if thread.number(11, 0) != _FILTER_MODE or thread.number(12, 0) not in filters:
        raise BadRecord("it has not the system call filter of the sandbox")


def _check_filters(reader: _Reader, allowed: Allowed) -> dict[int, bool]:
    """Return the numbers of the filters that include the filter of the sandbox.

    Each comes with whether it is set for all threads of a process at once. A program may add
    filters; each filter names the one before it.
    """
    name = "seccomp.img"
    good: dict[int, bool] = {}
    (record,) = reader.records(name, SECCOMP, 1)
    with _reading(name):
        filters = record.messages(1)
        for number, each in enumerate(filters):
            before = each.number(2) if each.has(2) else None
            if before is not None and before >= number:
                raise BadRecord("a filter comes before the one that it adds to")
            if before in good or (before is None and each.text(1) in allowed.filter_programs):
                good[number] = bool(each.number(3, 0) & _FOR_ALL_THREADS)
    return good


def _check_inventory(reader: _Reader) -> dict[int, int]:
    """Return the namespaces in which CRIU ran: the number of each, by its field."""
    name = "inventory.img"
    (record,) = reader.records(name, INVENTORY, 1)
    with _reading(name):
        if record.has(1) and record.number(1) not in (_VERSION, _VERSION + 1):
            raise BadRecord(f"the version of the image is {record.number(1)}")
        if record.has(13) and not _RUN_ID.fullmatch(record.text(13)):
            raise BadRecord("the number of the dump is not one")
        if record.number(6, 0) or (record.has(12) and record.text(12)):
            raise BadRecord("it needs a security module or a plugin")
        ids = record.message(3)
        return {field: ids.number(field) for field in _NAMESPACES}


#: Fields of a process's namespaces: pid, net, ipc, uts, mnt, user, cgroup. The time namespace is
#: left out: CRIU makes a new one, so that clocks go on.
_NAMESPACES = range(5, 12)


def _check_place(
    reader: _Reader, pid: int, namespaces: dict[int, int], paths: Mapping[int, str]
) -> None:
    """Check that a process is in no namespace of its own, and has the root of the sandbox."""
    name = f"ids-{pid}.img"
    (ids,) = reader.records(name, IDS)[:1]
    with _reading(name):
        if any(ids.number(field, 0) not in (0, its) for field, its in namespaces.items()):
            raise BadRecord("it is in a namespace of its own")
    name = f"fs-{pid}.img"
    if name not in reader.files:
        return  # the process shares its files with its parent, or has ended
    (place,) = reader.records(name, FS)[:1]
    with _reading(name):
        if paths.get(place.number(2)) != "/":
            raise BadRecord("its root is not that of the sandbox")
        if not paths.get(place.number(1)):
            raise BadRecord("its working folder is not an open file of the image")


# --- files ----------------------------------------------------------------------------------------


def _check_files(reader: _Reader, tree: CheckedTree, allowed: Allowed) -> dict[int, str]:
    """Check all open and mapped files; return the path of each by its number, "" if it has none."""
    name = "files.img"
    paths: dict[int, str] = {}
    for record in reader.records(name, FILES):
        with _reading(name):
            kind = record.number(1)
            if kind not in KINDS:
                raise BadRecord(f"a process of a command has no open file of kind {kind}")
            at, owner = KINDS[kind]
            entry = record.message(at)
            if entry.number(1) != record.number(2):
                raise BadRecord("an open file has two numbers")
            if owner:
                _check_owner(entry.message(owner), allowed.uid)
            if record.number(2) in paths:
                raise BadRecord("two open files have one number")
            paths[record.number(2)] = ""
            if kind == _REG:
                paths[record.number(2)] = _check_path(entry, tree, allowed)
            elif kind == UNIX_SOCKET:
                _check_unix_socket(entry, allowed.uid)
            elif kind == _NETLINK and entry.number(3) != _ROUTE:
                raise BadRecord("a netlink socket would be of another protocol")
    return paths


def _check_owner(owner: ImageRecord, uid: int) -> None:
    """Check the user that sends the signals of a file: CRIU becomes this user for a moment."""
    if owner.number(5) and {owner.number(1), owner.number(2)} != {uid}:
        raise BadRecord("signals of a file would be sent by another user")


def _check_path(entry: ImageRecord, tree: CheckedTree, allowed: Allowed) -> str:
    path = _clean_path(entry.text(6))
    if entry.number(9, 0):
        raise BadRecord(f"{path} would come from outside")
    if _is_below(path, _WRITABLE) or path in _DEVICES:
        return path
    if entry.number(2) & _ACCESS_MODE:
        raise BadRecord(f"{path} would be open for writing")
    proc = _PROC.fullmatch(path)
    if proc and int(proc[1]) not in tree.threads:
        raise BadRecord(f"{path} is of a process outside the tree")
    if not proc and path != "/" and not _is_below(path, ("/code", "/etc", "/dev", *allowed.shown)):
        raise BadRecord(f"{path} is not visible in the sandbox")
    return path


def _check_unix_socket(entry: ImageRecord, uid: int) -> None:
    if entry.number(6) & _OUTSIDE:
        raise BadRecord("a socket would be joined to one outside")
    address = entry.text(11)
    # other addresses are names of the network namespace
    if address and not address.startswith(b"\0"):
        place = _clean_path(entry.text(14)) + "/" if entry.has(14) else ""
        path = _clean_path(place.encode() + address.rstrip(b"\0"))
        if not _is_below(path, _WRITABLE):
            raise BadRecord(f"a socket would be made at {path}")
    for rights in entry.messages(13):
        if {rights.number(2), rights.number(3)} != {uid}:
            raise BadRecord("a socket would be of another user")


def _clean_path(raw: bytes) -> str:
    path = raw.decode("utf-8", "surrogateescape")
    parts = PurePosixPath(path).parts
    if not path.startswith("/") or ".." in parts or "\0" in path or path.startswith("//"):
        raise BadRecord(f"expected a plain absolute path; got {path[:100]!r}")
    return path


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _check_kept_files(reader: _Reader, allowed: Allowed) -> None:
    """Check files whose content is in the image.

    These are files that had no name when the image was made.
    """
    for name in reader.names("ghost-file-"):
        (record,) = reader.records(name, GHOST, 1)
        with _reading(name):
            if {record.number(1), record.number(2)} != {allowed.uid}:
                raise BadRecord("it would be of another user")
            mode = record.number(3)
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or mode & (stat.S_ISUID | stat.S_ISGID):
                raise BadRecord(f"its mode is {mode:o}")
    if "memfd.img" in reader.files:
        for record in reader.records("memfd.img", MEMFD):
            with _reading("memfd.img"):
                if {record.number(2), record.number(3)} != {allowed.uid}:
                    raise BadRecord("it would be of another user")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Put the name of the file before the reason."""
    try:
        yield
    except BadRecord as error:
        raise BadImage(name, str(error)) from error
