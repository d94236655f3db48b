"""Hints through a real worker and a real Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import takewhile

import pytest
import redis

from app.messaging import broker

APP = """
import os
from app.messaging import broker
from workers.process.celery_inbox import hears, hears_all

celery = broker.make_celery("heard", os.environ["REDIS_URL"])

@hears(celery, "say")
def say(word="nothing"):
    os.write(1, f"{word}\\n".encode())
    if word == "nonsense":
        raise ValueError(word)

@hears_all
def say_that_all_is_heard():
    os.write(1, b"all\\n")
    raise ValueError("all")
"""


LONG_S = 3600.0  # until a message expires: a slow machine starts a worker in minutes
OWN_TO_EACH = ("id", "root_id", "correlation_id", "delivery_tag", "expires")
SAID = {"late\n", "one\n", "nonsense\n"}


@pytest.fixture
def worker(servers, tmp_path):
    (tmp_path / "heard_app.py").write_text(APP)
    words = ["-A", "heard_app", "worker", "--pool", "threads", "-c", "1", "-Q", "hints"]
    words += ["-l", "WARNING"]
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, "-m", "celery", *words],
        cwd=tmp_path,
        env={**os.environ, "REDIS_URL": servers.redis_url, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_received_message_is_not_stored_and_not_answered(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    for word, expires_s in (("late", -1.0), ("one", LONG_S), ("nonsense", LONG_S), ("two", LONG_S)):
        broker.send(sender, "say", "hints", word, expires_s=expires_s)

    told = takewhile(lambda line: line != "two\n", worker.stdout)
    assert [line for line in told if line in SAID] == ["one\n", "nonsense\n"]
    with redis.Redis.from_url(servers.redis_url) as client:
        assert client.llen("hints") == 0
        assert not client.exists("unacked", "unacked_index")
    worker.terminate()
    told = worker.communicate(timeout=90)[1]
    assert worker.returncode == 0, told
    assert "say was not heard" in told


def test_a_nudge_without_a_text_is_heard(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    broker.send(sender, "say", "hints", expires_s=LONG_S)
    broker.send(sender, "say", "hints", "two", expires_s=LONG_S)
    told = [*takewhile(lambda line: line != "two\n", worker.stdout)]
    assert "nothing\n" in told


def test_reader_says_when_all_that_waited_was_heard(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    broker.send_all(sender, "say", [("hints", str(n)) for n in range(50)], expires_s=LONG_S)
    broker.send_all(sender, "say", [("hints", "two")], expires_s=LONG_S)
    told = [*takewhile(lambda line: line != "two\n", worker.stdout)]
    assert [line for line in told if line.strip().isdigit()] == [f"{n}\n" for n in range(50)]
    broker.send(sender, "say", "hints", "three", expires_s=LONG_S)
    assert "all\n" in takewhile(lambda line: line != "three\n", worker.stdout)


def test_messages_that_are_published_together_are_heard(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    assert broker.send_all(sender, "say", [("hints", "one")], expires_s=LONG_S) == {}
    assert broker.send_all(sender, "say", [("hints", "late")], expires_s=-1.0) == {}
    both = [("elsewhere", "lost"), ("hints", "two")]
    assert broker.send_all(sender, "say", both, expires_s=LONG_S) == {}
    told = takewhile(lambda line: line != "two\n", worker.stdout)
    assert [line for line in told if line in SAID] == ["one\n"]


def test_messages_that_are_published_together_have_the_form_of_celery(servers):
    sender = broker.make_celery("sender", servers.redis_url)
    broker.send(sender, "say", "form", "word")
    broker.send_all(sender, "say", [("form", "word")])
    with redis.Redis.from_url(servers.redis_url) as client:
        ours, theirs = (json.loads(item) for item in client.lrange("form", 0, -1))
    for part in ("headers", "properties"):
        theirs[part].pop("reply_to", None)  # where an answer would go
        assert ours[part].keys() == theirs[part].keys()
        for own in OWN_TO_EACH:
            ours[part].pop(own, None), theirs[part].pop(own, None)
    assert ours == theirs


def test_key_of_another_type_refuses_only_its_own_message(servers):
    sender = broker.make_celery("sender", servers.redis_url)
    with redis.Redis.from_url(servers.redis_url) as client:
        client.set("no.queue", "x")
        refused = broker.send_all(sender, "say", [("no.queue", "a"), ("queue", "b")])
        assert refused.keys() == {"no.queue"}
        assert refused["no.queue"].startswith("WRONGTYPE")
        assert client.llen("queue") == 1
