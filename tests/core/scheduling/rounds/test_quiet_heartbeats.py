"""Which pulses repeat what was answered, and when their progress is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.model.protocol.messages import Alive, Answer, LogLines, Pulse, ResidentView, Stopped
from app.core.scheduling.rounds.quiet_heartbeats import QuietHeartbeats, acknowledged

VIEW = ResidentView(
    task="tsk_t", epoch=1, state="running", step=4, held_us=9, order_seq=1, memory_bytes=100
)
ALIVE = Alive(
    device="h.0",
    incarnation="p",
    sent_us=1,
    facts={"kind": "cpu", "pulses": True},
    residents=[VIEW],
    events=[Stopped(task="tsk_t", epoch=1, seq=1, step=4, held_us=9)],
    logs=[LogLines(task="tsk_t", epoch=1, first=0, lines=[["out", ""]])],
    health={"findings": []},
)
ANSWER = Answer(
    device="h.0", incarnation="p", sent_us=1, lease_us=10, heard={}, logged={}, keep=[], drop=[]
)
PULSE = Pulse(device="h.0", incarnation="p", sent_us=2, report=1, answer=1, progress=[[5, 10, 3]])


@pytest.fixture
def quiet():
    """ALIVE was acknowledged."""
    found = QuietHeartbeats()
    found.recorded(ALIVE)
    found.learn({"h.0": acknowledged(ALIVE, ANSWER, txid="7")})
    return found


def renewed(quiet, pulse, *, now_s):
    """The pulse came and was taken in."""
    beat = quiet.beat_of(pulse, came_s=now_s)
    quiet.put(beat)
    quiet.renewed(beat, "8")
    return beat


class TestNumber:
    def test_a_pulse_tells_the_progress_of_the_tasks_of_its_report(self, quiet):
        beat = quiet.beat_of(PULSE, came_s=1.0)
        assert (beat.device, beat.incarnation, beat.sent_us, beat.answer_us) == ("h.0", "p", 2, 1)
        assert beat.progress == (("tsk_t", 1, 5, 10, 3),)
        assert quiet.report_of(beat).answer == ANSWER

    @pytest.mark.parametrize(
        "other",
        [
            replace(PULSE, device="h.1"),
            replace(PULSE, incarnation="o"),
            replace(PULSE, incarnation="q"),
            replace(PULSE, report=0),
            replace(PULSE, report=2),
            replace(PULSE, progress=[]),
            replace(PULSE, progress=[[5, 10, 3]] * 2),
        ],
    )
    def test_a_pulse_of_another_report_or_process_says_nothing(self, quiet, other):
        assert quiet.beat_of(other, came_s=1.0) is None

    def test_nothing_is_known_of_a_report_once_another_has_come(self, quiet):
        quiet.put(quiet.beat_of(PULSE, came_s=1.0))
        quiet.supersede(replace(ALIVE, sent_us=3))
        assert (quiet.beat_of(PULSE, came_s=1.0), quiet.waiting) == (None, {})

    def test_a_report_that_is_recorded_once_more_keeps_its_number(self, quiet):
        again = quiet.told_by(quiet.beat_of(PULSE, came_s=1.0))
        quiet.recorded(again)
        assert quiet.beat_of(replace(PULSE, sent_us=3), came_s=1.0) is not None

    def test_the_report_is_as_the_device_would_send_it_now(self, quiet):
        told = quiet.told_by(quiet.beat_of(PULSE, came_s=1.0))
        view = replace(VIEW, step=5, held_us=10, staged_us=3)
        assert told == replace(ALIVE, sent_us=2, residents=[view], events=[], logs=[])

    def test_only_a_device_with_the_fact_takes_short_answers(self, quiet):
        assert quiet.is_numbered("h.0")
        assert not quiet.is_numbered("h.1")
        quiet.supersede(ALIVE)
        quiet.recorded(replace(ALIVE, facts={}))
        assert not quiet.is_numbered("h.0")


class TestTake:
    def test_a_pulse_waits_until_it_is_renewed(self, quiet):
        quiet.put(beat := quiet.beat_of(PULSE, came_s=1.0))
        [(asked, report)], others = quiet.take()
        assert (asked, report.answer, others) == (beat, ANSWER, [])
        assert quiet.waiting
        quiet.renewed(beat, "8")
        assert not quiet.waiting
        assert quiet.report_of(beat).txid == "8"

    def test_what_was_forgotten_meanwhile_is_recorded_once_more(self, quiet):
        quiet.put(beat := quiet.beat_of(PULSE, came_s=1.0))
        quiet.forget_answers()
        assert quiet.take() == ([], [beat])
        assert not quiet.waiting
        assert quiet.told_by(beat).sent_us == PULSE.sent_us

    def test_an_answer_to_an_earlier_process_is_not_repeated(self, quiet):
        quiet.supersede(later := replace(ALIVE, incarnation="q", sent_us=1))
        quiet.learn({"h.0": acknowledged(ALIVE, ANSWER, txid="7")})
        quiet.recorded(later)
        beat = quiet.beat_of(replace(PULSE, incarnation="q"), came_s=1.0)
        assert quiet.report_of(beat) is None

    def test_a_report_replaces_what_waits(self, quiet):
        quiet.put(quiet.beat_of(PULSE, came_s=1.0))
        assert not quiet.supersede(replace(ALIVE, sent_us=3))
        assert quiet.take() == ([], [])


class TestProgress:
    def due(self, quiet, now_s):
        return quiet.due(now_s=now_s, every_s=5.0)

    def test_it_is_due_after_a_while_however_often_the_device_speaks(self, quiet):
        for now_s in (1.0, 3.0, 5.0):
            renewed(quiet, PULSE, now_s=now_s)
            assert not self.due(quiet, now_s)
        newest = renewed(quiet, replace(PULSE, progress=[[8, 10, 3]]), now_s=6.0)
        assert self.due(quiet, 6.0) == [newest]
        quiet.written([newest])
        assert not self.due(quiet, 99.0)

    def test_it_is_due_in_time_though_the_device_has_fallen_silent(self, quiet):
        beat = renewed(quiet, PULSE, now_s=1.0)
        assert self.due(quiet, 6.0) == [beat]

    def test_a_device_without_tasks_has_none(self, quiet):
        quiet.supersede(idle := replace(ALIVE, residents=[]))
        quiet.recorded(idle)
        quiet.learn({"h.0": acknowledged(idle, ANSWER, txid="7")})
        renewed(quiet, replace(PULSE, progress=[]), now_s=1.0)
        assert not self.due(quiet, 99.0)

    def test_a_report_of_the_same_process_has_all_of_it(self, quiet):
        renewed(quiet, PULSE, now_s=1.0)
        assert not quiet.supersede(replace(ALIVE, sent_us=3))
        assert not self.due(quiet, 99.0)

    def test_what_the_process_before_said_is_still_to_be_written(self, quiet):
        beat = renewed(quiet, PULSE, now_s=1.0)
        assert quiet.supersede(replace(ALIVE, incarnation="q"))
        assert quiet.unwritten(["h.0", "h.1"]) == [beat]
