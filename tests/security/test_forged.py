"""An intruder who can read and write all of Redis cannot run, report or end anything.

The intruder can forge, change, redirect and repeat messages, and fill queues with garbage.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from dataclasses import replace

import psycopg
import pytest
import redis

from app.core.model.protocol.messages import (
    Alive,
    Answer,
    Cancel,
    Failed,
    Finished,
    LogLines,
    encode,
)
from app.local.embedded_servers import temporary_home
from app.messaging import broker
from app.messaging.message_keys import MessageKeys
from app.messaging.signed_messages import sealed_heartbeat, sealed_news
from app.storage.signing import HEARTBEAT, BadSignature, Signer
from tests.acceptance.conftest import STEADY, System, running_fast
from tests.launches import launch_of
from tests.security.test_garbage import GARBAGE

pytestmark = [pytest.mark.acceptance, pytest.mark.security]

STAYS = {"command": ["sh", "-c", "echo began; sleep 300"]}


class Intruder:
    """Reads all that is sent over Redis, and writes anything there."""

    def __init__(self, url, folder):
        self.redis = redis.Redis.from_url(url, socket_timeout=60.0)
        self.celery = broker.make_celery("intruder", url)
        self.keys = MessageKeys(Signer.at(folder / "key"))
        self.seen: list[tuple[str, bytes]] = []
        self._monitor = redis.Redis.from_url(url).monitor()
        self._monitor.__enter__()  # from here on it misses nothing
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def close(self):
        """Stop listening."""
        for client in self.redis.client_list():
            if client["cmd"] == "monitor":
                self.redis.client_kill_filter(_id=client["id"])
        self._listener.join()

    def _listen(self):
        with contextlib.suppress(redis.ConnectionError), contextlib.ExitStack() as stack:
            stack.push(self._monitor)
            for each in self._monitor.listen():
                command = each["command"].split(" ", 2)
                if command[0] == "LPUSH":
                    self.seen.append((command[1], command[2].encode("latin-1")))

    def news(self, device, *messages, keys=None, instead=None):
        """Send news to a device.

        `instead` is a key to name in the text instead of the sender's key.
        """
        text = sealed_news(keys or self.keys, device, [encode(each) for each in messages])
        self._send(broker.DEVICE_NEWS, broker.device_queue(device), text, instead)

    def heartbeat(self, alive, *, instead=None):
        text = sealed_heartbeat(self.keys, alive)
        self._send(broker.ISLAND_ALIVE, broker.island_queue("local"), text, instead)

    def _send(self, name, queue, text, instead):
        if instead is not None:
            text = instead + text[len(self.keys.public) :]
        broker.send(self.celery, name, queue, text)

    def repeat(self, *, elsewhere):
        """Send all recorded messages again.

        `elsewhere` maps queues to the queues to use instead.
        """
        for queue, item in [*self.seen]:
            self.redis.lpush(elsewhere.get(queue, queue), item)


@pytest.fixture(scope="module")
def system():
    with (
        temporary_home() as home,
        running_fast(home, devices=2, env=STEADY) as handle,
        contextlib.closing(System(handle)) as system,
    ):
        yield system


@pytest.fixture
def intruder(system, tmp_path):
    intruder = Intruder(system.handle.facts["redis_url"], tmp_path)
    yield intruder
    intruder.close()


@pytest.fixture
def victim(system, intruder):
    """A running task of beta: (its request, its id, the device where it runs)."""
    beta = system.client("beta")
    request = beta.submit({"name": "victim", "tasks": [{"name": "t", "run": STAYS}]})
    task = request["tasks"][0]["id"]
    beta.wait_until(
        request["id"], lambda found: found["tasks"][0]["state"] == "running", timeout_s=180
    )
    assert system.until(lambda: beta.log_text(task) == ["began"])
    device = beta.get(f"/v1/tasks/{task}/placements")["items"][0]["device_id"]
    yield request["id"], task, device
    if beta.request(request["id"])["state"] == "running":
        beta.post(f"/v1/requests/{request['id']}/cancel")
    beta.wait(request["id"], timeout_s=180)


def believed(system, device):
    """Return the device's key, its process and when it was heard, from the database."""
    url = system.handle.facts["database_url"].replace("postgresql+psycopg", "postgresql", 1)
    query = "select facts->>'key', incarnation, heard_us from devices where id = %s"
    with psycopg.connect(url) as connection:
        return connection.execute(query, (device,)).fetchone()


def island_key(system):
    return system.client("beta").get("/v1/islands/local")["key"]


def beats(system, device):
    """Wait until the device was heard twice more, so that its queues have been read."""
    for _ in range(2):
        before = believed(system, device)[2]
        assert system.until(lambda before=before: believed(system, device)[2] > before)


def assert_nothing_came_of_it(system, victim, pids):
    request, task, device = victim
    beta = system.client("beta")
    beats(system, device)
    assert system.handle.pids() == pids, "nothing died"
    assert beta.request(request)["tasks"][0]["state"] == "running"
    assert beta.log_text(task) == ["began"], "nothing ran, nothing was told"
    placements = beta.get(f"/v1/tasks/{task}/placements")["items"]
    assert [each["epoch"] for each in placements] == [1]
    devices = system.client("platform", "platform_admin").items("/v1/devices")
    assert [(each["id"], each["up"]) for each in devices] == [("local.0", True), ("local.1", True)]


def forged_launch(task, incarnation, **more):
    """Return a Launch as an old intruder used it: any task, with every tenant's store at /code."""
    given = {
        "run": {"command": ["sh", "-c", "echo FORGED; ls -R /code"]}, "bundle": "../../../store",
        "budget_us": 10**9, "incarnation": incarnation, "surely_until_us": 2**60,
    }  # fmt: skip
    return launch_of(task, seq=9, **{**given, **more})


def test_forged_orders_and_answers_are_not_obeyed(system, intruder, victim):
    _, task, device = victim
    pids, (_, incarnation, heard_us) = system.handle.pids(), believed(system, device)
    orders = [
        forged_launch(task, incarnation),
        forged_launch("tsk_" + "0" * 32, incarnation, bundle=""),
        Cancel(task=task, epoch=1, seq=9),
        Answer(
            device=device, incarnation=incarnation, sent_us=heard_us + 10**9, lease_us=10**9,
            heard={}, logged={}, keep=[], drop=[[task, 1]], peers=[intruder.keys.public],
        ),
    ]  # fmt: skip
    for order in orders:
        intruder.news(device, order)
        intruder.news(device, order, instead=island_key(system))
        intruder.news(device, order, instead="")
    assert_nothing_came_of_it(system, victim, pids)


def test_forged_heartbeats_are_not_believed(system, intruder, victim):
    _, task, device = victim
    pids, (key, incarnation, heard_us) = system.handle.pids(), believed(system, device)
    facts = {"host": "local", "island": "local", "kind": "cpu", "threads": 1, "memory_bytes": 2**30}
    end = {"task": task, "epoch": 1, "seq": 2, "step": 1, "held_us": 1}
    alive = Alive(
        device=device, incarnation=incarnation, sent_us=heard_us + 10**9,
        facts={**facts, "key": key}, residents=[],
        events=[
            Finished(**end, result={"forged": True}, outputs={}),
            Failed(**{**end, "seq": 3}, cause="exit", message="forged"),
        ],
        logs=[LogLines(task=task, epoch=1, first=1, lines=[["stdout", "forged"]])],
    )  # fmt: skip
    evil = replace(alive, device="evil.0", events=[], logs=[], facts={**facts, "host": "evil"})
    for beat in (alive, evil, replace(alive, incarnation="9", events=[], logs=[])):
        intruder.heartbeat(beat)
        intruder.heartbeat(beat, instead=key)
        theirs = {**beat.facts, "key": intruder.keys.public}
        intruder.heartbeat(replace(beat, facts=theirs))
    assert_nothing_came_of_it(system, victim, pids)


def test_devices_and_island_prove_messages_by_the_key_that_they_share(system, intruder, victim):
    """A message shows the exchange key of its sender, unless it is signed.

    So are the first messages of a process, and those that the intruder sent in another's name.
    """
    device, key = victim[2], believed(system, victim[2])[0]
    senders = {"island.local": key, "device.local": island_key(system)}

    def refusals():
        """Change the newest message of each queue; return why each is refused."""
        texts = {queue: json.loads(item)["body"] for queue, item in [*intruder.seen]}
        told = []
        for queue, sender in senders.items():
            public, proof, _ = base64.b64decode(texts[queue]).decode().split("\n", 2)
            assert public == sender
            with pytest.raises(BadSignature) as refused:
                intruder.keys.opened(f"{public}\n{proof}\n{{}}", HEARTBEAT, known=(public,))
            told.append(str(refused.value))
        return told

    beats(system, device)
    assert system.until(lambda: all(told.startswith("its code is not") for told in refusals()))


def test_repeated_or_redirected_message_changes_nothing(system, intruder, victim):
    device, pids = victim[2], system.handle.pids()
    other = "local.1" if device == "local.0" else "local.0"
    here, there = broker.device_queue("local"), broker.device_queue(other)
    assert system.until(lambda: {queue for queue, _ in [*intruder.seen]} >= {here, "island.local"})
    for _ in range(3):
        intruder.repeat(elsewhere={})
    intruder.repeat(elsewhere={here: there, there: here, "island.local": here})
    intruder.repeat(elsewhere={here: "island.local", there: "control", "island.local": "control"})
    assert_nothing_came_of_it(system, victim, pids)


def test_garbage_ends_no_worker(system, intruder, victim):
    pids = system.handle.pids()
    intruder.close()  # else it would read all of the garbage
    for queue in ("control", "island.local", "device.local", "device.local.0", "device.local.1"):
        for item in GARBAGE.values():
            intruder.redis.lpush(queue, item)
        intruder.redis.lpush(queue, *[b"garbage"] * 1000)
    assert_nothing_came_of_it(system, victim, pids)
    logs = "".join(file.read_text() for file in (system.handle.wanted.home / "logs").iterdir())
    assert "dropped an invalid message" in logs
    assert len(re.findall("dropped an invalid message", logs)) < 20


def test_messages_to_one_process_mean_nothing_to_the_next(system, intruder, victim):
    """Repeat a process's orders and reports when its successor is there."""
    request, task, device = victim
    old = [*intruder.seen]
    name = f"device.{device.rpartition('.')[2]}"
    system.kill(name)
    beta = system.client("beta")
    assert system.until(lambda: len(beta.get(f"/v1/tasks/{task}/placements")["items"]) == 2)
    assert system.until(lambda: beta.log_text(task) == ["began", "began"])
    pids = system.handle.pids()
    for queue, item in old * 2:
        intruder.redis.lpush(queue, item)
    beats(system, "local.0")
    beats(system, "local.1")
    assert system.handle.pids() == pids
    assert beta.log_text(task) == ["began", "began"]
    assert beta.request(request)["tasks"][0]["state"] == "running"
    beta.post(f"/v1/requests/{request}/cancel")
    assert beta.wait(request, timeout_s=180)["state"] == "cancelled"
