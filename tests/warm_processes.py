"""A warm process has imported what its forks need, so each of them starts in milliseconds.

A test process asks it, over a socket that its forks may inherit and ask again.  A fork has its own
session.  It ends with the thread that asked for it, and with the warm process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.local.exec_leash import die_with

JSON = dict[str, Any]

ROOT = Path(__file__).parent.parent
_PID, _STATUS = struct.Struct("=q"), struct.Struct("=i")
_BODY_BYTES, _FDS = 2**17, 8
_WORDS_BYTES = 1000  # room for the words that the list of processes shows of a fork


class Warm:
    """The asking end: `main` of a module serves, in a process that starts when it is needed.

    Its forks may ask the warm processes in `asks`, once these have begun, and with `own_ask` the
    same one.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        *,
        own_ask: bool = False,
        asks: Sequence[Warm] = (),
    ) -> None:
        self.module, self.environment = module, environment
        self._own_ask, self._asks = own_ask, asks
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @functools.cached_property
    def _ends(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def ask(self) -> socket.socket:
        """Return the socket to ask at; the process begins if it has not."""
        with self._starting:
            if self._process is None:
                self._process = self._start()
            return self._ends[0]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # its forks die with it
            self._process.wait()
            self._ends[0].close()

    def _start(self) -> subprocess.Popen[bytes]:
        ask, theirs = self._ends
        asked = [ask] if self._own_ask else []
        asked += [warm._ends[0] for warm in self._asks]
        kept = [theirs.fileno(), *(each.fileno() for each in asked)]
        boot = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {self.module} import main;"
        process = subprocess.Popen(
            [sys.executable, "-B", "-c", f"{boot} main(*{kept})", " " * _WORDS_BYTES],
            env=self.environment,
            pass_fds=kept,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        atexit.register(self.close)
        return process


def fork_of(ask: socket.socket, body: JSON, fds: list[int]) -> Forked:
    """Ask the warm process at the other end for a fork that ends with this thread."""
    ends, end = os.pipe()
    vars(_of_thread).setdefault("lifelines", []).append(_Lifeline(end))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(ask, [json.dumps(body).encode()], [theirs.fileno(), ends, *fds])
    theirs.close()
    os.close(ends)
    told, pidfds, _, _ = socket.recv_fds(ours, _PID.size, 1)
    if not pidfds:
        raise RuntimeError(f"the warm process gave no fork for {body}")
    return Forked(_PID.unpack(told)[0], pidfds[0], ours)


_of_thread = threading.local()


class _Lifeline:
    """Closes a pipe when the thread that holds it ends."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Forked:
    """What is used of `subprocess.Popen`, for a process that is not our child."""

    def __init__(self, pid: int, pidfd: int, ended: socket.socket) -> None:
        self.pid, self.returncode = pid, None
        self._pidfd, self._ended = pidfd, ended.detach()

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            told = os.read(self._ended, _STATUS.size)
            self.returncode = _STATUS.unpack(told)[0] if told else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._pidfd)
        close(self._ended)


# --- the warm process -----------------------------------------------------------------------------


@dataclass
class _Fork:
    pid: int
    pidfd: int
    told: socket.socket
    lifeline: int
    death: int  # the signal that it gets when the thread that asked for it ends


class Forks:
    """The forks of this process, which has one thread."""

    def __init__(self, asks: int) -> None:
        self.asks = socket.socket(fileno=asks)
        self.also: dict[int, Callable[[], None]] = {}  # what to do if this can be read
        self._by_pidfd: dict[int, _Fork] = {}
        self._by_lifeline: dict[int, _Fork] = {}

    def serve(self) -> tuple[JSON, list[int]]:
        """Fork on request.  Returns in each fork, with its request and descriptors."""
        while True:
            watched = [self.asks, *self.also, *self._by_lifeline, *self._by_pidfd]
            ready = select.select(watched, [], [])[0]
            for fd in ready:
                if fork := self._by_pidfd.get(fd):
                    self._reap(fork)
                elif fork := self._by_lifeline.get(fd):  # the thread that asked has ended
                    del self._by_lifeline[fd]
                    signal.pidfd_send_signal(fork.pidfd, fork.death)
                    if fork.death == signal.SIGKILL:  # it holds nothing when the next one begins
                        os.waitid(os.P_PIDFD, fork.pidfd, os.WEXITED | os.WNOWAIT)
                elif act := self.also.get(fd):
                    act()
            if self.asks in ready and (asked := self._fork()):
                return asked

    def _reap(self, fork: _Fork) -> None:
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            fork.told.send(_STATUS.pack(os.waitstatus_to_exitcode(status)))
        del self._by_pidfd[fork.pidfd]
        self._by_lifeline.pop(fork.lifeline, None)
        fork.told.close()
        os.close(fork.lifeline)
        os.close(fork.pidfd)

    def _fork(self) -> tuple[JSON, list[int]] | None:
        said, fds, _, _ = socket.recv_fds(self.asks, _BODY_BYTES, _FDS)
        if not said:
            os._exit(0)  # all who could ask are gone; the forks die with this process
        told, lifeline, *given = fds
        body = json.loads(said)
        us, pid = os.getpid(), os.fork()
        if not pid:
            die_with(us, body["death"])
            os.setsid()
            return body, given
        fork = _Fork(pid, os.pidfd_open(pid), socket.socket(fileno=told), lifeline, body["death"])
        self._by_pidfd[fork.pidfd] = self._by_lifeline[lifeline] = fork
        with contextlib.suppress(OSError):  # it died while it asked
            socket.send_fds(fork.told, [_PID.pack(pid)], [fork.pidfd])
        for fd in given:
            os.close(fd)
        return None


def show_as(words: str) -> None:
    """Let the list of processes show these words for this fork."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fields[n - 3]) for n in (48, 49))
    told = words.encode()[: end - begin - 1]
    ctypes.memmove(begin, told.ljust(end - begin, b"\0"), end - begin)


def run_program(body: JSON, outputs: tuple[int, int], kept: set[int]) -> None:
    """Run the module that `body` names, as `python -m` does, in this fork."""
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    for begin, end in itertools.pairwise([2, *sorted(kept), 1 << 20]):
        if begin + 1 < end:
            os.closerange(begin + 1, end)
    os.chdir(body["folder"])
    os.environ.clear()
    os.environ.update(body["env"])
    _, module, *arguments = body["words"]
    show_as(" ".join([sys.executable, *body["words"]]))
    sys.argv = [module, *arguments]
    gc.enable()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
