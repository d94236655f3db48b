"""A secret through HTTP alone: a task has it, and nothing else of the system ever shows it."""

from __future__ import annotations

import base64
import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from app.cli.client import ApiProblem
from tests.acceptance.conftest import System, TenantClient

pytestmark = pytest.mark.acceptance

LAST = "the last command of a test"
TOKEN = "hf_Acceptance/Horse+Battery"
#: parts of the value as it is, in Base64 at each place, and as Postgres shows bytes
FORMS = [
    *(TOKEN, "Horse+Battery", TOKEN.encode().hex(), "Horse%2BBattery"),
    *(base64.b64encode(b"x" * n + TOKEN.encode()).decode()[4:-4] for n in range(3)),
]
SCRIPT = """
import base64, os, subprocess, sys, time
token = os.environ["HF_TOKEN"]
for piece in (token[:9], token[9:], " is told\\n"):
    sys.stdout.write(piece)
    sys.stdout.flush()
    time.sleep(0.1)
print(base64.b64encode(("user:" + token).encode()).decode())
subprocess.run(["env"])
print(len(token), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
raise ValueError(f"cannot sign in with {token!r}")
"""


def set_secret(client: TenantClient, value: str = TOKEN) -> None:
    client.put("/v1/secrets/HF_TOKEN", {"value": value})


def submit(client: TenantClient, **task: Any) -> str:
    body = {"name": "t", "secrets": ["HF_TOKEN"], **task}
    request = {"name": "with-a-secret", "tasks": [body], "bundle": client.bundle}
    return str(client.submit(request)["id"])


@contextlib.contextmanager
def heard(url: str) -> Iterator[list[str]]:
    """All commands that reach Redis meanwhile."""
    told: list[str] = []
    with redis.Redis.from_url(url) as client, client.monitor() as monitor:

        def listen() -> None:
            with contextlib.suppress(redis.ConnectionError, ValueError, OSError):
                while LAST not in (command := str(monitor.next_command())):
                    told.append(command)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield told
        client.echo(LAST)  # all commands before it have been heard when this one is
        thread.join(60)
        assert not thread.is_alive()


def in_base64(text: str) -> list[str]:
    """The bodies of Celery's messages in a command."""
    found = re.findall(r"[A-Za-z0-9+/]{200,}={0,2}", text)
    return [base64.b64decode(body + "===").decode("utf-8", "replace") for body in found]


def in_redis(url: str) -> list[str]:
    with redis.Redis.from_url(url) as client:
        readers = {
            b"string": lambda key: client.get(key),
            b"list": lambda key: client.lrange(key, 0, -1),
            b"set": client.smembers,
            b"hash": client.hgetall,
            b"zset": lambda key: client.zrange(key, 0, -1),
        }
        return [f"{key} {readers[client.type(key)](key)}" for key in client.scan_iter("*")]


def in_postgres(system: System) -> list[str]:
    tables = system.sql("select tablename from pg_tables where schemaname = 'public'")
    rows = [system.sql(f'select cast(t as text) from "{name}" t') for (name,) in tables]
    return [text for found in rows for (text,) in found]


def test_secret_is_given_to_its_task_and_shown_nowhere(system):
    client = system.client("alpha")
    set_secret(client)
    url = system.handle.facts["redis_url"]
    with heard(url) as commands, system.gate() as gate:
        run = {"command": ["python", "-c", SCRIPT, gate.file]}
        id = submit(client, run=run, mounts=gate.mounts)
        task_id = client.request(id)["tasks"][0]["id"]
        assert system.until(lambda: str(len(TOKEN)) in client.log_text(task_id))
        texts = [*in_redis(url), *in_postgres(system)]  # while it runs
        gate.open()
        [task] = client.wait(id)["tasks"]
        texts += [*in_redis(url), *in_postgres(system)]
    lines, told = client.log_text(task_id), str(client.get(f"/v1/requests/{id}/events"))
    lost = "ValueError: cannot sign in with '***'"
    assert {"*** is told", "HF_TOKEN=***", lost} <= {*lines}
    assert task["state"] == "failed"
    bodies = [body for command in commands for body in in_base64(command)]
    assert any("Launch" in body and "sealed" in body and task_id in body for body in bodies)
    assert any("sealed" in text and task_id in text for text in texts)  # the row of the order
    for text in (*commands, *bodies, *texts, *lines, told):
        for form in FORMS:
            assert form not in text, text[:300]
    [secret] = client.get("/v1/secrets")["items"]
    assert secret["last_used_at"] is not None
    uses = system.sql("select after->>'task' from audit_events where operation = 'launchTask'")
    assert (task_id,) in uses


def test_job_whose_secret_was_removed_while_it_was_paused_fails_with_the_reason(system):
    client = system.client("alpha")
    set_secret(client)
    id = submit(client, run={"job": "train:Train"}, params={"steps": 10**6})
    system.wait_running(client, id)
    [task] = client.request(id)["tasks"]
    client.post(f"/v1/tasks/{task['id']}/pause")
    client.wait_until(id, lambda request: request["tasks"][0]["state"] == "blocked")
    client.delete("/v1/secrets/HF_TOKEN")
    client.post(f"/v1/tasks/{task['id']}/resume")
    [task] = client.wait(id)["tasks"]
    assert (task["state"], task["cause"]) == ("failed", "secret")
    assert task["message"].startswith("It cannot have its secrets: neither its user nor its tenant")
    assert "HF_TOKEN" in task["message"]


def test_task_with_an_unknown_secret_is_refused_at_once(system):
    client = system.client("beta")
    with pytest.raises(ApiProblem) as refused:
        submit(client, run={"command": ["true"]})
    [told] = refused.value.errors
    assert told["pointer"] == "/tasks/0/secrets/0"
    assert "neither you nor your tenant has a secret HF_TOKEN" in told["detail"]
