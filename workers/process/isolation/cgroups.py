"""Limits with control groups what the residents of a device take of their host.

    <group of the device worker>/roundhouse-<device>-<instance>-<owner>/<resident>

The device worker makes one group for its device, and below it one group for each resident, with
plain file operations.  A resident joins its group before any tenant code runs.  Version 2 has one
hierarchy for all controllers; version 1 has one for each; a hybrid host may have both.  A library
would not help: those for Python support one version, or need systemd's bus.

Each device worker tries once at its start which limits work, as it does with the layers of the
sandbox.  If a limit does not work, the reason is kept.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.core import units
from app.core.model.provisions.resources import CPUS, MEMORY, PROCESSES, exceeded
from workers.process.isolation.group_owners import owned_name, predecessors, remove_orphans

#: Limit -> its controller in version 1 and in version 2; "" if there is none.
CONTROLLERS = {
    "memory": ("memory", "memory"),
    "processes": ("pids", "pids"),
    "cpu": ("cpu", "cpu"),
    "io": ("blkio", "io"),
    "devices": ("devices", ""),
}
CLOSE_S = 2.0
# per resident, threads included; below RLIMIT_NPROC, so that this limit is hit first and reported
PROCESSES_MAX = 1000

# version 2: the device worker's own group, next to those of its residents
_WORKER = "roundhouse-worker"
# version 2: ten times the weight of a thread, so that no tenant starves the device worker
_WORKER_WEIGHT = 1000
_CONTROL_DEVICES = "rwm"
_PERIOD_US = 100_000  # the period for which a quota of processor time counts
# processes of the platform in a resident; they are allowed in addition to the limit of its task
OWN_PROCESSES = 4
_NOTHING: Mapping[str, int] = {}
_TERMINALS = 136  # major number
_NEARLY_BYTES = 2 * 2**20  # a huge page, the largest single charge


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lists the limits for all residents of a device together, and for each resident."""

    device_memory_bytes: int
    resident_memory_bytes: int
    residents_max: int
    threads: int
    nodes: tuple[Path, ...] = ()  # the device nodes that each resident may open
    image_bytes: int = 0  # the part of `resident_memory_bytes` for the image of a resident

    @classmethod
    def of(
        cls,
        *,
        memory_bytes: int,
        host_memory_bytes: int,
        overhead_bytes: int,
        residents_max: int,
        threads: int,
        nodes: Iterable[Path],
    ) -> Bounds:
        """Return limits that allow each resident the whole device, one image, and its own
        overhead.
        """
        shared = memory_bytes + host_memory_bytes
        return cls(
            device_memory_bytes=shared + residents_max * overhead_bytes,
            resident_memory_bytes=shared + overhead_bytes,
            residents_max=residents_max,
            threads=threads,
            image_bytes=host_memory_bytes,
            nodes=tuple(nodes),
        )

    @property
    def task_memory_bytes(self) -> int:
        """The most host memory that a task may ask for as its limit."""
        return self.resident_memory_bytes - self.image_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Toll:
    """Counts what the kernel refused a resident, by its control groups."""

    oom_kills: int = 0
    memory_refused: int = 0  # how often its own limit was reached; version 1: 0 or 1
    forks_refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUsage:
    """Counts the memory and processes of a resident: what it has now, and the most processes that
    it had.

    `memory_bytes` is memory that the kernel cannot take back, so pages of files do not count.
    """

    memory_bytes: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Describes a mounted hierarchy of groups: the group of this process in it, and the limits that
    it enforces.
    """

    version: int
    own: Path
    limits: tuple[str, ...]


# --- the groups of this process -------------------------------------------------------------------


def hierarchies(mountinfo: str, own: str) -> list[Hierarchy]:
    """Return the hierarchies with a used controller, from /proc/self/mountinfo and
    /proc/self/cgroup.

    A hierarchy is left out if this process's group lies above its mounted part (in a container).
    """
    paths = {names: path for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    found = []
    for line in mountinfo.splitlines():
        front, _, back = line.partition(" - ")
        root, point = front.split()[3:5]
        kind, _, options = back.split()[:3]
        if kind == "cgroup2":
            path = _below(point, root, paths.get("", ""))
            limits = tuple(name for name, (_, second) in CONTROLLERS.items() if second)
            found += [Hierarchy(2, path, limits)] if path else []
        elif kind == "cgroup":
            mounted = set(options.split(","))
            names = next((names for names in paths if names and {*names.split(",")} <= mounted), "")
            path = _below(point, root, paths.get(names, "")) if names else None
            limits = tuple(name for name, (first, _) in CONTROLLERS.items() if first in mounted)
            found += [Hierarchy(1, path, limits)] if path and limits else []
    return found


def _below(point: str, root: str, path: str) -> Path | None:
    if not path.startswith("/") or "/.." in path:
        return None
    if root != "/" and path != root and not path.startswith(root + "/"):
        return None
    return Path(point) / (path if root == "/" else path[len(root) :]).lstrip("/")


# --- the groups of a device -----------------------------------------------------------------------


@dataclass
class ControlGroups:
    """Manages the control groups of one device worker. `standing` are the limits that work here."""

    name: str
    bounds: Bounds
    standing: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    parents: list[tuple[Hierarchy, Path]] = field(default_factory=list)
    left: set[Path] = field(default_factory=set)  # groups that could not be removed yet
    # resident -> the limits that its task asked for (`provisions.resources`)
    asked: dict[str, Mapping[str, int]] = field(default_factory=dict)
    disks: Path = Path("/sys/block")
    smaller: dict[str, int] = field(default_factory=dict)  # resident -> its own limit of memory

    @classmethod
    def made(cls, device: str, run: Path, bounds: Bounds) -> ControlGroups:
        """Make the groups of this device, and end the processes that its last worker left.

        Empty groups that killed workers of other devices left are removed, too.
        """
        mountinfo = Path("/proc/self/mountinfo").read_text()
        own = Path("/proc/self/cgroup").read_text()
        groups = cls(name=owned_name(group_name(device, run)), bounds=bounds)
        groups.take(hierarchies(mountinfo, own))
        return groups

    def take(self, found: list[Hierarchy]) -> None:
        """Try each hierarchy; a limit works if all of its steps succeed."""
        self.missing = {name: "this host has no such controller" for name in CONTROLLERS}
        for hierarchy in found:
            parent = _own_group(hierarchy) / self.name
            try:
                handed = _prepare(hierarchy)
                # including the last worker's group: version 1 takes no rules once a group has child
                # groups
                _remove_all(predecessors(parent.parent, self.name))
                remove_orphans(parent.parent)
                parent.mkdir(exist_ok=True)
                if handed:
                    _write(parent / "cgroup.subtree_control", handed)
                standing = self._bound(hierarchy, parent)
                _try_to_join(parent / "probe")
            except OSError as error:
                self.missing |= dict.fromkeys(hierarchy.limits, _reason(hierarchy, error))
                standing = []
            if standing:
                self.parents.append((hierarchy, parent))
            else:  # no limit holds here, so residents need no groups
                self.left |= set() if _remove(parent) else {parent}
            self.standing += standing
        self.standing = [name for name in CONTROLLERS if name in self.standing]
        self.missing = {k: v for k, v in self.missing.items() if k not in self.standing}

    def _bound(self, hierarchy: Hierarchy, parent: Path) -> list[str]:
        """Write the limits of the device; return the limits that were accepted."""
        standing = []
        for name in hierarchy.limits:
            try:
                if name == "devices":  # the residents have rules, each for its own devices
                    _try_rules(parent / "probe")
                _write_all(parent, _of_device(hierarchy.version, name, self.bounds))
            except OSError as error:
                self.missing[name] = _reason(hierarchy, error)
            else:
                standing.append(name)
        if "io" in standing and not _heeds_weights(self.disks):
            standing.remove("io")
            self.missing["io"] = "no disk has the scheduler bfq, and others take no weights"
        return standing

    def limits_cpus(self) -> bool:
        """True if the groups of residents can have a quota of processor time."""
        return any(
            (parent / _quota_file(hierarchy.version)).exists()
            for hierarchy, parent in self.parents
            if "cpu" in hierarchy.limits and "cpu" in self.standing
        )

    def make(
        self,
        resident: str,
        asked: Mapping[str, int] = _NOTHING,
        spare_bytes: int = 0,
        nodes: Iterable[Path] = (),
    ) -> list[str]:
        """Make the groups of one resident, which joins them itself (`join`); return their paths.

        `asked` are the limits of its task, and `nodes` the nodes of its devices.  A task with a
        fraction of the device may have `spare_bytes` less memory than others.  Raises OSError if a
        limit cannot be set.
        """
        made = []
        self.asked[resident] = asked
        most_bytes = self.bounds.resident_memory_bytes - spare_bytes
        shown = (*self.bounds.nodes, *nodes)
        bounds = replace(self.bounds, resident_memory_bytes=most_bytes, nodes=shown)
        if spare_bytes:
            self.smaller[resident] = most_bytes
        for hierarchy, parent in self.parents:
            group = parent / resident
            _remove(group)  # a group left from before would have old counts
            group.mkdir(exist_ok=True)
            self.left.discard(group)  # it is in use again
            for name in hierarchy.limits:
                if name in self.standing:
                    _write_all(group, _of_resident(hierarchy.version, name, bounds, asked))
            made.append(str(group))
        return made

    def toll(self, resident: str) -> Toll:
        """Return what the kernel counted for one resident; its groups must still exist."""
        counted: dict[str, int] = {}
        for _, parent in self.parents:
            counted |= _counts(parent / resident)
        return Toll(
            oom_kills=counted.get("oom_kill", 0),
            memory_refused=counted.get("memory_refused", 0),
            forks_refused=counted.get("forks_refused", 0),
        )

    def usage(self, resident: str) -> GroupUsage:
        """Return what one resident holds, as long as its groups exist."""
        counted: dict[str, int] = {}
        for _, parent in self.parents:
            counted |= _held(parent / resident)
        processes = counted.get("processes", 0)
        return GroupUsage(memory_bytes=counted.get("memory", 0), processes=processes)

    def refused(self, resident: str, *, held_bytes: int = 0) -> str:
        """Return in a sentence what the kernel refused this resident; "" if it refused nothing.

        `held_bytes` is the most memory that it was seen to hold.
        """
        toll, asked = self.toll(resident), self.asked.get(resident, _NOTHING)
        memory, processes = asked.get(MEMORY, 0), asked.get(PROCESSES, 0)
        if toll.oom_kills and toll.memory_refused and memory:
            return f"{exceeded(MEMORY, max(held_bytes, memory), memory)} The kernel ended it."
        if toll.forks_refused and processes:
            return exceeded(PROCESSES, processes, processes)
        if toll.oom_kills and toll.memory_refused:
            usual_bytes = self.bounds.resident_memory_bytes
            most = units.size(self.smaller.get(resident, usual_bytes))
            return (
                f"It used more than {most} of host memory (limit of this device)"
                " and was ended by the kernel."
            )
        if toll.oom_kills:
            most = units.size(self.bounds.device_memory_bytes)
            return (
                f"The tasks on this device together used more than {most} of host memory"
                " (limit of this device); the kernel ended a process of this one."
            )
        if toll.forks_refused:
            return f"It reached {PROCESSES_MAX} processes and threads (limit of this device)."
        return ""

    def remove(self, resident: str) -> None:
        """Remove the groups of a resident that has ended, and kill processes that are left in
        them.
        """
        self.asked.pop(resident, None)
        self.smaller.pop(resident, None)
        self.left |= {parent / resident for _, parent in self.parents}
        self.left = {group for group in self.left if not _remove(group)}

    def close(self) -> None:
        """Remove all groups and kill the processes in them.

        Killed processes take a moment to end, and the kernel does not report an empty group.  The
        next device worker of this name removes what is left after CLOSE_S.
        """
        self.left = _remove_all([*(parent for _, parent in self.parents), *self.left])


def group_name(device: str, run: Path) -> str:
    """Return the name of a device's group.

    It has a hash of the instance, as two instances may have equal device names.
    """
    instance = zlib.crc32(f"{run.absolute()}\0{device}".encode())
    return f"roundhouse-{re.sub(r'[^A-Za-z0-9.-]', '_', device)[:64]}-{instance:08x}"


def join(groups: Iterable[str]) -> None:
    """Enter these groups; called in a new process with one thread.

    Version 1 has a file to move single threads, which takes 0.1 ms at most.  Moving a whole process
    stops forks and exits on the whole host, and takes about 15 ms.
    """
    for group in groups:
        tasks = Path(group) / "tasks"
        _write(tasks if tasks.exists() else Path(group) / "cgroup.procs", "0")


# --- version 2 ------------------------------------------------------------------------------------


def _own_group(hierarchy: Hierarchy) -> Path:
    """Return the group to work in.

    It is the parent if this process has already moved into a group of its own.
    """
    return hierarchy.own.parent if hierarchy.own.name == _WORKER else hierarchy.own


def _prepare(hierarchy: Hierarchy) -> str:
    """Pass the controllers on to child groups (version 2); return the line written for that.

    A group that has processes cannot pass them on. Then this process moves into a group next to
    those of its residents. Other processes in the group stay, and then the kernel refuses.
    """
    if hierarchy.version == 1:
        return ""
    own = _own_group(hierarchy)
    there = (own / "cgroup.controllers").read_text().split()
    wanted = [name for _, name in CONTROLLERS.values() if name in there]
    if not wanted:
        raise FileNotFoundError("no controller was delegated to the group of this device worker")
    handed = " ".join(f"+{name}" for name in wanted)
    try:
        _write(own / "cgroup.subtree_control", handed)
    except OSError:
        (own / _WORKER).mkdir(exist_ok=True)
        _write(own / _WORKER / "cgroup.procs", str(os.getpid()))
        _write(own / "cgroup.subtree_control", handed)
        if "cpu" in wanted:
            _write(own / _WORKER / "cpu.weight", str(_WORKER_WEIGHT))
    return handed


# --- control files --------------------------------------------------------------------------------

#: (file, text to write, True if the limit works without it)
Line = tuple[str, str, bool]


def _of_device(version: int, limit: str, bounds: Bounds) -> list[Line]:
    match limit:
        case "memory":
            return _of_memory(version, bounds.device_memory_bytes)
        case "processes":
            return [("pids.max", str(bounds.residents_max * PROCESSES_MAX), False)]
        case "cpu" if version == 1:
            return [("cpu.shares", str(1024 * bounds.threads), False)]
        case "cpu":
            return [("cpu.weight", str(min(10_000, 100 * bounds.threads)), False)]
        case "io":
            return [(_weight_file(version), "100", False)]
        case _:
            return []


def _of_resident(
    version: int, limit: str, bounds: Bounds, asked: Mapping[str, int] = _NOTHING
) -> list[Line]:
    """Return the lines that set the limits of one resident.

    Shares that are equal for all residents need no line. An image of a task is a copy of its own
    memory or folder, and does not count as its memory. So the kernel's limit leaves room for an
    image, and the supervisor watches the rest.
    """
    if limit == "memory":
        together = [("memory.oom.group", "1", True)] if version == 2 else []
        most = bounds.resident_memory_bytes
        if MEMORY in asked:
            most = min(most, asked[MEMORY] + bounds.image_bytes)
        return _of_memory(version, most) + together
    if limit == "cpu" and CPUS in asked:
        return _of_quota(version, asked[CPUS] * _PERIOD_US // 1000)
    if limit == "processes":
        most = asked.get(PROCESSES, PROCESSES_MAX) + (OWN_PROCESSES if PROCESSES in asked else 0)
        return [("pids.max", str(min(most, PROCESSES_MAX)), False)]
    return _of_devices(bounds.nodes) if limit == "devices" else []


def _quota_file(version: int) -> str:
    return "cpu.cfs_quota_us" if version == 1 else "cpu.max"


def _of_quota(version: int, quota_us: int) -> list[Line]:
    if version == 1:
        return [
            ("cpu.cfs_period_us", str(_PERIOD_US), False),
            ("cpu.cfs_quota_us", str(quota_us), False),
        ]
    return [("cpu.max", f"{quota_us} {_PERIOD_US}", False)]


def _of_memory(version: int, size_bytes: int) -> list[Line]:
    """Return the lines that limit memory and, if swap is counted, forbid it: swapping would slow
    down other tasks.
    """
    if version == 1:
        swap = ("memory.memsw.limit_in_bytes", str(size_bytes), True)
        return [("memory.limit_in_bytes", str(size_bytes), False), swap]
    return [("memory.max", str(size_bytes), False), ("memory.swap.max", "0", True)]


def _weight_file(version: int) -> str:
    return "blkio.bfq.weight" if version == 1 else "io.weight"


def _heeds_weights(disks: Path) -> bool:
    """True if a disk has the scheduler that divides bandwidth by weight."""
    files = disks.glob("*/queue/scheduler")
    return any("[bfq]" in file.read_text() for file in files)


def _of_devices(nodes: tuple[Path, ...]) -> list[Line]:
    lines: list[Line] = [("devices.deny", "a", False)]
    for node in nodes:
        status = node.stat()
        if stat.S_ISCHR(status.st_mode):
            number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            lines.append(("devices.allow", f"c {number} {_CONTROL_DEVICES}", False))
    # terminals of its own, which get their numbers later (`sandbox._give_terminals`)
    lines.append(("devices.allow", f"c {_TERMINALS}:* {_CONTROL_DEVICES}", False))
    return lines


def _counts(group: Path) -> dict[str, int]:
    """Return the event counts of one group, by our names; a hierarchy may lack some of them."""
    found: dict[str, int] = {}
    for name, words in (
        ("memory.events", {"oom_kill": "oom_kill", "max": "memory_refused"}),
        ("memory.oom_control", {"oom_kill": "oom_kill"}),
        ("pids.events", {"max": "forks_refused"}),
    ):
        with suppress(FileNotFoundError):
            for line in (group / name).read_text().splitlines():
                word, _, value = line.partition(" ")
                if word in words:
                    found[words[word]] = int(value)
    with suppress(FileNotFoundError):  # version 1: newer kernels do not count in memory.failcnt
        most = int((group / "memory.max_usage_in_bytes").read_text())
        limit = int((group / "memory.limit_in_bytes").read_text())
        found["memory_refused"] = int(most >= limit - _NEARLY_BYTES)
    return found


#: Rows of memory.stat that count memory which the kernel cannot take back, by version.
_FIXED_MEMORY = {1: ("total_rss", "total_shmem"), 2: ("anon", "shmem")}


def _held(group: Path) -> dict[str, int]:
    """Return the memory that a group holds, and the largest number of processes that it had."""
    found: dict[str, int] = {}
    with suppress(FileNotFoundError):
        lines = (group / "memory.stat").read_text().splitlines()
        rows = dict(line.split(maxsplit=1) for line in lines)
        version = 1 if "total_rss" in rows else 2
        found["memory"] = sum(int(rows.get(name, 0)) for name in _FIXED_MEMORY[version])
    for name in ("pids.current", "pids.peak"):  # older kernels keep no peak
        with suppress(FileNotFoundError):
            found["processes"] = int((group / name).read_text())
    return found


# --- file operations ------------------------------------------------------------------------------


def _write_all(group: Path, lines: list[Line]) -> None:
    for name, text, may_fail in lines:
        try:
            _write(group / name, text)
        except OSError:
            if not may_fail:
                raise


def _write(path: Path, text: str) -> None:
    """Write in one system call, as the kernel takes each write as one command; the file must
    exist.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _try_rules(group: Path) -> None:
    """Set rules for device nodes in a new group; raises OSError."""
    group.mkdir(exist_ok=True)
    _write_all(group, _of_devices(()))


def _try_to_join(group: Path) -> None:
    """Move an idle process of ours into a new group; raises OSError."""
    group.mkdir(exist_ok=True)
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as probe:
        try:
            _write(group / "cgroup.procs", str(probe.pid))
        finally:
            assert probe.stdin is not None
            probe.stdin.close()
    _remove(group)


def _remove_all(parents: Iterable[Path]) -> set[Path]:
    """Remove these groups and their children, which takes at most CLOSE_S; return those that
    remain.
    """
    until_s, left = time.monotonic() + CLOSE_S, set(parents)
    while left and time.monotonic() < until_s:
        for parent in left:
            _sweep(parent)
        left = {parent for parent in left if not _remove(parent)}
        time.sleep(0.01 if left else 0.0)
    return left


def _sweep(parent: Path) -> None:
    with suppress(FileNotFoundError):
        for entry in parent.iterdir():
            if entry.is_dir():
                _remove(entry)


def _remove(group: Path) -> bool:
    """Remove a group and return True.

    If it has processes, kill them, which takes a moment, and return False.
    """
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        with suppress(OSError):  # some processes have ended meanwhile; the next removal tries again
            for pid in map(int, (group / "cgroup.procs").read_text().split()):
                if pid:  # 0 is a process without an id in our namespace
                    os.kill(pid, signal.SIGKILL)
        return False
    return True


def _reason(hierarchy: Hierarchy, error: OSError) -> str:
    return f"{hierarchy.own}: {error.strerror or error}"
