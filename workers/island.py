"""One island's scheduler: look, decide, write down, send.

    celery -A workers.island worker --pool threads -Q island.<name>

Of several such workers one leads, by a lease in the island's row; the others stand by.  Every round
locks that row first, so two schedulers never write at once, whoever believes to lead.  All of them
sign with the island's one key.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import ColumnElement, Select, bindparam, func, select, true, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from app import broker, collector, db, journal, ledger, moving, outbox
from app.core import record
from app.core.board import Board
from app.core.island import Plan
from app.core.messages import Alive, Answer, BadMessage
from app.core.rota import as_json
from app.core.sharing import shares
from app.core.standing import is_wanted, soonest_first
from app.enrolment import Roster
from app.envelope import opened_heartbeat
from app.follow import Follower
from app.models import Device, Island, LedgerBase, Order, Placement, Task
from app.settings import settings
from app.signing import BadSignature
from app.tally import Tally
from workers.hints import hears
from workers.loop import Loop, keep

log = logging.getLogger(__name__)

BUSY_S = 0.05  # until a wish that is being written now has been written
TOLD_TASKS = 5  # so many are named in the log when a round looks back
RESEND_LOOKS = 4  # so often orders are looked for that are due again, in the time of one

celery = broker.make_celery("island", settings().redis_url.get_secret_value(), settings().redis_tls)


class Scheduler(Loop):
    """The brain of `island`; `inbox` holds the heartbeats heard since the last round."""

    def __init__(self, island: str) -> None:
        super().__init__(f"island {island}")
        self.island, self.me = island, uuid.uuid4().hex
        self.inbox: queue.SimpleQueue[Alive] = queue.SimpleQueue()
        self.roster = Roster(island)
        self.spoken: dict[str, tuple[str, int]] = {}  # by device: its newest process, and when
        self.nudged = threading.Event()
        self.follower = Follower(island)
        self.tally, self.leads = Tally(), False
        self.began_s = 0.0  # by the monotonic clock: this round's transaction
        self.due_s = 0.0  # by the monotonic clock: when time alone may change the plan
        self.resend_s = 0.0  # by the monotonic clock: when to look for orders to be sent again
        self.deaf_until_s = 0.0  # by the monotonic clock: silence says nothing about devices

    def receive(self, text: str) -> None:
        """Hear a heartbeat as it came over Redis; raises BadSignature or BadMessage if it does not
        count.  Called in the thread that reads from Redis.
        """
        alive = opened_heartbeat(text, hosts=self.roster.hosts)
        if objection := self.roster.objection(alive):
            raise BadSignature(objection)
        sent = alive.incarnation, alive.sent_us
        if sent > self.spoken.get(alive.device, ("", 0)):
            self.spoken[alive.device] = sent
            self.hear(alive)

    def hear(self, alive: Alive) -> None:
        self.inbox.put(alive)
        self.wake.set()

    def nudge(self) -> None:
        self.nudged.set()
        self.wake.set()

    def look(self) -> float:
        began_s, heard = time.monotonic(), self._heard()
        look_now = self.nudged.is_set() or time.monotonic() >= self.due_s
        self.nudged.clear()
        try:
            answers, due = self._written_down(heard, look_now)
        except BaseException:
            self._not_written_down(heard)
            raise
        # 4. Only what is committed is sent.
        self._send(answers, due)
        if self.leads:
            self.tally.round(time.monotonic() - began_s)
        return max(0.0, self.due_s - time.monotonic())

    def _written_down(self, heard: list[Alive], look_now: bool) -> tuple[list[Answer], list[Order]]:
        """One round.  If anything is wrong with it, it is made again, with care: what is heard of
        each device, and the plan, in a savepoint of its own, so that nothing bad spoils the rest.
        """
        try:
            return self._round_in_one_transaction(heard, look_now, careful=False)
        except (OperationalError, InterfaceError):
            raise  # the database went away
        except Exception as error:
            log.warning("island %s: a round is made again, with care: %r", self.island, error)
            self.follower.forget()
        return self._round_in_one_transaction(heard, look_now, careful=True)

    def _round_in_one_transaction(
        self, heard: list[Alive], look_now: bool, *, careful: bool
    ) -> tuple[list[Answer], list[Order]]:
        with db.transaction() as session:
            # 1. Only one writes at a time.
            row, due = self._begin(session), list[Order]()
            self.roster.read(session)
            # 2. What devices say is true.
            recorded = journal.record_all(session, heard, careful=careful) if heard else []
            changed = look_now or any(changed for _, changed in recorded)
            if changed and db.is_awaited(session):  # others need not wait for our plan as well
                due = self._settled(session)
                db.commit(session)
                session.expunge_all()
                row = self._begin(session)
            # 3. Who leads also decides, if anything moved.
            if changed:
                plan = self._plan if careful else self._cycle
                again_s = plan(session) if self.leads else settings().tick_s
                self.due_s = time.monotonic() + again_s
            due += self._settled(session)
            self.tally.write(session, row, leads=self.leads)
            return [self._with_order(answer) for answer, _ in recorded], due

    def _begin(self, session: Session) -> Island:
        """Nobody else writes until the commit; and who leads is known."""
        row, left_s = self._row(session)
        _check_key(row)
        self.began_s = time.monotonic()
        self.leads = self._lead(session, row, left_s)
        if not self.leads:
            self.follower.forget()
        return row

    def _settled(self, session: Session) -> list[Order]:
        """All is written down that the commit makes true; orders to be sent after it."""
        journal.settle(session)
        return self._due(session)

    def _due(self, session: Session) -> list[Order]:
        """Orders to be sent: the new ones, and, looked for now and then, what was sent long ago."""
        new, resend_s = journal.ordered(session), settings().order_resend_s
        if time.monotonic() < self.resend_s:
            return new
        self.resend_s = time.monotonic() + resend_s / RESEND_LOOKS
        return [*outbox.take_unsent(session, _live(self.island), resend_s=resend_s), *new]

    def _with_order(self, answer: Answer) -> Answer:
        """Devices obey the islands that their own one names.

        Where a device has too little memory for all that live there, the last of them leaves;
        where several share one, the least served of them goes next; where nobody waits for such a
        device, who stands still there may stay.
        """
        board, answer = self.follower.board, replace(answer, peers=self.roster.peers)
        if board is None:
            return answer
        rota = [as_json(share) for share in shares(board, answer.device)]
        soonest = soonest_first(board, [task for task, _ in answer.keep])
        return replace(answer, next=soonest, rota=rota, wanted=is_wanted(board, answer.device))

    def _not_written_down(self, heard: list[Alive]) -> None:
        for alive in heard:
            self.inbox.put(alive)
        self.follower.forget()
        self.nudged.set()

    def leave(self) -> None:
        """Let the standby take over at once."""
        with db.transaction() as session:
            row, _ = self._row(session)
            if row.leader == self.me:
                row.leader_until = func.now()

    def _heard(self) -> list[Alive]:
        """The newest heartbeat of every device process: it says all that those before it said."""
        newest: dict[tuple[str, str], Alive] = {}
        while not self.inbox.empty():
            alive = self.inbox.get()
            process = (alive.device, alive.incarnation)
            if process not in newest or newest[process].sent_us < alive.sent_us:
                newest[process] = alive
        return [newest[process] for process in sorted(newest)]

    def _row(self, session: Session) -> tuple[Island, float]:
        """The island's row, locked, and how many seconds are left of its leader's lease."""
        found = session.execute(_ROW, {"island": self.island}).one_or_none()
        if found is None:
            session.execute(insert(Island).values(name=self.island).on_conflict_do_nothing())
            found = session.execute(_ROW, {"island": self.island}).one()
        db.it_is(session, float(found[2]))
        ledger.it_is(session, found[3])
        return found[0], float(found[1])

    def _lead(self, session: Session, row: Island, left_s: float) -> bool:
        """Take or renew the lease; False while another's is open.

        A lease of ours that has ended was a pause in which nobody was heard, and in which control
        may have given our tasks away: we begin anew.
        """
        if left_s > 0 and row.leader != self.me:
            return False
        if left_s <= 0:
            log.warning("%s leads island %s", self.me[:8], self.island)
            row.leader, row.term, row.leading_since = self.me, row.term + 1, func.now()
            self.follower.forget()
            _spare_leases(session, self.island)
        if left_s < settings().leader_s / 2:
            row.leader_until = func.now() + timedelta(seconds=settings().leader_s)
        return True

    def _plan(self, session: Session) -> float:
        """In a savepoint: a plan that cannot be made or written down leaves what devices said."""
        try:
            with session.begin_nested():
                return self._cycle(session)
        except (OperationalError, InterfaceError):
            raise
        except Exception:
            log.exception("island %s could not make its plan", self.island)
            self.follower.forget()
            return settings().tick_s

    def _cycle(self, session: Session) -> float:
        journal.write_down(session)
        # The transaction's clock stands still: whose turn ended while we wrote is seen at once.
        now_s = db.now_s(session) + time.monotonic() - self.began_s
        known, board = self.follower.board, self.follower.look(session, now_s=now_s)
        if board is not known:
            collector.spare_anew()
        moves = self.follower.news is not None and self.follower.news.moves
        if moves and moving.advance(session, board, island=self.island):
            board = self.follower.look(session, now_s=now_s)
        self._spare_the_silent(session, board)
        plan = self.follower.cycle(session, board)
        seen = None
        if plan.decisions or plan.lifts:
            seen = record.seen_by(board, plan, plan.before, island=self.island)
        if not journal.store(session, plan, seen=seen):
            self.follower.forget()
            return BUSY_S
        if self.follower.news is not None and self.follower.news.saves:
            journal.order_saves(session, self.island)
        moving.make_fit(session, board)
        if self.follower.behind:
            return 0.0
        return self._wait_s(plan, board, now_s=now_s)

    def _wait_s(self, plan: Plan, board: Board, *, now_s: float) -> float:
        """Until the next round, if nothing wakes it; a plan that is to be made again in the past
        is a fault of the scheduler, and must not keep it busy for ever.
        """
        if plan.look_again_s is None:
            return settings().tick_s
        if plan.look_again_s <= now_s:
            waiting = sorted(board.tried.keys() | board.in_the_way)[:TOLD_TASKS]
            log.error(
                "island %s: the round at %.6f s asked to be made again at %.6f s; tasks: %s",
                self.island,
                now_s,
                plan.look_again_s,
                ", ".join(waiting) or "none",
            )
            return settings().tick_s
        return min(settings().tick_s, plan.look_again_s - now_s)

    def _spare_the_silent(self, session: Session, board: Board) -> None:
        """While Redis is away, and for one lease after it: devices must get through first."""
        if all(board.alive(id) for id in (*board.seated, *board.leaving)):
            return
        if not outbox.reachable():
            # Until the leases given now have ended and were given once more.
            self.deaf_until_s = time.monotonic() + 2 * settings().lease_s
        if time.monotonic() < self.deaf_until_s:
            _spare_leases(session, self.island)
            self.follower.look_at_devices(session)

    def _send(self, answers: list[Answer], due: list[Order]) -> None:
        if unsent := outbox.send(answers, due):
            self.resend_s = 0.0
            with db.transaction() as session:
                outbox.mark_unsent(session, unsent)


def _check_key(row: Island) -> None:
    """Devices are told one key of an island; what another one signs, they would not obey."""
    ours = outbox.signer().public
    row.key = row.key or ours
    if row.key != ours:
        raise RuntimeError(
            f"island {row.name} signs with the key {row.key[:16]}…, and "
            f"{settings().island_key_file} holds {ours[:16]}…: copy the file from where the island "
            "runs, or run `python -m app.seed --island` here to give the island this key"
        )


_LEFT_S = func.coalesce(func.extract("epoch", Island.leader_until - func.now()), 0)

# Locked, with the seconds left of its leader's lease, what time it is, and the ledger's row.
_ROW = (
    select(Island, _LEFT_S, func.extract("epoch", func.now()), LedgerBase)
    .outerjoin(LedgerBase, true())
    .where(Island.name == bindparam("island"))
    .with_for_update(key_share=True, of=Island)
)


def _spare_leases(session: Session, island: str) -> None:
    """Nobody could be heard, for a while or now: give every device one lease to be heard again.

    Without this, a pause of the control plane or of Redis would count every running task as lost.
    Devices stop by themselves when they are not answered, so nothing runs twice meanwhile.
    """
    until = func.now() + timedelta(seconds=settings().lease_s)
    parked = select(Task.id).where(Task.image_on == Device.id, ~Task.saved)
    spared = update(Device).where(Device.island == island, _seats_somebody() | parked.exists())
    session.execute(spared.values(lease_until=func.greatest(Device.lease_until, until)))


def _seats_somebody() -> ColumnElement[bool]:
    open_ = select(Placement.id).where(
        Placement.device_id == Device.id, Placement.ended_at.is_(None)
    )
    return open_.exists()


def _live(island: str) -> Select[tuple[str]]:
    return select(Device.id).where(Device.island == island, Device.lease_until > func.now())


scheduler = Scheduler(settings().island)
keep(celery, scheduler)


@hears(celery, broker.ISLAND_NUDGE)
def nudge() -> None:
    scheduler.nudge()


not_heard = broker.Complaint(log, "a heartbeat does not count")


@hears(celery, broker.ISLAND_ALIVE)
def alive(text: str) -> None:
    try:
        scheduler.receive(text)
    except (BadSignature, BadMessage) as error:
        not_heard.say(error)
