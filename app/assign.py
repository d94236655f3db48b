"""A request's portions -> islands: the first of the two schedulers.

Every task of one request goes to one island, so that what it needs lies near; which one is decided
by how much of its device kinds is free there for each task already waiting.  The island's own
scheduler does the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app.core.lifecycle import ENDED
from app.models import Device, Task


def assign_new(session: Session) -> set[str]:
    """Give every request that has none an island; returns the islands that got something."""
    portions, cancelled = _unassigned(session)
    if not portions:
        return set()
    devices, load = _devices(session), _load(session)
    touched = set()
    for request_id, kinds in portions.items():
        island = choose(kinds, devices, load)
        if island is None and request_id in cancelled:
            island = min(devices, default=None)  # any will do to end it
        if island is None:
            continue  # no island has such devices now; it is looked at again
        mine = (Task.request_id == request_id, Task.island.is_(None))
        session.execute(update(Task).where(*mine).values(island=island))
        load[island] += sum(kinds.values())
        touched.add(island)
    return touched


def choose(
    kinds: Mapping[str, int], devices: Mapping[str, Counter[str]], load: Mapping[str, int]
) -> str | None:
    """The island with all these device kinds and the fewest live tasks per device; by name if even.

    `kinds` counts the tasks of the request by device kind, `devices` an island's devices by kind,
    `load` an island's live tasks.
    """
    fitting = [island for island, has in devices.items() if all(has[kind] for kind in kinds)]
    return min(fitting, key=lambda i: (load[i] / devices[i].total(), i), default=None)


def _unassigned(session: Session) -> tuple[dict[str, Counter[str]], set[str]]:
    """The tasks of each request by kind, and the requests of which something was cancelled.

    Locked in the order of their ids, as wishes lock them, and without leaving any out: all tasks of
    a request go to one island.
    """
    query = (
        select(Task.request_id, Task.kind, Task.cancel_asked_at)
        .where(Task.island.is_(None), Task.state.not_in(ENDED))
        .order_by(Task.id)
        .with_for_update(key_share=True)
    )
    portions: dict[str, Counter[str]] = {}
    cancelled = set()
    for request_id, kind, cancel_asked_at in session.execute(query):
        portions.setdefault(request_id, Counter())[kind] += 1
        if cancel_asked_at is not None:
            cancelled.add(request_id)
    return portions, cancelled


def _devices(session: Session) -> dict[str, Counter[str]]:
    query = select(Device.island, Device.kind, func.count()).group_by(Device.island, Device.kind)
    islands: dict[str, Counter[str]] = {}
    for island, kind, n in session.execute(query):
        islands.setdefault(island, Counter())[kind] = n
    return islands


def _load(session: Session) -> Counter[str]:
    query = (
        select(Task.island, func.count())
        .where(Task.island.is_not(None), Task.state.not_in(ENDED))
        .group_by(Task.island)
    )
    return Counter({island: n for island, n in session.execute(query) if island})
