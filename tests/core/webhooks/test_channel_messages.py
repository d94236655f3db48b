"""Channels: which news become one message, and what a message says."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model.provisions.notify import EVENTS
from app.core.webhooks.channel_texts import KINDS, RequestTold, body, sentence
from app.core.webhooks.grouping import (
    AT_ONCE,
    FAILURE,
    HOUR_S,
    WINDOW_S,
    RecentMessages,
    RequestNews,
    group,
)

AT = datetime(2026, 11, 30, 12, 10, tzinfo=UTC)
TYPES = [type_ for types in EVENTS.values() for type_ in types]


def messages_of(happened: list[tuple[float, str]], *, until_s: float) -> list[tuple[float, int]]:
    """Play what happened (at, request) with a look each second; return (at, count) of messages."""
    told_at_s, sent = dict[str, float](), list[tuple[float, int]]()
    waiting, due_s = dict[str, int](), dict[str, float]()
    coming = sorted(happened, reverse=True)
    for now_s in range(int(until_s) + 1):
        while coming and coming[-1][0] <= now_s:
            request = coming.pop()[1]
            waiting[request] = waiting.get(request, 0) + 1
            due_s[request] = now_s
        due = [request for request in waiting if due_s[request] <= now_s]
        if not due:
            continue
        news = [
            RequestNews(request=r, type="x", count=waiting[r], told_at_s=told_at_s.get(r))
            for r in due
        ]
        recent = [at_s for at_s, _ in sent if at_s > now_s - HOUR_S]
        last_s = max(recent, default=float("-inf"))
        found = group(news, RecentMessages(count=len(recent), last_at_s=last_s), now_s)
        assert {one.request for one, _ in found.waiting} | {
            one.request for message in found.messages for one in message
        } == set(due)
        for message in found.messages:
            sent.append((now_s, sum(one.count for one in message)))
            for one in message:
                told_at_s[one.request] = now_s
                del waiting[one.request]
        for one, at_s in found.waiting:
            assert at_s > now_s
            due_s[one.request] = at_s
    return sent


class TestGrouping:
    def test_forty_preemptions_in_an_hour_are_a_message_in_ten_minutes(self):
        sent = messages_of([(90 * n, "sweep") for n in range(40)], until_s=2 * HOUR_S)
        assert [at_s for at_s, _ in sent] == [WINDOW_S * n for n in range(7)]
        assert sent[0][1] == 1
        assert sum(count for _, count in sent) == 40

    def test_ten_thousand_requests_that_fail_in_an_hour_are_at_most_twenty_messages(self):
        sent = messages_of([(0.36 * n, f"r{n}") for n in range(10_000)], until_s=HOUR_S + WINDOW_S)
        assert len(sent) <= 20
        assert sum(count for _, count in sent) == 10_000

    def test_few_requests_are_told_at_once_and_one_by_one(self):
        sent = messages_of([(n, f"r{n}") for n in range(AT_ONCE)], until_s=60)
        assert sent == [(n, 1) for n in range(AT_ONCE)]

    @given(
        st.lists(
            st.tuples(st.floats(0, 4000), st.sampled_from([f"r{n}" for n in range(25)])),
            max_size=80,
        )
    )
    def test_each_event_is_told_once_and_soon(self, happened):
        sent = messages_of(happened, until_s=4000 + 3 * WINDOW_S)
        assert sum(count for _, count in sent) == len(happened)
        for at_s, _ in sent:
            near = [other for other, _ in sent if at_s <= other < at_s + HOUR_S]
            assert len(near) <= AT_ONCE + HOUR_S / WINDOW_S

    def test_failure_is_told_by_the_first_one_and_by_the_end(self):
        first = RequestNews(request="r", type=FAILURE, count=1)
        assert not first.is_needless
        assert RequestNews(request="r", type=FAILURE, count=9, told_at_s=0.0).is_needless
        assert RequestNews(request="r", type=FAILURE, count=1, has_ended=True).is_needless


def told(**more: object) -> RequestTold:
    link = "https://rh.example.org/ui/requests/req_1"
    return RequestTold(**{"id": "req_1", "name": "sweep-7", "link": link, **more})


class TestTexts:
    @pytest.mark.parametrize(
        ("type_", "requests", "expected"),
        [
            ("request.done", [told()], "sweep-7 is done"),
            (
                "request.failed",
                [told(ends={"done": 9988, "failed": 12, "cancelled": 0})],
                "sweep-7 has failed (9,988 done, 12 failed)",
            ),
            ("task.preempted", [told(tasks=["train"])], "sweep-7: train was preempted"),
            (
                "task.preempted",
                [told(tasks=["train"], count=40)],
                "sweep-7: train was preempted 40 times",
            ),
            (
                "task.moved",
                [told(tasks=["a", "b"], count=3)],
                "sweep-7: 3 times a task was moved to another device (a, b)",
            ),
            ("request.done", [told(), told(name="x")], "2 requests are done: sweep-7, x"),
            (
                "request.failed",
                [told(name=f"r{n}") for n in range(7)],
                "7 requests have failed: r0, r1, r2, r3, r4 and 2 more",
            ),
        ],
    )
    def test_sentence(self, type_, requests, expected):
        assert sentence(type_, requests) == expected

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("type_", [*TYPES, "webhook.test"])
    def test_each_kind_has_a_message_of_each_type_with_names_and_links(self, kind, type_):
        requests = [] if type_ == "webhook.test" else [told(tasks=["train"]), told(name="x")]
        for some in (requests[:1], requests):
            text = body(kind, type_, some, at=AT, since=None)
            json.loads(text)
            for each in some:
                assert each.name in text
                assert each.link in text

    def test_names_are_no_markup_in_slack(self):
        text = body("slack", "request.done", [told(name="<!channel> & co")], at=AT, since=None)
        assert "<!channel>" not in text
        assert "&lt;!channel&gt; &amp; co" in text

    def test_text_in_teams_is_no_markdown(self):
        text = body("teams", "request.done", [told(name="[x](https://e.org)")], at=AT, since=None)
        [attached] = json.loads(text)["attachments"]
        [words] = attached["content"]["body"]
        assert words["type"] == "RichTextBlock"
        assert words["inlines"] == [{"type": "TextRun", "text": "[x](https://e.org) is done."}]

    def test_count_comes_with_its_time(self):
        since = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
        several = [told(tasks=["train"], count=7)]
        text = json.loads(body("webhook", "task.preempted", several, at=AT, since=since))
        assert text["data"]["text"] == "sweep-7: train was preempted 7 times, since 12:00 UTC."
        assert (text["data"]["count"], text["type"]) == (7, "task.preempted")
