"""Explains why tasks wait, and until when; computed when a user asks (rule F10).

None of this is stored, since one launch changes the positions of a million tasks. A small board
holds what is on devices and the tasks that the user asks about. All other waiting tasks are read as
counts (`lines`) and evaluated by `core.scheduling.blockers`. So the cost of an answer depends on
what the island holds and on the number of tenants, not on the number of waiting tasks.

For each engine, the counts, the tree and the usage of all users are cached for `KEPT_S`; changes of
the tree and of usage are read by transaction ids. A session on a connection of its own caches
nothing, since it may roll back all that it sees. `app.insight.forecast` estimates when a task
starts.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from app.core.explanation import waiting_reasons as says
from app.core.explanation.estimator import Estimate, Unknown
from app.core.explanation.waiting_reasons import Ahead, Blockers
from app.core.fairness import budget
from app.core.fairness.fair_tree import Branch, above, lane
from app.core.fairness.reservation import owed
from app.core.model.lifecycle import NOT_STARTED, ON_A_DEVICE, State
from app.core.model.rungs import HELD_AT_RUNG
from app.core.model.snapshot import (
    BoardTask,
    BoardTenant,
    BoardUser,
    IdleCreditFloor,
    Reason,
    Snapshot,
)
from app.core.scheduling import blockers
from app.core.scheduling.blockers import WaitingBefore, WaitingBranch, before
from app.core.scheduling.board import MILLI, Board
from app.db import gc_freeze, transactions
from app.db.lines import IN_LINE
from app.db.models import Island, Lot, Placement
from app.db.models import Request as RequestRow
from app.db.models import Task as TaskRow
from app.db.models import User as UserRow
from app.db.transactions import AnyRow, AnySelect
from app.insight import forecast, needed_requests
from app.insight.forecast import Start
from app.insight.named_reservations import named_reservations
from app.insight.windows_ahead import WindowAhead, windows_ahead
from app.scheduling import ledger, snapshot_reader
from app.scheduling.journal import rungs
from app.scheduling.journal.lots import counts_of

JSON = dict[str, Any]

KEPT_S = 1.0
UNITS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Why one task waits, in line or on its device; all fields are empty if it does not wait.

    `reasons` have code, message, next_action, unblocked_by and change; `nearest` is about the
    reason that ends first.  `place` is the position, from 1, among all tasks that wait for its kind
    on its island.  `estimate` is None if `no_estimate` is given, a code and a sentence.
    """

    reasons: tuple[JSON, ...] = ()
    nearest: JSON | None = None
    place: int | None = None
    estimate: Start | None = None
    no_estimate: JSON | None = None


def explain(session: Session, tasks: Sequence[TaskRow]) -> dict[str, Why]:
    """Return why each task waits, by id; one board serves all tasks of an island."""
    found = _explained(session, tasks)

    def starts_of(needed: Sequence[TaskRow]) -> dict[str, Start | None]:
        return {id: why.estimate for id, why in _explained(session, needed).items()}

    learned = _kept(session).learned
    awaited = needed_requests.reasons(session, tasks, starts_of, learned)
    return found | {id: _with_awaited(found[id], reasons) for id, reasons in awaited.items()}


def _with_awaited(why: Why, reasons: Sequence[Reason]) -> Why:
    """Return the answer with one reason for each request that the task comes after, in place of
    what the island knows of them.
    """
    others = [each for each in why.reasons if each["code"] not in says.OF_REQUESTS]
    first = says.nearest(reasons)
    told = [*map(_as_json, reasons), *others]
    is_first = first is not None and all(_is_later(each, first) for each in others)
    nearest = _nearest(first) if first is not None and is_first else why.nearest
    until = nearest["message"] if nearest is not None else ""
    unknown = {"code": "BLOCKED", "message": f"First: {until}"}
    return replace(why, reasons=tuple(told), nearest=nearest, no_estimate=unknown)


def _is_later(reason: JSON, first: Reason) -> bool:
    order = [*says.CODES]
    return order.index(reason["code"]) > order.index(first.code)


def _explained(session: Session, tasks: Sequence[TaskRow]) -> dict[str, Why]:
    found = {task.id: Why() for task in tasks}
    by_island: dict[str | None, list[TaskRow]] = defaultdict(list)
    for task in tasks:
        if task.state in NOT_STARTED:
            by_island[task.island].append(task)
    kept = _kept(session)
    with kept.lock:
        for island, asked in by_island.items():
            if island is None:
                lots = [task for task in asked if task.lot_id == task.id]
                found |= {task.id: _why((_unassigned(task),)) for task in asked}
                found |= _of_lots(session, lots) if lots else {}
            else:
                picture = kept.picture(session, island, know={row.tenant_id for row in asked})
                found |= _Answer(session, picture, asked).told()
    found |= _at_rungs(session, tasks, found)
    return found | _short_of_room(session, tasks) | _still(tasks)


def _still(tasks: Sequence[TaskRow]) -> dict[str, Why]:
    """Return why running gangs stand still, by id; those that move are left out."""
    return {task.id: _why((says.rank_behind(task.behind),)) for task in tasks if task.behind}


def _short_of_room(session: Session, tasks: Sequence[TaskRow]) -> dict[str, Why]:
    """Return why launched tasks wait on their devices, by id; those that do not are left out."""
    if not (starting := [task for task in tasks if task.state == State.starting]):
        return {}
    here = Placement.task_id.in_([task.id for task in starting]), Placement.ended_at.is_(None)
    query = select(Placement.task_id, Placement.device_id, Placement.waits_for)
    rows = session.execute(query.where(*here, ~Placement.guest, Placement.waits_for != ""))
    return {id: _why((says.lacks_room(device, what),)) for id, device, what in rows}


def _at_rungs(
    session: Session, tasks: Sequence[TaskRow], found: Mapping[str, Why]
) -> dict[str, Why]:
    """Add their places to the reasons of members that lost at a rung."""
    told = rungs.places_told(session, [task for task in tasks if task.hold == HELD_AT_RUNG])
    return {
        id: replace(
            found[id],
            reasons=tuple(
                {**reason, "message": message} if reason["code"] == "LOST_AT_RUNG" else reason
                for reason in found[id].reasons
            ),
        )
        for id, message in told.items()
    }


def _unassigned(task: TaskRow) -> Reason:
    """Return why a task has no island yet."""
    environment = task.descriptor.get("environment")
    if environment and not environment["lock"]:
        return says.environment_pending()
    return says.not_looked_at()


def _of_lots(session: Session, asked: Sequence[TaskRow]) -> dict[str, Why]:
    """Return why lots make no members now: what they wait for themselves, or that enough live."""
    now_s = transactions.now_s(session)
    which = TaskRow.id.in_([task.id for task in asked])
    rows = session.execute(snapshot_reader.tasks().where(which)).all()
    tasks = snapshot_reader.tasks_of(session, rows, now_s=now_s)
    names = _names_of_needed(session, tasks)
    windows = named_reservations(session, tasks.values())
    counts = {
        lot.id: counts_of(lot) for lot in session.scalars(select(Lot).where(Lot.id.in_(tasks)))
    }
    found = {}
    for task in asked:
        window = windows.get(task.id, says.UNNAMED)
        needs = names.get(task.id, {})
        reasons = says.start(tasks[task.id], now_s=now_s, names=needs, reservation=window)
        environment = task.descriptor.get("environment")
        if environment and not environment["lock"]:
            reasons += (says.environment_pending(),)
        found[task.id] = _why((*reasons, *says.of_lot(counts[task.id])) or (says.not_looked_at(),))
    return found


def _names_of_needed(session: Session, tasks: Mapping[str, BoardTask]) -> dict[str, dict[str, str]]:
    """Return the names of the tasks that each task waits for, by id; of another request with
    its name.
    """
    needs = {task.id: set(task.conditions.waits_for) for task in tasks.values()}
    wanted = set().union(*needs.values()) if needs else set()
    if not wanted:
        return {}
    query = select(TaskRow.id, TaskRow.name, TaskRow.request_id, RequestRow.name).join(
        RequestRow, RequestRow.id == TaskRow.request_id
    )
    rows = session.execute(query.where(TaskRow.id == func.any(sorted(wanted)))).all()
    return {
        id: {
            row[0]: row[1] if row[2] == tasks[id].request else f"{row[1]} of {row[3]}"
            for row in rows
            if row[0] in needed
        }
        for id, needed in needs.items()
        if needed
    }


def breadth(session: Session, task: TaskRow) -> str:
    """Return how many devices an elastic task holds, or with how many tasks a task shares one, in
    words; "" for other tasks.
    """
    if task.devices_max == task.devices_min and task.resized_at is None and not task.shares:
        return ""
    rows = session.execute(snapshot_reader.tasks().where(TaskRow.id == task.id)).all()
    seen = snapshot_reader.tasks_of(session, rows, now_s=transactions.now_s(session))[task.id]
    return says.company(seen, _beside(session, task)) if task.shares else says.breadth(seen)


def _beside(session: Session, task: TaskRow) -> int:
    """Return the number of other tasks on the task's device.

    They are not named, as they may be another tenant's.
    """
    others = select(func.count()).where(
        Placement.device_id == task.seat,
        Placement.task_id != task.id,
        Placement.ended_at.is_(None),
        ~Placement.leaving,
    )
    return session.scalar(others) or 0


def warm(session: Session) -> None:
    """Read ahead what the first answer about each island would have to read."""
    kept = _kept(session)
    with kept.lock:
        for island in session.scalars(select(Island.name)).all():
            picture = kept.picture(session, island, know=set())
            for kind in list(picture.line.waiting):
                picture.beside(session, kind, None)
    gc_freeze.spare()


def _why(
    reasons: Sequence[Reason],
    place: int | None = None,
    expected: Start | Unknown | None = None,
) -> Why:
    first = says.nearest(reasons)
    unknown = expected if isinstance(expected, Unknown) else None
    if expected is None and first is not None:
        unknown = Unknown(code="BLOCKED", message=f"First: {first.unblocked_by}.")
    return Why(
        reasons=tuple(_as_json(reason) for reason in reasons),
        nearest=None if first is None else _nearest(first),
        place=place,
        estimate=expected if isinstance(expected, Start) else None,
        no_estimate=None if unknown is None else asdict(unknown),
    )


def _as_json(reason: Reason) -> JSON:
    return {
        "code": reason.code,
        "message": reason.message,
        "next_action": reason.next_action,
        "unblocked_by": reason.unblocked_by,
        "change": _change(reason),
    }


def _change(reason: Reason) -> JSON:
    change = reason.change
    value = list(change.value) if isinstance(change.value, tuple) else change.value
    return {"action": change.action, "value": value, "of": change.of}


def _nearest(reason: Reason) -> JSON:
    until = reason.unblocked_by
    return {"code": reason.code, "message": f"{until}.", **_change(reason)}


# --- what is kept between two answers -------------------------------------------------------------


@dataclass(slots=True)
class _InLine:
    """Counts the waiting tasks of an island by kind and tenant, including those of all tenants
    below.

    `parties` are the tenants right below a tenant (None: at the top), as `core.scheduling.blockers`
    compares them; those of `stale` tenants have to be built again. `units` is the cost of a turn by
    kind; it is refreshed only now and then, because all parties change with it.
    """

    since: int = 0  # the oldest transaction with changes that may still be unread
    lines: dict[tuple[str, str, int, int, str], int] = field(default_factory=dict)
    lifts: dict[str, dict[str, IdleCreditFloor]] = field(default_factory=lambda: defaultdict(dict))
    waiting: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    widths: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    gangs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    below: dict[tuple[str, str | None], list[str]] = field(
        default_factory=lambda: defaultdict(list)
    )
    stale: set[str] = field(default_factory=set)
    parties: dict[tuple[str, str | None], dict[str, WaitingBranch]] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    units_s: float = 0.0

    def count(self, rows: Iterable[AnyRow], tree: _Kept) -> None:
        for row in rows:
            key = row.user_id, row.kind, row.memory_bytes, row.width, row.device_choice
            more = row.waiting - self.lines.get(key, 0)
            self.lines[key] = row.waiting
            if not more:
                continue
            if row.width > 1:
                self.gangs[row.kind] += more
            waiting, widths = self.waiting[row.kind], self.widths[row.kind]
            for id in tree.path(row.tenant_id):
                if id not in waiting:
                    self.below[row.kind, tree.tenants[id].parent].append(id)
                waiting[id] = waiting.get(id, 0) + more
                widths[id] = widths.get(id, 0) + more * row.width
                self.stale.add(id)

    def lift(self, rows: Iterable[AnyRow]) -> None:
        for row in rows:
            lift = IdleCreditFloor(
                tenant=row.tenant_id, user=row.user_id, kind=row.kind, faded_us=int(row.faded)
            )
            self.lifts[lift.user or lift.tenant][lift.kind] = lift
            self.stale.add(lift.tenant)

    def lifted(self, id: str, kind: str) -> int:
        lift = self.lifts[id].get(kind) if id in self.lifts else None
        return 0 if lift is None else lift.faded_us

    def take_units_anew(self, half_life_s: float) -> None:
        """Refresh the cost of a turn before the cached cost is wrong by more than a thousandth."""
        lasts_s = min(UNITS_S, half_life_s / 1000) if half_life_s else UNITS_S
        if time.monotonic() - self.units_s >= max(lasts_s, KEPT_S):
            self.units_s = time.monotonic()
            self.units.clear()
            self.parties.clear()


@dataclass(slots=True)
class _Kept:
    """The cache of an engine: the tree and the usage, kept up to date, and a picture of each
    island.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    since: int = 0  # the oldest transaction with changes that may still be unread
    tenants: dict[str, BoardTenant] = field(default_factory=dict)
    reserved: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # by island
    booked: dict[str, tuple[str, int]] = field(default_factory=dict)  # user -> (tenant, faded)
    used: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by subtree
    in_line: dict[str, _InLine] = field(default_factory=dict)
    pictures: dict[str, _Picture] = field(default_factory=dict)
    learned: forecast.Learned = field(default_factory=forecast.Learned)

    def picture(self, session: Session, island: str, *, know: set[str]) -> _Picture:
        """Return a picture that is less than `KEPT_S` old and knows these tenants, or draw a new
        one.
        """
        found = self.pictures.get(island)
        if found is None or found.age_s >= KEPT_S or not know <= self.tenants.keys():
            found = self.pictures[island] = self._draw(session, island)
        self.learned.refreshed(session)
        return found

    def _draw(self, session: Session, island: str) -> _Picture:
        """Draw a new picture.  Tenants are read last, so that all tenants in the other rows are
        among them.
        """
        line = self.in_line.setdefault(island, _InLine())
        horizon = int(session.scalar(_HORIZON) or 0)
        values = {"since": str(self.since), "island": island}
        accounts = session.execute(_ACCOUNTS, values).all()
        rows = session.execute(_LINES, {**values, "since": str(line.since)}).all()
        lifts = session.execute(_LIFTS, {**values, "since": str(line.since)}).all()
        on_devices = [*session.execute(_on_devices(island)), *session.execute(_moving(island))]
        if self._follow_tenants(session.execute(_TENANTS, values).all()):
            self.in_line = {island: (line := _InLine())}
            rows = session.execute(_LINES, {**values, "since": "0"}).all()
            lifts = session.execute(_LIFTS, {**values, "since": "0"}).all()
        for user, tenant, faded in accounts:
            _, old = self.booked.get(user, (tenant, 0))
            self.booked[user] = tenant, int(faded)
            self._use(tenant, int(faded) - old)
        line.lift(lifts)
        line.count(rows, self)
        anew, self.since, line.since = not line.since, horizon, horizon
        drawn = _Picture(session, self, island, line, on_devices, self.pictures.get(island))
        if anew:
            gc_freeze.spare()
        return drawn

    def _follow_tenants(self, rows: Sequence[AnyRow]) -> bool:
        """Update the tenants.  True if one has moved in the tree: then all sums change."""
        moved = False
        for row in rows:
            parent = None if row.under_root else row.parent_id
            old = self.tenants.get(row.id)
            moved |= old is not None and old.parent != parent
            self.tenants[row.id] = BoardTenant(
                id=row.id,
                name=row.name,
                weight=row.weight_milli,
                parent=parent,
                guarantee=row.guarantee,
                limit=row.limit,
                most_running=row.max_running,
                carried_us=int(row.carried),
                exhausted=row.exhausted,
                budget_ends_s=float(row.budget_ends_s or 0.0),
            )
            self.reserved[row.id] = row.reserved
            for line in self.in_line.values():
                line.stale.add(row.id)
        if moved:
            self.used.clear()
            for tenant, faded in self.booked.values():
                self._use(tenant, faded)
        return moved

    def tenant_on(self, island: str, id: str) -> BoardTenant:
        """Return a tenant as an island sees it: what is reserved there counts as guaranteed."""
        tenant, here = self.tenants[id], self.reserved[id].get(island)
        return replace(tenant, guarantee=owed(tenant.guarantee, here)) if here else tenant

    def _use(self, tenant: str, faded: int) -> None:
        for id in self.path(tenant):
            self.used[id] += faded
            for line in self.in_line.values():
                line.stale.add(id)

    def path(self, tenant: str | None) -> Iterator[str]:
        """Yield the tenant and the tenants above it."""
        while tenant is not None:
            yield tenant
            tenant = self.tenants[tenant].parent


_engines: WeakKeyDictionary[Engine, _Kept] = WeakKeyDictionary()
_first = threading.Lock()


def _kept(session: Session) -> _Kept:
    bind = session.get_bind()
    if not isinstance(bind, Engine):
        return _Kept()
    with _first:
        return _engines.setdefault(bind, _Kept())


# --- one island's picture -------------------------------------------------------------------------


class _Picture:
    """Holds an island's board without the waiting tasks, and the number of waiting tasks beside it.

    The board has a waiting task only if the task is being moved, because devices are kept for it.
    It has the tenants and users of all its tasks and of the tasks asked about. Below each tenant it
    has one more user, which stands for all other users of the tenant and has their usage, so that
    the sums are right.
    """

    def __init__(
        self,
        session: Session,
        kept: _Kept,
        island: str,
        line: _InLine,
        on_devices: Sequence[AnyRow],
        old: _Picture | None,
    ) -> None:
        self.kept, self.island, self.line, self.on_devices = kept, island, line, on_devices
        self.drawn_s, self.now_s = time.monotonic(), transactions.now_s(session)
        self.led = bool(session.scalar(_LED, {"island": island}))
        self._users: dict[tuple[str, str], dict[str, WaitingBranch]] = {}
        self._widest: dict[str, int] = {}
        self.board = self._draw(session)
        line.take_units_anew(self.board.policy.half_life_s)
        if old is not None:
            line.stale |= old.board.tenants.keys()
        line.stale |= self.board.tenants.keys()  # running tasks add to their usage
        self._freshen()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.drawn_s

    def _draw(self, session: Session) -> Board:
        drawn = Snapshot(
            island=self.island,
            policy=snapshot_reader.policy(ledger.base(session)),
            tenants={},
            users={},
            devices=snapshot_reader.devices(session, self.island),
            tasks={},
        )
        self.board = board = Board.of(drawn, now_s=self.now_s)
        self.know(session, {row.user_id for row in self.on_devices})
        tasks = snapshot_reader.tasks_of(session, self.on_devices, now_s=self.now_s)
        for id in sorted(tasks):
            board.set_task(tasks[id])
        for kind, tier, started in session.execute(_PAUSED, {"island": self.island}):
            board.urgency.started[kind, tier] += started
        return board

    def know(self, session: Session, users: set[str]) -> None:
        """Add these users to the board if they are missing."""
        missing = users - self.board.users.keys()
        if not missing:
            return
        found = snapshot_reader.users(session, self.island, UserRow.id == func.any(sorted(missing)))
        kept, board = self.kept, self.board
        above_them = {id for user in found.values() for id in kept.path(user.tenant)}
        new = sorted(above_them - board.tenants.keys())
        board.tenants |= {id: kept.tenant_on(self.island, id) for id in new}
        for id in new:
            board.set_tenant(board.tenants[id])
        for id in sorted(found):
            board.set_user(replace(found[id], faded_us=kept.booked.get(id, ("", 0))[1]))
        for id in (*new, *found):
            for lift in self.line.lifts.get(id, {}).values():
                board.set_lift(lift)
        self._balance(above_them)

    def _balance(self, tenants: Iterable[str]) -> None:
        """Add usage of users that are not on the board to the user that stands for them."""
        used, board = self.kept.used, self.board
        rest = {id: used[id] for id in tenants}
        for user in board.users.values():
            if user.tenant in rest and user.id != _rest(user.tenant):
                rest[user.tenant] -= user.faded_us
        for tenant in board.tenants.values():
            if tenant.parent in rest:
                rest[tenant.parent] -= used[tenant.id]
        for id, faded in rest.items():
            board.set_user(BoardUser(id=_rest(id), tenant=id, faded_us=max(0, faded)))

    # --- the queue ---

    def unit(self, kind: str) -> int:
        """The cost of a turn for a task that needs one device."""
        units = self.line.units
        if kind not in units:
            units[kind] = blockers.fee(self.board, kind, 1, 1)
        return units[kind]

    def widest_gang(self, kind: str) -> int:
        """Return the most devices that a waiting task of the kind needs at once."""
        if kind not in self._widest:
            lines = self.line.lines.items()
            widths = (key[3] for key, waiting in lines if waiting > 0 and key[1] == kind)
            self._widest[kind] = max(widths, default=0)
        return self._widest[kind]

    def beside(
        self, session: Session, kind: str, parent: str | None
    ) -> Mapping[str, WaitingBranch]:
        """Return the parties with waiting tasks right below a tenant; None stands for the top."""
        found = self.line.parties.get((kind, parent))
        if found is None:
            made = {id: self._tenant(kind, id) for id in self.line.below[kind, parent]}
            found = {id: party for id, party in made.items() if party is not None}
            self.line.parties[kind, parent] = found
        if parent is None:
            return found
        return {**found, **self._users_below(session, kind, parent)}

    def _freshen(self) -> None:
        """Build the stale parties anew."""
        for id in self.line.stale:
            for kind in self.line.waiting:
                found = self.line.parties.get((kind, self.kept.tenants[id].parent))
                if found is None:
                    continue
                party = self._tenant(kind, id)
                if party is not None:
                    found[id] = party
                else:
                    found.pop(id, None)
        self.line.stale.clear()

    def _tenant(self, kind: str, id: str) -> WaitingBranch | None:
        """Return the party of a tenant; None if none of its tasks waits, or if a limit excludes all
        of them.
        """
        waiting, tenant = self.line.waiting[kind].get(id, 0), self.kept.tenant_on(self.island, id)
        if waiting <= 0:
            return None
        widths, unit = self.line.widths[kind][id], self.unit(kind)
        used = self.kept.used[id] + tenant.carried_us
        bound = bool(tenant.guarantee or tenant.limit or tenant.exhausted)
        bound |= tenant.most_running is not None
        if bound or id in self.board.tenants:
            if not self._has_room(kind, tenant):
                return None
            return self._party(kind, id, tenant.parent, used, tenant.weight, waiting, widths)
        fee = unit if widths == waiting else unit * widths // waiting
        used = used * MILLI + self.line.lifted(id, kind)
        return WaitingBranch(id, used, tenant.weight, fee, waiting)

    def _users_below(self, session: Session, kind: str, parent: str) -> dict[str, WaitingBranch]:
        found = self._users.get((kind, parent))
        if found is None:
            found = self._users[kind, parent] = {}
            values = {"island": self.island, "tenant": parent, "kind": kind}
            for id, weight, carried, waiting, widths in session.execute(_USERS, values):
                faded = self.kept.booked.get(id, ("", 0))[1] + int(carried)
                found[id] = self._party(kind, id, parent, faded, weight, waiting, int(widths))
        return found

    def _has_room(self, kind: str, tenant: BoardTenant) -> bool:
        """True if the tenant may hold one more device.

        If not, no task is behind its tasks (rule F4).
        """
        if tenant.id in self.board.tenants:
            return self.board.tree.branches[self.board.path_of(tenant.id)].room(lane(kind))
        limit = budget.bounds(tenant.limit, tenant.exhausted)
        shut = any(limit.get(each, 1) < 1 for each in (kind, "*"))
        return not shut and tenant.most_running != 0

    def _party(
        self,
        kind: str,
        id: str,
        parent: str | None,
        faded: int,
        weight: int,
        waiting: int,
        widths: int,
    ) -> WaitingBranch:
        """Build a party, including what its tasks hold if it is on the board."""
        above_it = self.board.path_of(parent) if parent in self.board.tenants else ()
        branch = self.board.tree.branches.get((*above_it, id))
        fee = max(1, self.unit(kind) * widths // waiting)
        if branch is not None:
            borrows = branch.borrows(lane(kind, max(1, widths // waiting)))
            used = self.board.tree.usage(branch) + branch.lifts.get(kind, 0)
            return WaitingBranch(id, used, weight, fee, waiting, borrows)
        known = id in self.kept.tenants  # otherwise it is a user
        promised = self.kept.tenant_on(self.island, id).guarantee.get(kind, 0) if known else 0
        used = faded * MILLI + self.line.lifted(id, kind)
        return WaitingBranch(id, used, weight, fee, waiting, promised * waiting < widths)


def _rest(tenant: str) -> str:
    """The id of the user that stands for all other users of a tenant."""
    return f"{tenant}/rest"


# --- answers --------------------------------------------------------------------------------------


class _Answer:
    """Explains why some tasks of one island wait, on its picture."""

    def __init__(self, session: Session, picture: _Picture, asked: Sequence[TaskRow]) -> None:
        self.session, self.picture, self.board = session, picture, picture.board
        self.now_s = picture.now_s + picture.age_s
        mine = snapshot_reader.tasks(*forecast.COLUMNS).where(
            TaskRow.id == func.any([row.id for row in asked])
        )
        rows = session.execute(mine.order_by(TaskRow.id)).all()
        self.asked = {row.id: row for row in rows}
        self.tasks = snapshot_reader.tasks_of(session, rows, now_s=self.now_s)
        picture.know(session, {task.user for task in self.tasks.values()})

    def told(self) -> dict[str, Why]:
        picture = self.picture
        here = () if picture.led else (says.no_scheduler(picture.island),)
        ranks = self._ranks([task for task in self.tasks.values() if task.state == State.waiting])
        seen: dict[Any, Blockers] = {}
        found = {}
        waiting: list[tuple[BoardTask, tuple[Reason, ...], int, Estimate | Unknown | None]] = []
        names = _names_of_needed(self.session, self.tasks)
        windows = named_reservations(self.session, self.tasks.values())
        for task in self.tasks.values():
            window = windows.get(task.id, says.UNNAMED)
            needs = names.get(task.id, {})
            unmet = says.start(task, now_s=self.now_s, names=needs, reservation=window)
            reasons = (*here, *unmet)
            if task.state != State.waiting:
                found[task.id] = _why(reasons or (says.not_looked_at(),))
                continue
            key = blockers.alike(self.board, task)
            if key not in seen:
                gangs = picture.line.gangs[task.kind] > 0
                found_here = blockers.find_blockers(self.board, task, gangs=gangs)
                until_s = self._reserved_until_s(task) if found_here.guaranteed else 0.0
                seen[key] = replace(found_here, reserved_until_s=until_s)
            ahead, crowd = self._ahead(task, ranks[task.id])
            reasons += says.waiting(task, seen[key], ahead)
            gang = picture.widest_gang(task.kind) if seen[key].kept else 0
            expected = self._expected(task, reasons, ahead, crowd, gang)
            waiting.append((task, reasons, ahead.all + 1, expected))
        starts = self._starts((task, place, told) for task, _, place, told in waiting)
        for task, reasons, place, told in waiting:
            start = None if isinstance(told, Estimate) else told
            found[task.id] = _why(reasons, place, starts.get(task.id, start))
        return found

    def _starts(
        self, told: Iterable[tuple[BoardTask, int, Estimate | Unknown | None]]
    ) -> dict[str, Start]:
        """Return the starts by task, of each kind in the order of places."""
        by_kind: dict[str, list[tuple[int, str, Estimate]]] = defaultdict(list)
        for task, place, estimate in told:
            if isinstance(estimate, Estimate):
                by_kind[task.kind].append((place, task.id, estimate))
        found: dict[str, Start] = {}
        for line in by_kind.values():
            line.sort(key=itemgetter(0, 1))
            starts = forecast.in_order([estimate for *_, estimate in line], self.board.now_s)
            found |= {id: start for (_, id, _), start in zip(line, starts, strict=True)}
        return found

    def _reserved_until_s(self, task: BoardTask) -> float:
        """Return when the last window in force ends that reserves devices of the task's kind for
        others; 0 if there is none.
        """
        path = self.board.path_of(task.tenant)
        ends_s = (
            window.ends_s
            for window in self._windows
            if window.in_force and task.kind in window.number_by_kind
            if window.owners and window.owners[0] not in path
        )
        return max(ends_s, default=0.0)

    def _expected(
        self,
        task: BoardTask,
        reasons: Sequence[Reason],
        ahead: Ahead,
        crowd: WaitingBefore,
        gang: int,
    ) -> Estimate | Unknown | None:
        """Forecast the start; None if something unpredictable must happen first."""
        if any(reason.code in says.CLOSED for reason in reasons):
            return None
        return forecast.start(
            self.board,
            task,
            asked=self.asked[task.id],
            on_devices=self.picture.on_devices,
            own=ahead.all - sum(crowd[1]),
            crowd=crowd,
            unit=self.picture.unit(task.kind),
            learned=self.picture.kept.learned,
            gang=gang,
            windows=self._windows,
        )

    @cached_property
    def _windows(self) -> Sequence[WindowAhead]:
        """Lists the windows of reservations and maintenance that are not over."""
        return windows_ahead(self.session, self.picture.island, self._path)

    def _path(self, tenant: str) -> Iterable[str]:
        """Return the tenant and those above it; alone, if it came after the picture was drawn."""
        kept = self.picture.kept
        return kept.path(tenant) if tenant in kept.tenants else (tenant,)

    def _ahead(
        self, task: BoardTask, rank: tuple[int, int, int | None]
    ) -> tuple[Ahead, WaitingBefore]:
        """Count the tasks before this one, and how many of them each party at the top has."""
        higher, earlier, highest = rank
        k, users, tenants = higher + earlier, 0, 0
        crowd: WaitingBefore = ([], [])
        for up, branch in enumerate(above(self.board.leaf(task))):
            if branch.parent is None:
                break
            parent = branch.parent.name or None
            beside = self.picture.beside(self.session, task.kind, parent)
            crowd = before(beside.get(branch.name) or self._alone(task, branch), k, beside.values())
            more = sum(crowd[1])
            k += more
            users, tenants = (users, tenants + more) if up else (users + more, tenants)
        ahead = Ahead(tenants=tenants, users=users, higher=higher, earlier=earlier, highest=highest)
        return ahead, crowd

    def _alone(self, task: BoardTask, branch: Branch) -> WaitingBranch:
        """Return the party of a branch without counted tasks: it has just arrived, or a limit
        excludes it.
        """
        fee = self.picture.unit(task.kind) * task.width
        usage = self.board.tree.usage(branch) + branch.lifts.get(task.kind, 0)
        borrows = branch.borrows(self.board.lane_in_line(task))
        return WaitingBranch(branch.name, usage, branch.weight, fee, 1, borrows)

    def _ranks(self, tasks: Sequence[BoardTask]) -> dict[str, tuple[int, int, int | None]]:
        """Return three numbers for each task: how many of the user's tasks have higher priority,
        how many are older, and the highest priority.

        Tasks of one user, kind and priority form a row. Between two tasks asked about, the tasks
        are counted, so that each is counted once, however many are asked about.
        """
        rows: dict[Any, list[BoardTask]] = defaultdict(list)
        for task in sorted(tasks, key=lambda task: (task.submitted_s, task.id)):
            rows[task.user, task.kind, task.priority].append(task)
        after: dict[str, str | None] = {}
        for row in rows.values():
            after[row[0].id] = None
            after |= {later.id: earlier.id for earlier, later in pairwise(row)}
        values = {
            "island": self.picture.island,
            "ids": list(after),
            "after": list(after.values()),
        }
        counted = self.session.execute(_RANKS, values).all() if after else []
        between = {row.id: (row.higher or 0, row.earlier, row.highest) for row in counted}
        found = {}
        for row in rows.values():
            before_it = 0
            higher, _, highest = between.get(row[0].id, (0, 0, None))
            for task in row:
                _, n, _ = between.get(task.id, (0, 0, None))
                before_it += n
                found[task.id] = int(higher), int(before_it), highest
        return found


# --- rows -----------------------------------------------------------------------------------------


def _on_devices(island: str) -> AnySelect:
    """Select by open placements, because a million tasks may wait."""
    return (
        snapshot_reader.tasks(*forecast.COLUMNS)
        .join(Placement, Placement.task_id == TaskRow.id)
        .where(
            Placement.ended_at.is_(None),
            ~Placement.guest,
            TaskRow.island == island,
            TaskRow.state.in_(ON_A_DEVICE),
        )
    )


def _moving(island: str) -> AnySelect:
    """Select the waiting tasks that devices are kept for."""
    moving = (TaskRow.move_to.is_not(None), TaskRow.state == State.waiting)
    return snapshot_reader.tasks(*forecast.COLUMNS).where(TaskRow.island == island, *moving)


_HORIZON = text("select pg_snapshot_xmin(pg_current_snapshot())::text")

_TENANTS = text(
    """
    select t.id, t.name, t.parent_id, t.weight_milli, t.carried, t.guarantee,
           t."limit", t.max_running, t.exhausted,
           extract(epoch from t.budget_ends_at) as budget_ends_s, t.reserved,
           coalesce(p.parent_id is null, false) as under_root
    from tenants t left join tenants p on p.id = t.parent_id
    where t.txid >= cast(:since as xid8)
    """
)

_ACCOUNTS = text(
    "select user_id, tenant_id, faded from accounts where txid >= cast(:since as xid8)"
)

# Lines have no `txid` column: the row's `xmin` says what wrote it last, for recent transactions.
_LINES = text(
    """
    select user_id, kind, memory_bytes, width, device_choice, tenant_id, waiting from lines
    where island = :island and age(xmin) <= age(cast(cast(:since as xid8) as xid))
    """
)

_LIFTS = text(
    """
    select tenant_id, user_id, kind, faded from lifts
    where island = :island and age(xmin) <= age(cast(cast(:since as xid8) as xid))
    """
)

_LED = text("select leader_until > now() from islands where name = :island")

# Only tasks with an image on a device: an index finds them quickly among a million waiting tasks.
_PAUSED = text(
    """
    select kind, tier, sum(devices_min)::bigint from tasks
    where image_on is not null and move_to is null and state = 'waiting' and island = :island
    group by 1, 2
    """
)

_USERS = text(
    """
    select l.user_id, u.weight_milli, u.carried, sum(l.waiting)::bigint,
        sum(l.waiting * l.width)::bigint
    from users u join lines l on l.user_id = u.id
    where u.tenant_id = :tenant and l.island = :island and l.kind = :kind and l.waiting > 0
    group by 1, 2, 3
    """
)

# By each queue line of the user, as the index ix_tasks_line has them.  Tasks of higher priority are
# counted for the first task of a row only.  Of equal priority, only tasks between the task and the
# previous task asked about are counted.  So no task is counted twice.
_RANKS = text(
    f"""
    select a.id,
        sum((select count(*) from tasks t where b.id is null and t.state = 'waiting'
            and {IN_LINE}
            and t.priority > a.priority)) as higher,
        sum((select count(*) from tasks t where t.state = 'waiting'
            and {IN_LINE}
            and t.priority = a.priority
            and (t.submitted_at, t.id) < (a.submitted_at, a.id)
            and (t.submitted_at, t.id)
                >= (coalesce(b.submitted_at, '-infinity'), coalesce(b.id, '')))) as earlier,
        max((select max(t.priority) from tasks t where b.id is null and t.state = 'waiting'
            and {IN_LINE}
            and t.priority > a.priority)) as highest
    from unnest(cast(:ids as text[]), cast(:after as text[])) as asked (id, after)
    join tasks a on a.id = asked.id
    left join tasks b on b.id = asked.after
    join lines l on l.island = :island and l.user_id = a.user_id and l.kind = a.kind
        and l.waiting > 0
    group by a.id
    """
)
