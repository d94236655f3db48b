"""Runs a thread of the stub that begins before the command does.

The limit on threads counts the stub's threads together with those of its command, as both have one
user. So the stub begins its thread first: a command may use up the limit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable

LAST_LINES_S = 1.0  # how long the stub's end waits for lines that the log does not take at once


class StubThread:
    """Does pieces of work one after the other."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        self._asked.put(work)

    def _run(self) -> None:
        while True:
            self._asked.get()()


def tell_owner(what: str) -> None:
    """Write a line into the task's log.

    It uses a thread, since writing blocks if the command has filled the pipe.
    """

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"Roundhouse: {what}\n".encode())

    teller().give(write)


def tell_the_rest() -> None:
    """Wait until the lines are written, but not for long: nothing may read the full pipe."""
    is_done = threading.Event()
    teller().give(is_done.set)
    is_done.wait(LAST_LINES_S)


@functools.cache
def teller() -> StubThread:
    return StubThread()
