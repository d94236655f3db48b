"""Tells a command that its processes will be stopped: first a file, then a signal.

The file is JSON: `why` (`provisions.notice.NoticeReason`), `message` in words, `seconds` from now,
and `until`, the time of the stop.  It is there only between a notice and the next pause.

The signal goes to the first process of each rank, as a batch system sends it: the processes that
these have started (loaders, shells) usually die of a signal that they do not expect.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from app.core.model.provisions.notice import NO_SIGNAL, NoticeReason
from workers.commands.stored_processes import FirstProcess

RETRY_S = 0.1  # interval of looks whether a process handles the signal
_MASKS = ("SigIgn:", "SigCgt:")
MESSAGES = {
    NoticeReason.DRAIN: "Its device is being drained.",
    NoticeReason.MOVE: "It is moved to another device.",
    NoticeReason.RECLAIM: "Its device goes back to the tenant that it is guaranteed to.",
    NoticeReason.SHUTDOWN: "The worker of its device stops.",
    NoticeReason.MAX_DURATION: "It has held its device for nearly max_duration_s.",
}


def write_notice(path: Path, why: str, left_s: float) -> None:
    """Replace the file in one step, so that no reader sees half of it; raises OSError."""
    until = datetime.now(UTC) + timedelta(seconds=left_s)
    said = {
        "why": why,
        "message": MESSAGES[NoticeReason(why)],
        "seconds": round(left_s, 3),
        "until": until.isoformat(timespec="milliseconds"),
    }
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.write_text(json.dumps(said) + "\n")
    draft.replace(path)


class NoticeSignal:
    """Sends the signal to each process as soon as the process handles it.

    A program that has just begun does not handle it yet, and would die of it. A process that never
    handles the signal does not get it; it can only read the file.
    """

    def __init__(self, processes: Iterable[FirstProcess], name: str) -> None:
        self.number = None if name == NO_SIGNAL else signal.Signals[name]
        self.waiting = [] if self.number is None else list(processes)

    def send(self) -> None:
        """Send the signal to processes that now handle it; forget processes that have ended."""
        left = [process for process in self.waiting if process.returncode is None]
        self.waiting = [process for process in left if not self._sent(process.pid)]

    def _sent(self, pid: int) -> bool:
        assert self.number is not None
        if not _handles(pid, self.number):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, self.number)
        return True


def _handles(pid: int, number: int) -> bool:
    """True if the process catches or ignores the signal, or if that cannot be seen."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(_MASKS)]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
