"""Hints through a real worker and a real Redis."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from itertools import takewhile

import psutil
import pytest
import redis
from kombu.exceptions import OperationalError

from app.messaging import broker
from tests.refusing_redis import BUSY, EACH, LOADING, NOAUTH, READONLY, RefusingRedis

APP = """
import os
from app.messaging import broker
from workers.process import celery_inbox
from workers.process.celery_inbox import hears, hears_all

celery_inbox.CONNECT_AGAIN_S = 0.1  # what is tested is that it tries again, not when
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


OWN_TO_EACH = ("id", "root_id", "correlation_id", "delivery_tag")
SAID = {"one\n", "nonsense\n"}


@pytest.fixture
def worker(servers, tmp_path):
    with _running(servers.redis_url, tmp_path) as process:
        yield process


@contextlib.contextmanager
def _running(redis_url, tmp_path):
    (tmp_path / "heard_app.py").write_text(APP)
    words = ["-A", "heard_app", "worker", "--pool", "threads", "-c", "1", "-Q", "hints"]
    words += ["-l", "WARNING"]
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, "-m", "celery", *words],
        cwd=tmp_path,
        env={**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_received_message_is_not_stored_and_not_answered(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    for word in ("one", "nonsense", "two"):
        broker.send(sender, "say", "hints", word)

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
    broker.send(sender, "say", "hints")
    broker.send(sender, "say", "hints", "two")
    told = [*takewhile(lambda line: line != "two\n", worker.stdout)]
    assert "nothing\n" in told


def test_reader_says_when_all_that_waited_was_heard(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    broker.send_all(sender, "say", [("hints", str(n)) for n in range(50)])
    broker.send_all(sender, "say", [("hints", "two")])
    told = [*takewhile(lambda line: line != "two\n", worker.stdout)]
    assert [line for line in told if line.strip().isdigit()] == [f"{n}\n" for n in range(50)]
    broker.send(sender, "say", "hints", "three")
    assert "all\n" in takewhile(lambda line: line != "three\n", worker.stdout)


def test_messages_that_are_published_together_are_heard(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    assert broker.send_all(sender, "say", [("hints", "one")]) == {}
    both = [("elsewhere", "lost"), ("hints", "two")]
    assert broker.send_all(sender, "say", both) == {}
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


def test_worker_outlives_every_refusal_of_redis_and_hears_again(servers, tmp_path):
    sender = broker.make_celery("sender", servers.redis_url)
    with RefusingRedis(servers.redis_url) as proxy, _running(proxy.url, tmp_path) as worker:
        _hears(worker, sender, "begun")
        begun = _connections(worker)
        for refusal in (each for each in EACH if "BRPOP" not in each.spared):
            with proxy.refusing(refusal):
                proxy.wait_refused(2)
            _hears(worker, sender, refusal.name)
        assert _connections(worker) <= begun, "each new try has closed the connection before it"
        with proxy.refusing(READONLY):
            proxy.wait_refused(2)
            worker.terminate()
            told = worker.communicate(timeout=90)[1]
    assert worker.returncode == 0, told
    assert "Redis is away or refuses" in told


def _connections(worker):
    return sum(one.status == "ESTABLISHED" for one in psutil.Process(worker.pid).net_connections())


def _hears(worker, sender, word):
    broker.send(sender, "say", "hints", word)
    assert f"{word}\n" in worker.stdout


@pytest.mark.parametrize("refusal", EACH, ids=lambda refusal: refusal.reply[:14])
def test_probe_says_why_redis_takes_no_message(servers, refusal):
    with RefusingRedis(servers.redis_url) as proxy:
        assert broker.refusal(proxy.url, {}) == ""
        with proxy.refusing(refusal):
            told = broker.refusal(proxy.url, {})
    assert told == f"refuses messages: {refusal.reply}"


def test_probe_of_a_redis_that_is_away_says_so(servers):
    with RefusingRedis(servers.redis_url) as proxy:
        pass
    assert broker.refusal(proxy.url, {}) == "no answer: ConnectionError"
    told = broker.refusal("redis://nowhere.invalid:6379/0", {})
    assert told == "no answer: the name of its host cannot be resolved"


@pytest.mark.parametrize("refusal", [LOADING, NOAUTH, BUSY, READONLY], ids=lambda one: one.name)
def test_sender_does_not_wait_for_a_redis_that_refuses(servers, refusal):
    """A round of an island would wait with it, and lose its lead."""
    with RefusingRedis(servers.redis_url) as proxy:
        sender = broker.make_celery("sender", proxy.url)
        broker.send(sender, "say", "waits", "word")
        with proxy.refusing(refusal):
            for _ in range(2):
                sending = threading.Thread(target=_sends, args=(sender,), daemon=True)
                sending.start()
                sending.join(60.0)
                assert not sending.is_alive()
    with redis.Redis.from_url(servers.redis_url) as client:
        client.delete("waits")


def _sends(sender):
    with contextlib.suppress(OperationalError, redis.RedisError):
        broker.send_all(sender, "say", [("waits", "word")])
