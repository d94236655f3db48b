"""Nudges are published by threads that end on request, and begin anew."""

import queue
import threading

import pytest

from app.messaging import broker, outbox

SOON_S = 30.0


@pytest.fixture
def published(monkeypatch):
    found = queue.Queue()
    monkeypatch.setattr(outbox, "hint", lambda message, queue, text="": found.put((message, queue)))
    yield found
    outbox.stop_nudging()


def nudgers():
    return [thread for thread in threading.enumerate() if isinstance(thread, outbox.Nudger)]


def test_nudge_is_published_to_the_queue_of_its_worker(published):
    outbox.nudge_control()
    assert published.get(timeout=SOON_S) == (broker.CONTROL_NUDGE, broker.CONTROL_QUEUE)
    outbox.nudge_island("isle")
    assert published.get(timeout=SOON_S) == (broker.ISLAND_NUDGE, broker.island_queue("isle"))


def test_many_nudges_become_a_few_messages(published):
    for _ in range(1000):
        outbox.nudge_control()
    published.get(timeout=SOON_S)
    outbox.stop_nudging()
    assert published.qsize() < 100


def test_stopped_nudges_leave_no_thread_and_the_next_one_is_published(published):
    outbox.nudge_control()
    published.get(timeout=SOON_S)
    outbox.stop_nudging()
    assert not nudgers()
    outbox.nudge_control()
    assert published.get(timeout=SOON_S) == (broker.CONTROL_NUDGE, broker.CONTROL_QUEUE)
    assert len(nudgers()) == 1
