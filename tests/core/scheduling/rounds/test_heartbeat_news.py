"""Which heartbeats need a round at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.model.protocol.messages import Alive, LogLines, ResidentView, Stopped
from app.core.scheduling.rounds.heartbeat_news import HeartbeatNews

VIEW = ResidentView(
    task="tsk_t", epoch=1, state="running", step=4, held_us=9, order_seq=1, memory_bytes=0
)
ALIVE = Alive(
    device="h.0",
    incarnation="p",
    sent_us=1,
    facts={"kind": "cpu"},
    residents=[VIEW],
    events=[],
    logs=[],
    health={"temperature": 40, "findings": []},
)


@pytest.fixture
def news():
    """It has heard ALIVE."""
    found = HeartbeatNews()
    assert found.is_new(ALIVE)
    return found


def test_later_times_more_steps_and_other_temperatures_are_no_news(news):
    later = replace(VIEW, step=5, held_us=10, metrics={"loss": 0.5}, points=[[4, {"loss": 1.0}]])
    health = {"temperature": 50, "findings": []}
    assert not news.is_new(replace(ALIVE, sent_us=2, residents=[later], health=health))
    assert not news.is_new(ALIVE)


@pytest.mark.parametrize(
    "more",
    [
        {"incarnation": "q"},
        {"facts": {"kind": "cpu", "leaving": True}},
        {"residents": []},
        {"residents": [replace(VIEW, state="paused")]},
        {"residents": [replace(VIEW, epoch=2)]},
        {"residents": [replace(VIEW, order_seq=2)]},
        {"residents": [replace(VIEW, level="disk")]},
        {"residents": [replace(VIEW, lacks=["x"])]},
        {"residents": [VIEW, replace(VIEW, task="tsk_u")]},
        {"ahead": [{"task": "tsk_u"}]},
        {"links": ["10.0.0.1", 99]},
        {"hung": [["tsk_t", 1]]},
        {"health": {"findings": [{"rule": "memory"}]}},
        {"device": "h.1"},
    ],
    ids=str,
)
def test_whatever_else_differs_is_news_once(news, more):
    assert news.is_new(replace(ALIVE, **more))
    assert not news.is_new(replace(ALIVE, sent_us=2, **more))


def test_events_and_log_lines_are_news_until_they_are_acknowledged(news):
    stopped = Stopped(task="tsk_t", epoch=1, seq=2, step=4, held_us=9)
    lines = LogLines(task="tsk_t", epoch=1, first=0, lines=[["out", "hello"]])
    for _ in range(2):
        assert news.is_new(replace(ALIVE, events=[stopped]))
        assert news.is_new(replace(ALIVE, logs=[lines]))
