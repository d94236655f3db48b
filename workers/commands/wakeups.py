"""Wakes the loop of a stub, or of a shell's inner end, when a child ends or a thread is done."""

from __future__ import annotations

import contextlib
import os
import signal


class Wakeups:
    """Provides a descriptor that becomes readable when a child ends or a thread is done."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the loop wakes anyway
            os.write(self._write, b"w")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
