"""Starts and watches, for the stub, ranks whose processes can be stored: all are below one process,
their rank parent (`rank_parent`).

The rank parent runs as the user of the command, so the stub does not trust its answers: a wrong one
can at most end its own command early.
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.commands.gang import rank_parent
from workers.commands.stored_processes import AdoptedProcess, FirstProcess

JSON = dict[str, Any]

ENDS = "ends"  # file in the working folder with the ranks that have ended
ANSWER_S = 10.0  # time limit for a parent to start its ranks
_SAID_BYTES = 2**16  # most bytes that are read from a parent
#: The errors that numbers written by the command may cause.
_NONSENSE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


@dataclass
class RankTree:
    """The parent of a command's ranks, and the first process of each rank."""

    root: FirstProcess
    ranks: list[AdoptedProcess] = field(default_factory=list)

    @classmethod
    def begun(
        cls,
        argv: Sequence[str],
        folder: str,
        environments: Sequence[dict[str, str]],
        fds: Sequence[int],
        ends: Path,
        again: int | None,
    ) -> RankTree:
        """Start the ranks.

        Raises OSError as `subprocess.Popen` does, or if the parent hangs.
        """
        read, write = os.pipe()
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", rank_parent.__file__],
            stdin=subprocess.PIPE,
            cwd="/",
            env={},
            pass_fds=(write, *fds),
            start_new_session=True,
        )
        os.close(write)
        told = {
            "argv": list(argv),
            "folder": folder,
            "environments": list(environments),
            "fds": list(fds),
            "answer": write,
            "ends": str(ends),
            "again": again,
        }
        assert started.stdin is not None
        try:
            with suppress(BrokenPipeError), started.stdin:
                started.stdin.write(json.dumps(told).encode())
            return cls(started, _begun_ranks(read, argv[0]))
        except OSError:
            started.kill()
            started.wait()
            raise
        finally:
            os.close(read)

    @classmethod
    def adopted(cls, root: FirstProcess, about: JSON) -> RankTree:
        """Return the ranks of an image, whose `about` lies in its folder."""
        ranks = [AdoptedProcess(int(pid), code) for pid, code in about["ranks"]]
        return cls(root, ranks)

    @property
    def about(self) -> JSON:
        return {"ranks": [[rank.pid, rank.returncode] for rank in self.ranks]}

    def ended(self, ends: Path) -> list[tuple[int, int]]:
        """Return the ranks that have ended, with their statuses, in the order of their ends."""
        with suppress(OSError, *_NONSENSE):
            listed = [(int(rank), int(code)) for rank, code in json.loads(_read_file(ends))]
            return [end for end in listed if 0 <= end[0] < len(self.ranks)]
        return []


def _begun_ranks(fd: int, program: str) -> list[AdoptedProcess]:
    """Return the ranks that a parent says it has started; raises OSError, also if the parent says
    nothing.

    A rank that has begun may stop the parent, so the wait has a time limit.
    """
    try:
        said = json.loads(_heard(fd, time.monotonic() + ANSWER_S) or b"{}")
        if "pids" in said:
            return [AdoptedProcess(int(pid)) for pid in said["pids"]]
        told = str(said.get("error", "the process that starts its ranks ended"))
        number = int(said.get("errno", errno.ECHILD))
    except (*_NONSENSE, AttributeError) as error:
        number, told = errno.EPROTO, f"the process that starts its ranks said {error!r:.100}"
    raise OSError(number, told, program)


def _heard(fd: int, until_s: float) -> bytes:
    """Read to the end of a pipe; raises OSError if it takes too long or there is too much to
    read.
    """
    said = b""
    while len(said) <= _SAID_BYTES:
        ready, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
        if not ready:
            raise OSError(errno.ETIMEDOUT, "the process that starts its ranks does not answer")
        if not (part := os.read(fd, _SAID_BYTES)):
            return said
        said += part
    raise OSError(errno.EMSGSIZE, "the process that starts its ranks says too much")


def _read_file(path: Path) -> bytes:
    """Read a file in a folder where the command can put anything; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", str(path))
        return file.read(_SAID_BYTES)
