"""Jobs that behave, misbehave, wait and depend, and what becomes of them; through HTTP alone."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

pytestmark = pytest.mark.acceptance


@pytest.fixture
def client(system):
    return system.client("alpha")


def ended(client, id):
    return client.wait(id)["tasks"][0]


def test_failing_job_shows_its_traceback_to_its_owner(client):
    task = ended(client, client.submit_job("train:Raises", name="raises"))
    assert (task["state"], task["cause"]) == ("failed", "exception")
    assert task["message"] == "ValueError: the third step is cursed"
    assert 'raise ValueError("the third step is cursed")' in task["detail"]
    assert "workers/" not in task["detail"]


def test_metrics_of_the_last_step_are_kept_however_short_the_job(client):
    task = ended(client, client.submit_job("train:Train", name="short", params={"steps": 3}))
    assert task["metrics"].keys() == {"loss"}
    assert [row["step"] for row in client.items(f"/v1/tasks/{task['id']}/metrics")][-1] == 3


def test_a_job_that_hangs_is_ended_by_max_duration(client):
    task = ended(client, client.submit_job("train:Hangs", name="hangs", max_duration_s=1.5))
    assert (task["state"], task["cause"]) == ("failed", "max_duration")
    assert task["held_us"] >= 1_500_000


def test_object_that_cannot_be_captured_is_named_at_the_first_safe_point(client):
    task = ended(client, client.submit_job("train:Uncapturable", name="uncapturable"))
    assert (task["state"], task["cause"], task["step"]) == ("failed", "uncapturable", 1)
    assert "job.data['source'][0]: generator" in task["message"]


def test_crashed_job_is_retried_as_often_as_allowed(client):
    id = client.submit_job("train:Raises", name="again", retry={"max": 1})
    task = ended(client, id)
    assert (task["state"], task["attempts"]) == ("failed", 1)
    assert len(list(client.items(f"/v1/tasks/{task['id']}/placements"))) == 2


def test_job_paused_by_its_owner_resumes_after_the_same_step(system, client):
    with system.gate() as gate:
        params = {"steps": 150, "seed": 5, "step_s": 0.2}
        id = client.submit_job("train:Train", name="pause", params=params, gate=gate)
        system.wait_running(client, id)
        task_id = client.request(id)["tasks"][0]["id"]
        client.post(f"/v1/tasks/{task_id}/pause")
        held = client.wait_until(id, lambda request: request["tasks"][0]["state"] == "blocked")
        at = held["tasks"][0]["step"]
        why = client.get(f"/v1/tasks/{task_id}/explain")
        assert [reason["code"] for reason in why["reasons"]] == ["HELD_BY_USER"]
        time.sleep(1.0)
        assert client.request(id)["tasks"][0]["step"] == at
    client.post(f"/v1/tasks/{task_id}/resume")
    task = ended(client, id)
    assert (task["result"]["done"], task["lost_steps"], task["pauses"]) == (150, 0, 1)


def test_job_of_several_ranks_is_paused_and_moved(system, client):
    def train(name, step_s, **task):
        params = {"steps": 60, "step_s": step_s}
        return client.submit_job("train:Ranks", name=name, world_size=3, params=params, **task)

    undisturbed = ended(client, train("ranks-alone", 0.0))["result"]
    with system.gate() as gate:
        id = train("ranks", 0.5, gate=gate, devices={"max": 1})
        system.wait_running(client, id)
        url = f"/v1/tasks/{client.request(id)['tasks'][0]['id']}"
        client.post(f"{url}/pause")
        client.wait_until(id, lambda request: request["tasks"][0]["state"] == "blocked")
        client.post(f"{url}/resume")
        client.wait_until(id, lambda request: request["tasks"][0]["state"] == "running")
        client.post(f"{url}/migrate")
        assert system.until(lambda: client.get(url)["move_to"] is None)
    task = ended(client, id)
    assert task["result"] == undisturbed
    assert (task["lost_steps"], task["pauses"] >= 1) == (0, True)
    places = [each["device_id"] for each in client.items(f"{url}/placements")]
    assert len(set(places)) == 2, places


def test_cancel_ends_a_running_and_a_waiting_job(system, client):
    running = client.submit_job("train:Train", name="running", params={"steps": 100_000})
    system.wait_running(client, running)
    waiting = client.submit_job("train:Train", name="waiting", start={"hold": True})
    for id in (running, waiting):
        client.post(f"/v1/requests/{id}/cancel")
        assert ended(client, id)["state"] == "cancelled"


def test_output_of_one_task_is_input_of_the_next(client):
    request = {
        "name": "flow",
        "bundle": client.bundle,
        "tasks": [
            {
                "name": "make",
                "type": "preprocess",
                "run": {"function": "train:make"},
                "params": {"n": 10},
                "outputs": ["numbers"],
            },
            {
                "name": "total",
                "type": "preprocess",
                "run": {"function": "train:total"},
                "params": {"scale": 2},
                "inputs": {"numbers": "make.numbers"},
            },
        ],
    }
    ended_request = client.wait(client.submit(request)["id"])
    assert ended_request["state"] == "done", ended_request
    assert ended_request["tasks"][1]["result"] == {"total": 90}


def test_dependent_of_a_failed_task_says_so_and_never_runs(client):
    request = {
        "name": "broken",
        "bundle": client.bundle,
        "tasks": [
            {"name": "first", "type": "train", "run": {"job": "train:Raises"}},
            {
                "name": "second",
                "type": "train",
                "run": {"job": "train:Train"},
                "start": {"after": ["first"]},
            },
        ],
    }
    second = client.wait(client.submit(request)["id"])["tasks"][1]
    assert (second["state"], second["cause"], second["epoch"]) == ("failed", "needs", 0)


def test_not_before_delays_a_task_until_its_time(client):
    at = (datetime.now(UTC) + timedelta(seconds=3)).isoformat()
    id = client.submit_job(
        "train:Train", name="later", params={"steps": 2}, start={"not_before": at}
    )
    task = ended(client, id)
    assert task["state"] == "done"
    assert task["first_started_at"] >= at[:19]


def test_task_waits_for_fair_share_with_a_reason_while_others_used_less(system):
    """Keep both devices busy for two tenants; the third's flood waits, with an explanation."""
    busy = [system.client("beta"), system.client("gamma")]
    long = [c.submit_job("train:Train", name="busy", params={"steps": 100_000}) for c in busy]
    for c, id in zip(busy, long, strict=True):
        system.wait_running(c, id)
    flood = system.client("alpha")
    ids = [
        flood.submit_job("train:Train", name=f"flood-{n}", params={"steps": 100_000})
        for n in range(3)
    ]
    last = flood.request(ids[-1])["tasks"][0]["id"]
    explain = f"/v1/tasks/{last}/explain"
    assert system.until(lambda: flood.get(explain)["place"])
    why = flood.get(explain)
    assert all(reason["message"] and reason["next_action"] for reason in why["reasons"])
    for c, id in [*zip(busy, long, strict=True), *((flood, id) for id in ids)]:
        c.post(f"/v1/requests/{id}/cancel")
    for id in ids:
        assert ended(flood, id)["state"] == "cancelled"
