"""A session gives its device away while nobody uses it, and comes back at the next keystroke."""

from __future__ import annotations

import time

import pytest

from tests.acceptance.test_tunnels import Terminal, terminal

pytestmark = pytest.mark.acceptance

__all__ = ["Terminal"]


def busy(client, count):
    """Submit commands that run until they are cancelled; returns the ids of their requests."""
    run = {"command": ["sleep", "600"]}
    return [
        client.submit({"name": f"busy-{n}", "tasks": [{"name": "t", "run": run}]})["id"]
        for n in range(count)
    ]


def running(client, ids):
    return sum(client.request(id)["tasks"][0]["state"] == "running" for id in ids)


def test_idle_session_gives_its_device_away_and_comes_back_at_a_keystroke(system):
    mine, beta = system.client("gamma"), system.client("beta")  # gamma used little before
    devices = len(list(beta.items("/v1/devices")))
    with terminal(
        system, "run", "--interactive", "--idle", "5", "--name", "desk", tenant="gamma"
    ) as desk:
        desk.until("$ ")
        desk.type("x=41; echo rea''dy\r")
        desk.until("ready")
        id = next(iter(mine.items("/v1/requests", name="desk")))["id"]
        task_id = mine.request(id)["tasks"][0]["id"]
        others = busy(beta, 2 * devices)  # all take turns, which are shorter than idle_s

        def is_away():
            return mine.get(f"/v1/tasks/{task_id}")["hold"] == "idle"

        began_s = time.monotonic()
        assert system.until(is_away)
        assert system.until(lambda: running(beta, others) == devices)
        away_s = time.monotonic() - began_s
        desk.until("Idle: its device was given back. It comes back at the next keystroke.")
        held_us = mine.get(f"/v1/tasks/{task_id}")["held_us"]
        time.sleep(3)  # charged for nothing while it is away
        assert mine.get(f"/v1/tasks/{task_id}")["held_us"] == held_us
        why = mine.get(f"/v1/tasks/{task_id}/explain")
        assert "IDLE_SESSION" in [reason["code"] for reason in why["reasons"]]

        began_s = time.monotonic()
        desk.type("echo is $((x + 1)); exit 4\r")
        desk.until("is 42")
        back_s = time.monotonic() - began_s
        assert desk.ended() == 4
    events = [event["type"] for event in mine.items(f"/v1/requests/{id}/events")]
    assert "task.idle_away" in events
    assert "task.woken" in events
    assert mine.wait(id)["state"] == "cancelled"
    for other in others:
        beta.post(f"/v1/requests/{other}/cancel")
    print(f"away {away_s:.2f} s after others came, back {back_s:.2f} s after the keystroke")  # noqa: T201
