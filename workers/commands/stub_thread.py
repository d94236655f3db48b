"""A thread of the stub that begins before the command does.

The limit on threads counts those of the stub with those of its command, as they have one user.  A
command that has as many threads as it may have would leave the stub none to begin later.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable


class StubThread:
    """Does work one piece after the other; nothing waits for it, also not the end of the stub."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        self._asked.put(work)

    def _run(self) -> None:
        while True:
            self._asked.get()()


def tell_owner(what: str) -> None:
    """Write a line into the task's log, in a thread, as the command may have filled the pipe."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"Roundhouse: {what}\n".encode())

    teller().give(write)


@functools.cache
def teller() -> StubThread:
    return StubThread()
