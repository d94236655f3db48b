"""Pulses: what is answered and written, and when the whole report is recorded or asked for.

The oracle is the full record.  Whatever happens in the world of `test_protocol`, a pulse gets the
answer that a full record of the whole report would give, and changes nothing else.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select, text

from app.core.device.sent_reports import SentReports
from app.core.model.protocol.messages import Alive, Pulse, ReportWanted, encode
from app.core.model.protocol.wellformed import BadMessage
from app.core.scheduling.rounds.quiet_heartbeats import QuietHeartbeats
from app.db import transactions
from app.db.models import Account, Device, Enrolment, Placement, Task, Usage
from app.identity import enrolment
from app.messaging import outbox
from app.messaging.message_keys import MessageKeys
from app.messaging.outbox import NewsRoute
from app.messaging.signed_messages import sealed_heartbeat
from app.scheduling import journal
from app.settings import settings
from app.storage.signing import HEARTBEAT, BadSignature, Signer
from tests.app.scheduling import test_protocol as protocol
from tests.app.scheduling.test_island import (
    add_task,
    alive,
    answers,
    clock_us,
    isle,
    news,
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
    """An island that takes in pulses, and asks each time what a full record would do."""

    def __init__(self, session, seed):
        super().__init__(session, seed)
        self.quiet, self.times, self.again = QuietHeartbeats(), 0, 0
        self.reports = defaultdict(SentReports)

    def island(self, heard):
        for said in heard:
            sent = self.reports[said.device]
            pulse = sent.heartbeat(said)
            beat = None
            if isinstance(pulse, Pulse):
                beat = self.quiet.beat_of(pulse, came_s=1.0)
            if beat is None:  # the island asks for the whole report
                sent.forget()
                sent.heartbeat(said)
            answer = None if beat is None else self._quietly(said, beat)
            if answer is None:
                answer = self._recorded(said, is_whole=beat is None)
            if answer is not None:
                self.down.append((said.device, answer))
                if self.dice.random() < 0.8:  # else the answer is lost
                    sent.answered(replace(answer, pulses=True))
        super().island([])

    def _recorded(self, said, *, is_whole):
        if is_whole and self.quiet.supersede(said):
            journal.write_progress(self.session, self.quiet.unwritten([said.device]))
        reports = {}
        recorded = journal.record_all(self.session, [said], careful=False, quiet=reports)
        for answer, _ in recorded:
            self.quiet.recorded(said)
            self.quiet.learn(reports)
            return answer

    def _quietly(self, said, beat):
        """Return the answer to a pulse; None if the report must be recorded once more."""
        assert self.quiet.told_by(beat) == said
        if (report := self.quiet.report_of(beat)) is None:
            self.again += 1
            return None
        full = self._full_record(said)
        renewed = journal.renew(self.session, [(beat, report)], island="isle")
        self.session.expire_all()
        if said.device not in renewed:
            self.again += 1
            self.quiet.forget_answer(said.device)
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
def test_pulses_are_answered_as_a_full_record_would(session, seed):
    world = protocol.furnished(QuietWorld(session, seed))
    for _ in range(250):
        world.act()
        if world.dice.random() < 0.3:
            world.beat("h.0")  # once more, with nothing new
    world.calm()
    assert world.times
    assert world.again
    booked = session.scalar(select(func.sum(Usage.charged_us)))
    assert booked == session.scalar(select(func.sum(Placement.charged_us)))
    assert booked == session.scalar(select(func.sum(Account.total_us)))


# --- the island ---------------------------------------------------------------------------------

KEY = MessageKeys(Signer(Ed25519PrivateKey.generate()))


def say(scheduler, message, keys=KEY):
    """A heartbeat comes over Redis."""
    scheduler.receive(sealed(message, keys))
    scheduler.pressing.set()
    scheduler.look()


def sealed(message, keys=KEY):
    if isinstance(message, Alive):
        message = replace(message, facts={**message.facts, "key": keys.public})
    return sealed_heartbeat(keys, message)


def sealed_body(body):
    """A heartbeat that is not well formed, signed by its host."""
    return KEY.sealed(HEARTBEAT, json.dumps(body).encode(), to="")


def report(**more):
    """A report of a device that sends pulses, on which the task runs."""
    return alive(residents=[running_view(**more)], pulses=True)


def running_view(step=0, held_us=0, **more):
    return replace(view("tsk_t", step=step, **more), held_us=held_us)


def pulse(known, *, step=0, held_us=0, answer=None, **more):
    """The pulse that follows a report, whose answer has come."""
    about = {"device": "h.0", "incarnation": "p1", "sent_us": next(clock_us), **more}
    newest = known.sent_us if answer is None else answer
    progress = [[step, held_us, 0]]
    return Pulse(**{"report": known.sent_us, "answer": newest, "progress": progress, **about})


@pytest.fixture
def running(session, isle, sent):
    """The task t runs on h.0, and the island has acknowledged it."""
    enrolment.enrol(session, "h.0", KEY.public, by="test")
    with transactions.transaction() as reading:
        isle.roster.read(reading)
    add_task(session, "t")
    say(isle, alive())
    say(isle, alive(residents=[view("tsk_t")], events=[started("tsk_t")]))
    assert state(session, "t") == "running"
    return isle


@pytest.fixture
def known(running, sent):
    """The newest report of h.0, which was answered."""
    say(running, found := report())
    assert answers(sent)[-1][1]["pulses"]
    sent.clear()
    return found


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


def left_s(session):
    """How long the lease of h.0 lasts."""
    return session.scalar(text("select lease_until - now() from devices")).total_seconds()


def told(sent):
    """What h.0 was told, by kind, and the last of it."""
    bodies = [body for _, body in news(sent)]
    return [body["is"] for body in bodies], bodies[-1] if bodies else None


class TestIsland:
    def test_a_pulse_renews_the_lease_and_changes_no_more(
        self, session, running, known, sent, monkeypatch
    ):
        recorded, before = full_records(monkeypatch), written(session)
        pass_time(session, "devices", "lease_until", 5)
        pass_time(session, "devices", "seen_at", 5)
        say(running, pulse(known, step=3, held_us=3_000_000))
        say(running, last := pulse(known, step=4, held_us=4_000_000))
        assert (recorded, before) == ([], written(session))
        about = {"device": "h.0", "incarnation": "p1", "sent_us": last.sent_us}
        short = {"is": "LeaseRenewal", **about, "answer": known.sent_us}
        assert told(sent) == (["LeaseRenewal"] * 2, short)
        assert left_s(session) == settings().lease_s

    def test_the_answer_is_whole_until_the_device_has_it(self, running, known, sent):
        say(running, first := pulse(known, answer=known.sent_us - 1))
        kinds, answer = told(sent)
        assert (kinds, answer["sent_us"], answer["keep"]) == (
            ["Answer"],
            first.sent_us,
            [["tsk_t", 1]],
        )
        say(running, pulse(known))  # the answer was lost
        say(running, third := pulse(known))
        assert told(sent)[0] == ["Answer"] * 3
        say(running, pulse(known, answer=third.sent_us))
        assert told(sent)[0][3:] == ["LeaseRenewal"]

    def test_the_answer_is_whole_if_the_plan_has_changed(
        self, session, running, known, sent, monkeypatch
    ):
        monkeypatch.setattr(control, "is_wanted", lambda board, device: True)
        say(running, changed := pulse(known))
        assert told(sent)[1].get("wanted", True)
        say(running, pulse(known, answer=changed.sent_us))
        assert told(sent)[0] == ["Answer", "LeaseRenewal"]

    @pytest.mark.parametrize(
        "more",
        [{"report": 1}, {"incarnation": "p0"}, {"incarnation": "p2"}, {"progress": []}],
        ids=str,
    )
    def test_a_pulse_of_an_unknown_report_renews_nothing_and_the_report_is_asked_for(
        self, session, running, known, sent, more
    ):
        pass_time(session, "devices", "lease_until", 5)
        before = left_s(session)
        say(running, said := pulse(known, **more))
        kinds, wanted = told(sent)
        if (said.incarnation, said.sent_us) > ("p1", known.sent_us):
            assert kinds == ["ReportWanted"]
            assert wanted == {
                "is": "ReportWanted",
                "device": "h.0",
                "incarnation": said.incarnation,
                "sent_us": said.sent_us,
            }
        else:
            assert not kinds
        assert left_s(session) == before

    def test_a_repeated_or_older_pulse_renews_nothing(self, session, running, known, sent):
        older, newer = pulse(known), pulse(known)
        say(running, newer)
        pass_time(session, "devices", "lease_until", 5)
        before = left_s(session)
        for again in (newer, older):
            say(running, again)
        assert (told(sent)[0], left_s(session)) == (["LeaseRenewal"], before)

    def test_a_new_leader_asks_for_the_report(self, session, running, known, sent):
        """A replayed pulse makes it ask, too, and renews nothing."""
        say(running, replayed := pulse(known))
        row, _ = running._row(session)
        row.leader_until = func.now()
        session.flush()
        leader = control.Scheduler("isle")
        leader.roster.read(session)
        pass_time(session, "devices", "lease_until", 5)
        leader.look()  # it spares the device, on which a task runs, one lease
        before = left_s(session)
        sent.clear()
        for said in (replayed, pulse(known)):
            say(leader, said)
        assert (told(sent)[0], left_s(session)) == (["ReportWanted"] * 2, before)
        say(leader, whole := report(step=9))
        say(leader, pulse(whole))
        assert told(sent)[0][2:] == ["Answer", "LeaseRenewal"]

    def test_leader_that_was_away_records_the_report_once_more(
        self, session, running, known, sent, monkeypatch
    ):
        row, _ = running._row(session)
        row.leader_until = func.now()
        session.flush()
        recorded = full_records(monkeypatch)
        say(running, pulse(known))
        assert (len(recorded), told(sent)[0]) == (1, ["Answer"])

    def test_the_report_is_recorded_once_more_if_time_may_change_the_answer(
        self, session, running, known, sent, monkeypatch
    ):
        idle = replace(running_view(), idle_us=1)
        say(running, shown := alive(residents=[idle], pulses=True))
        recorded = full_records(monkeypatch)
        say(running, said := pulse(shown, step=5, held_us=5))
        [again] = recorded
        views = [replace(idle, step=5, held_us=5)]
        facts = {**shown.facts, "key": KEY.public}
        assert again == replace(shown, facts=facts, sent_us=said.sent_us, residents=views)
        assert told(sent)[1]["sent_us"] == said.sent_us
        say(running, pulse(shown, step=6, held_us=6))  # it still has the same number
        assert len(recorded) == 2

    def test_a_device_that_was_enrolled_with_another_key_must_report(
        self, session, running, known, sent
    ):
        other = MessageKeys(Signer(Ed25519PrivateKey.generate()))
        enrolment.enrol(session, "h.0", other.public, by="test", may_replace=True)
        running.roster._due_s = 0.0
        running.roster.read(session)
        before = left_s(session)
        say(running, pulse(known), other)
        assert (told(sent)[0], left_s(session)) == (["ReportWanted"], before)

    def test_a_device_that_got_an_enrolment_of_its_own_must_report(
        self, session, running, known, sent
    ):
        """Its host's enrolment covered it until then."""
        other = MessageKeys(Signer(Ed25519PrivateKey.generate()))
        session.get_one(Enrolment, "h.0").device_id = "h"
        session.flush()
        enrolment.enrol(session, "h.0", other.public, by="test")
        running.roster._due_s = 0.0
        running.roster.read(session)
        before = left_s(session)
        say(running, pulse(known), other)
        assert (told(sent)[0], left_s(session)) == (["ReportWanted"], before)

    def test_pulse_of_a_device_with_another_key_is_rejected(self, session, running, known):
        other = MessageKeys(Signer(Ed25519PrivateKey.generate()))
        enrolment.enrol(session, "h.1", other.public, by="test")
        running.roster._due_s = 0.0
        running.roster.read(session)
        with pytest.raises(BadSignature):
            running.receive(sealed(pulse(known), other))

    def test_device_whose_reports_cannot_be_read_is_listed_with_what_to_do(
        self, session, isle, sent
    ):
        """Its worker is of another version: the host signs what this version does not know."""
        enrolment.enrol(session, "new", KEY.public, by="test")
        isle.roster._due_s = 0.0
        isle.roster.read(session)
        body = encode(alive("new.0", host="new", kind="cuda", protocol=7)) | {"later": 1}
        body["facts"] |= {"key": KEY.public}
        with pytest.raises(BadMessage, match="Alive has no later"):
            isle.receive(sealed_body(body))
        isle.look()
        device = session.get_one(Device, "new.0")
        assert (device.host, device.kind, device.lease_until) == ("new", "cuda", None)
        assert "messages 7; this service has 1" in device.facts["failed"]
        assert "start the worker of this service's version" in device.facts["failed"]
        # of a stranger nothing is kept
        enrolment.revoke(session, "new")
        isle.roster._due_s = 0.0
        isle.roster.read(session)
        body["device"] = "new.1"
        with pytest.raises((BadMessage, BadSignature)):
            isle.receive(sealed_body(body))
        isle.look()
        assert session.get(Device, "new.1") is None

    def test_unreadable_report_changes_nothing_while_the_device_has_its_lease(
        self, session, running, known
    ):
        body = encode(known) | {"later": 1, "sent_us": next(clock_us)}
        body["facts"] = {**body["facts"], "key": KEY.public}
        with pytest.raises(BadMessage):
            running.receive(sealed_body(body))
        running.look()
        assert "failed" not in session.get_one(Device, "h.0").facts
        pass_time(session, "devices", "lease_until", 600)
        with pytest.raises(BadMessage):
            running.receive(sealed_body(body))
        running.look()
        session.expire_all()
        assert "cannot be read" in session.get_one(Device, "h.0").facts["failed"]

    def test_island_with_many_devices_asks_for_a_slower_beat_and_gives_a_longer_lease(
        self, session, running, sent, monkeypatch
    ):
        """A worker of an older version, which does not know a beat of its island, is told none."""
        monkeypatch.setenv("ROUNDHOUSE_ISLAND_BEATS_PER_S", "0.1")
        settings.cache_clear()
        running.paced_s = -math.inf
        for is_paced, beat_us in ((True, 10_000_000), (False, None)):
            facts = {"paced": True} if is_paced else {}
            said = alive(residents=[running_view(step=3)], pulses=True, **facts)
            say(running, said)
            say(running, pulse(said, answer=0))
            for _, answer in answers(sent)[-2:]:
                assert (answer["lease_us"], answer.get("beat_us")) == (34_000_000, beat_us)
        [(left, lease_us)] = session.execute(
            text("select lease_until - now(), lease_us from devices")
        )
        assert (left.total_seconds(), lease_us) == (34, 34_000_000)

    def test_progress_is_written_and_charged_once(self, session, running, known, monkeypatch):
        recorded = full_records(monkeypatch)
        say(running, pulse(known, step=3, held_us=3_000_000))
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
        self, session, running, known, sent
    ):
        say(running, pulse(known, step=3, held_us=3_000_000))
        say(running, alive(incarnation="p2", pulses=True))
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
    def test_a_lease_is_not_renewed_once_the_rows_differ(self, session, running, known, change):
        beat = running.quiet.beat_of(pulse(known), came_s=0.0)
        asked = [(beat, running.quiet.report_of(beat))]
        assert journal.renew(session, asked, island="isle")
        beat = replace(beat, sent_us=beat.sent_us + 1)
        session.execute(text(change))
        assert not journal.renew(session, [(beat, asked[0][1])], island="isle")

    def test_a_lease_is_not_renewed_if_another_transaction_wrote_the_row(
        self, session, running, known
    ):
        beat = running.quiet.beat_of(pulse(known), came_s=0.0)
        other = replace(running.quiet.report_of(beat), txid="1")
        assert not journal.renew(session, [(beat, other)], island="isle")

    def test_a_pause_reaches_a_device_that_sends_pulses(self, session, running, known, sent):
        session.get_one(Task, "tsk_t").hold = "user"
        session.flush()
        running.nudge()
        say(running, pulse(known, step=2))
        assert orders(sent) == ["Pause"]


class TestVersionBefore:
    """Workers that send whole reports, and take no short answers."""

    @pytest.fixture
    def older(self, running, sent):
        say(running, alive(residents=[running_view()]))
        sent.clear()
        return running

    def test_a_report_that_repeats_an_earlier_one_only_renews_the_lease(
        self, session, older, sent, monkeypatch
    ):
        recorded, before = full_records(monkeypatch), written(session)
        pass_time(session, "devices", "lease_until", 5)
        said = [alive(residents=[running_view(step=n, held_us=n)]) for n in range(5)]
        for each in said:
            say(older, each)
        assert (recorded, before) == ([], written(session))
        assert [answer["sent_us"] for _, answer in answers(sent)] == [one.sent_us for one in said]
        assert all("pulses" not in answer for _, answer in answers(sent))
        assert left_s(session) == settings().lease_s
        [beat] = older.quiet.unwritten(["h.0"])
        assert [task.step for task in beat.progress] == [4]

    def test_whatever_else_it_says_is_recorded(self, session, older, sent, monkeypatch):
        recorded = full_records(monkeypatch)
        for facts in ({"labels": ["big"]}, {"labels": ["big"]}, {}):
            say(older, alive(residents=[running_view()], **facts))
        assert [one.facts.get("labels") for one in recorded] == [["big"], None]

    def test_it_is_recorded_again_whenever_rows_have_changed(
        self, session, older, sent, monkeypatch
    ):
        recorded = full_records(monkeypatch)
        for _ in range(2):
            older.quiet._answers["h.0"].txid = "1"
            say(older, last := alive(residents=[running_view(step=2)]))
            say(older, alive(residents=[running_view(step=2)]))
        assert len(recorded) == 2
        assert answers(sent)[-1][1]["sent_us"] > last.sent_us

    def test_nothing_of_it_is_forgotten_with_the_lead(self, session, older, sent, monkeypatch):
        recorded = full_records(monkeypatch)
        row, _ = older._row(session)
        row.leader_until = func.now()
        session.flush()
        older.look()
        for _ in range(2):
            say(older, alive(residents=[running_view()]))
        assert (len(recorded), len(answers(sent))) == (1, 2)

    def test_the_worker_may_be_replaced_by_one_of_this_version(self, session, older, sent):
        say(older, whole := alive(residents=[running_view()], pulses=True))
        say(older, pulse(whole))
        assert told(sent)[0] == ["Answer", "LeaseRenewal"]
        say(older, alive(residents=[running_view()]))
        say(older, alive(residents=[running_view()]))
        assert told(sent)[0][2:] == ["Answer"] * 2


def test_only_a_device_that_announced_an_exchange_key_gets_codes(running, monkeypatch):
    """During an upgrade, device workers of two versions may serve one host."""
    posted = []
    monkeypatch.setattr(
        outbox, "post", lambda texts: posted.append(dict(texts)) or set(dict(texts))
    )
    said = report(step=1)
    newer = replace(said, facts={**said.facts, "exchange_key": KEY.announced})
    for step, each in enumerate((said, newer, newer, said, said)):
        say(running, replace(each, sent_us=said.sent_us + step))
    proofs = [texts["h.0"].split("\n", 2)[1] for texts in posted]
    assert [":" in proof for proof in proofs] == [False, True, True, False, False]


def test_devices_of_a_host_share_a_message_unless_their_keys_differ(monkeypatch):
    """A device may be enrolled with a key of its own, and its worker may be another one."""
    posted, wanted = [], ReportWanted(device="h.0", incarnation="p1", sent_us=1)
    monkeypatch.setattr(outbox, "post", lambda texts: posted.extend(texts) or set(dict(texts)))
    hosts = NewsRoute(key="a" * 64, host="h"), NewsRoute(key="b" * 64, host="h")
    routes = {"h.0": hosts[0], "h.1": hosts[0], "h.2": hosts[1], "h.3": NewsRoute()}
    news = {device: [encode(wanted)] for device in ("h.0", "h.1", "h.2", "h.3", "h.4")}
    assert outbox.post_news(news, routes) == set(news)
    told = [(name, json.loads(text.split("\n", 2)[2])) for name, text in posted]
    assert [(name, said.get("device") or list(said["news"])) for name, said in told] == [
        ("h", ["h.0", "h.1"]),
        ("h", ["h.2"]),
        ("h.3", "h.3"),
        ("h.4", "h.4"),
    ]


class TestUnopened:
    """Heartbeats that came since the reader last looked."""

    @pytest.fixture
    def unopened(self, running, monkeypatch):
        monkeypatch.setattr(control, "scheduler", running)
        return running

    def test_only_the_newest_of_a_device_is_opened(self, unopened, known, monkeypatch):
        """Reports and pulses are of one device."""
        texts = [sealed(said) for said in (report(), pulse(known), report(), pulse(known, step=2))]
        opened, receive = [], unopened.receive
        monkeypatch.setattr(unopened, "receive", lambda each: opened.append(each) or receive(each))
        for each in texts:
            control.alive(each)
        control.open_heartbeats()
        assert opened == texts[-1:]
        assert [said.progress for said, _ in iter_inbox(unopened)] == [[[2, 0, 0]]]

    def test_forged_and_repeated_heartbeats_take_the_place_of_none(self, unopened, known):
        forger = MessageKeys(Signer(Ed25519PrivateKey.generate()))
        old, honest = sealed(pulse(known, step=1)), sealed(pulse(known, step=2))
        forged = sealed(pulse(known, step=9), forger)
        unopened.receive(old)
        for each in (honest, KEY.public + forged[len(KEY.public) :], old, "x"):
            control.alive(each)
        control.open_heartbeats()
        assert [said.progress[0][0] for said, _ in iter_inbox(unopened)] == [1, 2]


def iter_inbox(scheduler):
    while not scheduler.inbox.empty():
        yield scheduler.inbox.get()
