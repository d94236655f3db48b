"""One warm process of this test process forks the zygotes of all its devices.

A zygote of a device worker starts as a fresh interpreter and imports torch, which takes seconds.
The warm process does so once, in the environment of a zygote, and then forks a zygote for each
supervisor that asks.  Such a zygote has its own session, wire and lock.  It too ends with the
thread that asked for it, with its wire, or when it is killed.  The first zygote tries the sandbox
layers out; if all work, the others report the same.  Each resident still applies every layer.
Tests of the start itself use the fixture `fresh_zygotes`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn
from unittest import mock

from workers.device.processes import zygote_handle
from workers.process.isolation.sandbox import Room

ROOT = Path(__file__).parent.parent.parent
_ID = struct.Struct("=q")
_KIND_BYTES = 64
_start_fresh = zygote_handle.start_zygote


@contextlib.contextmanager
def forked_from_a_warm_process() -> Iterator[None]:
    """All zygotes of this process's supervisors are forks of one warm process."""
    warm = _Warm()
    with mock.patch.object(zygote_handle, "start_zygote", warm.start_zygote):
        yield
    warm.close()


@contextlib.contextmanager
def started_afresh() -> Iterator[None]:
    """Each zygote starts as it does in a device worker."""
    with mock.patch.object(zygote_handle, "start_zygote", _start_fresh):
        yield


class _Warm:
    """The test process's end: asks for zygotes, from any thread."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._of_thread = threading.local()
        self._environment = zygote_handle.zygote_environment({})

    def start_zygote(
        self, fd: int, lock_fd: int, variables: Mapping[str, str]
    ) -> _ForkedZygote | subprocess.Popen[bytes]:
        """Fork a zygote; in another environment than the warm process's, start it afresh."""
        if zygote_handle.zygote_environment(variables) != self._environment:
            return _start_fresh(fd, lock_fd, variables)
        ends, end = os.pipe()
        lifelines = vars(self._of_thread).setdefault("lifelines", [])
        lifelines.append(_Lifeline(end))
        with self._one_at_a_time:
            ask = self._started[1]
            socket.send_fds(ask, [b"!"], [fd, lock_fd, 1, 2, ends])
            told, (pidfd,), _, _ = socket.recv_fds(ask, _ID.size, 1)
        os.close(ends)
        return _ForkedZygote(_ID.unpack(told)[0], pidfd)

    @functools.cached_property
    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "from tests.workers.warm_zygotes import main; main({})"
        boot = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code.format(theirs.fileno())}"
        process = subprocess.Popen(
            [sys.executable, "-B", "-c", boot],
            env=self._environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        return process, ours

    def close(self) -> None:
        if "_started" in vars(self):
            process, ask = self._started
            ask.close()
            process.wait(timeout=90)


class _Lifeline:
    """Closes a pipe when the thread that holds it ends."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class _ForkedZygote:
    """What a supervisor uses of `subprocess.Popen`, for a process that is not our child."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        select.select([self._pidfd], [], [])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._pidfd)


# --- the warm process -----------------------------------------------------------------------------


def main(fd: int) -> NoReturn:
    """Fork zygotes on request until the test process is gone."""
    from workers import zygote

    zygote.import_what_jobs_need()
    zygote.keep_pages_shared()
    _Forks(socket.socket(fileno=fd)).serve()


class _Forks:
    """The zygotes that the warm process has forked."""

    def __init__(self, asks: socket.socket) -> None:
        self.asks = asks
        self.pids: dict[int, int] = {}  # by pidfd
        self.lifelines: dict[int, int] = {}  # by read end of a thread's pipe: its zygote's pidfd
        self.told, self.tell = os.pipe()  # from a zygote: a kind of room, if every layer works

    def serve(self) -> NoReturn:
        works_for = set[bytes]()
        while True:
            ready, _, _ = select.select([self.asks, self.told, *self.lifelines, *self.pids], [], [])
            for pidfd in self.pids.keys() & ready:
                self._reap(pidfd)
            for lifeline in self.lifelines.keys() & ready:  # the zygote's supervisor has ended
                signal.pidfd_send_signal(self.lifelines[lifeline], signal.SIGKILL)
                os.waitid(os.P_PIDFD, self.lifelines[lifeline], os.WEXITED | os.WNOWAIT)
            if self.told in ready:
                works_for.add(os.read(self.told, _KIND_BYTES))
            if self.asks in ready:
                self._fork(works_for)

    def _reap(self, pidfd: int) -> None:
        os.waitpid(self.pids.pop(pidfd), 0)
        lifeline = next(end for end, of in self.lifelines.items() if of == pidfd)
        del self.lifelines[lifeline]
        os.close(lifeline)
        os.close(pidfd)

    def _fork(self, works_for: set[bytes]) -> None:
        said, fds, _, _ = socket.recv_fds(self.asks, 1, 5)
        if not said:
            os._exit(0)  # all zygotes die with this process
        *given, lifeline = fds
        pid = os.fork()
        if not pid:
            _become_zygote(given, self.tell, works_for)
        pidfd = os.pidfd_open(pid)
        self.pids[pidfd], self.lifelines[lifeline] = pid, pidfd
        socket.send_fds(self.asks, [_ID.pack(pid)], [pidfd])
        for fd in given:
            os.close(fd)


def _become_zygote(given: list[int], tell: int, works_for: set[bytes]) -> NoReturn:
    from workers import zygote
    from workers.process.isolation import sandbox

    try:
        sandbox.die_with_parent()
        os.setsid()
        fd, lock_fd, out, err = given
        os.dup2(out, 1)
        os.dup2(err, 2)
        zygote.close_all_but({0, 1, 2, fd, lock_fd, tell})
        _try_out_once(tell, works_for)
        zygote.serve(fd, lock_fd)
    except BaseException as error:
        sys.stderr.write(f"a forked zygote ended: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def _kind_of(room: Room) -> bytes:
    """Return what decides which layers work, and whether a volume does."""
    own = zlib.crc32(repr((room.nodes, room.folders)).encode())
    said = [own, room.uid == os.geteuid()]
    if room.template is not None:
        about = room.template.stat()
        said += [about.st_dev, about.st_size]
    return " ".join(map(str, said)).encode().ljust(_KIND_BYTES)


def _try_out_once(tell: int, works_for: set[bytes]) -> None:
    """Let this zygote try layers and volume out only if none did for the same kind of room."""
    from workers.process import volumes
    from workers.process.isolation import sandbox

    try_layers, try_volume = sandbox.try_out, volumes.try_out
    kind = b""  # of the room, once every layer was tried and works

    def layers(room: Room) -> tuple[list[str], dict[str, str]]:
        nonlocal kind
        sought = _kind_of(room)
        walls, missing = (list(sandbox.WALLS), {}) if sought in works_for else try_layers(room)
        kind = b"" if missing else sought
        return walls, missing

    def volume(template: Path, uid: int) -> str:
        if kind in works_for:
            return ""
        why = try_volume(template, uid)
        if kind and not why:
            os.write(tell, kind)
        return why

    sandbox.try_out, volumes.try_out = layers, volume
