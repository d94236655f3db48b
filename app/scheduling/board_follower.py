"""Keeps an island's board up to date with the rows: reads once in full, then only the changes.

Every row that matters for decisions carries the id of the transaction that wrote it last; a trigger
sets it. A change that was not visible at the last look was written by a transaction that had not
ended then. So reading again all rows from the oldest such transaction on misses nothing. One
statement asks which tables have such rows; a look that finds no changes costs only that statement.
The renewal of a lease marks no row, since each device is renewed every few seconds: the board reads
a device again before the lease that it knows ends.

Of each line (the waiting tasks of one user that need the same) only the beginning is read, and more
when it runs out. So the cost of a board depends on what may be picked, not on what waits. If a
transaction fails after the board was changed, the board is discarded and read again (`forget`).
With the board goes the part of its plan that is not written yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnClause,
    ColumnElement,
    Double,
    Integer,
    Select,
    TableValuedAlias,
    Text,
    and_,
    cast,
    column,
    func,
    literal,
    or_,
    select,
    text,
    tuple_,
)
from sqlalchemy.orm import Session, aliased

from app.core.fairness.fair_tree import Branch, Lane
from app.core.model.lifecycle import ENDED, State
from app.core.model.request_needs import RequestStanding
from app.core.model.reserved_task import ReservationStanding
from app.core.model.snapshot import BatchSize, BoardTask, GangWait, Plan
from app.core.model.story import Story
from app.core.scheduling.board import Board, alike, place_in_line
from app.core.scheduling.cycle import cycle
from app.core.scheduling.idle_credit import CarriedLevels, recall
from app.db import lines
from app.db.models import Account, Device, Host, Need, Tenant, User, Xid8
from app.db.models import Line as LineRow
from app.db.models import Task as TaskRow
from app.db.transactions import AnyRow, AnySelect
from app.scheduling import snapshot_reader
from app.scheduling.journal.decisions import UnwrittenPlan
from app.settings import settings

BEGINNING = 4  # tasks of every line that are read at first
MORE = 32  # most tasks of a line that are read when it runs out
LINES_AT_ONCE = 256  # most lines that one statement reads on, if fewer have run out
MORE_AT_ONCE = 512  # tasks that it reads in all, but at least BEGINNING of each line
LEASE_LOOKS = 2  # leases that end within so many looks are read again, so that few end unread
AT_ONCE = 1000  # changed tasks read in one round; the next round reads the rest
# most blocked tasks that can start read in one round; the next round reads the rest
STARTABLE = 500

Line = tuple[Branch, Lane]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Says what to read: which tables have changed, and which tasks have become due."""

    horizon: int  # oldest transaction that may still write more
    tenants: bool
    devices: bool
    tasks: bool
    abroad: bool  # tasks of other islands have ended, for which tasks here may wait
    given: bool  # tasks that still run, of any island, have made outputs durable
    gangs: bool  # members of gangs that span islands have changed
    users: bool
    due: bool  # blocked tasks have reached their start time
    saves: bool  # users asked for checkpoints
    moves: bool  # moves are under way or asked for
    next_due_s: float | None  # when the next blocked task reaches its start time


@dataclass(slots=True)
class Follower:
    """Keeps the board of one island, and how far it has been read.

    `since` is the oldest transaction with changes that may still be unread. `after` is the position
    from which a look that was cut short continues.
    """

    island: str
    board: Board | None = None
    since: int = 0
    after: tuple[int, str] | None = None
    locked: bool = True  # True if there may be startable blocked tasks that were not read
    blocked: set[str] = field(default_factory=set)  # blocked tasks read since the last round
    behind: bool = False  # True if there are changes that were not read yet
    news: News | None = None  # result of the last look
    unwritten: UnwrittenPlan | None = None  # the plan of which a rest is to be written
    memory: CarriedLevels | None = None  # what is remembered of the previous board
    waits: dict[str, GangWait] = field(default_factory=dict)  # the waits of gangs on it
    # its sizes of batches of functions
    batches: dict[tuple[str, str], BatchSize] = field(default_factory=dict)
    story: Story = field(default_factory=Story)  # what was read and decided, on all boards so far

    def forget(self) -> None:
        """Discard the board, because what it holds may not have been written."""
        if self.board is not None:
            self.memory, self.waits = CarriedLevels.of(self.board), self.board.waits
            self.batches = self.board.batches
            self.board = self.unwritten = None

    def look(self, session: Session, *, now_s: float) -> Board:
        """Return the board after reading what has changed.

        A look reads at most `AT_ONCE` changed tasks; the next look reads the rest.  The caller must
        have written the decisions of the last look.
        """
        self.news = self._ask(session, now_s)
        if self.board is not None:
            self.board.memory.written_down()
            if not self._catch_up(session, self.board, self.news, now_s):
                self.forget()
        if self.board is None:
            self.board = self._read(session, self.news, now_s)
        return self.board

    def look_at_devices(self, session: Session) -> None:
        """Read again the devices that have changed since the last look."""
        if self.board is not None:
            self._devices(session, self.board)

    def cycle(self, session: Session, board: Board) -> Plan:
        """Run one round of `core.scheduling.cycle`; reads more of a line whenever the line runs
        out."""
        plan = cycle(board)
        while board.short:
            self._lengthen(session, board)
            more = cycle(board)
            plan = replace(
                more,
                decisions=(*plan.decisions, *more.decisions),
                before={**more.before, **plan.before},
                lifts=(*plan.lifts, *more.lifts),
            )
        for id in self.blocked & board.tasks.keys():
            task = board.tasks[id]
            if task.state == State.blocked or (task.state == State.waiting and board.beyond(task)):
                board.drop_task(id)  # it is read again when something about it changes
        self.blocked.clear()
        due_s = self.news.next_due_s if self.news is not None else None
        if due_s is None:
            return plan
        return replace(plan, look_again_s=min(plan.look_again_s or due_s, due_s))

    # --- all at once ---

    def _read(self, session: Session, news: News, now_s: float) -> Board:
        self.since, self.after, self.behind = news.horizon, None, False
        self.locked = True
        board = Board.of(
            snapshot_reader.without_line(session, self.island, now_s=now_s), now_s=now_s
        )
        beginnings = self._take_in(session, board, self._beginnings())
        if news.moves:
            self._take_in(session, board, self._moving())
        self._mark_longer(board, beginnings, BEGINNING)
        self._unlock(session, board)
        self._take_in(session, board, self._members())
        recall(board, self.memory)
        board.waits, board.batches, board.story = self.waits, self.batches, self.story
        return board

    def _unlock(self, session: Session, board: Board) -> None:
        found = self._take_in(session, board, self._startable(board.now_s))
        self.locked = len(found) == STARTABLE

    def _beginnings(self) -> AnySelect:
        line = (
            self._line({name: getattr(LineRow, name) for name in lines.KEY})
            .limit(BEGINNING)
            .lateral("line")
        )
        return (
            select(*line.c)
            .select_from(LineRow)
            .join(line, text("true"))
            .where(LineRow.island == self.island, LineRow.waiting > 0)
        )

    def _moving(self) -> AnySelect:
        """Select the tasks that are between two devices in a move, wherever in their lines they
        stand.
        """
        return snapshot_reader.tasks().where(
            TaskRow.island == self.island, TaskRow.move_to.is_not(None), TaskRow.state == "waiting"
        )

    def _mark_longer(self, board: Board, rows: Sequence[AnyRow], each: int) -> None:
        """Mark the lines of which `each` tasks were read: more may wait behind these.

        The counts in `lines` may not show that: they are written at the end of each transaction,
        including ours.
        """
        read: dict[Line, list[BoardTask]] = {}
        for task in (board.tasks[row.id] for row in rows):
            read.setdefault((board.leaf(task), alike(task)), []).append(task)
        for line, tasks in read.items():
            if len(tasks) == each:
                board.longer[line] = max(place_in_line(task) for task in tasks)

    # --- what changed ---

    def _ask(self, session: Session, now_s: float) -> News:
        values = {"island": self.island, "since": str(self.since), "now_s": now_s}
        row = session.execute(_NEWS, values).one()._asdict()
        due_s = row.pop("next_due_s")
        horizon = int(row.pop("horizon"))
        return News(horizon=horizon, next_due_s=None if due_s is None else float(due_s), **row)

    def _catch_up(self, session: Session, board: Board, news: News, now_s: float) -> bool:
        """Read the changes.

        False if the shape of the tree has changed: then all must be read again.
        """
        seen_s = board.now_s
        board.at(now_s)
        if news.tenants and not self._tenants(session, board):
            return False
        if news.devices:
            self._devices(session, board)
        self._leases(session, board, seen_s)
        cut_short = self.after is not None
        changed = self._take_in(session, board, self._changed()) if news.tasks or cut_short else ()
        ended = [row.id for row in changed if row.is_needed and row.state in ENDED]
        self._changed_around(session, board, news, ended)
        if self.locked:
            self._unlock(session, board)
        elif news.due:
            self._take_in(session, board, self._due(now_s))
            self._take_in(session, board, self._members())
        if news.users or news.tenants:
            self._users(session, board)
        self.behind = len(changed) == AT_ONCE
        if self.behind:
            self.after = (changed[-1].txid, changed[-1].id)
        else:
            self.since, self.after = news.horizon, None
        return True

    def _changed_around(self, session: Session, board: Board, news: News, ended: list[str]) -> None:
        """Read tasks that have not changed themselves, but that wait for something that has
        changed.
        """
        if news.abroad:
            ended = [*ended, *session.scalars(self._ended_abroad())]
        if ended:
            self._take_in(session, board, self._dependents(Need.needs_id == func.any(ended)))
        if news.given:
            self._take_in(session, board, self._dependents(Need.given >= _xid(self.since)))
        if news.gangs:
            self._take_in(session, board, self._of_gangs())

    def _changed(self) -> AnySelect:
        needed = select(Need.task_id).where(Need.needs_id == TaskRow.id).exists()
        query = snapshot_reader.tasks(TaskRow.txid, needed.label("is_needed")).where(
            TaskRow.island == self.island, TaskRow.txid >= _xid(self.since)
        )
        if self.after is not None:
            txid, id = self.after
            query = query.where(tuple_(TaskRow.txid, TaskRow.id) > tuple_(_xid(txid), literal(id)))
        return query.order_by(TaskRow.txid, TaskRow.id).limit(AT_ONCE)

    def _ended_abroad(self) -> Select[str]:
        return select(TaskRow.id).where(
            TaskRow.abroad, TaskRow.state.in_(ENDED), TaskRow.txid >= _xid(self.since)
        )

    def _members(self) -> AnySelect:
        """Select blocked members of gangs over several islands; they may stay blocked after their
        start time.
        """
        mine = (TaskRow.island == self.island, TaskRow.gang_id.is_not(None))
        return snapshot_reader.tasks().where(*mine, TaskRow.state == "blocked")

    def _startable(self, now_s: float) -> AnySelect:
        """Select blocked tasks that can start now, or can never start; members of gangs are left
        out.
        """
        needed = aliased(TaskRow)
        needs = select(Need.task_id).join(needed, needed.id == Need.needs_id)
        mine = Need.task_id == TaskRow.id
        is_free = TaskRow.standing == RequestStanding.free
        lacking = (needed.state != "done", Need.given.is_(None), ~Need.late)
        open_ = needs.where(mine, *lacking).exists()
        # what failed in another request is decided with the task's standing to it
        counts = or_(is_free, needed.request_id == TaskRow.request_id)
        broken = needs.where(mine, needed.state.in_(("failed", "cancelled")), counts).exists()
        time_has_come = or_(
            TaskRow.not_before.is_(None), TaskRow.not_before <= func.to_timestamp(now_s)
        )
        may_run = TaskRow.reservation_state == ReservationStanding.free
        free = and_(TaskRow.hold == "", is_free, may_run, ~open_, time_has_come)
        never = or_(TaskRow.standing == RequestStanding.never, broken)
        return (
            snapshot_reader.tasks()
            .where(TaskRow.island == self.island, TaskRow.state == "blocked")
            .where(TaskRow.gang_id.is_(None))
            .where(or_(free, never, TaskRow.cancel_asked_at.is_not(None)))
            .order_by(TaskRow.id)
            .limit(STARTABLE)
        )

    def _due(self, now_s: float) -> AnySelect:
        """Select the startable tasks that waited for their start time."""
        return self._startable(now_s).where(TaskRow.not_before <= func.to_timestamp(now_s))

    def _dependents(self, which: ColumnElement[bool]) -> AnySelect:
        ids = select(Need.task_id).where(which)
        return snapshot_reader.tasks().where(
            TaskRow.id.in_(ids), TaskRow.island == self.island, TaskRow.state.not_in(ENDED)
        )

    def _of_gangs(self) -> AnySelect:
        """Select the tasks here of gangs in which any member, on any island, has changed."""
        other = aliased(TaskRow)
        changed = select(other.gang_id).where(
            other.gang_id.is_not(None), other.txid >= _xid(self.since)
        )
        return snapshot_reader.tasks().where(
            TaskRow.gang_id.in_(changed),
            TaskRow.island == self.island,
            TaskRow.state.not_in(ENDED),
        )

    def _tenants(self, session: Session, board: Board) -> bool:
        for tenant in snapshot_reader.tenants(session, self.island).values():
            old = board.tenants.get(tenant.id)
            if old is not None and old.parent != tenant.parent:
                return False
            if old != tenant:
                board.set_tenant(tenant)
        return True

    def _users(self, session: Session, board: Board) -> None:
        """Read the users that have changed, after the tasks.

        The board adds what running tasks owe to what the ledger has booked. With older values of
        the tasks it would count twice what has been booked since.
        """
        since = _xid(self.since)
        # the limits of a user may be those that its tenant gives its users
        moved = select(User.id).join(Tenant, Tenant.id == User.tenant_id)
        moved = moved.where(or_(User.txid >= since, Tenant.txid >= since))
        booked = select(Account.user_id).where(Account.txid >= since)
        for user in snapshot_reader.users(
            session, self.island, User.id.in_(moved.union(booked))
        ).values():
            board.set_user(user)

    def _leases(self, session: Session, board: Board, seen_s: float) -> None:
        """Read again the devices whose leases, as the board has them, have ended since `seen_s` or
        end soon: a lease that is renewed in time marks no row as changed.
        """
        until_s = board.now_s + LEASE_LOOKS * settings().tick_s
        ends = [
            device.id
            for device in board.devices.values()
            if seen_s < device.lease_until_s <= until_s
        ]
        if not ends:
            return
        ending = Device.id == func.any(ends)
        for device in snapshot_reader.devices(session, self.island, ending).values():
            board.set_device(device)

    def _devices(self, session: Session, board: Board) -> None:
        since = _xid(self.since)
        fresh = or_(Device.txid >= since, Host.txid >= since)
        for device in snapshot_reader.devices(session, self.island, fresh).values():
            board.set_device(device)

    # --- tasks ---

    def _take_in(self, session: Session, board: Board, query: AnySelect) -> Sequence[AnyRow]:
        """Put tasks on the board as their rows are.

        Tasks behind the part of a line that was read are left out.
        """
        rows = session.execute(query).all()
        for task in snapshot_reader.tasks_of(session, rows, now_s=board.now_s).values():
            if task.state == State.blocked:
                self.blocked.add(task.id)
            beyond = task.state == State.waiting and task.user in board.users
            self._note(board.tasks.get(task.id), task, board.now_s)
            conditions = task.conditions
            never = conditions.broken or conditions.standing == RequestStanding.never
            ends = task.stops or task.cancel_asked or never or conditions.terms.lets_go
            if beyond and not ends and board.beyond(task):
                board.drop_task(task.id)
            elif task.user in board.users:
                board.set_task(task)
            else:
                board.set_user(
                    snapshot_reader.users(session, self.island, User.id == task.user)[task.user]
                )
                board.set_task(task)
        return rows

    def _note(self, known: BoardTask | None, task: BoardTask, now_s: float) -> None:
        """Note that a row shows a task in another state than its own last decision did.

        When all is read anew, nothing is noted: it would push out what happened.
        """
        is_new = known is None or (known.state, known.epoch) != (task.state, task.epoch)
        if is_new and self.board is not None:
            self.story.note(round(now_s * 1e6), task.id, ("read", task.state), task.epoch)

    def _lengthen(self, session: Session, board: Board) -> None:
        """Read more of the lines that ran out, and of some that are about to."""
        ends = {line: board.longer.pop(line) for line in board.ending(LINES_AT_ONCE)}
        each = min(MORE, max(BEGINNING, MORE_AT_ONCE // len(ends)))
        rows = self._take_in(session, board, self._beyond(ends, each))
        self._mark_longer(board, rows, each)
        board.short.clear()

    def _beyond(self, ends: Mapping[Line, tuple[int, float, str]], each: int) -> AnySelect:
        """Select up to `each` tasks of every line, from behind its last loaded task on."""
        end = _as_rows(ends)
        later = tuple_(TaskRow.submitted_at, TaskRow.id) > tuple_(
            func.to_timestamp(end.c.submitted_s), end.c.task_id
        )
        key = {name: end.c[name] for name in lines.KEY if name != "island"}
        line = (
            self._line({**key, "island": self.island})
            .where(TaskRow.priority <= end.c.priority)
            .where(or_(TaskRow.priority < end.c.priority, later))
            .limit(each)
            .lateral("line")
        )
        return select(*line.c).select_from(end).join(line, text("true"))

    def _line(self, key: Mapping[str, Any]) -> AnySelect:
        """Select the tasks in one line, in the order of rule F3; `key` has the line's values or
        columns.
        """
        of_line = (getattr(TaskRow, lines.KEY[name]) == value for name, value in key.items())
        return (
            snapshot_reader.tasks()
            .where(TaskRow.state == "waiting", *of_line)
            .order_by(TaskRow.priority.desc(), TaskRow.submitted_at, TaskRow.id)
        )


def _as_rows(ends: Mapping[Line, tuple[int, float, str]]) -> TableValuedAlias:
    """Return a row for each line: its key but the island, and the place of its last loaded task."""
    values = [
        (
            leaf.name,
            here.kind,
            here.memory_bytes,
            here.width,
            here.choice,
            -urgency,
            submitted_s,
            id,
        )
        for (leaf, here), (urgency, submitted_s, id) in ends.items()
    ]
    arrays = (
        cast(list(each), ARRAY(column.type))
        for each, column in zip(zip(*values, strict=True), _END, strict=True)
    )
    return func.unnest(*arrays).table_valued(*_END, name="ends").render_derived()


_END: tuple[ColumnClause[Any], ...] = (
    column("user_id", Text),
    column("kind", Text),
    column("memory_bytes", BigInteger),
    column("width", Integer),
    column("device_choice", Text),
    column("priority", Integer),
    column("submitted_s", Double),
    column("task_id", Text),
)


def _xid(txid: int) -> ColumnElement[int]:
    return cast(str(txid), Xid8)


# Compares the newest row of each table, by its index: an `exists` could read many rows.
_NEWS = text(
    """
    select pg_snapshot_xmin(pg_current_snapshot())::text as horizon,
        coalesce((select txid from tenants order by txid desc limit 1) >= since, false) as tenants,
        coalesce((select txid from devices order by txid desc limit 1) >= since, false)
            or coalesce((select txid from hosts order by txid desc limit 1) >= since, false)
            as devices,
        coalesce((select txid from tasks where island = :island order by txid desc limit 1)
            >= since, false) as tasks,
        coalesce((select txid from tasks where abroad and state in ('done', 'failed', 'cancelled')
            order by txid desc limit 1) >= since, false) as abroad,
        coalesce((select given from needs where given is not null
            order by given desc limit 1) >= since, false) as given,
        coalesce((select txid from tasks where gang_id is not null
            order by txid desc limit 1) >= since, false) as gangs,
        coalesce((select txid from users order by txid desc limit 1) >= since, false)
            or coalesce((select txid from accounts order by txid desc limit 1) >= since, false)
            as users,
        coalesce((select min(not_before) from tasks where island = :island
            and state = 'blocked') <= to_timestamp(:now_s), false) as due,
        exists (select from tasks where save_asked and state = 'running' and island = :island)
            as saves,
        exists (select from tasks where move_to is not null and island = :island) as moves,
        (select extract(epoch from min(not_before)) from tasks where island = :island
            and state = 'blocked' and not_before > to_timestamp(:now_s)) as next_due_s
    from cast(:since as xid8) as since
    """
)
