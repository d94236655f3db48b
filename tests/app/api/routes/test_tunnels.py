"""Tunnels: who gets a ticket, what a WebSocket does with it, and what is written down.

The device worker's side is the real one: its links, its server of tunnels and its inner ends, which
here run without walls.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import asdict

import pytest
from sqlalchemy import func, select, text, update
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from app.api import tunnel_relay
from app.api.routes import tunnels as routes
from app.core.model.provisions import tunnel as values
from app.core.model.provisions.tunnel import FrameKind, message_of
from app.core.security import peer_proof
from app.db.models import ApiKey, AuditEvent, Device, RequestEvent, Task, Tunnel
from app.db.transactions import transaction
from app.intake import tunnels
from app.messaging.live_updates import changes
from tests.serving import server  # noqa: F401
from workers.commands.shells.tunnels import start_end
from workers.device.tunnels import TunnelServer
from workers.transfer.peer_auth import Links

pytestmark = pytest.mark.slow
SECRET = "ab" * 32
SHELL = {"kind": "shell", "words": ["bash", "--norc"]}


class Host:
    """A device worker, as far as tunnels know it; it has one task."""

    def __init__(self):
        self.task, self.ends, self.folder = "", [], "."
        self.tunnels = TunnelServer(SECRET, lambda act: act(), self.open)
        self.links = Links("127.0.0.1", lambda act: act(), {peer_proof.TUNNEL: self.tunnels})
        self.tunnels.start()
        self.links.listen()

    def open(self, ticket, theirs):
        if (ticket.task, ticket.epoch) != (self.task, 1):
            return "the task is not on this device any more"
        begun = start_end(asdict(ticket), theirs.fileno(), self.folder, dict(os.environ), None)
        self.ends.append(begun)
        return ""

    def close(self):
        self.links.close()
        self.tunnels.close()
        for end in self.ends:
            end.kill()
            end.wait()


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


@pytest.fixture
def running(server, host):  # noqa: F811
    """A running command of red.member."""
    with server.client() as client:
        run = {"command": ["sleep", "600"]}
        answer = client.post("/v1/requests", json={"tasks": [{"name": "t", "run": run}]})
        host.task = answer.json()["tasks"][0]["id"]
    with transaction() as session:
        session.execute(
            update(Device).where(Device.id == "h.0").values(links=host.links.place, secret=SECRET)
        )
        now = {"started_at": func.now(), "first_started_at": func.now()}
        session.execute(update(Task).values(state="running", seat="h.0", epoch=1, **now))
    return server


class User:
    """The user's end of a tunnel."""

    def __init__(self, server, who="red.member", ticket=None, **body):  # noqa: F811
        if ticket is None:
            task = task_id()
            with server.client(who) as client:
                answer = client.post(f"/v1/tasks/{task}/tunnels", json=body or SHELL)
            assert answer.status_code == 201, answer.text
            ticket = answer.json()["ticket"]
        self.ticket = ticket
        self.stack = contextlib.ExitStack()
        url = server.url.replace("http", "ws") + "/v1/tunnels"
        self.socket = self.stack.enter_context(connect(url, max_size=2**17))
        self.socket.send(ticket)
        self.text, self.status, self.told = b"", None, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def type(self, line):
        self.socket.send(message_of(FrameKind.DATA, 0, line.encode()))

    def take(self, timeout_s=60.0):
        message = self.socket.recv(timeout_s)
        if isinstance(message, str):
            self.told.append(json.loads(message))
            return
        kind, channel = values.MESSAGE_HEAD.unpack_from(message)
        body = message[values.MESSAGE_HEAD.size :]
        if kind == FrameKind.DATA:
            self.text += body
            with contextlib.suppress(ConnectionClosed):  # what it sent before can still be taken
                size = len(body).to_bytes(4, "big")
                self.socket.send(message_of(FrameKind.WINDOW, channel, size))
        elif kind == FrameKind.EXIT:
            self.status = int.from_bytes(body, "big", signed=True)

    def until(self, word):
        while word.encode() not in self.text:
            self.take()
        _, _, self.text = self.text.partition(word.encode())

    def hears(self, word):
        while not any(said["is"] == word for said in self.told):
            self.take()
        return next(said for said in self.told if said["is"] == word)

    def to_the_end(self):
        """Take all that comes; returns the code and the reason with which it was closed."""
        try:
            while True:
                self.take()
        except ConnectionClosed as closed:
            return closed.rcvd.code, closed.rcvd.reason


def task_id():
    with transaction() as session:
        return session.scalar(select(Task.id))


def set_task(**values):
    with transaction() as session:
        task = session.scalars(select(Task)).one()
        for name, value in values.items():
            setattr(task, name, value)
    changes.tell(task.tenant_id, task.request_id)


def records(action):
    with transaction() as session:
        query = select(AuditEvent).where(AuditEvent.action == action)
        found = session.scalars(query.order_by(AuditEvent.id)).all()
        return [row for row in found if row.target_kind in ("tunnel", "task")]


def until(true, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def test_shell_goes_through_the_service_and_is_written_down(running):
    with User(running) as user:
        assert user.hears("attached") == {"is": "attached", "device": "h.0"}
        user.type("echo in$((40 + 2)); exit 7\n")
        assert user.to_the_end()[0] == 1000
        assert user.status == 7
        assert b"in42" in user.text
        assert user.told[-1] == {"is": "ended", "told": "the shell has ended"}
    [made], [ended] = records("made"), until(lambda: records("removed"))
    assert made.target_id == ended.target_id
    about = {"task": task_id(), "kind": "shell", "port": 0, "words": SHELL["words"]}
    assert made.after == about
    assert (ended.user, ended.tenant_id) == ("red.member", "ten_red")
    assert ended.after["sent_bytes"] > 20
    assert ended.after["received_bytes"] > 20
    assert 0 < ended.after["seconds"] < 60
    with transaction() as session:
        [event] = session.scalars(
            select(RequestEvent).where(RequestEvent.type == "task.tunnel_opened")
        )
        assert event.message == "A shell was opened by red.member."


def test_administrators_may_look_in_and_others_may_not(running):
    for who in ("red.tenant_admin", "root"):
        with User(running, who, kind="shell", words=["true"]) as user:
            assert user.to_the_end()[0] == 1000
    for who, status in (("red.other", 403), ("red.viewer", 403), ("blue.tenant_admin", 404)):
        with running.client(who) as client:
            answer = client.post(f"/v1/tasks/{task_id()}/tunnels", json=SHELL)
            assert answer.status_code == status
    # a stranger's try shows nowhere that the task exists; a neighbour's is recorded
    assert [(row.user, row.target_id) for row in records("refused")] == [
        ("red.other", task_id()),
        ("red.viewer", task_id()),
    ]


def test_task_with_secrets_opens_for_its_user_only(running):
    with transaction() as session:
        task = session.scalars(select(Task)).one()
        task.descriptor = {**task.descriptor, "secrets": ["HF_TOKEN"]}
    for who in ("red.tenant_admin", "root"):
        with running.client(who) as client:
            answer = client.post(f"/v1/tasks/{task_id()}/tunnels", json=SHELL)
            assert answer.status_code == 403
            assert "it has HF_TOKEN" in answer.json()["detail"]
    assert [row.user for row in records("refused")] == ["red.tenant_admin", "root"]
    with User(running, kind="shell", words=["true"]) as user:
        assert user.to_the_end()[0] == 1000


def test_ticket_opens_one_tunnel_once_and_soon(running):
    with User(running) as user:
        user.hears("attached")
        with User(running, ticket=user.ticket) as again:
            assert again.to_the_end() == (1008, tunnels.NO_TICKET)
    with User(running, ticket="not a ticket") as forger:
        assert forger.to_the_end() == (1008, tunnels.NO_TICKET)
    task = task_id()
    with running.client() as client:
        late = client.post(f"/v1/tasks/{task}/tunnels", json=SHELL).json()["ticket"]
    with transaction() as session:
        session.execute(text("update tunnels set expires_at = now() where opened_at is null"))
    with User(running, ticket=late) as user:
        assert user.to_the_end() == (1008, tunnels.NO_TICKET)
    assert {row.user for row in records("refused")} == {"red.member", ""}


def test_connection_without_a_ticket_is_closed(running, monkeypatch):
    with connect(running.url.replace("http", "ws") + "/v1/tunnels") as sock:
        sock.send(b"\x00\x00")
        with pytest.raises(ConnectionClosed):
            sock.recv(60)
    monkeypatch.setattr(routes, "TICKET_WITHIN_S", 0.2)
    with connect(running.url.replace("http", "ws") + "/v1/tunnels") as sock:
        with pytest.raises(ConnectionClosed):
            sock.recv(60)
        assert sock.close_code == 1008
    monkeypatch.setattr(routes, "UNKNOWN_MAX", 0)
    with connect(running.url.replace("http", "ws") + "/v1/tunnels") as sock:
        with pytest.raises(ConnectionClosed):
            sock.recv(60)
        assert sock.close_code == 1013


@pytest.mark.parametrize(
    "message",
    ["text", b"", message_of(FrameKind.EXIT), message_of(FrameKind.DATA, 99), b"\x00" * 40_000],
)
def test_user_that_sends_other_than_frames_is_cut_off(running, message):
    with User(running) as user:
        user.hears("attached")
        user.socket.send(message)
        assert user.to_the_end()[0] == 1008


def test_message_beyond_the_limit_ends_the_connection(running):
    with User(running) as user:
        user.hears("attached")
        # Its head alone: the service reads no more of it, and a reset could lose the answer.
        user.socket.socket.sendall(b"\x82\xff" + (2**17).to_bytes(8, "big") + bytes(4))
        assert user.to_the_end()[0] == 1009


def test_tunnels_of_a_task_and_of_a_tenant_are_limited(running, monkeypatch):
    task = task_id()
    for limit, name in (("PER_TASK", "task"), ("PER_TENANT", "tenant")):
        monkeypatch.setattr(tunnels, limit, 1)
        with transaction() as session:
            session.execute(text("delete from tunnels"))
        with running.client() as client:
            assert client.post(f"/v1/tasks/{task}/tunnels", json=SHELL).status_code == 201
            answer = client.post(f"/v1/tasks/{task}/tunnels", json=SHELL)
            assert answer.status_code == 429
            assert f"{name} has 1 open tunnel" in answer.json()["detail"]
        monkeypatch.setattr(tunnels, limit, 10)


GRAPH = {"name": "t", "run": {"graph": f"sha256:{'5' * 64}"}}
ONLY = "the task runs a graph; only a command, job or function can be looked into"


def test_tunnel_of_a_task_that_has_ended_or_runs_a_graph_is_refused(running):
    task = task_id()
    with running.client() as client:
        set_task(state="done")
        answer = client.post(f"/v1/tasks/{task}/tunnels", json=SHELL)
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/conflict-state")
        set_task(state="running", descriptor=GRAPH)
        answer = client.post(f"/v1/tasks/{task}/tunnels", json=SHELL)
        assert (answer.status_code, answer.json()["detail"]) == (409, ONLY)


BAD = [
    {"kind": "root"}, {"kind": "forward"}, {"kind": "shell", "port": 80},
    {"kind": "forward", "port": 80, "words": ["x"]}, {"kind": "forward", "port": 80, "rows": 9},
    {"kind": "forward", "port": 0}, {"kind": "shell", "rows": 0}, {"kind": "shell", "term": "a b"},
    {"kind": "shell", "words": [""]}, {"kind": "shell", "shell": "zsh"}, {},
]  # fmt: skip


def test_tunnel_that_makes_no_sense_is_refused(running, subtests):
    with running.client() as client:
        for body in BAD:
            with subtests.test(body=body):
                answer = client.post(f"/v1/tasks/{task_id()}/tunnels", json=body)
                assert answer.status_code == 422


def test_tunnel_waits_for_a_task_that_does_not_run(running):
    set_task(state="waiting", seat=None)
    with User(running, kind="shell", words=["echo", "late"]) as user:
        assert user.hears("waiting")["told"]
        set_task(state="running", seat="h.0")
        assert user.hears("attached")["device"] == "h.0"
        user.to_the_end()
        assert b"late" in user.text


def test_open_tunnel_tells_when_its_task_pauses_and_when_it_is_back(running):
    with User(running) as user:
        user.hears("attached")
        set_task(state="waiting", seat=None, image_on="h.0")
        assert user.hears("waiting")["told"]
        user.told.clear()
        set_task(state="running", seat="h.0", epoch=2)
        user.hears("attached")
        user.type("echo sa''me; exit\n")
        user.until("same")


def test_tunnel_ends_with_its_task_and_with_its_key(running):
    with User(running) as user:
        user.hears("attached")
        set_task(state="failed")
        assert user.to_the_end()[0] == 1000
        assert user.told[-1]["told"] == "the task is failed"
    set_task(state="running")
    with User(running) as user:
        user.hears("attached")
        with transaction() as session:
            session.execute(
                update(ApiKey)
                .where(ApiKey.user_id == "usr_red.member")
                .values(revoked_at=func.now())
            )
        set_task(step=5)
        user.to_the_end()
        assert "revoked" in user.told[-1]["told"]


def test_device_that_cannot_be_reached_is_said(running, monkeypatch):
    monkeypatch.setattr(tunnel_relay, "REFUSALS_MAX", 2)
    with transaction() as session:
        session.execute(update(Device).where(Device.id == "h.0").values(secret="cd" * 32))
    with User(running) as user:
        user.to_the_end()
        assert "h.0 opens no tunnel" in user.told[-1]["told"]


def test_killed_shell_and_lost_user_end_the_tunnel(running, host):
    with User(running) as user:
        user.hears("attached")
        host.ends[-1].send_signal(signal.SIGKILL)
        user.to_the_end()
        assert "the task's side was closed" in user.told[-1]["told"]
    user = User(running)
    user.hears("attached")
    user.socket.socket.shutdown(socket.SHUT_RDWR)  # as if it were killed: nothing is said
    until(lambda: host.ends[-1].poll() is not None)

    def is_over():
        with transaction() as session:
            return not session.scalar(select(func.count()).where(Tunnel.ended_at.is_(None)))

    until(is_over)
    user.stack.close()


def test_user_that_reads_nothing_holds_up_only_the_own_tunnel(running):
    with User(running, kind="shell", words=["cat", "/dev/zero"]) as idle:
        idle.hears("attached")
        with User(running, kind="shell", words=["seq", "20000"]) as user:
            user.to_the_end()
            assert user.text.decode().split()[-1] == "20000"
        idle.socket.close_timeout = 0.1  # its goodbye comes behind all that it has not read


def test_task_says_why_its_reader_cannot_look_into_it(running):
    def said(who="red.member"):
        with running.client(who) as client:
            one = client.get(f"/v1/tasks/{task_id()}").json()
            of_request = client.get(f"/v1/requests/{one['request_id']}").json()["tasks"][0]
        assert of_request["no_tunnel"] == one["no_tunnel"]
        return one["no_tunnel"]

    assert said() == said("root") == ""
    assert said("red.other") == "only its owner or an administrator may look into it"
    with transaction() as session:
        task = session.scalars(select(Task)).one()
        task.descriptor = {**task.descriptor, "secrets": ["HF_TOKEN"]}
    assert said() == ""
    assert "it has HF_TOKEN" in said("red.tenant_admin")
    set_task(state="waiting", seat=None)
    assert said() == "", "a shell waits until the task runs"
    set_task(state="failed")
    assert said() == "the task is already failed; its processes are gone"
    set_task(state="running", descriptor=GRAPH)
    assert said() == ONLY
    for devices, has in (({"kind": "cuda"}, "a cuda device"), ({"fraction": 0.5}, "a fraction of")):
        set_task(descriptor={"name": "t", "run": {"job": "m:J"}, "devices": devices})
        assert f"the task is a job with {has}" in said()


def test_tunnel_of_a_killed_api_process_is_ended_by_control(running):
    with User(running) as user:
        user.hears("attached")
        with transaction() as session:
            tunnels.end_lost(session)
        assert not records("removed"), "its API process lives"
        with running.client() as client:  # a ticket that nobody uses
            unused = client.post(f"/v1/tasks/{task_id()}/tunnels", json=SHELL).json()["id"]
        with transaction() as session:
            session.execute(text("update tunnels set seen_at = now() - interval '61 seconds'"))
            session.execute(text("update tunnels set expires_at = now()"))
            tunnels.end_lost(session)
            tunnels.end_lost(session)
        [ended] = records("removed")
        assert ended.target_id != unused
        assert ended.after["why"] == "the API process that carried it was lost"
        with transaction() as session:
            assert not session.scalar(select(func.count()).where(Tunnel.ended_at.is_(None)))
