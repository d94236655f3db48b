"""Gives a Celery worker one long-lived thread; control and island schedulers use it.

A *worker* bootstep starts the thread, so it lives as long as the worker, whatever happens to the
connection to Redis. Hints only wake it. Without hints the thread looks by itself when the time that
its last look returned has passed. All database work happens in this thread, which gets no signals.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod

from celery import Celery, bootsteps
from sqlalchemy.exc import DBAPIError

from app.db.guarded_connection import refusal
from app.messaging.broker import Complaint

log = logging.getLogger(__name__)

BACK_OFF_S = 1.0


class Loop(threading.Thread):
    """Calls `look` when woken, or when the seconds that the last `look` returned have passed."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.wake = threading.Event()
        self.stopping = False
        self.waits = Complaint(log, f"{name} waits")

    @abstractmethod
    def look(self) -> float:
        """Run one round; return the seconds until the next one if nothing wakes the thread."""

    def leave(self) -> None:
        """Clean up; called once, when the worker stops."""

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
            if told := refusal(error):  # uncommitted work is done again
                self.waits.say(f"{told}: {error.orig}")
            else:
                log.exception("%s: a round failed", self.name)
        except Exception:
            # The transaction was rolled back; the next round reads the database again.
            log.exception("%s: a round failed after %.2f s", self.name, time.monotonic() - began)
        return BACK_OFF_S


def keep(celery: Celery, loop: Loop) -> None:
    """Start and stop `loop` with the worker of `celery`."""

    class Step(bootsteps.StartStopStep):
        name = f"{__name__}.{loop.name}"  # Celery merges steps of equal name
        requires = {"celery.worker.components:Pool"}

        def start(self, parent: object) -> None:
            loop.start()

        def stop(self, parent: object) -> None:
            loop.stop()

        def terminate(self, parent: object) -> None:
            loop.stop()

    celery.steps["worker"].add(Step)
