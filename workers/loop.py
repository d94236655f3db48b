"""A Celery worker that owns one long-lived thread: the shape of control and island.

The thread is started by a *worker* bootstep, so it lives as long as the worker, whatever happens to
the connection to Redis.  Hints only wake it; without any it looks by itself, at the latest after
the time its last look asked for.  All database work happens in this thread, which gets no signals.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod

from celery import Celery, bootsteps
from sqlalchemy.exc import DBAPIError

log = logging.getLogger(__name__)

BACK_OFF_S = 1.0


class Loop(threading.Thread):
    """Calls `look` when woken, and after the number of seconds it returned at the latest."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.wake = threading.Event()
        self.stopping = False

    @abstractmethod
    def look(self) -> float:
        """One round; returns after how many seconds to look again if nothing wakes us."""

    def leave(self) -> None:
        """Called once, when the worker stops."""

    def run(self) -> None:
        while not self.stopping:
            self.wake.clear()
            self.wake.wait(timeout=self._round())
        self.leave()

    def stop(self, timeout_s: float = 10.0) -> None:
        self.stopping = True
        self.wake.set()
        self.join(timeout_s)

    def _round(self) -> float:
        began = time.monotonic()
        try:
            return self.look()
        except DBAPIError as error:
            # Postgres is away or took back a connection; what was not committed is done again.
            log.warning("%s: the database does not answer: %s", self.name, error.orig)
        except Exception:
            # The round is rolled back and the next one starts from the truth again.
            log.exception("%s: a round failed after %.2f s", self.name, time.monotonic() - began)
        return BACK_OFF_S


def keep(celery: Celery, loop: Loop) -> None:
    """Let `loop` live and end with the worker of `celery`."""

    class Step(bootsteps.StartStopStep):
        name = f"{__name__}.{loop.name}"  # steps of one name are one step to Celery
        requires = {"celery.worker.components:Pool"}

        def start(self, parent: object) -> None:
            loop.start()

        def stop(self, parent: object) -> None:
            loop.stop()

        def terminate(self, parent: object) -> None:
            loop.stop()

    celery.steps["worker"].add(Step)
