"""A job leaves the device of a frozen command for a free device, and nothing is lost."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.acceptance

COUNT = 'n=0; while true; do n=$((n+1)); echo "count $n"; sleep 0.2; done'


def test_job_leaves_the_device_of_a_frozen_command_for_a_free_device(system):
    """The job is more urgent, so it does not give way to the command: only a move helps."""
    alpha = system.client("alpha")
    wanted = {"name": "count", "run": {"command": ["bash", "-c", COUNT]}}
    counts = alpha.submit({"name": "frozen", "tasks": [wanted]})["id"]

    def runs(request):
        return request["tasks"][0]["state"] == "running"

    def seat(request):
        return alpha.request(request)["tasks"][0]["seat"]

    alpha.wait_until(counts, runs)
    here, command = seat(counts), alpha.request(counts)["tasks"][0]["id"]
    alpha.wait_until(counts, lambda _: len(alpha.log_text(command)) > 3)
    alpha.post(f"/v1/tasks/{command}/pause")
    alpha.wait_until(counts, lambda request: request["tasks"][0]["state"] == "blocked")
    jobs = [
        alpha.submit_job("train:Train", name=f"job{n}", params={"steps": 10**6, "step_s": 0.2})
        for n in range(2)
    ]
    for job in jobs:
        system.wait_running(alpha, job)
    (holder,) = [job for job in jobs if seat(job) == here]
    (other,) = [job for job in jobs if job != holder]
    there = seat(other)
    alpha.post(f"/v1/requests/{other}/cancel")
    alpha.wait(other)
    alpha.patch(f"/v1/requests/{holder}", {"priority": 7})
    alpha.post(f"/v1/tasks/{command}/resume")
    alpha.wait_until(counts, runs)
    alpha.wait_until(holder, lambda request: request["tasks"][0]["seat"] == there)
    assert seat(counts) == here
    moved = [one for one in alpha.items(f"/v1/requests/{holder}/events") if "moving" in one["type"]]
    assert [one["data"]["to"] for one in moved] == [there]
    before = len(alpha.log_text(command))
    alpha.wait_until(counts, lambda _: len(alpha.log_text(command)) > before)
    lines = alpha.log_text(command)
    assert lines == [f"count {n + 1}" for n in range(len(lines))]  # it did not begin again
    for request in (counts, holder):
        alpha.post(f"/v1/requests/{request}/cancel")
        alpha.wait(request)
