"""A task reaches what its tenant's policy and its own wish allow, through HTTP alone."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx2
import pytest

from app.cli.client import ApiProblem
from tests.acceptance.conftest import HOUSE
from tests.processes import runs

pytestmark = pytest.mark.acceptance

#: Asks for a file again and again, prints what changes, and ends when it is told to.
SCRIPT = """
import sys, time, urllib.request
def get(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()[:20]
    except OSError as error:
        return str(error)
for url in sys.argv[2:]:
    print("once", get(url), flush=True)
before = ""
while before != "stop":
    now = get(sys.argv[1])
    if now != before:
        print("got", now, flush=True)
    before = now
    time.sleep(0.05)
"""


class House(ThreadingHTTPServer):
    """A server in the house; `said` is what it answers."""

    said = "data"
    asked = 0

    def __init__(self) -> None:
        super().__init__((HOUSE, 0), Answers)

    @property
    def destination(self) -> str:
        return f"files.test:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: House

    def do_GET(self) -> None:
        self.server.asked += 1
        body = self.server.said.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def house() -> Iterator[House]:
    with House() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def policy(system):
    """Sets what alpha may reach; nothing at the end."""
    admin = system.client("platform", "platform_admin")
    [alpha] = [each for each in admin.items("/v1/tenants") if each["name"] == "alpha"]
    path = f"/v1/tenants/{alpha['id']}"

    def allow(*destinations: str) -> None:
        version = admin.get(path)["version"]
        admin.patch(path, {"network": list(destinations)}, version=version)

    yield allow
    admin.patch(path, {"network": None}, version=admin.get(path)["version"])


def request(name, allow, *urls):
    command = ["python", "-c", SCRIPT, *urls]
    task = {"name": "fetch", "run": {"command": command}, "network": {"allow": list(allow)}}
    return {"name": name, "tasks": [task]}


def refused(client, body):
    with pytest.raises(ApiProblem) as problem:
        client.submit(body)
    return [(fault["pointer"], fault["code"], fault["detail"]) for fault in problem.value.errors]


def test_task_reaches_what_is_allowed_and_nothing_else(system, house, policy):
    alpha, beta = system.client("alpha"), system.client("beta")
    api = urlsplit(system.url).port
    inner = f"local.test:{api}"
    allow = (house.destination, inner, "meta.test:80")
    urls = (f"http://{house.destination}/file", f"http://{inner}/", "http://meta.test/latest")
    body = request("fetches", allow, *urls, f"http://other.test:{api}/")

    may = "may reach {}; an administrator can change that"
    where = [f"/tasks/0/network/allow/{n}" for n in range(3)]
    nothing = may.format("nothing")
    assert refused(alpha, body) == [
        (at, "network", f"{wanted} is not allowed: alpha {nothing}")
        for at, wanted in zip(where, allow, strict=True)
    ]
    policy(*allow)
    assert refused(beta, request("not-ours", allow[:1], urls[0])) == [
        (where[0], "network", f"{allow[0]} is not allowed: beta {nothing}")
    ]
    refusal = f"pypi.org:443 is not allowed: alpha {may.format(', '.join(allow))}"
    too_much = request("too-much", ["pypi.org:443"], urls[0])
    assert refused(alpha, too_much) == [(where[0], "network", refusal)]

    id = alpha.submit(body)["id"]
    task_id = alpha.request(id)["tasks"][0]["id"]
    no_public = "has no public address, and this host allows no other ones"
    told = f"Roundhouse refused a connection: local.test {no_public}"  # by the proxy, at its time
    assert system.until(lambda: {"got data", told} <= {*alpha.log_text(task_id)})
    lines = alpha.log_text(task_id)
    assert [line for line in lines if line.startswith("once")] == [
        f"once HTTP Error 403: local.test {no_public}",
        f"once HTTP Error 403: meta.test {no_public}",
        f"once HTTP Error 403: other.test:{api} is not in network.allow of this task",
    ]

    # what the proxy has told survives it
    def told_connections():
        return alpha.get(f"/v1/tasks/{task_id}")["network"]["connections"]

    told = house.asked
    assert system.until(lambda: told_connections() >= told)

    # the proxy dies: it is started again, and the next connection works
    before = [each for each in system.of_devices() if runs(each, "workers.egress.process")]
    assert before
    for each in before:
        each.kill()
    house.said = "data after a kill"
    assert system.until(lambda: "got data after a kill" in alpha.log_text(task_id))
    lost = house.asked - told  # at most: connections that the dead proxy had not told of yet

    # the policy becomes narrower: the next launch goes without what was taken away
    alpha.post(f"/v1/tasks/{task_id}/pause", {})
    assert system.until(lambda: alpha.get(f"/v1/tasks/{task_id}")["phase"] == "paused")
    policy("pypi.org:443")
    alpha.post(f"/v1/tasks/{task_id}/resume", {})
    narrower = f"the policy of the tenant does not allow {house.destination} any more"
    assert system.until(lambda: f"got HTTP Error 403: {narrower}" in alpha.log_text(task_id))
    house.said = "stop"
    alpha.post(f"/v1/tasks/{task_id}/pause", {})
    assert system.until(lambda: alpha.get(f"/v1/tasks/{task_id}")["phase"] == "paused")
    policy(*allow)
    alpha.post(f"/v1/tasks/{task_id}/resume", {})
    assert alpha.wait(id)["state"] == "done"

    used = alpha.get(f"/v1/tasks/{task_id}")["network"]
    assert used["allow"] == list(allow)
    assert house.asked - lost <= used["connections"] <= house.asked + 1  # one may have died
    assert used["refused"] >= 4
    assert used["received_bytes"] > used["connections"] * len("data")
    assert system.until(lambda: _metrics(system)["connections_total"] >= used["connections"])


def _metrics(system):
    """Return the newest counts of the network, by name."""
    key = system.keys["platform"]["platform_admin"]
    with contextlib.closing(httpx2.Client(headers={"Authorization": f"Bearer {key}"})) as client:
        text = client.get(f"{system.url}/metrics").text
    found = re.findall(r"^roundhouse_network_(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
