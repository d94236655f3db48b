"""Heartbeats that say nothing new: what is answered and written, and when they do not count as
such.

The oracle is the full record.  Whatever happens in the world of `test_protocol`, a quiet heartbeat
gets the answer that a full record of it would give, and changes nothing else.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select, text

from app.core.model.protocol.messages import encode
from app.core.scheduling.rounds.quiet_heartbeats import QuietHeartbeats
from app.db import transactions
from app.db.models import Account, Placement, Task, Usage
from app.identity import enrolment
from app.messaging import outbox
from app.messaging.message_keys import MessageKeys
from app.messaging.signed_messages import sealed_heartbeat
from app.scheduling import journal
from app.settings import settings
from app.storage.signing import BadSignature, Signer
from tests.app.scheduling import test_protocol as protocol
from tests.app.scheduling.test_island import (
    add_task,
    alive,
    answers,
    isle,
    orders,
    pass_time,
    sent,
    started,
    state,
    view,
)
from tests.thoroughness import rest_long
from workers.control import scheduler as control

__all__ = ["isle", "sent"]


class QuietWorld(protocol.World):
    """An island that takes in quiet heartbeats, and asks each time what a full record would do."""

    def __init__(self, session, seed):
        super().__init__(session, seed)
        self.quiet, self.times = QuietHeartbeats(), 0

    def island(self, heard):
        for said in heard:
            if (answer := self._quietly(said)) is not None:
                self.down.append((said.device, answer))
                continue
            if self.quiet.supersede(said):
                journal.write_progress(self.session, self.quiet.unwritten([said.device]))
            reports = {}
            recorded = journal.record_all(self.session, [said], careful=False, quiet=reports)
            self.quiet.learn(reports, now_s=0.0)
            self.down += [(said.device, answer) for answer, _ in recorded]
        super().island([])

    def _quietly(self, said):
        beat = self.quiet.recognise(encode(said), now_s=1.0)
        if beat is None or (report := self.quiet.report_of(beat)) is None:
            return None
        full = self._full_record(said)
        renewed = journal.renew(self.session, [(beat, report)], island="isle")
        self.session.expire_all()
        if said.device not in renewed:
            self.quiet.forget(said.device)
            return None
        answer = replace(report.answer, sent_us=said.sent_us)
        assert full == [(answer, False)]
        self.times += 1
        self.quiet.renewed(beat, renewed[said.device])
        if self.dice.random() < 0.3:
            journal.write_progress(self.session, [beat])
            self.quiet.written([beat])
            self.session.expire_all()
        return answer

    def _full_record(self, said):
        """What a full record would answer; it is undone."""
        journal.settle(self.session)
        savepoint = self.session.begin_nested()
        found = journal.record_all(self.session, [said], careful=False)
        savepoint.rollback()
        self.session.info.pop("round", None)
        self.session.expire_all()
        return found


@pytest.mark.parametrize("seed", rest_long(range(20), keep=3))
@pytest.mark.slow
def test_quiet_heartbeats_are_answered_as_a_full_record_would(session, seed):
    world = protocol.furnished(QuietWorld(session, seed))
    for _ in range(250):
        world.act()
        if world.dice.random() < 0.3:
            world.beat("h.0")  # once more, with nothing new
    world.calm()
    assert world.times
    booked = session.scalar(select(func.sum(Usage.charged_us)))
    assert booked == session.scalar(select(func.sum(Placement.charged_us)))
    assert booked == session.scalar(select(func.sum(Account.total_us)))


# --- the island ---------------------------------------------------------------------------------

KEY = MessageKeys(Signer(Ed25519PrivateKey.generate()))


def say(scheduler, message, keys=KEY):
    """A heartbeat comes over Redis."""
    facts = {**message.facts, "key": keys.public}
    scheduler.receive(sealed_heartbeat(keys, replace(message, facts=facts)))
    scheduler.pressing.set()
    scheduler.look()


def running_view(step=0, held_us=0, **more):
    return replace(view("tsk_t", step=step, **more), held_us=held_us)


@pytest.fixture
def running(session, isle, sent):
    """The task t runs on h.0, and the island has acknowledged it."""
    enrolment.enrol(session, "h.0", KEY.public, by="test")
    with transactions.transaction() as reading:
        isle.roster.read(reading)
    add_task(session, "t")
    say(isle, alive())
    say(isle, alive(residents=[view("tsk_t")], events=[started("tsk_t")]))
    say(isle, alive(residents=[running_view()]))
    assert state(session, "t") == "running"
    sent.clear()
    return isle


def written(session):
    """The newest write of each row of these tables."""
    tables = ("tasks", "placements", "accounts", "orders")
    return [session.execute(text(f"select ctid, xmin from {name}")).all() for name in tables]


def full_records(monkeypatch):
    """Each heartbeat that is recorded in full from now on."""
    found, record_all = [], journal.record_all

    def noted(session, alives, **how):
        found.extend(alives)
        return record_all(session, alives, **how)

    monkeypatch.setattr(journal, "record_all", noted)
    return found


class TestIsland:
    def test_quiet_heartbeat_is_answered_and_renews_the_lease_and_no_more(
        self, session, running, sent, monkeypatch
    ):
        recorded, before = full_records(monkeypatch), written(session)
        pass_time(session, "devices", "lease_until", 5)
        left = "select lease_until - now() from devices"
        pass_time(session, "devices", "seen_at", 5)
        said = alive(residents=[running_view(step=3, held_us=3_000_000)])
        say(running, said)
        say(running, repeated := replace(said, sent_us=said.sent_us + 1))
        assert (recorded, before) == ([], written(session))
        [(_, answer), (_, last)] = answers(sent)
        assert (answer["sent_us"], last["sent_us"]) == (said.sent_us, repeated.sent_us)
        assert (answer["lease_us"], answer["keep"]) == (
            int(settings().lease_s * 1e6),
            [["tsk_t", 1]],
        )
        assert session.scalar(text(left)).total_seconds() == settings().lease_s

    def test_island_with_many_devices_asks_for_a_slower_beat_and_gives_a_longer_lease(
        self, session, running, sent, monkeypatch
    ):
        """A worker of an older version, which does not know a beat of its island, is told none."""
        recorded = full_records(monkeypatch)
        monkeypatch.setenv("ROUNDHOUSE_ISLAND_BEATS_PER_S", "0.1")
        settings.cache_clear()
        running.paced_s = -math.inf
        for is_paced, beat_us in ((True, 10_000_000), (False, None)):
            facts = {"paced": True} if is_paced else {}
            for step in (3, 4):  # the first one with other facts is recorded in full
                said = alive(residents=[running_view(step=step)], **facts)
                say(running, said)
                _, answer = answers(sent)[-1]
                assert (answer["lease_us"], answer.get("beat_us")) == (34_000_000, beat_us)
            assert recorded.pop().facts.get("paced", False) == is_paced
            assert not recorded
        [(left, lease_us)] = session.execute(
            text("select lease_until - now(), lease_us from devices")
        )
        assert (left.total_seconds(), lease_us) == (34, 34_000_000)

    def test_progress_is_written_and_charged_once(self, session, running, monkeypatch):
        recorded = full_records(monkeypatch)
        said = alive(residents=[running_view(step=3, held_us=3_000_000)])
        say(running, said)
        assert session.get_one(Task, "tsk_t").step == 0
        [beat] = running.quiet.unwritten(["h.0"])
        running._write_progress([beat])
        session.expire_all()
        task, [placement] = session.get_one(Task, "tsk_t"), session.scalars(select(Placement))
        assert (task.step, task.held_us, placement.last_step) == (3, 3_000_000, 3)
        assert placement.held_us == placement.charged_us == 3_000_000
        assert session.scalar(select(Account.total_us)) == 3_000_000
        assert not recorded
        running._write_progress([beat])  # once more
        assert session.scalar(select(func.sum(Usage.charged_us))) == 3_000_000

    def test_what_a_process_said_last_is_charged_before_it_is_replaced(
        self, session, running, sent
    ):
        say(running, alive(residents=[running_view(step=3, held_us=3_000_000)]))
        say(running, alive(incarnation="p2"))
        session.expire_all()
        first = session.scalars(select(Placement).where(Placement.epoch == 1)).one()
        assert (first.end, first.held_us) == ("lost", 3_000_000)

    @pytest.mark.parametrize(
        "change",
        [
            "update devices set incarnation = 'p0'",
            "update devices set heard_us = heard_us + 1000",
            "update placements set epoch = 2",
            "update placements set ended_at = now()",
            "update orders set answered_at = null",
            "update tasks set move_to = 'h.0'",
            "insert into placements (task_id, epoch, device_id, tenant_id, user_id, kind,"
            " cost_milli, incarnation, guest, leaving) select task_id, epoch, device_id, tenant_id,"
            " user_id, kind, cost_milli, incarnation, true, true from placements",
        ],
    )
    def test_a_lease_is_not_renewed_quietly_once_the_rows_differ(self, session, running, change):
        said = alive(residents=[running_view()])
        body = encode(replace(said, facts={**said.facts, "key": KEY.public}))
        beat = running.quiet.recognise(body, now_s=0.0)
        asked = [(beat, running.quiet.report_of(beat))]
        assert journal.renew(session, asked, island="isle")
        beat = replace(beat, sent_us=beat.sent_us + 1)
        session.execute(text(change))
        assert not journal.renew(session, [(beat, asked[0][1])], island="isle")

    def test_a_lease_is_not_renewed_quietly_if_another_transaction_wrote_the_row(
        self, session, running
    ):
        said = alive(residents=[running_view()])
        body = encode(replace(said, facts={**said.facts, "key": KEY.public}))
        beat = running.quiet.recognise(body, now_s=0.0)
        report = replace(running.quiet.report_of(beat), txid="1")
        assert not journal.renew(session, [(beat, report)], island="isle")

    def test_a_pause_reaches_a_device_that_says_nothing_new(self, session, running, sent):
        session.get_one(Task, "tsk_t").hold = "user"
        session.flush()
        running.nudge()
        say(running, alive(residents=[running_view(step=2)]))
        assert orders(sent) == ["Pause"]

    def test_a_key_that_is_not_the_devices_own_is_rejected_though_it_says_the_same(
        self, session, running
    ):
        other = MessageKeys(Signer(Ed25519PrivateKey.generate()))
        enrolment.enrol(session, "h.1", other.public, by="test")
        running.roster._due_s = 0.0
        running.roster.read(session)
        said = alive(residents=[running_view()])
        honest = replace(said, facts={**said.facts, "key": KEY.public})
        with pytest.raises(BadSignature):
            running.receive(sealed_heartbeat(other, honest))

    def test_a_repeated_heartbeat_is_not_heard_twice(self, running, sent):
        said = alive(residents=[running_view(step=1)])
        say(running, said)
        say(running, said)
        assert len(answers(sent)) == 1


def test_only_a_device_that_announced_an_exchange_key_gets_codes(running, monkeypatch):
    """During an upgrade, device workers of two versions may serve one host."""
    posted = []
    monkeypatch.setattr(outbox, "post", lambda texts: posted.append(texts) or set(texts))
    said = alive(residents=[running_view(step=1)])
    newer = replace(said, facts={**said.facts, "exchange_key": KEY.announced})
    for step, each in enumerate((said, newer, newer, said, said)):
        say(running, replace(each, sent_us=said.sent_us + step))
    proofs = [texts["h.0"].split("\n", 2)[1] for texts in posted]
    assert [":" in proof for proof in proofs] == [False, True, True, False, False]


class TestUnopened:
    """Heartbeats that came since the reader last looked."""

    @pytest.fixture
    def unopened(self, running, monkeypatch):
        monkeypatch.setattr(control, "scheduler", running)
        return running

    def sealed(self, keys=KEY, instead=None, **more):
        said = alive(residents=[running_view(**more)])
        facts = {**said.facts, "key": KEY.public}
        sealed = sealed_heartbeat(keys, replace(said, facts=facts))
        return sealed if instead is None else instead + sealed[len(instead) :]

    def test_only_the_newest_of_a_device_is_opened(self, unopened, monkeypatch):
        texts, opened = [self.sealed(step=n) for n in range(3)], []
        receive = unopened.receive
        monkeypatch.setattr(unopened, "receive", lambda each: opened.append(each) or receive(each))
        for each in texts:
            control.alive(each)
        control.open_heartbeats()
        assert opened == texts[-1:]
        [beat] = [said for said, _ in iter_inbox(unopened)]
        assert [view["step"] for view in beat.residents()] == [2]

    def test_forged_and_repeated_heartbeats_take_the_place_of_none(self, unopened):
        forger = MessageKeys(Signer(Ed25519PrivateKey.generate()))
        old, honest = self.sealed(step=1), self.sealed(step=2)
        unopened.receive(old)
        for each in (honest, self.sealed(forger, KEY.public, step=9), old, "x"):
            control.alive(each)
        control.open_heartbeats()
        steps = [view["step"] for said, _ in iter_inbox(unopened) for view in said.residents()]
        assert steps == [1, 2]


def iter_inbox(scheduler):
    while not scheduler.inbox.empty():
        yield scheduler.inbox.get()
