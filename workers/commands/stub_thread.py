"""A thread of the stub that begins before the command does.

The limit on threads counts those of the stub with those of its command, as they have one user.  So
the stub begins its thread first: a command may use up the limit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable


class StubThread:
    """Does pieces of work one after the other; not even the stub's end waits for them."""

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
