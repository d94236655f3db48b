"""Which heartbeats repeat what was acknowledged, and when their progress is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.model.protocol.messages import Alive, Answer, LogLines, ResidentView, Stopped, encode
from app.core.scheduling.rounds.quiet_heartbeats import (
    FIGURES_EVERY_S,
    WHOLE_EVERY_S,
    QuietHeartbeats,
    acknowledged,
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
ANSWER = Answer(
    device="h.0", incarnation="p", sent_us=1, lease_us=10, heard={}, logged={}, keep=[], drop=[]
)
STOPPED = Stopped(task="tsk_t", epoch=1, seq=1, step=4, held_us=9)


@pytest.fixture
def quiet():
    """ALIVE was acknowledged at 0 s."""
    found = QuietHeartbeats()
    found.learn({"h.0": acknowledged(ALIVE, ANSWER, txid="7")}, now_s=0.0)
    return found


def seen(quiet, alive, *, now_s=1.0):
    return quiet.recognise(encode(alive), now_s=now_s)


def resident(**moved):
    return replace(ALIVE, sent_us=2, residents=[replace(VIEW, **moved)])


def renewed(quiet, alive, *, now_s):
    """The heartbeat came and was taken in."""
    beat = seen(quiet, alive, now_s=now_s)
    quiet.put(beat)
    quiet.renewed(beat, "8")
    return beat


class TestRecognise:
    @pytest.mark.parametrize(
        "later",
        [
            ALIVE,
            replace(ALIVE, sent_us=2),
            resident(step=5, held_us=10, staged_us=1),
            resident(memory_bytes=99, on_device_bytes=7, host_bytes=0),
            replace(ALIVE, health={"reading": {"temperature_c": 80}, "findings": []}),
            replace(ALIVE, facts={"kind": "cpu", "held_bytes": {}}),
        ],
    )
    def test_what_only_moves_is_quiet(self, quiet, later):
        beat = seen(quiet, later)
        assert (beat.device, beat.incarnation, beat.sent_us) == ("h.0", "p", later.sent_us)

    @pytest.mark.parametrize(
        "later",
        [
            replace(ALIVE, incarnation="q"),
            replace(ALIVE, facts={**ALIVE.facts, "stopping": True}),
            replace(ALIVE, residents=[]),
            replace(ALIVE, residents=[VIEW, replace(VIEW, task="tsk_u")]),
            replace(ALIVE, events=[STOPPED]),
            replace(ALIVE, logs=[LogLines(task="tsk_t", epoch=1, first=0, lines=[["out", ""]])]),
            replace(ALIVE, ahead=[{"task": "tsk_u"}]),
            replace(ALIVE, links=["::1", 9]),
            replace(ALIVE, hung=[["tsk_t", 1]]),
            replace(ALIVE, grace_us=1),
            replace(ALIVE, health={"findings": [{"rule": "xid"}]}),
            resident(state="paused"),
            resident(epoch=2),
            resident(order_seq=2),
            resident(lacks=["x"]),
            resident(metrics={"loss": 1.0}),
            resident(network={"connections": 1}),
            resident(peaks={"cpus": 1}),
            resident(idle_us=1),
            resident(memory_bytes=101),
            resident(host_bytes=51),
        ],
    )
    def test_whatever_else_differs_is_recorded_in_full(self, quiet, later):
        assert seen(quiet, later) is None

    @pytest.mark.parametrize("bad", [-1, True, 1.5, "9", None, 2**53])
    @pytest.mark.parametrize("name", ["step", "held_us", "memory_bytes"])
    def test_a_number_that_is_no_count_is_never_quiet(self, quiet, name, bad):
        body = encode(ALIVE)
        body["residents"][0][name] = bad
        assert quiet.recognise(body, now_s=1.0) is None

    @pytest.mark.parametrize("lacking", ["step", "held_us", "task"])
    def test_a_resident_that_lacks_a_field_is_never_quiet(self, quiet, lacking):
        body = encode(ALIVE)
        del body["residents"][0][lacking]
        assert quiet.recognise(body, now_s=1.0) is None

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"device": []},
            {"device": "h.0"},
            {"device": "h.0", "sent_us": 2},
            {"device": "h.0", "sent_us": 2, "facts": 1},
            {"device": "h.0", "sent_us": 2, "facts": {}, "residents": 3},
            {"device": "h.0", "sent_us": 2, "facts": {}, "residents": [4]},
            {"device": "h.0", "sent_us": 2, "facts": {}, "health": 5},
        ],
    )
    def test_what_is_no_heartbeat_is_never_quiet(self, quiet, body):
        assert quiet.recognise(body, now_s=1.0) is None

    def test_a_device_of_which_nothing_is_known_is_never_quiet(self, quiet):
        assert seen(quiet, replace(ALIVE, device="h.1")) is None
        quiet.forget_all()
        assert seen(quiet, ALIVE) is None

    def test_now_and_then_a_heartbeat_is_recorded_in_full(self, quiet):
        assert seen(quiet, ALIVE, now_s=WHOLE_EVERY_S / 4) is not None
        assert seen(quiet, ALIVE, now_s=2 * WHOLE_EVERY_S) is None

    @pytest.mark.parametrize(
        "alive",
        [
            replace(ALIVE, health={**ALIVE.health, "reading": {"temperature_c": 41}}),
            replace(ALIVE, facts={**ALIVE.facts, "held_bytes": {"ten_a": [1, 3]}}),
            resident(memory_bytes=90),
            resident(host_bytes=40),
            resident(on_device_bytes=1),
        ],
    )
    def test_other_figures_are_recorded_after_some_minutes(self, quiet, alive):
        assert seen(quiet, alive, now_s=FIGURES_EVERY_S / 4) is not None
        assert seen(quiet, alive, now_s=1.5 * FIGURES_EVERY_S) is None
        assert seen(quiet, resident(step=5, held_us=10), now_s=1.5 * FIGURES_EVERY_S) is not None


class TestTake:
    def test_a_heartbeat_waits_until_it_is_renewed(self, quiet):
        quiet.put(beat := seen(quiet, ALIVE))
        [(asked, report)], others = quiet.take()
        assert (asked, report.answer, others) == (beat, ANSWER, [])
        assert quiet.waiting
        quiet.renewed(beat, "8")
        assert not quiet.waiting
        assert quiet.report_of(beat).txid == "8"

    def test_what_was_forgotten_meanwhile_is_recorded_in_full(self, quiet):
        quiet.put(beat := seen(quiet, ALIVE))
        quiet.forget_all()
        assert quiet.take() == ([], [beat])
        assert not quiet.waiting

    def test_a_full_heartbeat_replaces_what_waits(self, quiet):
        quiet.put(seen(quiet, ALIVE))
        assert not quiet.supersede(replace(ALIVE, sent_us=3))
        assert quiet.take() == ([], [])


class TestProgress:
    def due(self, quiet, now_s):
        return quiet.due(now_s=now_s, every_s=5.0)

    def test_it_is_due_after_a_while_however_often_the_device_speaks(self, quiet):
        for now_s in (1.0, 3.0, 5.0):
            renewed(quiet, ALIVE, now_s=now_s)
            assert not self.due(quiet, now_s)
        newest = renewed(quiet, resident(step=8), now_s=6.0)
        assert self.due(quiet, 6.0) == [newest]
        quiet.written([newest])
        assert not self.due(quiet, 99.0)

    def test_it_is_due_in_time_though_the_device_has_fallen_silent(self, quiet):
        beat = renewed(quiet, ALIVE, now_s=1.0)
        assert self.due(quiet, 6.0) == [beat]

    def test_a_device_without_tasks_has_none(self, quiet):
        idle = replace(ALIVE, residents=[])
        quiet.learn({"h.0": acknowledged(idle, ANSWER, txid="7")}, now_s=0.0)
        renewed(quiet, idle, now_s=1.0)
        assert not self.due(quiet, 99.0)

    def test_a_full_heartbeat_of_the_same_process_has_all_of_it(self, quiet):
        renewed(quiet, ALIVE, now_s=1.0)
        assert not quiet.supersede(replace(ALIVE, sent_us=3))
        assert not self.due(quiet, 99.0)

    def test_what_the_process_before_said_is_still_to_be_written(self, quiet):
        beat = renewed(quiet, ALIVE, now_s=1.0)
        assert quiet.supersede(replace(ALIVE, incarnation="q"))
        assert quiet.unwritten(["h.0", "h.1"]) == [beat]
