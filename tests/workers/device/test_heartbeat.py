"""When a device reports, and how long it trusts itself."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from app.core.device.device_records import StayRecord
from app.core.device.lease import Lease
from app.core.model.protocol.messages import Alive, Answer, HostPulses, Pulse
from tests.launches import launch_of
from workers.device import heartbeat
from workers.device.heartbeat import CHATTER_S, SOON_S, HeartbeatSender, PulseGatherer, Rhythm
from workers.device.stay import Stay

ALIVE = Alive(device="h.0", incarnation="1", sent_us=0, facts={}, residents=[], events=[], logs=[])


def answer(sent_us: int) -> Answer:
    return Answer(
        device="h.0",
        incarnation="1",
        sent_us=sent_us,
        lease_us=10_000_000,
        heard={},
        logged={},
        keep=[],
        drop=[],
    )


def test_trust_counts_from_when_the_report_was_sent_and_never_shrinks():
    lease = Lease().after(answer(5_000_000), margin_us=3_000_000)
    assert (lease.trusted_until_us, lease.ends_us) == (12_000_000, 15_000_000)
    assert lease.after(answer(4_000_000), margin_us=3_000_000) is lease  # a late answer


@pytest.mark.parametrize(
    ("happened", "chatter", "answered_us", "due_us"),
    [
        (False, False, 10_000_000, 12_000_000),  # the beat
        (True, False, 0, 0),  # at once
        (False, True, 10_000_000, 10_000_000 + int(CHATTER_S * 1e6)),  # soon
        (False, True, 9_000_000, 12_000_000),  # nobody heard the last one: no more before the beat
    ],
)
def test_next_report_is_due_after_the_right_time(happened, chatter, answered_us, due_us):
    rhythm = Rhythm(2_000_000)
    rhythm.reported(10_000_000)
    rhythm.happened, rhythm.chatter = happened, chatter
    assert rhythm.due_us(answered_us) == due_us


def test_events_that_follow_at_once_are_reported_together():
    rhythm = Rhythm(2_000_000)
    rhythm.reported(10_000_000)
    rhythm.soon(10_200_000, is_followed=False)
    rhythm.soon(10_250_000, is_followed=True)  # it does not put off what waits
    assert rhythm.due_us(10_000_000) == 10_200_000 + int(SOON_S * 1e6)
    rhythm.happened = True
    assert rhythm.due_us(10_000_000) == 0
    rhythm.reported(10_260_000)
    assert rhythm.due_us(10_260_000) == 12_000_000
    rhythm.soon(10_300_000, is_followed=True)
    assert rhythm.due_us(10_000_000) == 10_300_000 + int(CHATTER_S * 1e6)


def test_devices_of_a_host_report_at_the_same_times_and_those_of_others_at_other_times():
    def dues(host, sent_us, beat_us):
        rhythm = Rhythm(2_000_000, host=host)
        rhythm.set_pace(beat_us)
        rhythm.reported(sent_us)
        return rhythm.due_us(sent_us)

    for beat_us in (2_000_000, 26_000_000):
        for sent_us in range(10**8, 10**8 + 2 * beat_us, 77_777):
            due_us = dues("h", sent_us, beat_us)
            assert beat_us // 4 <= due_us - sent_us <= 1.25 * beat_us
            assert (due_us - dues("h", 10**8, beat_us)) % beat_us == 0
        phases = {dues(f"h{n}", 10**8, beat_us) % beat_us * 10 // beat_us for n in range(100)}
        assert phases == set(range(10))


def test_device_whose_report_was_not_answered_reports_sooner_than_a_slow_beat():
    rhythm = Rhythm(2_000_000)
    rhythm.set_pace(26_000_000)
    rhythm.reported(10_000_000)
    assert rhythm.due_us(9_000_000) == 16_500_000
    due_us = rhythm.due_us(10_000_000)
    rhythm.set_pace(26_000_000)
    assert rhythm.due_us(10_000_000) == due_us  # told again: as it was


@pytest.mark.parametrize("told_us", [0, 1_000_000])
def test_device_never_reports_less_often_than_it_would_by_itself(told_us):
    rhythm = Rhythm(2_000_000)
    rhythm.set_pace(26_000_000)
    rhythm.reported(10_000_000)
    rhythm.set_pace(told_us)
    assert rhythm.due_us(10_000_000) == rhythm.due_us(9_000_000) == 12_000_000


class Line:
    """A transport that can be down, and that blocks until it is let go."""

    def __init__(self) -> None:
        self.sent: list[Alive] = []
        self.is_down = False
        self.open = threading.Event()
        self.open.set()

    def send(self, alive: Alive) -> None:
        self.open.wait(60)
        if self.is_down:
            raise ConnectionError("no line")
        self.sent.append(alive)


def a_pulse(device: str) -> Pulse:
    return Pulse(device=device, incarnation="1", sent_us=3, report=1, answer=1, progress=[])


class TestPulsesOfAHost:
    def sent_at_once(self, gatherer, names):
        """Send a pulse of each device by a thread of its own; return what each of them raised."""
        raised, together = [], threading.Barrier(len(names))

        def send(name):
            together.wait()
            try:
                gatherer.send(a_pulse(name))
            except ConnectionError as error:
                raised.append(str(error))

        threads = [threading.Thread(target=send, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return raised

    def test_each_pulse_is_sent_once_and_those_of_one_moment_together(self, monkeypatch):
        monkeypatch.setattr(heartbeat, "GATHER_S", 60.0)
        sent: list[Pulse | HostPulses] = []
        gatherer = PulseGatherer(sent.append, most=3)
        names = ["h.2", "h.0", "h.1"]
        assert self.sent_at_once(gatherer, names) == []
        assert sent == [HostPulses.of(map(a_pulse, names))]
        assert self.sent_at_once(gatherer, names) == []
        assert len(sent) == 2

    def test_pulse_without_others_is_sent_alone(self):
        sent: list[Pulse | HostPulses] = []
        PulseGatherer(sent.append, most=3).send(a_pulse("h.0"))
        assert sent == [a_pulse("h.0")]

    def test_all_learn_that_their_pulses_were_not_sent(self, monkeypatch):
        monkeypatch.setattr(heartbeat, "GATHER_S", 60.0)

        def down(message):
            raise ConnectionError("no line")

        gatherer = PulseGatherer(down, most=3)
        raised = self.sent_at_once(gatherer, ["h.0", "h.1", "h.2"])
        assert len(raised) == 3
        assert all("no line" in each for each in raised)


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def sender(line):
    sender = HeartbeatSender(line, clock_us=lambda: 77)
    sender.start()
    yield sender
    sender.end()
    sender.join(60)
    assert not sender.is_alive()


def test_a_report_is_stamped_when_it_is_sent(sender, line):
    sender.say(ALIVE)
    assert sender.flush(60)
    assert line.sent == [replace(ALIVE, sent_us=77)]


def test_only_the_newest_report_is_kept_while_the_connection_is_slow(sender, line):
    line.open.clear()
    for number in range(5):
        sender.say(replace(ALIVE, incarnation=str(number)))
    line.open.set()
    assert sender.flush(60)
    assert line.sent[-1].incarnation == "4"
    assert len(line.sent) <= 2


def test_failed_connection_is_retried(sender, line):
    line.is_down = True
    sender.say(ALIVE)
    assert sender.flush(60)
    line.is_down = False
    sender.say(ALIVE)
    assert sender.flush(60)
    assert len(line.sent) == 1


def test_rows_of_a_stay_are_told_until_a_report_with_them_is_answered():
    stay = Stay.of(launch_of("t1"), StayRecord("t1", 1))
    first, more = [[1, {"loss": 2.0}]], [[2, {"loss": 1.0}]]
    stay.add_rows(first, is_thinned=False)
    assert stay.view(1_000).points == first
    stay.add_rows(more, is_thinned=False)
    stay.add_rows([], is_thinned=False)  # its process has told all
    assert stay.view(1_200).points == first + more
    stay.heard(0, 900)
    assert stay.view(1_300).points == first + more
    stay.heard(0, 1_200)  # the report of that time had the second row, too, which is told again
    assert stay.view(2_000).points == more
    stay.heard(0, 1_500)
    assert stay.view(3_000).points == more
    stay.heard(0, 2_000)
    assert stay.view(4_000).points == []
