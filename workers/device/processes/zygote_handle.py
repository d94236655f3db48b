"""Starts and ends the zygote of a device, the process that forks its residents."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from workers.process.isolation.sandbox import ENVIRONMENT, Room
from workers.process.wire import FDS_PER_RESIDENT, Wire, pair

JSON = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
_BOOT = "import sys; sys.path.insert(0, {root!r}); from workers.{module} import main; main{fds}"
_KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "ATEN_CPU_CAPABILITY",
)


class ZygoteProcess(Protocol):
    """The process of a zygote: a program of its own, or a fork of the host zygote."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def wait(self) -> object: ...
    def send_signal(self, sig: int) -> None: ...


def start_zygote(fd: int, lock_fd: int, variables: Mapping[str, str]) -> ZygoteProcess:
    """Start a process of `workers.zygote` that serves at `fd` and holds the lock.

    `variables` are those of its device (`workers.process.isolation.device_access`). Without any,
    the process is a fork of the host zygote (`workers.host_zygote`).
    """
    if not variables:
        return HOST_ZYGOTE.fork(fd, lock_fd)
    return _program("zygote", (fd, lock_fd), variables)


def _program(
    module: str, fds: tuple[int, ...], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-B", "-c", _BOOT.format(root=str(ROOT), module=module, fds=fds)],
        env=zygote_environment(variables),
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the supervisor, which drains first
        cwd="/",
    )


class HostZygote:
    """Asks the process of `workers.host_zygote` for zygotes, for all supervisors of the worker.

    It starts that process when the first zygote is asked for, and anew if it died.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asks: Wire | None = None

    def fork(self, fd: int, lock_fd: int) -> ForkedZygote:
        """Ask for a zygote that serves at `fd` and holds the lock; the process comes later."""
        with self._lock:
            if self._asks is None or self._asks.wait(0):  # it says nothing, so this is its end
                self._begin()
            assert self._asks is not None
            self._asks.send({"is": "fork"}, [fd, lock_fd])
        return ForkedZygote()

    def _begin(self) -> None:
        if self._asks is not None:
            self._asks.close()
        self._asks, theirs = pair()
        begun = threading.Event()
        threading.Thread(target=_keep, args=(theirs, begun), daemon=True).start()
        begun.wait()


def _keep(theirs: socket.socket, begun: threading.Event) -> None:
    """Start the host zygote, and live as long as it: it dies with the thread that starts it."""
    try:
        process = _program("host_zygote", (theirs.fileno(),), {})
    finally:
        theirs.close()
        begun.set()
    process.wait()


class ForkedZygote:
    """A zygote that the host zygote forks. It has no `pid` before it says that it was forked."""

    def __init__(self) -> None:
        self.pid, self._pidfd = 0, -1

    def forked(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Send a signal; a zygote that is not there yet ends when its wire is closed."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def wait(self) -> None:
        """Wait for its end; only the host zygote could learn its status."""
        if self._pidfd >= 0:
            poll = select.poll()  # select takes no descriptor above 1,023
            poll.register(self._pidfd, select.POLLIN)
            poll.poll()
            os.close(self._pidfd)
            self._pidfd = -1


HOST_ZYGOTE = HostZygote()


class Zygote:
    """The process of `workers.zygote`.  It dies with the worker."""

    def __init__(
        self, *, lock_fd: int, probe: Room | None, records: Path, variables: Mapping[str, str]
    ) -> None:
        self.wire, theirs = pair()
        self.is_ready = False
        self.process = start_zygote(theirs.fileno(), lock_fd, variables)
        theirs.close()
        tried = None if probe is None else _room(probe)
        self.wire.send({"is": "begin", "probe": tried, "records": str(records)})

    def forked(self, pid: int, pidfd: int) -> None:
        """Take the process that the host zygote has forked."""
        assert isinstance(self.process, ForkedZygote)
        self.process.forked(pid, pidfd)

    def spawn(
        self, id: int, room: Room, walls: list[str], fds: list[int], sort: str, last_pid: int = 0
    ) -> None:
        """Have the zygote fork a resident.

        The caller closes its `fds` (`wire.FDS_PER_RESIDENT`). With `last_pid`, all processes that
        the resident starts have higher ids.
        """
        body = {"is": "spawn", "id": id, "room": _room(room), "walls": walls, "sort": sort}
        body["last_pid"] = last_pid
        body["has_egress"] = len(fds) > FDS_PER_RESIDENT
        self.wire.send(body, fds)

    def enter(self, room: Room, walls: list[str], fds: list[int]) -> None:
        """Have the zygote start an inner end of a tunnel beside a resident.

        The caller closes its `fds` (`wire.FDS_BESIDE`).
        """
        self.wire.send({"is": "enter", "room": _room(room), "walls": walls}, fds)

    def end(self) -> None:
        """Kill the zygote, and with it all processes that it forked."""
        self.process.kill()
        self.process.wait()
        self.wire.close()


def _room(room: Room) -> JSON:
    template = "" if room.template is None else str(room.template)
    return {
        "code": str(room.code),
        "scratch": str(room.scratch),
        "uid": room.uid,
        "nodes": [os.fspath(node) for node in room.nodes],
        "folders": [os.fspath(folder) for folder in room.folders],
        "passages": [os.fspath(folder) for folder in room.passages],
        "groups": room.groups,
        "mounts": [[mount.root, mount.below, mount.target] for mount in room.mounts],
        "environment": "" if room.environment is None else str(room.environment),
        "image": "" if room.image is None else str(room.image),
        "tmp_bytes": room.tmp_bytes,
        "processes": room.processes,
        "template": template,
    }


def zygote_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the zygote's environment: its device, and where programs and libraries lie; no
    secrets.
    """
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, **variables, **ENVIRONMENT, "HOME": "/nonexistent"}
