"""When a device reports, and how long it trusts itself."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from app.core.device.device_records import StayRecord
from app.core.device.lease import Lease
from app.core.model.protocol.messages import Alive, Answer
from tests.launches import launch_of
from workers.device.heartbeat import CHATTER_S, SOON_S, HeartbeatSender, Rhythm
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
    assert rhythm.due_us(10_000_000) == 12_260_000
    rhythm.soon(10_300_000, is_followed=True)
    assert rhythm.due_us(10_000_000) == 10_300_000 + int(CHATTER_S * 1e6)


def test_device_reports_at_random_times_within_a_slower_beat_of_its_island():
    rhythm, found = Rhythm(2_000_000), []
    rhythm.set_pace(26_000_000)
    for _ in range(100):
        rhythm.reported(10_000_000)
        found.append(rhythm.due_us(10_000_000) - 10_000_000)
    assert 13_000_000 <= min(found) < 16_000_000 < 23_000_000 < max(found) <= 26_000_000
    assert rhythm.due_us(9_000_000) == 16_500_000  # the last one was not answered: sooner
    rhythm.set_pace(26_000_000)
    assert rhythm.due_us(10_000_000) - 10_000_000 == found[-1]  # told again: as it was


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
