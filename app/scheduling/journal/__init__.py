"""Writes plans and heartbeats into rows: the only writer of the state of tasks, placements and
orders.

There are two main entries. Both run in the island's transaction after its row was locked, so that
only one scheduler writes at a time:

* `store(plan)` writes what was decided, and the orders that follow from it; `store_part` writes a
  limited part of a plan;
* `record(alive)` writes what a device reports, and builds the answer.

Every event is fenced. It counts only if it comes from the task's present epoch and from the process
that holds the task, with the next `seq`. Any other event is history and changes nothing.

Actions that users request lock tasks too: the tasks of one request, in the order of their ids. To
avoid a deadlock, `record` (or `lock`, for several heartbeats) locks in the same order, and at once,
everything that it may touch. `store` never waits for a lock.

The number of statements dominates the cost of a round. So each entry reads at the beginning what it
may need and changes rows in memory. It flushes earlier only where the order of writes matters: a
slot is released before it is promised again. Sums and events are noted during the round, and
`settle` writes them.
"""

from __future__ import annotations

from app.scheduling.journal.decisions import UnwrittenPlan, store, store_part
from app.scheduling.journal.device_rows import lock
from app.scheduling.journal.losses import hand_over, lose, unseat
from app.scheduling.journal.lots import look_at_lots
from app.scheduling.journal.orders import order_round, order_saves, ordered
from app.scheduling.journal.reports.events import STORE_AGAIN_S
from app.scheduling.journal.reports.heartbeats import record, record_all
from app.scheduling.journal.reports.quiet import renew, write_progress
from app.scheduling.journal.reports.residents import LAUNCHES_UNSEEN
from app.scheduling.journal.request_needs import decide_needs
from app.scheduling.journal.settlement import CHANGES, settle, write_down
from app.scheduling.journal.stalled_tasks import tell_stalled
from app.scheduling.journal.task_writer import break_off, savepoint, tell
from app.scheduling.journal.unassigned import cancel, give_up
from app.scheduling.journal.unreadable import (
    UnreadableReport,
    note_unreadable,
    unreadable_report,
)

__all__ = [
    "CHANGES",
    "LAUNCHES_UNSEEN",
    "STORE_AGAIN_S",
    "UnreadableReport",
    "UnwrittenPlan",
    "break_off",
    "cancel",
    "decide_needs",
    "give_up",
    "hand_over",
    "lock",
    "look_at_lots",
    "lose",
    "note_unreadable",
    "order_round",
    "order_saves",
    "ordered",
    "record",
    "record_all",
    "renew",
    "savepoint",
    "settle",
    "store",
    "store_part",
    "tell",
    "tell_stalled",
    "unreadable_report",
    "unseat",
    "write_down",
    "write_progress",
]
