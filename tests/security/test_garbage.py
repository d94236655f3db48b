"""A real worker over a real Redis discards any garbage in its queue."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import threading
import zlib
from itertools import takewhile

import pytest
import redis

from app.messaging import broker

pytestmark = pytest.mark.security

APP = """
import os
from app.messaging import broker
from workers.process.celery_inbox import hears

celery = broker.make_celery("heard", os.environ["REDIS_URL"])

@celery.task(name="told")
def told(*words):
    os.write(1, b"told\\n")

@hears(celery, "say")
def say(word=""):
    os.write(1, f"said {word[:9]}\\n".encode())
"""

QUEUE = "spoilt"


def as_sent(**changed):
    """Return a message as it is stored in Redis; `changed` replaces parts, and None removes one."""
    text = changed.pop("text", b"bad")
    message = {
        "body": base64.b64encode(text).decode(),
        "content-type": broker.CONTENT_TYPE,
        "content-encoding": "utf-8",
        "headers": {"task": "say", "id": "1", "expires": None, **changed.pop("headers", {})},
        "properties": {
            "delivery_tag": "t",
            "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0,
            **changed.pop("properties", {}),
        },
    }
    message |= changed
    return json.dumps({key: value for key, value in message.items() if value is not None}).encode()


GARBAGE = {
    "no JSON": b"garbage",
    "nothing": b"",
    "a list": b"[1]",
    "an object": b"{}",
    "a number": b"1" * 10_000,
    "no text": b"\xff\xfe\x00",
    "UTF-16": as_sent().decode().encode("utf-16"),
    "deep": b"[" * 100_000,
    "wide": b"[" + b"[]," * 1_000_000 + b"[]]",
    "huge": b'"' + b"x" * 40_000_000 + b'"',
    "no body": as_sent(body=None),
    "a body that is no base64": as_sent(body="%%%"),
    "a body that is no text": as_sent(text=b"\xff\xff"),
    "a body that is an object": as_sent(body={}),
    "a body that is a bomb": as_sent(
        text=zlib.compress(b"x" * 10_000_000), headers={"compression": "application/x-gzip"}
    ),
    "pickle": as_sent(
        text=pickle.dumps(print),
        **{"content-type": "application/x-python-serialize", "content-encoding": "binary"},
    ),
    "JSON for Celery": as_sent(text=b"[[1], {}, {}]", **{"content-type": "application/json"}),
    "data": as_sent(**{"content-type": "application/data", "content-encoding": "binary"}),
    "another encoding": as_sent(**{"content-encoding": "idna"}),
    "another task of Celery's": as_sent(headers={"task": "celery.backend_cleanup"}),
    "a task that is no hint": as_sent(headers={"task": "told"}),
    "an unknown task": as_sent(headers={"task": "x" * 100_000}),
    "a task that is a list": as_sent(headers={"task": ["say"]}),
    "no task": as_sent(headers={"task": None}),
    "headers that are a list": as_sent() and json.dumps({"headers": [], "body": ""}).encode(),
    "large headers": as_sent(headers={"x": "y" * 100_000}),
    "properties that are none": json.dumps({**json.loads(as_sent()), "properties": 1}).encode(),
    "no tag": as_sent(properties={"delivery_tag": None}),
    "delivery info that is none": as_sent(properties={"delivery_info": 1}),
    "another body encoding": as_sent(properties={"body_encoding": "rot13"}),
}


@pytest.fixture
def worker(servers, tmp_path):
    (tmp_path / "spoilt_app.py").write_text(APP)
    words = ["-A", "spoilt_app", "worker", "--pool", "threads", "-c", "1", "-Q", QUEUE]
    words += ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "WARNING"]
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, "-m", "celery", *words],
        cwd=tmp_path,
        env={**os.environ, "REDIS_URL": servers.redis_url, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = threading.Timer(300.0, process.kill)
        deadline.start()
        yield process
        deadline.cancel()
        process.kill()


def test_worker_survives_whatever_lies_in_its_queue(servers, worker):
    with redis.Redis.from_url(servers.redis_url) as client:
        for item in GARBAGE.values():
            client.lpush(QUEUE, item)
            client.lpush(f"{QUEUE}\x06\x163", item)
        sender = broker.make_celery("sender", servers.redis_url)
        broker.send(sender, "say", QUEUE, "first")
        printed = takewhile(lambda line: line != "said first\n", worker.stdout)
        assert not [line for line in printed if line.startswith(("said", "told"))]

        client.delete(QUEUE)
        client.set(QUEUE, "no list")
        client.set(f"{QUEUE}\x06\x169", "no list")
        while client.exists(QUEUE):
            assert worker.poll() is None
        broker.send(sender, "say", QUEUE, "second")
        assert worker.stdout.readline() == "said second\n"
    worker.terminate()
    told = worker.communicate(timeout=120)[1]
    assert worker.returncode == 0, told
    assert "dropped an invalid message" in told
    assert len(told) < 10_000, "what is said of it is bounded"


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_before_celery_sees_it(name, monkeypatch):
    monkeypatch.setattr(broker, "HEARD", {"say": print})
    with pytest.raises(broker.NotAMessage) as refused:
        broker.checked([b"q", GARBAGE[name]])
    assert len(str(refused.value)) < 500


def test_message_of_ours_is_let_through(monkeypatch):
    monkeypatch.setattr(broker, "HEARD", {"say": print})
    reply = [b"q", as_sent(text=b"x" * 10_000_000)]
    assert broker.checked(reply) == (b"q", reply[1])
    assert broker.checked(None) is None
