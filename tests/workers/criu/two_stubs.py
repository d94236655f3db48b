"""Dumps a program in one sandbox and restores it in another: a process of its own, as it forks.

    python -m tests.workers.criu.two_stubs REQUEST        with the JSON of `Request`

Both sandboxes have all layers.  Each stands for a host: it has namespaces, a scratch folder and a
user of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from workers.commands import connections
from workers.commands.freezer import Tree
from workers.commands.runner import SETTLES_S
from workers.criu import confinement, dump_and_restore, image_check, image_folder, pids, program
from workers.process.isolation import sandbox
from workers.process.isolation.sandbox import Room

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Request:
    """A program, the moments at which it is moved, and where its sandboxes lie.

    The program does not end before there is the file `/scratch/end`, which it gets after its last
    move.
    """

    criu: str
    argv: list[str]
    files: dict[str, str]
    home: str
    stop_after_s: list[float]
    says_first: bool = False  # the moments count from when the program has written something
    uids: list[int] = field(default_factory=lambda: [261_001, 261_001])
    keep: bool = False  # only dump; the images stay
    is_stopped: bool = True  # when it is dumped


@dataclass(frozen=True)
class Ran:
    """What the program wrote, how it ended, and how long each move took."""

    output: str
    status: int
    dump_s: list[float]
    restore_s: list[float]
    images: list[str]


def run(request: Request) -> Ran:
    """Run the request in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.criu.two_stubs", json.dumps(asdict(request))],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])
    return Ran(**json.loads(done.stdout.splitlines()[-1]))


class Host:
    """A stub below which a program runs or is restored."""

    def __init__(self, request: Request, number: int, scratch: Path | None) -> None:
        self.home = Path(request.home) / f"host{number}"
        self.room = _room(self.home, request, request.uids[min(number, len(request.uids) - 1)])
        if scratch is not None:
            subprocess.run(["cp", "-a", f"{scratch}/.", str(self.room.scratch)], check=True)
            _own(self.room.scratch, self.room.uid)
        self.read, self.write = os.pipe()
        self.pipe = os.readlink(f"/proc/self/fd/{self.write}")
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = sandbox.fork(sandbox.WALLS)
        if not self.pid:
            self.orders.close()
            _serve(theirs, self.room, None if number else request.argv, self.write)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)
        self.answered()

    def order(self, what: str) -> str:
        self.orders.send(what.encode())
        return self.answered()

    def answered(self) -> str:
        said = self.orders.recv(4096).decode()
        if not said.startswith("done"):
            raise AssertionError(said or "the stub ended")
        return said[5:]

    def end(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)


def _room(home: Path, request: Request, uid: int) -> Room:
    code, scratch = home / "code", home / "scratch"
    code.mkdir(mode=0o755, parents=True)
    scratch.mkdir(mode=0o700)
    for name, text in request.files.items():
        (scratch / name).write_text(text)
    _own(scratch, uid)
    return Room(code=code, scratch=scratch, uid=uid)


def _own(folder: Path, uid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)


def _serve(orders: socket.socket, room: Room, argv: list[str] | None, out: int) -> None:
    try:
        sandbox.die_with_parent()
        if argv is not None:
            pids.begin_above(pids.RESERVED)
        sandbox.enclose(room, sandbox.WALLS)
        sandbox.die_with_parent()  # a change of user undoes it
        sandbox.hide_memory()
        tree, first = Tree(is_alone=True), 0
        if argv is not None:
            environ = {**sandbox.ENVIRONMENT, **sandbox.environment(Path("/scratch"))}
            environ |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            first = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ,
                start_new_session=True, cwd="/scratch",
            ).pid  # fmt: skip
        os.close(out)
        orders.send(b"done")
        while order := orders.recv(64).decode():
            orders.send(f"done {_obey(order, tree, first)}".encode())
    except BaseException as error:
        orders.send(f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def _obey(order: str, tree: Tree, first: int) -> object:
    match order.split():
        case ["stop"]:
            tree.freeze(5)
            if not connections.settle(tree, 5, SETTLES_S):
                raise AssertionError(connections.under_way())
            return first
        case ["first"]:
            return first
        case ["look", uid]:
            until_s, count = time.monotonic() + 30.0, len(alive := _alive(tree))
            while len(alive) == count and not _are_stopped(alive) and time.monotonic() < until_s:
                time.sleep(0.01)  # the stop is sent, but a busy processor comes to it later
                alive = _alive(tree)
            odd = [odd for state in alive for odd in confinement.oddities(state, int(uid))]
            stands = len(alive) == count and _are_stopped(alive)
            return "; ".join(odd if stands else [*odd, "it runs"])
        case ["go", "on"]:
            tree.thaw()
        case ["wait", of]:
            while True:
                pid, status = os.waitpid(-1, 0)
                if pid == (int(of) or first):
                    tree.end(5)
                    return os.waitstatus_to_exitcode(status)
    return ""


def _alive(tree: Tree) -> list[str]:
    """Return what the kernel tells of each process of the tree that has not ended."""
    states = (Path(f"/proc/{pid}/status").read_text() for pid in tree.pids())
    return [state for state in states if "State:\tZ" not in state]


def _are_stopped(states: list[str]) -> bool:
    return all("State:\tT" in state for state in states)


def _main(request: Request) -> Ran:
    found, host = program.find(request.criu), Host(request, 0, None)
    output, dump_s, restore_s, images, first = "", [], [], [], 0
    if request.says_first:
        select.select([host.read], [], [], 90)
    for number, after_s in enumerate(request.stop_after_s):
        time.sleep(after_s)
        first = int(host.order("stop" if request.is_stopped else "first")) or first
        folder = Path(request.home) / f"images{number}"
        folder.mkdir()
        images.append(str(folder))
        target = dump_and_restore.Target(pidfd=host.pidfd, images=folder, limit_s=30)
        began = time.monotonic()
        dump_and_restore.dump(found, target, pid=first, file_bytes=2**32)
        dump_s.append(time.monotonic() - began)
        host.end()
        os.close(host.write)
        output += _all_of(host.read)
        if request.keep:
            return Ran(output, 0, dump_s, restore_s, images)
        before, host = host, Host(request, number + 1, host.room.scratch)
        began = time.monotonic()
        image_folder.admit(folder, _allowed(before.room.uid), host.room.uid)
        target = dump_and_restore.Target(pidfd=host.pidfd, images=folder, limit_s=30)
        dump_and_restore.restore(
            found, target, [dump_and_restore.Inherited(fd=host.write, name=before.pipe)]
        )
        restore_s.append(time.monotonic() - began)
        if odd := host.order(f"look {host.room.uid}"):
            raise AssertionError(odd)
        host.order("go on")
    (host.room.scratch / "end").touch()
    os.close(host.write)
    host.orders.send(f"wait {first}".encode())
    output += _all_of(host.read)
    status = int(host.answered())
    host.end()
    return Ran(output, status, dump_s, restore_s, images)


def _allowed(uid: int) -> image_check.Allowed:
    return image_check.Allowed(
        uid=uid,
        machine=os.uname().machine,
        filter_programs=(sandbox.filter_program(has_own_network=True),),
        shown=tuple(map(str, sandbox._shown((), ()))),
    )


def _all_of(fd: int) -> str:
    with os.fdopen(fd, "rb") as file:
        return file.read().decode()


if __name__ == "__main__":
    print(json.dumps(asdict(_main(Request(**json.loads(sys.argv[1]))))))  # noqa: T201
