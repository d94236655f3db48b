"""When a device sends a pulse in place of its whole report."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.device.sent_reports import (
    FIGURES_EVERY_US,
    UNANSWERED_MOST,
    WHOLE_EVERY_US,
    SentReports,
)
from app.core.model.protocol.messages import (
    Alive,
    Answer,
    LogLines,
    Pulse,
    ResidentView,
    Stopped,
    decode,
    encode,
)

VIEW = ResidentView(
    task="tsk_t",
    epoch=1,
    state="running",
    step=4,
    held_us=9,
    order_seq=1,
    memory_bytes=100,
    host_bytes=50,
)
ALIVE = Alive(
    device="h.0",
    incarnation="p",
    sent_us=1,
    facts={"kind": "cpu", "held_bytes": {"ten_a": [1, 2]}},
    residents=[VIEW],
    events=[],
    logs=[],
    health={"reading": {"temperature_c": 40}, "findings": []},
)
STOPPED = Stopped(task="tsk_t", epoch=1, seq=1, step=4, held_us=9)
LINES = LogLines(task="tsk_t", epoch=1, first=0, lines=[["out", "hello"]])


def answer(sent_us, *, pulses=True):
    about = {"device": "h.0", "incarnation": "p", "sent_us": sent_us, "lease_us": 10}
    return Answer(**about, heard={}, logged={}, keep=[], drop=[], pulses=pulses)


def resident(sent_us=2, **moved):
    return replace(ALIVE, sent_us=sent_us, residents=[replace(VIEW, **moved)])


@pytest.fixture
def sent():
    """ALIVE was sent and acknowledged."""
    found = SentReports()
    assert found.heartbeat(ALIVE) is ALIVE
    found.answered(answer(ALIVE.sent_us))
    return found


def test_first_reports_are_whole_until_one_is_acknowledged():
    sent = SentReports()
    reports = [replace(ALIVE, sent_us=us) for us in range(1, 30)]
    assert [sent.heartbeat(report) for report in reports] == reports
    sent.answered(answer(25))
    assert isinstance(sent.heartbeat(replace(ALIVE, sent_us=30)), Pulse)


@pytest.mark.parametrize(
    "later",
    [
        replace(ALIVE, sent_us=2),
        resident(step=5, held_us=10, staged_us=1),
        resident(memory_bytes=99, on_device_bytes=7, host_bytes=0),
        replace(ALIVE, sent_us=2, health={"reading": {"temperature_c": 80}, "findings": []}),
        replace(ALIVE, sent_us=2, facts={"kind": "cpu", "held_bytes": {}}),
    ],
)
def test_what_only_moves_goes_into_a_pulse(sent, later):
    [view] = later.residents
    pulse = sent.heartbeat(later)
    assert (pulse.device, pulse.incarnation, pulse.sent_us) == ("h.0", "p", 2)
    assert (pulse.report, pulse.answer) == (1, 1)
    assert pulse.progress == [[view.step, view.held_us, view.staged_us]]
    assert decode(encode(pulse)) == pulse


@pytest.mark.parametrize(
    "later",
    [
        replace(ALIVE, device="h.1"),
        replace(ALIVE, incarnation="q"),
        replace(ALIVE, facts={**ALIVE.facts, "stopping": True}),
        replace(ALIVE, residents=[]),
        replace(ALIVE, residents=[VIEW, replace(VIEW, task="tsk_u")]),
        replace(ALIVE, events=[STOPPED]),
        replace(ALIVE, logs=[LINES]),
        replace(ALIVE, ahead=[{"task": "tsk_u"}]),
        replace(ALIVE, links=["::1", 9]),
        replace(ALIVE, secret="s"),
        replace(ALIVE, hung=[["tsk_t", 1]]),
        replace(ALIVE, grace_us=1),
        replace(ALIVE, health={"findings": [{"rule": "xid"}]}),
        resident(state="paused"),
        resident(epoch=2),
        resident(order_seq=2),
        resident(level="host"),
        resident(lacks=["x"]),
        resident(metrics={"loss": 1.0}),
        resident(points=[[1, {"loss": 1.0}]]),
        resident(network={"connections": 1}),
        resident(peaks={"cpus": 1}),
        resident(idle_us=1),
        resident(waits_for="disk"),
        resident(unstored="full"),
        resident(behind="Rank 0 waits, and rank 1 runs."),
        resident(memory_bytes=101),
        resident(host_bytes=51),
        resident(step=2**53),
    ],
)
def test_whatever_else_changes_is_reported(sent, later):
    later = replace(later, sent_us=2)
    assert sent.heartbeat(later) is later


def test_every_field_of_a_report_is_looked_at():
    """A new field needs a case above, or it only moves."""
    assert {field.name for field in fields(Alive)} == {
        *("device", "incarnation", "sent_us", "facts", "residents", "events", "logs", "ahead"),
        *("links", "secret", "hung", "grace_us", "health"),
    }


def test_a_report_that_is_changed_in_place_is_told(sent):
    facts = copy.deepcopy(ALIVE.facts)
    sent.heartbeat(first := replace(ALIVE, sent_us=2, facts=facts, links=["::1", 1]))
    sent.answered(answer(2))
    facts["kind"] = "cuda"
    later = replace(first, sent_us=3)
    assert sent.heartbeat(later) is later


def test_events_that_were_acknowledged_are_no_change(sent):
    sent.heartbeat(replace(ALIVE, sent_us=2, events=[STOPPED], logs=[LINES]))
    sent.answered(answer(2))
    assert sent.heartbeat(replace(ALIVE, sent_us=3)).report == 2


def test_whole_reports_are_sent_after_heartbeats_without_an_answer(sent):
    kinds = [type(sent.heartbeat(replace(ALIVE, sent_us=2 + n))) for n in range(4)]
    assert kinds == [Pulse] * UNANSWERED_MOST + [Alive] * (4 - UNANSWERED_MOST)
    sent.renewed()
    assert isinstance(sent.heartbeat(replace(ALIVE, sent_us=9)), Pulse)


def test_answers_that_take_no_pulses_are_followed_by_reports(sent):
    """An island of the version before never says that it takes them."""
    sent.answered(answer(2, pulses=False))
    for us in (3, 4):
        assert isinstance(sent.heartbeat(replace(ALIVE, sent_us=us)), Alive)
        sent.answered(answer(us, pulses=False))


def test_the_whole_report_is_sent_if_the_island_asks(sent):
    sent.forget()
    assert isinstance(sent.heartbeat(replace(ALIVE, sent_us=2)), Alive)
    sent.answered(answer(2))
    assert sent.heartbeat(replace(ALIVE, sent_us=3)).report == 2


def test_a_pulse_names_the_newest_answer(sent):
    sent.heartbeat(replace(ALIVE, sent_us=2))
    sent.answered(answer(2))
    pulse = sent.heartbeat(replace(ALIVE, sent_us=3))
    assert (pulse.report, pulse.answer) == (1, 2)


@pytest.mark.parametrize(
    "later",
    [
        replace(ALIVE, health={**ALIVE.health, "reading": {"temperature_c": 41}}),
        replace(ALIVE, facts={**ALIVE.facts, "held_bytes": {"ten_a": [1, 3]}}),
        resident(memory_bytes=90),
        resident(host_bytes=40),
        resident(on_device_bytes=1),
    ],
)
def test_other_figures_are_reported_after_some_minutes(sent, later):
    for us, kind in ((FIGURES_EVERY_US // 4, Pulse), (2 * FIGURES_EVERY_US, Alive)):
        assert isinstance(sent.heartbeat(replace(later, sent_us=us)), kind)


def test_now_and_then_the_whole_report_is_sent(sent):
    for us, kind in ((WHOLE_EVERY_US // 4, Pulse), (2 * WHOLE_EVERY_US, Alive)):
        assert isinstance(sent.heartbeat(replace(ALIVE, sent_us=us)), kind)


# --- a device and an island over a line that loses, repeats and delays ----------------------------

ACTS = ["work", "change", "beat", "hear", "answer", "lose up", "lose down", "forget"]


class Line:
    """A device whose state is a number, and an island that believes what it was told last."""

    def __init__(self):
        self.sent, self.now_us, self.state, self.step = SentReports(), 0, "running", 0
        self.up, self.down = [], []
        self.known = {}  # by number: the state that a report told; what the island remembers
        self.answered_us = 0

    def act(self, act):
        self.now_us += 1
        match act:
            case "work":
                self.step += 1
            case "change":
                self.state = "paused" if self.state == "running" else "running"
            case "beat":
                self.up.append((self.sent.heartbeat(self.report()), self.state))
            case "hear" if self.up:
                self.hear(*self.up.pop(0))
            case "answer" if self.down:
                self.take(*self.down.pop(0))
            case "lose up" if self.up:
                self.up.pop(0)
            case "lose down" if self.down:
                self.down.pop(0)
            case "forget":
                self.known = {}

    def report(self):
        view = replace(VIEW, state=self.state, step=self.step)
        return replace(ALIVE, sent_us=self.now_us, residents=[view])

    def hear(self, heartbeat, state):
        """The island knows the state at the time of sending, or asks."""
        if isinstance(heartbeat, Alive):
            self.known = {heartbeat.sent_us: heartbeat.residents[0].state}
        elif heartbeat.report not in self.known:
            self.down.append(("wanted", heartbeat.sent_us))
            return
        [believed] = self.known.values()
        assert believed == state
        self.down.append(("answer", heartbeat.sent_us))

    def take(self, kind, sent_us):
        if sent_us <= self.answered_us:
            return
        if kind == "wanted":
            self.sent.forget()
        else:
            self.answered_us = sent_us
            self.sent.answered(answer(sent_us))


@given(st.lists(st.sampled_from(ACTS), max_size=60))
def test_the_island_never_believes_what_no_longer_holds(acts):
    line = Line()
    for act in acts:
        line.act(act)
    while line.up or line.down:
        line.act("hear")
        line.act("answer")
    for _ in range(2):  # the first one may be a pulse of which the island does not know the report
        for act in ("beat", "hear", "answer"):
            line.act(act)
    assert [*line.known.values()] == [line.state]
    assert line.answered_us == line.now_us - 2
    line.act("beat")
    assert isinstance(line.up[-1][0], Pulse)
