"""Warm processes of this test process fork the zygotes of all its devices, one for each kind.

A zygote of a device worker starts as a fresh interpreter and imports torch, which takes seconds.
A warm process does so once, in the environment of a zygote, and then forks a zygote for each
supervisor that asks.  Such a zygote has its own wire and lock.  It too ends with the thread that
asked for it, with its wire, or when it is killed.  The first zygote tries the sandbox layers out;
if all work, the others report the same.  Each resident still applies every layer.  Tests of the
start itself use the fixture `fresh_zygotes`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn
from unittest import mock

import psutil

from tests.processes import children, runs
from tests.warm_processes import ROOT, Forked, Forks, Warm, fork_of, run_program, show_as
from workers.device.processes import zygote_handle
from workers.process.isolation.sandbox import Room
from workers.process.wire import Wire

Start = Callable[[int, int, Mapping[str, str]], "Forked | subprocess.Popen[bytes]"]

_KIND_BYTES = 64
_SHOWN = "workers.zygote of {}"
_start_fresh = zygote_handle.start_zygote

#: The warm processes of this test process.  A zygote of a simulated accelerator reads its variables
#: when it first uses the device, thus after the fork.
WARM = {
    kind: Warm("tests.workers.warm_zygotes", zygote_handle.zygote_environment(variables))
    for kind, variables in {"cpu": {}, "sim": {"SIM_DEVICES": "1"}}.items()
}


@contextlib.contextmanager
def forked_from_a_warm_process() -> Iterator[None]:
    """All zygotes of this process's supervisors are forks of a warm process."""
    with mock.patch.object(zygote_handle, "start_zygote", forked(lambda kind: WARM[kind].ask())):
        yield


@contextlib.contextmanager
def started_afresh() -> Iterator[None]:
    """Each zygote starts as it does in a device worker."""
    with mock.patch.object(zygote_handle, "start_zygote", _start_fresh):
        yield


def forked(ask: Callable[[str], socket.socket]) -> Start:
    """Return a `start_zygote` that forks zygotes, where they need no other environment."""

    def start(
        fd: int, lock_fd: int, variables: Mapping[str, str]
    ) -> Forked | subprocess.Popen[bytes]:
        own = {name: value for name, value in variables.items() if name.startswith("SIM_")}
        kind = "sim" if own.get("SIM_DEVICES") else "cpu"
        base = {"SIM_DEVICES": "1"} if kind == "sim" else {}
        others = {name: value for name, value in variables.items() if name not in own}
        if zygote_handle.zygote_environment({**others, **base}) != WARM[kind].environment:
            return _start_fresh(fd, lock_fd, variables)
        body = {"shown": _SHOWN.format(os.getpid()), "variables": own, "death": signal.SIGKILL}
        return fork_of(ask(kind), body, [fd, lock_fd, 1, 2])

    return start


def forked_for(pid: int) -> list[psutil.Process]:
    """Return the zygotes that this process asked for."""
    found = [each for warm in WARM.values() if warm.pid for each in children(warm.pid)]
    return [each for each in found if runs(each, _SHOWN.format(pid))]


def said_by(module: str, *words: str, kind: str = "cpu") -> bytes:
    """Return what a program prints that needs torch; it is a fork with this environment."""
    env = {**os.environ, "SIM_DEVICES": "1" if kind == "sim" else ""}
    body = {"words": ["-m", module, *words], "env": env, "folder": str(ROOT)}
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as output:
        program = fork_of(WARM[kind].ask(), {**body, "death": signal.SIGKILL}, [writes, 2])
        os.close(writes)
        said = output.read()
    status = program.wait()
    assert status == 0, f"{module} ended with {status}"
    return said


# --- the warm process -----------------------------------------------------------------------------


def main(asks: int) -> None:
    """Fork zygotes and programs on request until the test process is gone."""
    from workers import zygote

    zygote.import_what_jobs_need()
    zygote.keep_pages_shared()
    forks = Forks(asks)
    told, tell = os.pipe()  # from a zygote: a kind of room, if every layer works
    works_for = set[bytes]()
    forks.also[told] = lambda: works_for.add(os.read(told, _KIND_BYTES))
    body, given = forks.serve()
    if "words" in body:
        run_program(body, (given[0], given[1]), set())
        return
    show_as(body["shown"])
    os.environ.pop("SIM_DEVICES", None)
    os.environ.update(body["variables"])
    _become_zygote(given, tell, works_for)


def _become_zygote(given: list[int], tell: int, works_for: set[bytes]) -> NoReturn:
    from workers import zygote

    try:
        fd, lock_fd, out, err = given
        os.dup2(out, 1)
        os.dup2(err, 2)
        zygote.close_all_but({0, 1, 2, fd, lock_fd, tell})
        _try_out_once(tell, works_for)
        zygote.serve(Wire(socket.socket(fileno=fd)), lock_fd)
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
