"""Forks the residents of a device from a warm process: torch is imported, tenant code is not.

    supervisor (a thread of the device worker) -> zygote -> (keeper ->) resident

The supervisor's long-lived thread starts the zygote by exec, and the zygote dies with that thread.
All processes that it forks die with it; if one survives, the next device worker finds its record
(`workers.device.processes.resident_records`) and ends it.  The zygote has one thread, so a fork is
safe; a fork takes some milliseconds.  If the kernel allows a PID namespace, the resident is process
1 in its own, and all processes that it started end with it.  A zygote without root gets a PID
namespace only by way of a user namespace: then a `keeper` process in between waits for the resident
and ends like it.

Messages: `begin`, `spawn` and `enter` come in; `ready`, `spawned` and `exited` go back.

Invariant: no message has what belongs to a tenant: variables, words, secrets.  Each resident
inherits the zygote's memory, which keeps traces of all messages before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from app.core.model.provisions.tunnel import FrameKind, frame_of
from workers.criu import pids
from workers.device.processes import resident_records
from workers.hardware.dirty_pages import Unwatchable, Watch
from workers.process import own_packages, volumes
from workers.process.isolation import cgroups, sandbox
from workers.process.isolation.host_mounts import HostMount
from workers.process.isolation.sandbox import Room
from workers.process.wire import FDS_BESIDE, FDS_PER_RESIDENT, ToSupervisor, TrustSeen, Wire

JSON = dict[str, Any]

SPARES_KEPT_S = 10.0  # how long disk space stays reserved for the next resident
_PID = struct.Struct("=q")
_HUGE_BYTES, _MADV_COLLAPSE = 2 * 2**20, 25

# --- the zygote process ---------------------------------------------------------------------------


def main(fd: int, lock_fd: int) -> NoReturn:
    sandbox.die_with_parent()
    import_what_jobs_need()
    must_have_one_thread()
    keep_pages_shared()
    serve(Wire(socket.socket(fileno=fd)), lock_fd)


def import_what_jobs_need() -> None:
    """Import all that jobs need, so that no job waits for it.

    Torch would import its compiler, in about a second, when the first optimizer steps.
    """
    import cloudpickle  # noqa: F401
    import numpy  # noqa: F401

    with _hidden("tqdm"):  # torch.hub takes it where it is installed
        import torch._dynamo  # noqa: F401

    import workers.commands.runner
    import workers.commands.shells.job_shell
    import workers.residents.entry
    import workers.residents.pipeline

    assert workers.commands.runner
    workers.residents.pipeline.prepare()
    workers.residents.entry.put_own_modules_last()


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Let imports not find a package that is no part of the platform.

    A request may bring another version of it, which would have no effect once it is imported.
    """
    sys.modules[package] = None  # type: ignore[assignment]  # as Python's documentation says
    try:
        yield
    finally:
        del sys.modules[package]


def serve(wire: Wire, lock_fd: int) -> NoReturn:
    """Serve the supervisor at the other end of the wire, until the supervisor is gone."""
    if (records := _ready(wire, sys.modules["torch"].__version__)) is not None:
        gc.collect()
        gc.freeze()
        _serve(wire, lock_fd, records)
    os._exit(0)


def keep_pages_shared() -> None:
    """Keep the garbage collector from writing to pages that forks share, and make forks fast."""
    gc.collect()
    gc.freeze()
    gc.disable()
    _lay_on_huge_pages()


def must_have_one_thread() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.stderr.write(f"the zygote has {threads} threads; a fork loses all but one of them\n")


def _ready(wire: Wire, torch_version: str) -> Path | None:
    """Report which sandbox layers work here; return the folder for the records of residents, or
    None if the supervisor is gone.
    """
    wire.wait()
    if not (messages := wire.receive()):
        return None
    (begin,) = messages
    probe = begin["probe"]
    walls, missing = sandbox.try_out(_room(probe)) if probe else ([], {})
    told = {"torch": torch_version, "walls": walls, "missing": missing, "unwatched": _unwatched()}
    wire.send({"is": "ready", **told, "unbounded": _unbounded(probe, walls)})
    return Path(begin["records"])


def _unbounded(probe: JSON | None, walls: list[str]) -> str:
    """Return why the size of scratch folders has no limit here; "" if it has one."""
    room = None if probe is None else _room(probe)
    if room is None or room.template is None:
        return "no file system could be made for it"
    if "files" not in walls:
        return "the sandbox layer 'files' is not in force"
    return volumes.try_out(room.template, room.uid)


def _unwatched() -> str:
    """Return why writes to memory cannot be watched here; "" if they can."""
    try:
        Watch().close()
    except Unwatchable as why:
        return str(why)
    return ""


def _lay_on_huge_pages() -> None:
    """Move the heap to huge pages: a fork mostly copies page tables, which are then smaller.

    A kernel without MADV_COLLAPSE, or without free huge pages, leaves the pages as they are.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        mapped = [line.split() for line in maps]
    for where, may, _, _, _, *of in mapped:
        begin, end = (int(address, 16) for address in where.split("-"))
        begin, end = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
        if may == "rw-p" and of in ([], ["[heap]"]) and begin < end:
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def _room(body: JSON) -> Room:
    return Room(
        code=Path(body["code"]),
        scratch=Path(body["scratch"]),
        uid=body["uid"],
        nodes=tuple(map(Path, body["nodes"])),
        folders=tuple(map(Path, body["folders"])),
        passages=tuple(map(Path, body["passages"])),
        groups=tuple(body["groups"]),
        mounts=tuple(HostMount(*mount) for mount in body["mounts"]),
        environment=Path(body["environment"]) if body["environment"] else None,
        image=Path(body["image"]) if body["image"] else None,
        tmp_bytes=body["tmp_bytes"],
        processes=body["processes"],
        template=Path(body["template"]) if body["template"] else None,
    )


def _serve(wire: Wire, lock_fd: int, records: Path) -> None:
    """Fork on request and report the end of each fork, until the supervisor is gone."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # process id -> (id of the resident, its record); None for a process beside a resident
    children: dict[int, tuple[int, Path] | None] = {}
    spares = volumes.SpareImages()
    while not wire.closed:
        idle_s = SPARES_KEPT_S if spares.fds else None
        ready, _, _ = select.select([wire.fileno(), read], [], [], idle_s)
        if not ready:
            spares.close()
        if read in ready:
            os.read(read, 4096)
        if wire.fileno() in ready:
            for message in wire.receive():
                if message["is"] == "enter":
                    children[_fork_beside(wire, message)] = None
                    continue
                number = FDS_PER_RESIDENT + bool(message["has_egress"])
                fds = [wire.fds.pop(0) for _ in range(number)]
                pid, record = _spawn(wire, message, fds, lock_fd, records, spares)
                children[pid] = message["id"], record
        _report_exits(wire, children)


def _spawn(
    wire: Wire,
    message: JSON,
    fds: list[int],
    lock_fd: int,
    records: Path,
    spares: volumes.SpareImages,
) -> tuple[int, Path]:
    """Fork a resident and record it before it begins; return its process id and its record."""
    sys.stdout.flush()
    sys.stderr.flush()
    waits, begin = os.pipe()
    kept, tell = os.pipe()
    room = _room(message["room"])
    spares.prepare(room.template)
    pid = sandbox.fork(message["walls"])
    if not pid:
        os.close(begin)
        os.close(kept)
        _become(message, room, fds, lock_fd, waits, tell, spares.fds)
    for fd in (*fds, waits, tell):
        os.close(fd)
    inner = _kept_by(kept) or pid
    try:
        pidfd = os.pidfd_open(inner)  # the process waits for us, so the id is certainly its own
        record = resident_records.write_record(records, inner)
    except ProcessLookupError:  # killed at once: then use its parent, our own child
        inner, pidfd = pid, os.pidfd_open(pid)
        record = resident_records.write_record(records, pid)
    with contextlib.suppress(BrokenPipeError):  # the zygote's exit will be reported
        os.write(begin, b"!")
    os.close(begin)
    wire.send({"is": "spawned", "id": message["id"], "pid": inner}, [pidfd])
    os.close(pidfd)
    return pid, record


def _kept_by(fd: int) -> int:
    """Return the resident's process id, if a keeper reports it at `fd`; 0 if there is no keeper.
    Closes `fd`.
    """
    told = os.read(fd, _PID.size)
    os.close(fd)
    return int(_PID.unpack(told)[0]) if told else 0


def _fork_beside(wire: Wire, message: JSON) -> int:
    """Fork a process that enters the sandbox of a resident; return the process id."""
    fds = [wire.fds.pop(0) for _ in range(FDS_BESIDE)]
    pid = os.fork()
    if not pid:
        _go_beside(message, fds)
    for fd in fds:
        os.close(fd)
    return pid


def _report_exits(wire: Wire, children: dict[int, tuple[int, Path] | None]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        if (resident := children.pop(pid)) is None:
            continue
        id, record = resident
        record.unlink(missing_ok=True)
        wire.send({"is": "exited", "id": id, "status": code})


# --- in the forked process ------------------------------------------------------------------------


def _become(
    message: JSON,
    room: Room,
    fds: list[int],
    lock_fd: int,
    waits: int,
    tell: int,
    spares: list[int],
) -> NoReturn:
    """Become the keeper and the resident, or only the resident.

    The resident begins when `waits` becomes readable.
    """
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        sandbox.die_with_parent()
        _redirect(fds)
        walls = message["walls"]
        if os.getpid() != 1:
            sandbox.separate(walls)
            sandbox.die_with_parent()
            if "processes" in walls and (inner := os.fork()):
                _keep(inner, lock_fd, tell)
            sandbox.die_with_parent()
        os.close(tell)
        if not os.read(waits, 1):
            os._exit(sandbox.CANNOT_START)  # the zygote is gone
        if message["last_pid"]:
            pids.begin_above(message["last_pid"])  # inside the sandbox no process may
        if room.template is not None:  # needs a loop device, which its control group denies
            room = replace(room, volume=volumes.mounted(room.template, room.uid, spares))
        os._exit(_live(room, walls, fds, message["sort"]))
    except BaseException as error:
        sys.stderr.write(f"Roundhouse cannot run this job: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(sandbox.CANNOT_START)


def _go_beside(message: JSON, fds: list[int]) -> NoReturn:
    """Enter the sandbox of a resident, and run the inner end of a tunnel there."""
    control, outer, trust, resident, begin = fds
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        sandbox.die_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        close_all_but({0, 1, 2, *fds})
        room, walls = _room(message["room"]), message["walls"]
        cgroups.join(room.groups)
        sandbox.enter(resident, walls)
        if inner := os.fork():
            close_all_but({0, 1, 2, resident})
            _keep_beside(inner, resident)
        sandbox.die_with_parent()
        os.close(resident)
        sandbox.confine(room, walls)
        sandbox.die_with_parent()
        os._exit(_serve_beside(room, walls, control, outer, trust, begin))
    except BaseException as error:
        why = f"no process can be started beside the job: {type(error).__name__}: {error}"
        os.write(outer, frame_of(FrameKind.FAILED, 0, why.encode()))
        os._exit(sandbox.CANNOT_START)


def _keep_beside(inner: int, resident: int) -> NoReturn:
    """Reap the process beside the resident, which as process 1 cannot end before it.

    That process stops its shell while the job is paused. The shell has the same user, so it could
    stop or kill that process, and would run on during the pause. In this case the resident is
    ended, with all in its PID namespace.
    """
    _, status = os.waitpid(inner, os.WUNTRACED)
    if not os.WIFEXITED(status):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(resident, signal.SIGKILL)
    if os.WIFSTOPPED(status):
        os.waitpid(inner, 0)
    os._exit(0)


def _serve_beside(
    room: Room, walls: list[str], control: int, outer: int, trust: int, begin: int
) -> int:
    from workers.commands.shells import job_shell

    _, scratch = room.inside(walls)
    os.chdir(scratch)
    os.environ.update(sandbox.environment(scratch))
    if (environment := room.environment_inside(walls)) is not None:
        own_packages.enter(environment, is_command=True)
    return job_shell.serve(socket.socket(fileno=control), outer, TrustSeen(trust), begin)


def _redirect(fds: list[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fds[3], 1)
    os.dup2(fds[4], 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _keep(inner: int, lock_fd: int, tell: int) -> NoReturn:
    """Wait for the resident and end with its status."""
    os.write(tell, _PID.pack(inner))
    close_all_but({lock_fd})
    _, status = os.waitpid(inner, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _live(room: Room, walls: list[str], fds: list[int], sort: str) -> int:
    """Run the resident's task. `sort` is "command", or "job" for all code from a bundle."""
    from workers.commands import runner
    from workers.process.slab import Slab
    from workers.residents import pipeline

    volume = set() if room.volume is None else {room.volume}
    close_all_but({0, 1, 2, *fds[:3], *fds[5:]} | volume)
    watch = _watch() if sort == "job" else None  # inside the sandbox none can be opened
    if len(fds) > FDS_PER_RESIDENT:
        room = replace(room, egress=fds[FDS_PER_RESIDENT])
        os.environ.update(sandbox.proxy_environment())
    cgroups.join(room.groups)  # join before any tenant code runs, or any of its data is in memory
    _, scratch = room.inside(walls)
    sandbox.enclose(room, walls)
    sandbox.die_with_parent()
    os.chdir(scratch)
    os.environ.update(sandbox.environment(scratch))
    if room.image is not None:
        sandbox.enter_image()
    if (environment := room.environment_inside(walls)) is not None:
        own_packages.enter(environment, is_command=sort == "command")
    sys.dont_write_bytecode = True
    gc.enable()
    control, bulk = ToSupervisor(socket.socket(fileno=fds[0])), socket.socket(fileno=fds[1])
    trust, slab = TrustSeen(fds[2]), Slab(fds[5])
    control.send({"is": "entered"})  # what fails from here on is no fault of the device
    if sort == "command":
        return runner.execute(control, bulk, trust, slab)
    return pipeline.execute(control, bulk, trust, slab, watch)


def _watch() -> Watch | None:
    try:
        return Watch()
    except Unwatchable:
        return None  # reported in `ready`: images are then copied while the job waits


def close_all_but(kept: set[int]) -> None:
    before = -1
    for fd in sorted(kept):
        if fd > before + 1:  # closerange(0, 0) would close all descriptors
            os.closerange(before + 1, fd)
        before = fd
    os.closerange(before + 1, 1 << 20)
