"""Starts the ranks of a command below one process, as CRIU stores one tree of processes.

    python -I -S -B rank_parent.py        reads from its standard input, as JSON, what to start

The stub runs it as a program of its own: nothing of the stub is in its memory, and it imports
little.  It takes over processes that outlive their parent, and writes down how each rank ended.  It
ends when all ranks have ended, or when one has failed.  Its status is 0 only if all ranks ended
with 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    told: dict[str, Any] = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cancelled = []  # cancelled: all ranks may clean up
    signal.signal(signal.SIGTERM, lambda *_: cancelled.append(True))
    begun: list[subprocess.Popen[bytes]] = []
    with os.fdopen(told["answer"], "w") as answer:
        try:
            for environment in told["environments"]:
                begun.append(_started(told, environment))
        except OSError as error:
            json.dump({"errno": error.errno, "error": error.strerror}, answer)
            return 1
        json.dump({"pids": [process.pid for process in begun]}, answer)
    ranks = {process.pid: rank for rank, process in enumerate(begun)}
    ends: list[tuple[int, int]] = []
    while len(ends) < len(ranks):
        pid, status = os.waitpid(-1, 0)
        if pid not in ranks:
            continue
        code = os.waitstatus_to_exitcode(status)
        ends.append((ranks[pid], code))
        _tell(Path(told["ends"]), ends)
        if code not in (0, told["again"]) and not cancelled:
            break
    bad = [code for _, code in ends if code]
    return bad[0] if bad and bad[0] > 0 else len(bad)


def _started(told: dict[str, Any], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        told["argv"],
        cwd=told["folder"],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=told["fds"],
        start_new_session=True,
    )


def _tell(path: Path, ends: list[tuple[int, int]]) -> None:
    draft = path.with_name(f"{path.name}.new")
    with contextlib.suppress(
        OSError
    ):  # the disk is full: the parent's own exit status must suffice
        draft.write_text(json.dumps(ends))
        draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
