"""Runs one island's scheduler: read the state, decide, write the plan, send orders.

    celery -A workers.control.scheduler worker --pool threads -Q island.<name>

If several such workers run, one leads by a lease in the island's row and the others are standbys.
Every round locks that row first, so two schedulers never write at once, even if both believe to
lead.  All of them have the island's one key.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, func, select, text, true, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.device.sent_reports import SentReports
from app.core.model.protocol.messages import (
    JSON,
    Alive,
    Answer,
    LeaseRenewal,
    Pulse,
    ReportWanted,
    encode,
)
from app.core.model.protocol.wellformed import BadMessage
from app.core.model.snapshot import Plan
from app.core.scheduling import record
from app.core.scheduling.blockers import is_wanted, soonest_first
from app.core.scheduling.board import Board
from app.core.scheduling.rounds.heartbeat_backlog import HeartbeatBacklog, launches_wait
from app.core.scheduling.rounds.heartbeat_news import HeartbeatNews
from app.core.scheduling.rounds.pace import HeartbeatPace
from app.core.scheduling.rounds.quiet_heartbeats import AcknowledgedReport, Beat, QuietHeartbeats
from app.core.scheduling.rounds.unopened_heartbeats import UnopenedHeartbeats
from app.core.scheduling.sharing.time_sharing import shares
from app.core.scheduling.sharing.turns import as_json
from app.db import gc_freeze, transactions
from app.db.guarded_connection import refusal
from app.db.models import Device, Island, LedgerBase, OutboxOrder, Placement, Task
from app.identity.enrolment import Roster
from app.insight.counters import Tally
from app.messaging import broker, outbox
from app.messaging.outbox import NO_ROUTE, NewsRoute
from app.messaging.signed_messages import claimed_process, heartbeats_in, opened_body
from app.scheduling import island_pace, journal, ledger, task_migration
from app.scheduling.board_follower import Follower
from app.scheduling.island_pace import pace_of
from app.settings import settings
from app.storage.signing import BadSignature
from workers.control.loop import Loop, keep
from workers.process.celery_inbox import hears, hears_all

log = logging.getLogger(__name__)

BUSY_S = 0.05  # retry after this, while a requested action is being written
TOLD_TASKS = 5  # most tasks that the log names if a round asks to run at a time in the past
ROUNDS_A_LEASE = 5  # a round should take at most this part of the leader's lease
PACE_EVERY_S = 10.0  # how often the devices are counted, for their pace
GATHER_S = 0.25  # time between rounds that only take heartbeats that say nothing new
PROGRESSES_A_LEASE = 2  # how often the progress of quiet tasks is written during a lease
RESEND_LOOKS = 4  # looks for orders to resend, per resend interval
DECISIONS_A_ROUND = 128  # decisions written in one round; the next round writes on

celery = broker.make_celery("island", settings().redis_url.get_secret_value(), settings().redis_tls)


class Scheduler(Loop):
    """Schedules `island`.

    `inbox` holds the heartbeats received since the last round.  `backlog` holds the reports that no
    round has taken yet, and `quiet` the pulses.
    """

    def __init__(self, island: str) -> None:
        super().__init__(f"island {island}")
        self.island, self.me = island, uuid.uuid4().hex
        self.inbox: queue.SimpleQueue[tuple[Alive | Pulse, float]] = queue.SimpleQueue()
        self.backlog = HeartbeatBacklog()
        self.quiet = QuietHeartbeats()
        self.reports: dict[str, AcknowledgedReport] = {}  # of this round, not committed yet
        self.replaced: set[str] = set()  # devices whose process has been replaced
        self.wanted: dict[str, ReportWanted] = {}  # by device: reports to ask for
        # Devices of the version before, which send whole reports: these are compared here, and one
        # that repeats an earlier one counts as a pulse.
        self.unnumbered: dict[str, SentReports] = {}
        self.roster = Roster(island)
        # by device; workers of several versions may serve the devices of one host
        self.routes: dict[str, NewsRoute] = {}
        # device -> incarnation and time of its newest heartbeat
        self.spoken: dict[str, tuple[str, int]] = {}
        # device -> its newest report that could not be read, of those that its host signed
        self.unreadable: dict[str, journal.UnreadableReport] = {}
        self.heartbeat_news = HeartbeatNews()
        self.nudged = threading.Event()
        self.pressing = threading.Event()  # set if a round is to begin at once
        self.gathers_until_s = 0.0  # by the monotonic clock
        self.follower = Follower(island)
        self.tally, self.leads = Tally(), False
        self.began_s = 0.0  # start of this round's transaction, by the monotonic clock
        self.planned_s = 0.0  # start of the last plan, or part of one, by the monotonic clock
        self.due_s = 0.0  # when time alone may change the plan, by the monotonic clock
        self.resend_s = 0.0  # when to look for orders to resend, by the monotonic clock
        self.pace = HeartbeatPace(beat_s=0.0, lease_s=0.0)  # until the first round
        self.paced_s = -math.inf  # when the pace was set, by the monotonic clock
        self.deaf_until_s = 0.0  # until when silence proves nothing, by the monotonic clock

    def receive(self, sealed: str) -> bool:
        """Queue the heartbeats of a message that came over Redis.

        False if newer ones of its devices have come. Raises BadSignature or BadMessage if one is
        invalid; the others of its host count. The thread that reads from Redis calls it.
        """
        key, body = opened_body(outbox.message_keys(), sealed, hosts=self.roster.hosts)
        is_newest, objections = False, list[str]()
        try:
            heartbeats = heartbeats_in(body, sealed, key)
        except BadMessage as error:
            self._note_unreadable(body, key, str(error))
            raise
        for said in heartbeats:
            if objection := self._check_in(said, key):
                objections.append(objection)
            elif self._is_newest(said):
                self.hear(said)
                is_newest = True
        if objections:
            raise BadSignature("; ".join(objections))
        return is_newest

    def _note_unreadable(self, body: JSON, key: str, why: str) -> None:
        """Note a report that its own host signed, for the lists of people."""
        report = journal.unreadable_report(body, why)
        if report is not None and self.roster.has_key(report.device, key):
            self.unreadable[report.device] = report

    def _check_in(self, said: Alive | Pulse, key: str) -> str:
        """Return why this heartbeat, sent by the host with `key`, does not count; "" if it does.

        Learn from a report how its host takes news.
        """
        if isinstance(said, Pulse):
            is_enrolled = self.roster.has_key(said.device, key)
            return "" if is_enrolled else f"{said.device} is not enrolled with the sender's key"
        if not (objection := self.roster.objection(said)):
            self.routes[said.device] = _route(said, key)
        return objection

    def _is_newest(self, said: Alive | Pulse) -> bool:
        sent = said.incarnation, said.sent_us
        if sent <= self.spoken.get(said.device, ("", 0)):
            return False
        self.spoken[said.device] = sent
        return True

    def hear(self, said: Alive | Pulse) -> None:
        self.inbox.put((said, time.monotonic()))
        if isinstance(said, Alive) and self.heartbeat_news.is_new(said):
            self.pressing.set()
        self.wake.set()

    def nudge(self) -> None:
        self.nudged.set()
        self.pressing.set()
        self.wake.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        self.pressing.set()
        super().stop(timeout_s)

    def look(self) -> float:
        """Run one round; 0 if heartbeats are left for another one."""
        self._gather()
        began_s = time.monotonic()
        self._take_in()
        self._renew_quietly()
        # What a process said last counts before it is replaced.
        self._write_progress(self.quiet.unwritten(self.replaced))
        self.replaced.clear()
        heard = self.backlog.take()
        look_now = self.nudged.is_set() or time.monotonic() >= self.due_s
        if heard or look_now or self.unreadable:
            self._look(heard, look_now)
        every_s = settings().lease_s / PROGRESSES_A_LEASE
        self._write_progress(self.quiet.due(now_s=time.monotonic(), every_s=every_s))
        took_s = time.monotonic() - began_s
        self.backlog.adapt(took_s, most_s=settings().leader_s / ROUNDS_A_LEASE)
        if self.leads:
            self.tally.round(took_s)
        if self.backlog or self.quiet.waiting:
            return 0.0
        return max(0.0, self.due_s - time.monotonic())

    def _look(self, heard: list[Alive], look_now: bool) -> None:
        """Record what was heard, plan, and send answers and orders."""
        self.nudged.clear()
        try:
            answers, due = self._written_down(heard, look_now)
        except BaseException:
            self._not_written_down()
            raise
        # 4. Send only what is committed.
        self._remember(heard, answers)
        self._send(answers, due)

    def _remember(self, heard: list[Alive], answers: list[Answer]) -> None:
        """Remember the reports that were answered, and what may be answered again.

        The latter is empty after a careful round: then the devices send whole reports.
        """
        given = {(answer.device, answer.sent_us): answer for answer in answers}
        for alive in heard:
            if (answer := given.get((alive.device, alive.sent_us))) is None:
                continue
            self.quiet.recorded(alive)
            if (report := self.reports.get(alive.device)) is not None:
                report.answer = answer
            if (old := self.unnumbered.get(alive.device)) is not None:
                old.answered(replace(answer, pulses=True))
        self.quiet.learn(self.reports)

    def _renew_quietly(self) -> None:
        """Renew the leases of devices that sent pulses, and answer them. This goes first.

        If a device's rows have changed, there may be more to say: its report is then recorded once
        more.
        """
        news = dict[str, list[JSON]]()
        if self.quiet.waiting:
            asked, others, renewed = self._renewed()
            for beat, report in asked:
                if (txid := renewed.get(beat.device)) is None:
                    self.quiet.forget_answer(beat.device)
                    others.append(beat)
                    continue
                self.quiet.renewed(beat, txid)
                news[beat.device] = [encode(self._answered_again(beat, report))]
            for beat in others:
                self._record_again(beat)
        wanted, self.wanted = self.wanted, {}
        for device, message in wanted.items():
            news[device] = [encode(message)]
        if news:
            outbox.post_news(news, self.routes)

    def _answered_again(self, beat: Beat, report: AcknowledgedReport) -> Answer | LeaseRenewal:
        """Return what answers a pulse: a short message if the device has the same answer."""
        answer, device = self._as_planned(self._paced(report)), beat.device
        is_numbered = self.quiet.is_numbered(device)
        if not is_numbered and (old := self.unnumbered.get(device)) is not None:
            old.renewed()
        if is_numbered and answer is report.answer and beat.answer_us == answer.sent_us:
            return LeaseRenewal(
                device=device,
                incarnation=beat.incarnation,
                sent_us=beat.sent_us,
                answer=beat.answer_us,
            )
        report.answer = replace(answer, sent_us=beat.sent_us)
        return report.answer

    def _renewed(self) -> tuple[list[tuple[Beat, AcknowledgedReport]], list[Beat], dict[str, str]]:
        """Renew the leases for the waiting pulses.

        Returns the pulses that may be renewed with what is answered again, those whose reports must
        be recorded once more, and by device the transaction that renewed its lease.
        """
        try:
            with transactions.transaction() as session:
                row = self._begin(session)
                self.roster.read(session)
                asked, others = self.quiet.take()
                renewed = journal.renew(session, asked, island=self.island)
                self._hold_lead(row)
                return asked, others, renewed
        except Exception as error:
            if refusal(error):
                raise  # the database is away
            log.exception("island %s: no lease was renewed without a full record", self.island)
            self.quiet.forget_answers()
        return *self.quiet.take(), {}

    def _record_again(self, beat: Beat) -> None:
        """Let a round record the report once more, with the progress of this pulse."""
        self.backlog.put(self.quiet.told_by(beat), beat.came_s)

    def _ask_for_report(self, pulse: Pulse) -> None:
        self.wanted[pulse.device] = ReportWanted(
            device=pulse.device, incarnation=pulse.incarnation, sent_us=pulse.sent_us
        )

    def _paced(self, report: AcknowledgedReport) -> Answer:
        """Let the answer say for how long the lease was renewed; the same object if that has not
        changed.
        """
        beat_us = island_pace.told_us(self.pace, is_paced=report.is_paced)
        answer = report.answer
        if (answer.lease_us, answer.beat_us) == (self.pace.lease_us, beat_us):
            return answer
        return replace(answer, lease_us=self.pace.lease_us, beat_us=beat_us)

    def _as_planned(self, answer: Answer) -> Answer:
        """Add what the plan knows to the answer for a device for which no task waits.

        It is the same object if that has not changed.
        """
        board, peers = self.follower.board, self.roster.peers
        if board is None:
            return answer if answer.peers == peers else replace(answer, peers=peers)
        wanted = is_wanted(board, answer.device)
        if (answer.peers, answer.rota, answer.next, answer.wanted) == (peers, [], [], wanted):
            return answer
        return replace(answer, peers=peers, rota=[], next=[], wanted=wanted)

    def _write_progress(self, beats: list[Beat]) -> None:
        """Write how far the tasks are of which these pulses tell."""
        if not beats:
            return
        try:
            with transactions.transaction() as session:
                self._row(session)
                journal.write_progress(session, beats)
                journal.settle(session)
        except Exception as error:  # each device's next heartbeat has all of it
            if refusal(error):
                raise  # the database is away
            log.exception("island %s: the progress of tasks was not written", self.island)
        self.quiet.written(beats)

    def _gather(self) -> None:
        """If nothing is pressing, wait a moment for more heartbeats.

        Most of the cost of a round does not depend on their number.
        """
        until_s = min(self.gathers_until_s, self.due_s)
        if not (self.backlog or self.quiet.waiting):
            self.pressing.wait(max(0.0, until_s - time.monotonic()))
        self.pressing.clear()
        self.gathers_until_s = time.monotonic() + GATHER_S

    def _written_down(
        self, heard: list[Alive], look_now: bool
    ) -> tuple[list[Answer], list[OutboxOrder]]:
        """Run one round. If it fails, run it once more, carefully.

        The careful round uses a savepoint for each device's heartbeat and for the plan, so that a
        fault in one does not spoil the rest.
        """
        try:
            return self._round_in_one_transaction(heard, look_now, careful=False)
        except Exception as error:
            if refusal(error):
                raise  # the database is away
            log.warning(
                "island %s: the round is repeated, one step at a time",
                self.island,
                exc_info=error,
            )
            self.follower.forget()
        return self._round_in_one_transaction(heard, look_now, careful=True)

    def _round_in_one_transaction(
        self, heard: list[Alive], look_now: bool, *, careful: bool
    ) -> tuple[list[Answer], list[OutboxOrder]]:
        with transactions.transaction() as session:
            # 1. Let only one scheduler write at a time.
            row, due = self._begin(session), list[OutboxOrder]()
            self.roster.read(session)
            unreadable, self.unreadable = self.unreadable, {}
            if unreadable:
                journal.note_unreadable(session, self.island, unreadable)
            # 2. Record the reports of devices.
            self.reports = {}
            quiet = None if careful else self.reports
            recorded = (
                journal.record_all(session, heard, careful=careful, quiet=quiet) if heard else []
            )
            _spare_the_waiting(session, self.backlog.alive_since())
            changed = look_now or any(changed for _, changed in recorded)
            plans = changed and not self._launches_wait()
            # actions that wait for the commit need not wait for the plan
            if plans and transactions.is_awaited(session):
                due = self._settled(session)
                self._hold_lead(row)
                transactions.commit(session)
                session.expunge_all()
                row = self._begin(session)
            # 3. The leader also plans, if anything changed and no heartbeat is late.
            if plans:
                self.planned_s = time.monotonic()
                plan = self._plan if careful else self._cycle
                again_s = plan(session) if self.leads else settings().tick_s
                self.due_s = time.monotonic() + again_s
            elif changed:
                self.due_s = time.monotonic()
            due += self._settled(session)
            self.tally.write(session, row, leads=self.leads)
            self._hold_lead(row)
            return [self._with_order(answer) for answer, _ in recorded], due

    def _launches_wait(self) -> bool:
        waiting = [beat.came_s for beat in self.quiet.waiting.values()]
        if (oldest_s := self.backlog.oldest_s()) is not None:
            waiting.append(oldest_s)
        return launches_wait(
            oldest_s=min(waiting, default=None),
            planned_s=self.planned_s,
            now_s=time.monotonic(),
            lease_s=self.pace.lease_s,
        )

    def _begin(self, session: Session) -> Island:
        """Lock the island's row until the commit, and find out whether this scheduler leads."""
        row, left_s = self._row(session)
        _check_key(row)
        self._set_pace(session)
        self.began_s = time.monotonic()
        self.leads = self._lead(session, row, left_s)
        if not self.leads:
            self.follower.forget()
        return row

    def _set_pace(self, session: Session) -> None:
        if time.monotonic() - self.paced_s >= PACE_EVERY_S:
            self.pace, self.paced_s = island_pace.look_up(session, self.island), time.monotonic()
        island_pace.it_is(session, self.pace)

    def _settled(self, session: Session) -> list[OutboxOrder]:
        """Write everything that must be in this transaction; return the orders to send after its
        commit.
        """
        journal.settle(session)
        return self._due(session)

    def _due(self, session: Session) -> list[OutboxOrder]:
        """Return orders to send: the new ones and, now and then, old ones that were not
        answered.
        """
        new, resend_s = journal.ordered(session), settings().order_resend_s
        if time.monotonic() < self.resend_s:
            return new
        self.resend_s = time.monotonic() + resend_s / RESEND_LOOKS
        return [*outbox.take_unsent(session, _live(self.island), resend_s=resend_s), *new]

    def _with_order(self, answer: Answer) -> Answer:
        """Add to an answer what the plan knows: peers, order of slots, shares, and whether others
        wait.

        `peers` are the other islands that the device obeys. If its memory is short, the task last
        in `next` leaves first. Tasks that share the device take turns by `rota`, the least served
        first. If no task wants the device, a task that waits for an input may keep its slot.
        """
        board, answer = self.follower.board, replace(answer, peers=self.roster.peers)
        if board is None:
            return answer
        rota = [as_json(share) for share in shares(board, answer.device)]
        soonest = soonest_first(board, [task for task, _ in answer.keep])
        return replace(answer, next=soonest, rota=rota, wanted=is_wanted(board, answer.device))

    def _not_written_down(self) -> None:
        self.backlog.put_back()
        self.follower.forget()
        self.nudged.set()
        self.pressing.set()

    def leave(self) -> None:
        """Give up the lease, so that a standby takes over at once."""
        with transactions.transaction() as session:
            row, _ = self._row(session)
            if row.leader == self.me:
                row.leader_until = func.now()

    def _take_in(self) -> None:
        """Sort the heartbeats that have come: pulses that only renew a lease, and all others."""
        while not self.inbox.empty():
            said, came_s = self.inbox.get()
            if isinstance(said, Pulse):
                self._take_in_pulse(said, came_s)
            elif not self._is_repeated(said, came_s):
                self.wanted.pop(said.device, None)
                if self.quiet.supersede(said):
                    self.replaced.add(said.device)
                self.backlog.put(said, came_s)

    def _take_in_pulse(self, pulse: Pulse, came_s: float) -> None:
        """Take in a pulse.

        If the report that it names is unknown, or came from a host with another key than the device
        is enrolled with now, the device must send the report.
        """
        beat = self.quiet.beat_of(pulse, came_s=came_s)
        if beat is None or not self.roster.has_key(beat.device, self.quiet.key_of(beat.device)):
            self._ask_for_report(pulse)
        elif self.quiet.report_of(beat) is not None:
            self.quiet.put(beat)
        else:
            self._record_again(beat)

    def _is_repeated(self, alive: Alive, came_s: float) -> bool:
        """Take in a report as a pulse, if its device worker is of the version before and the report
        repeats an earlier one.
        """
        if alive.facts.get("pulses"):
            self.unnumbered.pop(alive.device, None)
            return False
        sent = self.unnumbered.setdefault(alive.device, SentReports())
        if not isinstance(pulse := sent.heartbeat(alive), Pulse):
            return False
        if (beat := self.quiet.beat_of(pulse, came_s=came_s)) is None:
            sent.forget()
            sent.heartbeat(alive)
            return False
        if self.quiet.report_of(beat) is not None:
            self.quiet.put(beat)
        else:
            self.backlog.put(alive, came_s)
        return True

    def _row(self, session: Session) -> tuple[Island, float]:
        """Return the island's row, locked, and the seconds left of its leader's lease."""
        found = session.execute(_ROW, {"island": self.island}).one_or_none()
        if found is None:
            session.execute(insert(Island).values(name=self.island).on_conflict_do_nothing())
            found = session.execute(_ROW, {"island": self.island}).one()
        transactions.it_is(session, float(found[2]))
        ledger.it_is(session, found[3])
        return found[0], float(found[1])

    def _lead(self, session: Session, row: Island, left_s: float) -> bool:
        """Take or renew the lease; False while another scheduler holds it.

        If our own lease has ended, heartbeats were missed and control may have given our tasks
        away: start again from the database.
        """
        if left_s > 0 and row.leader != self.me:
            return False
        if left_s <= 0:
            log.warning("%s leads island %s", self.me[:8], self.island)
            row.leader, row.term, row.leading_since = self.me, row.term + 1, func.now()
            self.follower.forget()
            self.quiet.forget_answers()
            _spare_leases(session, self.island)
        if left_s < settings().leader_s / 2:
            row.leader_until = func.now() + timedelta(seconds=settings().leader_s)
        return True

    def _hold_lead(self, row: Island) -> None:
        """Renew the lease at the end of a round that took a large part of it.

        The row has been locked since the round began, so nobody else can have taken the lead, even
        if the lease has ended meanwhile.
        """
        if self.leads and time.monotonic() - self.began_s > settings().leader_s / 4:
            until = func.clock_timestamp() + timedelta(seconds=settings().leader_s)
            row.leader_until = until

    def _plan(self, session: Session) -> float:
        """Make the plan in a savepoint: if it fails, the recorded reports of devices still
        remain.
        """
        try:
            with journal.savepoint(session):
                return self._cycle(session)
        except Exception as error:
            if refusal(error):
                raise
            log.exception("island %s could not compute its plan", self.island)
            self.follower.forget()
            return settings().tick_s

    def _cycle(self, session: Session) -> float:
        journal.write_down(session)
        if (unwritten := self.follower.unwritten) is not None:
            return 0.0 if self._write_on(session, unwritten) else BUSY_S
        # The transaction's clock stands still; add the time passed, to see turns that ended
        # meanwhile.
        now_s = transactions.now_s(session) + time.monotonic() - self.began_s
        known, board = self.follower.board, self.follower.look(session, now_s=now_s)
        if board is not known:
            gc_freeze.spare_anew()
        moves = self.follower.news is not None and self.follower.news.moves
        if moves and task_migration.advance(session, board, island=self.island):
            board = self.follower.look(session, now_s=now_s)
        self._spare_the_silent(session, board)
        plan = self.follower.cycle(session, board)
        seen = None
        if plan.decisions or plan.lifts:
            seen = record.seen_by(board, plan, plan.before, island=self.island)
        if not self._write_on(session, journal.UnwrittenPlan(plan, seen)):
            return BUSY_S
        if self.follower.unwritten is not None:
            return 0.0
        if self.follower.news is not None and self.follower.news.saves:
            journal.order_saves(session, self.island)
        task_migration.make_fit(session, board)
        if self.follower.behind:
            return 0.0
        return self._wait_s(plan, board, now_s=now_s)

    def _write_on(self, session: Session, unwritten: journal.UnwrittenPlan) -> bool:
        """Write the next part of a plan.  False if the plan is out of date: plan anew.

        Heartbeats are recorded between the parts, so a long plan costs no device its lease.
        """
        if not journal.store_part(session, unwritten, most=DECISIONS_A_ROUND):
            self.follower.forget()
            return False
        self.follower.unwritten = unwritten if unwritten.rest is not None else None
        return True

    def _wait_s(self, plan: Plan, board: Board, *, now_s: float) -> float:
        """Return the seconds until the next round, if nothing wakes the scheduler.

        A plan that asks for a time in the past is a fault of the scheduler.  It must not keep the
        scheduler busy for ever.
        """
        if plan.look_again_s is None:
            return settings().tick_s
        if plan.look_again_s <= now_s:
            waiting = sorted(board.memory.tried.keys() | board.memory.in_the_way)[:TOLD_TASKS]
            log.error(
                "island %s: the round at %.6f s asked to be repeated already at %.6f s; tasks: "
                "%s%s",
                self.island,
                now_s,
                plan.look_again_s,
                ", ".join(waiting) or "none",
                "".join(f"\n{line}" for task in waiting for line in board.story.of(task)),
            )
            return settings().tick_s
        return min(settings().tick_s, plan.look_again_s - now_s)

    def _spare_the_silent(self, session: Session, board: Board) -> None:
        """While Redis is away, and for one lease after that, extend the leases of silent
        devices.
        """
        if all(board.alive(id) for id in (*board.seated, *board.leaving)):
            return
        if not outbox.reachable():
            # Until the leases given now have ended and were given once more.
            self.deaf_until_s = time.monotonic() + 2 * self.pace.lease_s
        if time.monotonic() < self.deaf_until_s:
            _spare_leases(session, self.island)
            self.follower.look_at_devices(session)

    def _send(self, answers: list[Answer], due: list[OutboxOrder]) -> None:
        if unsent := outbox.send(answers, due, self.routes):
            self.resend_s = 0.0
            with transactions.transaction() as session:
                outbox.mark_unsent(session, unsent)


def _route(alive: Alive, key: str) -> NewsRoute:
    """Return how news for the device that sent this report go to its host, whose key is `key`."""
    facts = alive.facts
    if not (announced := facts.get("exchange_key")):
        return NO_ROUTE
    outbox.message_keys().learn(key, announced)
    return NewsRoute(key=key, host=facts["host"] if facts.get("host_news") else "")


def _check_key(row: Island) -> None:
    """Record our key at first use; raise RuntimeError if the island has another key.

    Devices obey only the one key of an island that they were told.
    """
    ours = outbox.message_keys().public
    row.key = row.key or ours
    if row.key != ours:
        raise RuntimeError(
            f"island {row.name} signs with the key {row.key[:16]}…, but "
            f"{settings().island_key_file} has {ours[:16]}…: copy the file from the island's "
            "machine, or run `python -m app.local.seed --island` here to give the island this key"
        )


_LEFT_S = func.coalesce(func.extract("epoch", Island.leader_until - func.now()), 0)

# A row of: the locked island; seconds left of its leader's lease; the time; the ledger's base.
_ROW = (
    select(Island, _LEFT_S, func.extract("epoch", func.now()), LedgerBase)
    .outerjoin(LedgerBase, true())
    .where(Island.name == bindparam("island"))
    .with_for_update(key_share=True, of=Island)
)


def _spare_leases(session: Session, island: str) -> None:
    """Extend the leases of devices with tasks by one lease, because no heartbeat could arrive.

    Without this, a pause of the control plane or of Redis would count every running task as lost. A
    device that gets no answer stops by itself, so nothing runs twice meanwhile.
    """
    until = func.now() + timedelta(seconds=pace_of(session).lease_s)
    parked = select(Task.id).where(Task.image_on == Device.id, ~Task.saved)
    spared = update(Device).where(Device.island == island, _seats_somebody() | parked.exists())
    session.execute(spared.values(lease_until=func.greatest(Device.lease_until, until)))


def _spare_the_waiting(session: Session, waiting: Sequence[tuple[Alive, float]]) -> None:
    """Extend the leases of devices whose heartbeats wait for a round, each until one lease after
    its heartbeat came.

    Such a device is alive, so its tasks must not count as lost.  It gets no answer yet: it goes by
    the lease of its last answer, and nothing runs twice meanwhile.  What the heartbeat says of
    tasks counts only when a round takes it.
    """
    if not waiting:
        return
    lease_s = pace_of(session).lease_s
    left_s = lease_s - time.monotonic()
    values: dict[str, Any] = {
        "ids": [alive.device for alive, _ in waiting],
        "processes": [alive.incarnation for alive, _ in waiting],
        "sent": [alive.sent_us for alive, _ in waiting],
        "left": [came_s + left_s for _, came_s in waiting],
        "lease": timedelta(seconds=lease_s),
    }
    session.execute(_SPARE_THE_WAITING, values)


# It changes a device only if the row still names the same process, and if the heartbeat is newer
# than the recorded one.
_SPARE_THE_WAITING = text(
    """
    update devices set lease_until = spared.until
    from (
        select id, now() + make_interval(secs => left_s) as until from devices
        join unnest(cast(:ids as text[]), cast(:processes as text[]), cast(:sent as bigint[]),
                cast(:left as float8[])) as waiting (device, incarnation, sent_us, left_s)
            on waiting.device = id and waiting.incarnation = devices.incarnation
        where heard_us < sent_us and lease_until < now() + cast(:lease as interval) / 2
            and lease_until < now() + make_interval(secs => left_s)
        order by id for no key update of devices
    ) as spared
    where devices.id = spared.id
    """
)


def _seats_somebody() -> ColumnElement[bool]:
    open_ = select(Placement.id).where(
        Placement.device_id == Device.id, Placement.ended_at.is_(None)
    )
    return open_.exists()


def _live(island: str) -> Select[str]:
    return select(Device.id).where(Device.island == island, Device.lease_until > func.now())


scheduler = Scheduler(settings().island)
keep(celery, scheduler)


@hears(celery, broker.ISLAND_NUDGE)
def nudge() -> None:
    scheduler.nudge()


not_heard = broker.Complaint(log, "rejected a heartbeat")
unopened = UnopenedHeartbeats()


@hears(celery, broker.ISLAND_ALIVE)
def alive(sealed: str) -> None:
    unopened.put(claimed_process(sealed), sealed)


@hears_all
def open_heartbeats() -> None:
    for sealed_by_one in unopened.take():
        for sealed in sealed_by_one:
            try:
                if scheduler.receive(sealed):
                    break
            except (BadSignature, BadMessage) as error:
                not_heard.say(error)
