"""Ends a device worker whose supervisor makes no round for a whole lease.

The supervisor says when it `works` and when it `rests` (waits for something to do).  Work that goes
on for longer than a lease is no work: nobody hears from the device any more, and no job there ends
at the end of its lease.  Then the process ends, and whoever started it starts it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LOOK_S = 0.25
LEAST_S = 5.0  # a busy host is no fault
LIMIT_S = 15.0  # before the island has said how long a lease is


class Watchdog(threading.Thread):
    """Does nothing else; `bite` is called once, in its thread."""

    def __init__(self, bite: Callable[[], None], *, limit_s: float = LIMIT_S) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.bite, self.limit_s = bite, limit_s
        self._since_s: float | None = None  # when the round under way began
        self._ended = threading.Event()

    def works(self) -> None:
        self._since_s = time.monotonic()

    def rests(self) -> None:
        self._since_s = None

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        # Counted in looks, not by a clock: while the whole process is stopped nothing is stuck.
        seen_s, looks = None, 0
        while not self._ended.wait(LOOK_S):
            since_s = self._since_s
            looks = looks + 1 if since_s is not None and since_s == seen_s else 0
            seen_s = since_s
            if looks * LOOK_S > max(LEAST_S, self.limit_s):
                log.critical("the supervisor made no round for %.1f s: it ends", looks * LOOK_S)
                self.bite()
                return
