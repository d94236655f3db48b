"""Starts and ends the zygote of a device, the process that forks its residents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from workers.process.sandbox import ENVIRONMENT, Room
from workers.process.wire import pair

JSON = dict[str, Any]

_ROOT = Path(__file__).resolve().parents[2]
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from workers.zygote import main; main({fd}, {lock})"
)
_KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "ATEN_CPU_CAPABILITY",
)


def start_zygote(fd: int, lock_fd: int) -> subprocess.Popen[bytes]:
    """Start a process of `workers.zygote` that serves at `fd` and holds the lock."""
    return subprocess.Popen(
        [sys.executable, "-B", "-c", _BOOT.format(root=str(_ROOT), fd=fd, lock=lock_fd)],
        env=zygote_environment(),
        pass_fds=(fd, lock_fd),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the supervisor, which drains first
        cwd="/",
    )


class Zygote:
    """The process of `workers.zygote`.  It dies with the thread that starts it."""

    def __init__(self, *, lock_fd: int, probe: Room | None, records: Path) -> None:
        self.wire, theirs = pair()
        self.is_ready = False
        self.process = start_zygote(theirs.fileno(), lock_fd)
        theirs.close()
        tried = None if probe is None else _room(probe)
        self.wire.send({"is": "begin", "probe": tried, "records": str(records)})

    def spawn(self, id: int, room: Room, walls: list[str], fds: list[int], sort: str) -> None:
        """Have the zygote fork a resident; the caller closes its `fds`
        (`wire.FDS_PER_RESIDENT`).
        """
        body = {"is": "spawn", "id": id, "room": _room(room), "walls": walls, "sort": sort}
        self.wire.send(body, fds)

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
        "kind": room.kind,
        "passages": [os.fspath(folder) for folder in room.passages],
        "groups": room.groups,
        "tmp_bytes": room.tmp_bytes,
        "template": template,
    }


def zygote_environment() -> dict[str, str]:
    """Return the zygote's environment: no secrets, only where programs and libraries lie."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, **ENVIRONMENT, "HOME": "/nonexistent"}
