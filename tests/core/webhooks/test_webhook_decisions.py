"""Checks the bodies of webhook messages, their retries, and which addresses may be called."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from ipaddress import ip_address

import pytest

from app.core.security.addresses import may_call, networks
from app.core.webhooks.message_bodies import (
    MESSAGE_LENGTH,
    TaskEnd,
    count_ends,
    message_body,
    wants,
)
from app.core.webhooks.retries import WAITS_S, Verdict, verdict, wait_s
from app.core.webhooks.urls import refusal


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200",
        "0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.0.192", "168.63.129.16",
        "::1", "::", "fe80::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::", "fec0::1", "::7f00:1",
        "64:ff9b:1::1", "100.64.0.1", "198.18.0.1", "240.0.0.1",
    ],
)  # fmt: skip
def test_non_public_address_is_not_called(address):
    assert not may_call(ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_public_address_is_called(address):
    assert may_call(ip_address(address))


def test_allowed_network_is_called_and_its_neighbours_are_not():
    allowed = networks("10.1.0.0/16, ::1/128")
    assert may_call(ip_address("10.1.2.3"), allowed)
    assert may_call(ip_address("::ffff:10.1.2.3"), allowed)
    assert may_call(ip_address("::1"), allowed)
    assert not may_call(ip_address("10.2.0.1"), allowed)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://example.org/", "http"),
        ("https://", "host"),
        ("https://user:secret@example.org/", "user name or password"),
        ("https://example.org/#here", "fragment"),
        ("https://example.org:99999/", "must be a valid URL"),
        ("https://[::1/", "must be a valid URL"),
        ("https://example.org/ü", "ASCII"),
        ("https://example.org/a b", "spaces"),
        ("https://example.org/" + "x" * 2000, "2000"),
        ("http://localhost:8000/", "must be a public address"),
        ("http://a.localhost/", "must be a public address"),
        ("http://2130706433/", "must be a public address"),
        ("http://0x7f.1/", "must be a public address"),
        ("http://127.1/", "must be a public address"),
        ("http://127.0.0.1/", "must be a public address"),
        ("http://127.0.0.1./", "must be a public address"),
        ("http://localhost./", "must be a public address"),
        ("http://0177.0.0.1/", "must be a public address"),
        ("http://0/", "must be a public address"),
        ("http://[fe80::1%25lo]/", "must be a public address"),
        ("http://8.8.8.8\\@127.0.0.1/", "user name or password"),
        ("http://127.0.0.1#@8.8.8.8/", "fragment"),
        ("http:///127.0.0.1/", "host"),
        ("http://127\u30020\u30020\u30021/", "ASCII"),
        ("http://8.8.8.8:80\t/", "spaces"),
        ("http://[::ffff:169.254.169.254]/", "must be a public address"),
    ],
)
def test_refused_address_has_a_reason(url, told):
    assert told in (refusal(url) or "nothing")


def test_host_name_is_checked_when_it_is_called():
    assert refusal("https://hooks.example.org:8443/a?b=c") is None
    assert refusal("http://127.0.0.1:9/", networks("127.0.0.0/8")) is None


@pytest.mark.parametrize(
    ("status", "found"),
    [(200, "delivered"), (204, "delivered"), (301, "again"), (307, "again"), (400, "again"),
     (410, "unwanted"), (500, "again"), (None, "again")],
)  # fmt: skip
def test_only_2xx_accepts_a_message_and_410_ends_the_webhook(status, found):
    assert verdict(status) == Verdict(found)


def test_message_is_retried_ever_later_and_then_given_up():
    waits = [wait_s(tries, 0.0) for tries in range(len(WAITS_S))]
    assert waits == sorted(waits) == [*WAITS_S]
    assert wait_s(len(WAITS_S), 0.0) is None
    assert sum(WAITS_S) == 272_105  # 3 days, 3 h and 35 min
    assert wait_s(1, 0.5) == pytest.approx(5.5)


def test_body_follows_the_standard():
    at = datetime(2026, 11, 21, 12, tzinfo=UTC)
    body = json.loads(message_body("request.done", at, {"id": "req_1"}))
    expected = {"type": "request.done", "timestamp": "2026-11-21T12:00:00+00:00"}
    assert body == {**expected, "data": {"id": "req_1"}}


def test_first_failed_task_is_named():
    def end(name, state, message=None):
        return TaskEnd(name=name, state=state, cause="exception", message=message)

    found = count_ends([end("a", "done"), end("b", "failed", "x" * 9999), end("c", "failed")])
    assert found["tasks"] == {"done": 1, "failed": 2}
    assert found["failure"] == {
        "task": "b",
        "cause": "exception",
        "message": "x" * MESSAGE_LENGTH,
    }
    assert count_ends([end("a", "done")])["failure"] is None


@pytest.mark.parametrize(
    ("notify", "state", "found"),
    [
        (None, "done", False),
        ({"webhook": "x"}, "cancelled", True),
        ({"webhook": "x", "on": []}, "done", True),
        ({"webhook": "x", "on": ["failed"]}, "done", False),
        ({"webhook": "x", "on": ["failed"]}, "failed", True),
    ],
)
def test_request_reports_only_the_ends_that_it_asked_for(notify, state, found):
    assert wants(notify, state) is found
