"""Runs CRIU on the processes below a stub: dumps them, or restores them below another stub.

The caller is root, on the side of the device worker: it is never a process of the sandbox. The
processes must be stopped, and the stub must wait. A dump leaves the processes as they are; if it
fails, `is_damaged` says whether they can still run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.criu import enter, network_lock, pids
from workers.criu.image_records import INVENTORY, ImageFile
from workers.criu.program import CriuProgram

JSON = dict[str, Any]

LOG, ERRORS = "criu.log", "criu.err"
# extra seconds after which a helper is killed that did not keep the time limit itself
_MORE_S = 5.0
_BOTH = ("--ghost-limit", "1G", "--file-locks", "--link-remap", "--manage-cgroups=ignore")
_SOCKETS = ("--tcp-established", "--network-lock", "nftables")
_ERROR = re.compile(r"Error \([^)]*\): (.+)")
_HARMLESS = ("tun: ", "rlimit: Can't setup RLIMIT_NOFILE")  # CRIU goes on after these warnings
_WAITS = "Timeout reached. Try to interrupt"  # CRIU gives a process 10 s to stop
_SAID_BYTES = 300
_DUMP_ID = 13  # field of CRIU's inventory
_DROPPED = "Read queue is dropped for socket"  # CRIU goes on without what it has read there


class CriuFailed(Exception):
    """Raised when CRIU fails.

    `is_damaged`: CRIU was killed while it held the processes.
    """

    def __init__(self, told: str, *, is_damaged: bool = False) -> None:
        super().__init__(told)
        self.is_damaged = is_damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The stub whose namespaces CRIU enters, and the folder of the images."""

    pidfd: int
    images: Path
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """Names a descriptor of ours that replaces a pipe or socket of the dumped processes."""

    fd: int
    name: str  # as in /proc/PID/fd: pipe:[INODE] or socket:[INODE]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    words: list[str]
    file_bytes: int = 0
    groups: tuple[str, ...] = ()  # control groups of the restored processes
    last_pid: int = 0  # 0: leave it to the kernel which id the next process gets
    inherited: list[int] = field(default_factory=list)
    # the id of the dump whose connections are restored in a locked network; "" if it has none
    locked_for: str = ""


def dump(program: CriuProgram, target: Target, *, pid: int, file_bytes: int) -> None:
    """Write the images of a stopped tree; `pid` is its root's id inside the sandbox."""
    words = ["dump", "-t", str(pid), "--leave-running", *_BOTH, *_SOCKETS]
    _run(program, target, _Request(words=words, file_bytes=file_bytes))
    if _DROPPED in _log_of(target):
        raise CriuFailed("dump: a datagram that came late is not read yet")


def restore(
    program: CriuProgram,
    target: Target,
    inherited: Iterable[Inherited] = (),
    groups: tuple[str, ...] = (),
) -> None:
    """Restore a tree below a stub that has no processes; the tree's root becomes the stub's child.

    The tree is in the control groups `groups`, not in those of the device worker. The tree is
    stopped, even if it ran when CRIU dumped it: it may not run before it is checked.
    """
    given = list(inherited)
    words = ["restore", "-d", "--leave-stopped", *_BOTH, *_SOCKETS]
    for each in given:
        words += ["--inherit-fd", f"fd[{each.fd}]:{each.name}"]
    fds = [each.fd for each in given]
    request = _Request(
        words=words,
        groups=groups,
        last_pid=pids.RESERVED,
        inherited=fds,
        locked_for=_dump_with_connections(target.images),
    )
    _run(program, target, request)


def _dump_with_connections(images: Path) -> str:
    """Return the id of the dump if it has TCP connections; "" if not."""
    if not any(images.glob("tcp-stream-*.img")):
        return ""
    inventory = ImageFile.read((images / "inventory.img").read_bytes(), INVENTORY, records_most=1)
    return inventory.records[0].text(_DUMP_ID).decode("ascii")


def reserve_pids(program: CriuProgram, target: Target) -> None:
    """Have a stub without processes leave its lowest process ids to helpers, as `restore` does."""
    _run(program, target, _Request(words=["--version"], last_pid=pids.RESERVED))


def _run(program: CriuProgram, target: Target, request: _Request) -> None:
    verb = request.words[0]
    with ExitStack() as opened:
        folders = _opened(program, target, opened)
        argv = _argv(program, folders)
        images = f"/proc/self/fd/{folders['images']}"
        argv += [*request.words, "-D", images, "-W", images, "-o", LOG, "-v2"]
        fds = [*folders.values(), *request.inherited]
        body = {
            "pidfd": target.pidfd,
            "argv": argv,
            "fds": fds,
            "limit_s": target.limit_s,
            "groups": request.groups,
            "last_pid": request.last_pid,
            "file_bytes": request.file_bytes,
            "lock": "",
            "unlock": "",
        }
        if dump_id := request.locked_for:
            body["lock"] = network_lock.locks(dump_id).hex()
            body["unlock"] = network_lock.unlocks(dump_id).hex()
        status = _entered(body, (*fds, target.pidfd), target)
    if status:
        # below 0: the helper was killed, and CRIU was killed with it
        is_killed = status < 0 or status >= 128 or status == enter.TIMED_OUT
        told = _reason(target, status)
        raise CriuFailed(f"{verb}: {told}", is_damaged=is_killed)


def _opened(program: CriuProgram, target: Target, opened: ExitStack) -> Mapping[str, int]:
    """Open what CRIU needs, because it sees no path of ours inside the sandbox."""
    wanted = {"images": target.images, "programs": program.binary.parent}
    if program.loader is not None:
        wanted["libraries"] = program.loader.parent
    found = {}
    for name, path in wanted.items():
        found[name] = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, found[name])
    return found


def _argv(program: CriuProgram, folders: Mapping[str, int]) -> list[str]:
    binary = f"/proc/self/fd/{folders['programs']}/{program.binary.name}"
    if program.loader is None:
        return [binary]
    libraries = f"/proc/self/fd/{folders['libraries']}"
    return [f"{libraries}/{program.loader.name}", "--library-path", libraries, binary]


def _entered(body: JSON, fds: tuple[int, ...], target: Target) -> int:
    """Run the helper; return its exit status."""
    with (target.images / ERRORS).open("wb") as errors:
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", enter.__file__, json.dumps(body)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={},
            cwd="/",
        )
    try:
        return helper.wait(target.limit_s + _MORE_S)
    except subprocess.TimeoutExpired:
        helper.terminate()  # the helper kills CRIU and ends
        return enter.TIMED_OUT
    finally:
        helper.wait()


def _log_of(target: Target) -> str:
    try:
        return (target.images / LOG).read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _reason(target: Target, status: int) -> str:
    if status == enter.TIMED_OUT:
        return f"CRIU took longer than {target.limit_s:g} s"
    errors = [said for said in _ERROR.findall(_log_of(target)) if not said.startswith(_HARMLESS)]
    if errors and errors[0].startswith(_WAITS):
        return "a process does not stop, for it waits in the kernel for a device or a file"
    if errors:
        return str(errors[0])[:_SAID_BYTES]
    said = (target.images / ERRORS).read_text("utf-8", "replace").strip()
    return said[-_SAID_BYTES:] or f"CRIU ended with status {status}"
