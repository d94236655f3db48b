"""Starts the inner ends of tunnels beside a command, in its sandbox (`tunnel_end`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.core.model.provisions.tunnel import FILES, PER_TASK

JSON = dict[str, Any]

_PROGRAM = Path(__file__).with_name("tunnel_end.py")
_READS_FILES = _PROGRAM.with_name("files_end.py")


class InnerEnds:
    """Manages the inner ends of a command's tunnels: processes of its tree, which stop and end with
    it.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[JSON, int]] = []  # ticket, descriptor of the socket
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._reading: set[int] = set()  # those among them that only read files

    @property
    def are_open(self) -> bool:
        return bool(self._started)

    def add(self, ticket: JSON, fd: int) -> None:
        """Take a tunnel, whose end starts when the tree may run."""
        # the device worker counts tunnels too
        if len(self._waiting) + len(self._started) >= 2 * PER_TASK:
            os.close(fd)
        else:
            self._waiting.append((ticket, fd))

    def start(self, folder: str, environment: JSON, bound: Callable[[], None] | None) -> None:
        """Start the ends that wait for it.

        No code of the tenant decides what is started.
        """
        waiting, self._waiting = self._waiting, []
        for ticket, fd in waiting:
            try:
                self._start(ticket, fd, folder, environment, bound)
            except OSError as error:  # perhaps the limit of processes is reached; the tunnel ends
                os.write(2, f"Roundhouse: a tunnel could not be started: {error}\n".encode())
            finally:
                os.close(fd)

    def _start(
        self,
        ticket: JSON,
        fd: int,
        folder: str,
        environment: JSON,
        bound: Callable[[], None] | None,
    ) -> None:
        begun = start_end(ticket, fd, folder, environment, bound)
        self._started[begun.pid] = begun
        if ticket["kind"] == FILES:
            self._reading.add(begun.pid)

    def end_reads(self) -> None:
        """End the ends that only read files, so that the processes can be stored without them; the
        call that reads is cut off, and may be made again.
        """
        for pid in self._reading & self._started.keys():
            process = self._started.pop(pid)
            process.kill()
            process.wait()
        self._reading.clear()

    def ended(self, pid: int, status: int) -> None:
        """Note that a process of the tree was reaped."""
        self._reading.discard(pid)
        if (process := self._started.pop(pid, None)) is not None:
            process.returncode = status

    def close(self) -> None:
        """Forget all ends, because the tree is gone."""
        for _, fd in self._waiting:
            os.close(fd)
        self._waiting = []
        for process in self._started.values():
            process.returncode = process.returncode or 0
        self._started, self._reading = {}, set()


_PROMPT = r"\[\e[1m\]job\[\e[0m\]:\w\$ "


def start_end(
    ticket: JSON, fd: int, folder: str, environment: JSON, bound: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    """Start one inner end with this descriptor; raises OSError.

    Its Python ignores site packages and PYTHON variables: so it starts in 20 ms, and does the same
    in every environment.
    """
    program = _READS_FILES if ticket["kind"] == FILES else _PROGRAM
    argv = [sys.executable, "-I", "-S", str(program), str(fd), json.dumps(ticket)]
    return subprocess.Popen(
        argv,
        cwd=folder,
        env={**environment, "TERM": ticket["term"], "PS1": _PROMPT},
        stdin=subprocess.DEVNULL,
        preexec_fn=bound,
        pass_fds=(fd,),
    )
