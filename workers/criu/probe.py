"""Tries out, when a device starts, whether processes of commands can be stored and restored here.

A tiny program is started in a sandbox with all layers, stopped, dumped, killed, and restored in a
second sandbox, where it must go on with its old memory. This takes about 0.4 s. The answer is the
first failure: a missing program, a missing layer or right, or the message of CRIU.

It runs as a program of its own, since it forks: `Trial` starts it and bounds its time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from workers.criu import confinement, dump_and_restore, enter, pids, program
from workers.process.isolation import sandbox
from workers.process.isolation.detached_mounts import memory_folder
from workers.process.isolation.sandbox import Room

JSON = dict[str, Any]

TRY_S = 20.0  # time limit of the trial

_STAGE_S = 8.0
_ROOT = Path(__file__).resolve().parents[2]
_BOOT = "import sys; sys.path.insert(0, {root!r}); from workers.criu.probe import main; main()"
_STATUS = Path("/proc/self/status")
#: The tiny program keeps a value in memory, and waits for a line on a pipe of the host.
_TINY = ("/bin/sh", "-c", "kept=4711; echo begun; read line; echo $kept $line")
# the right, and what CRIU says without it
_LIMITS, _READS_LIMITS = "SYS_RESOURCE", "Can't get rlimit"
_IMAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Found:
    """Reports what the trial found: the version of a CRIU that works here, or why there is none."""

    version: str = ""
    missing: str = ""


class CannotMove(Exception):
    """Raised when the trial fails; says which part is missing."""


# --- on the side of the device worker -------------------------------------------------------------


class Trial:
    """Runs the trial once; `end`, from another thread, ends it early."""

    def __init__(self, named: str, room: Room, walls: list[str]) -> None:
        self._named, self._walls = named, walls
        self._body = {"walls": walls, "room": _room_as_json(room)}
        self.program: program.CriuProgram | None = None  # the program that was tried
        self._lock = Lock()
        self._child: subprocess.Popen[str] | None = None
        self._is_over = False

    def run(self) -> Found:
        """Return what was found; this never raises and takes at most `TRY_S`."""
        try:
            check_rights(_STATUS.read_text(), self._walls)
            found = self.program = program.find(self._named)
        except (CannotMove, program.NoProgram, OSError) as error:
            return Found(missing=str(error))
        child = self._started(found)
        if child is None:
            return Found(missing="the device worker ends")
        try:
            said, errors = child.communicate(timeout=TRY_S)
        except subprocess.TimeoutExpired:
            child.kill()  # the processes that it started die with it
            child.communicate()
            return Found(missing=f"the trial took longer than {TRY_S:g} s")
        try:
            return Found(**json.loads(said))
        except (ValueError, TypeError):
            told = errors.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
            return Found(missing=f"the trial ended with: {told[0]}")

    def _started(self, found: program.CriuProgram) -> subprocess.Popen[str] | None:
        body = {**self._body, "program": found.as_json()}
        with self._lock:
            if not self._is_over:
                self._child = subprocess.Popen(
                    [sys.executable, "-B", "-c", _BOOT.format(root=str(_ROOT)), json.dumps(body)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                    text=True,
                    start_new_session=True,
                )
            return self._child

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._child is not None:
                self._child.kill()


def _room_as_json(room: Room) -> JSON:
    paths = ("nodes", "folders")
    return {
        "code": str(room.code),
        "scratch": str(room.scratch),
        "uid": room.uid,
        "tmp_bytes": room.tmp_bytes,
        **{name: [str(path) for path in getattr(room, name)] for name in paths},
    }


# --- the trial ------------------------------------------------------------------------------------


def main() -> NoReturn:
    body = json.loads(sys.argv[1])
    sandbox.die_with_parent()
    given = body["room"]
    room = Room(
        code=Path(given["code"]),
        scratch=Path(given["scratch"]),
        uid=given["uid"],
        tmp_bytes=given["tmp_bytes"],
        nodes=tuple(map(Path, given["nodes"])),
        folders=tuple(map(Path, given["folders"])),
    )
    found = program.CriuProgram.from_json(body["program"])
    answer = _answer(found, room, body["walls"])
    os.write(1, json.dumps(asdict(answer)).encode())
    os._exit(0)


def _answer(found: program.CriuProgram, room: Room, walls: list[str]) -> Found:
    try:
        with memory_folder(_IMAGE_BYTES) as images, ExitStack() as stack:
            _trial(found, room, walls, images, stack)
    except (CannotMove, dump_and_restore.CriuFailed, OSError) as error:
        return Found(missing=f"{_hint(str(error))}{error}")
    return Found(version=found.version)


def _hint(error: str) -> str:
    return f"the device worker lacks CAP_{_LIMITS}; " if _READS_LIMITS in error else ""


def check_rights(status: str, walls: list[str]) -> None:
    """Raise CannotMove if `status`, of this process, lacks what CRIU needs."""
    if lacking := [name for name in sandbox.WALLS if name not in walls]:
        raise CannotMove(f"the sandbox has no layer {lacking[0]!r} here")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    if fields["Uid"].split()[1] != "0":
        raise CannotMove("the device worker is not root")
    effective = int(fields["CapEff"], 16)
    lacking = [name for name, bit in enter.RIGHTS.items() if not effective >> bit & 1]
    if {*lacking} - {_LIMITS}:
        raise CannotMove(f"the device worker lacks {', '.join(f'CAP_{name}' for name in lacking)}")
    if fields.get("Seccomp", "0").strip() != "0":
        raise CannotMove(
            "the device worker runs below a system call filter, and such a process may not store "
            "others that have one"
        )


def _trial(
    found: program.CriuProgram, room: Room, walls: list[str], images: Path, stack: ExitStack
) -> None:
    first, second = _Pipes(stack), _Pipes(stack)
    with _Stub(room, walls, first, starts=True) as stub:
        first.expect("begun")
        stub.order("stop")
        names = [(fd, os.readlink(f"/proc/self/fd/{fd}")) for fd in first.inner]
        target = dump_and_restore.Target(pidfd=stub.pidfd, images=images, limit_s=_STAGE_S)
        dump_and_restore.dump(found, target, pid=pids.RESERVED + 1, file_bytes=_IMAGE_BYTES)
    inherited = [
        dump_and_restore.Inherited(fd=ours, name=name)
        for ours, (_, name) in zip(second.inner, names, strict=True)
    ]
    with _Stub(room, walls, second, starts=False) as stub:
        target = dump_and_restore.Target(pidfd=stub.pidfd, images=images, limit_s=_STAGE_S)
        dump_and_restore.restore(found, target, inherited)
        stub.order("look")
        stub.order("go on")
        second.write("again")
        second.expect("4711 again")
        stub.order("end")


class _Pipes:
    """The two pipes to a tiny program."""

    def __init__(self, stack: ExitStack) -> None:
        self.inner_in, self._write = os.pipe()
        self._read, self.inner_out = os.pipe()
        for fd in (*self.inner, self._write, self._read):
            stack.callback(os.close, fd)

    @property
    def inner(self) -> tuple[int, int]:
        return self.inner_in, self.inner_out

    def write(self, line: str) -> None:
        os.write(self._write, f"{line}\n".encode())

    def expect(self, line: str) -> None:
        ready, _, _ = select.select([self._read], [], [], _STAGE_S)
        said = os.read(self._read, 4096).decode("utf-8", "replace").strip() if ready else "nothing"
        if said != line:
            raise CannotMove(f"the tiny program of the trial said {said!r} instead of {line!r}")


class _Stub:
    """Process 1 of a sandbox with all layers; it starts the tiny program or waits for it."""

    def __init__(self, room: Room, walls: list[str], pipes: _Pipes, *, starts: bool) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = sandbox.fork(walls)
        if not self.pid:
            self._ours.close()
            _serve(theirs, room, walls, pipes if starts else None)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)
        self._ours.settimeout(_STAGE_S)

    def __enter__(self) -> _Stub:
        self._answered()
        return self

    def order(self, what: str) -> None:
        self._ours.send(what.encode())
        self._answered()

    def _answered(self) -> None:
        try:
            said = self._ours.recv(4096).decode()
        except TimeoutError:
            said = "a sandbox of the trial did not answer"
        if said != "done":
            raise CannotMove(said or "a sandbox of the trial ended")

    def __exit__(self, *of: object) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self._ours.close()


def _serve(orders: socket.socket, room: Room, walls: list[str], pipes: _Pipes | None) -> NoReturn:
    """Be the stub: enter the sandbox, start the tiny program, and obey."""
    try:
        sandbox.die_with_parent()
        if pipes is not None:
            pids.begin_above(pids.RESERVED)
        sandbox.enclose(room, walls)
        sandbox.die_with_parent()
        if not os.access("/proc/self/stat", os.R_OK):
            raise CannotMove("the sandbox has no /proc here")
        if pipes is not None:
            begin, end = pipes.inner
            subprocess.Popen(_TINY, stdin=begin, stdout=end, stderr=end, start_new_session=True)
        orders.send(b"done")
        while order := orders.recv(64):
            _obey(order.decode(), room.uid)
            orders.send(b"done")
    except BaseException as error:
        with suppress(OSError):
            orders.send(f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def _obey(order: str, uid: int) -> None:
    match order:
        case "look":
            for pid in _others():
                if odd := confinement.oddities(Path(f"/proc/{pid}/status").read_text(), uid):
                    raise CannotMove(f"a restored process is not confined: {odd[0]}")
        case "stop":
            os.kill(-1, signal.SIGSTOP)
            for pid in _others():
                os.waitpid(pid, os.WUNTRACED)
        case "go on":
            os.kill(-1, signal.SIGCONT)
        case "end":
            _, status = os.waitpid(-1, 0)
            if status:
                raise CannotMove(f"the tiny program of the trial ended with status {status}")


def _others() -> list[int]:
    """Return all processes of the sandbox except this one, which is process 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
