"""Starts and ends the zygote of a device, the process that forks its residents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.process.isolation.sandbox import ENVIRONMENT, Room
from workers.process.wire import FDS_PER_RESIDENT, pair

JSON = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from workers.zygote import main; main({fd}, {lock})"
)
_KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "ATEN_CPU_CAPABILITY",
)


def start_zygote(fd: int, lock_fd: int, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process of `workers.zygote` that serves at `fd` and holds the lock.

    `variables` are those of its device (`workers.process.isolation.device_access`).
    """
    return subprocess.Popen(
        [sys.executable, "-B", "-c", _BOOT.format(root=str(ROOT), fd=fd, lock=lock_fd)],
        env=zygote_environment(variables),
        pass_fds=(fd, lock_fd),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the supervisor, which drains first
        cwd="/",
    )


class Zygote:
    """The process of `workers.zygote`.  It dies with the thread that starts it."""

    def __init__(
        self, *, lock_fd: int, probe: Room | None, records: Path, variables: Mapping[str, str]
    ) -> None:
        self.wire, theirs = pair()
        self.is_ready = False
        self.process = start_zygote(theirs.fileno(), lock_fd, variables)
        theirs.close()
        tried = None if probe is None else _room(probe)
        self.wire.send({"is": "begin", "probe": tried, "records": str(records)})

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
