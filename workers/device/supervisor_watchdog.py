"""Ends a device worker if its supervisor does not finish a round within a lease.

The supervisor says when it `works` and when it `rests` (waits for something to do). A round that
takes longer than a lease counts as hung: the device is silent, and no job on it would stop at the
end of its lease. So the process is ended, and its service manager starts it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LOOK_S = 0.25
LEAST_S = 5.0  # least limit, as a busy host is no fault
LIMIT_S = 15.0  # limit until the island has sent the length of a lease


class Watchdog(threading.Thread):
    """Watches the supervisor's rounds; `bite` is called once, in this thread."""

    def __init__(self, bite: Callable[[], None], *, limit_s: float = LIMIT_S) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.bite, self.limit_s = bite, limit_s
        self._since_s: float | None = None  # start of the current round
        self._ended = threading.Event()

    def works(self) -> None:
        self._since_s = time.monotonic()

    def rests(self) -> None:
        self._since_s = None

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        # Counts looks and reads no clock: while the whole process is stopped, a round must not
        # count as stuck.
        seen_s, looks = None, 0
        while not self._ended.wait(LOOK_S):
            since_s = self._since_s
            looks = looks + 1 if since_s is not None and since_s == seen_s else 0
            seen_s = since_s
            if looks * LOOK_S > max(LEAST_S, self.limit_s):
                log.critical("the supervisor made no round for %.1f s and is ended", looks * LOOK_S)
                self.bite()
                return
