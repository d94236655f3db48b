"""Runs control: it assigns submitted requests to islands, delivers webhooks, and cleans up.

    celery -A workers.control.controller worker --pool threads -Q control

Several of these may run: locks in the database order them, and every chore may be done twice.
"""

from __future__ import annotations

import logging
import threading
import time

from celery import Celery
from sqlalchemy import select

from app.db import transactions
from app.db.models import Island
from app.intake import island_assignment, reservations, sessions, tunnels
from app.messaging import broker, outbox
from app.scheduling import budgets, gang_tickets, housekeeping, journal
from app.scheduling.housekeeping import Sweeper
from app.settings import settings
from workers.control.loop import Loop, keep
from workers.control.package_locker import PackageLocker
from workers.control.request_deleter import RequestDeleter
from workers.control.webhook_sender import Deliverer
from workers.process.celery_inbox import hears

celery: Celery = broker.make_celery(
    "control", settings().redis_url.get_secret_value(), settings().redis_tls
)

CHORES_S = 60.0
SWEEP_S = 600.0

log = logging.getLogger(__name__)


class Control(Loop):
    def __init__(self) -> None:
        super().__init__("control")
        self.package_locker = PackageLocker()
        self.chores_due_s = 0.0
        self.nudged = threading.Event()
        self.assigned_until = ""  # the next look goes on behind this request
        self.sweeper = Sweeper()
        self.sweeping: threading.Thread | None = None
        self.sweep_due_s = 0.0
        # island -> when it was first seen dark, by the monotonic clock
        self.dark_since_s: dict[str, float] = {}
        self.dark_due_s = 0.0

    def nudge(self) -> None:
        self.nudged.set()
        self.wake.set()

    def look(self) -> float:
        wished = self.nudged.is_set()
        self.nudged.clear()
        try:
            touched = self._take_over()
        except BaseException:
            self.dark_since_s.clear()  # a look that failed has seen no island
            raise
        with transactions.transaction() as session:
            undecided = journal.decide_needs(session)
            journal.settle(session)
        with transactions.transaction() as session:
            wished |= budgets.look(session)
        with transactions.transaction() as session:
            wished |= reservations.look(session)
        # In a transaction of its own, as rows of lots are locked after tasks.
        with transactions.transaction() as session:
            more = journal.look_at_lots(session)
            journal.settle(session)
        with transactions.transaction() as session:
            assigned, after = island_assignment.assign_new(session, after=self.assigned_until)
            touched |= assigned | gang_tickets.try_again(session)
            # A nudge for a requested action (pause, cancel, ...) names no island, so every island
            # looks. So it does when a budget is used, or its next period begins.
            islands = set(session.scalars(select(Island.name))) if wished else touched
        for island in sorted(islands):
            outbox.hint(broker.ISLAND_NUDGE, broker.island_queue(island))
        if wished and not assigned:  # what was submitted may wait for its environment
            self.package_locker.wake.set()
        self.assigned_until = after or ""
        self._chores()
        return 0.0 if after or more or undecided else 2 * settings().tick_s

    def _take_over(self) -> set[str]:
        """Give the unfinished requests of lost islands to other islands; return all that changed.

        An island is dark if it has unfinished tasks, but no leader and no live device
        (`island_assignment.dark`).  It is lost if it was dark at every look for `island_lost_s`.
        Only looks of this process count: after a pause of Postgres or of this process all islands
        look dark at once.
        """
        touched, now_s, lost_s = set[str](), time.monotonic(), settings().island_lost_s
        if not lost_s or now_s < self.dark_due_s:
            return touched
        with transactions.transaction() as session:
            dark = island_assignment.dark(session)
        self.dark_due_s = now_s + settings().tick_s
        self.dark_since_s = {one: self.dark_since_s.get(one, now_s) for one in sorted(dark)}
        for lost, since_s in self.dark_since_s.items():
            if now_s - since_s >= lost_s:
                touched |= _taken_over(lost)
                self.dark_since_s[lost] = now_s  # the rest is tried again after the same time
        return touched

    def _chores(self) -> None:
        if time.monotonic() < self.chores_due_s:
            return
        self.chores_due_s = time.monotonic() + CHORES_S
        with transactions.transaction() as session:
            freed = housekeeping.tidy(session)
            sessions.end_silent(session)
            tunnels.end_lost(session)
            journal.tell_stalled(session)
            journal.settle(session)
        housekeeping.free(freed)
        self._sweep()

    def _sweep(self) -> None:
        """Delete unreferenced data of the store.

        A thread does it, as listing a store takes time.
        """
        if self.sweeping is not None and self.sweeping.is_alive():
            return
        if time.monotonic() < self.sweep_due_s:
            return
        self.sweep_due_s = time.monotonic() + SWEEP_S
        self.sweeping = threading.Thread(target=_sweep, args=(self.sweeper,), daemon=True)
        self.sweeping.start()


def _taken_over(lost: str) -> set[str]:
    """Move the island's unfinished requests to others, some at a time; return the islands that got
    them.
    """
    touched = set[str]()
    after: str | None = ""
    while after is not None:
        with transactions.transaction() as session:
            more, after = island_assignment.take_over(session, lost, after=after)
        touched |= more
    told = f"{', '.join(sorted(touched))} took over" if touched else "nobody can take over"
    log.warning("island %s is lost; %s its unfinished tasks", lost, told)
    return touched


def _sweep(sweeper: Sweeper) -> None:
    try:
        swept = sweeper.sweep()
    except Exception:
        log.exception("cannot collect garbage in the store; it is tried again")
    else:
        log.info("the store: %s", swept or "another controller does this now")


control = Control()
keep(celery, control)
keep(celery, Deliverer())
keep(celery, RequestDeleter())
keep(celery, control.package_locker)


@hears(celery, broker.CONTROL_PROBE)
def probed() -> None:
    """Take the message; that is all that the check asks (`app.api.probes`)."""


@hears(celery, broker.CONTROL_NUDGE)
def nudge() -> None:
    control.nudge()
