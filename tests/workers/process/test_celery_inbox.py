"""Hints through a real worker and a real Redis."""

from __future__ import annotations

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
from workers.process.celery_inbox import hears

celery = broker.make_celery("heard", os.environ["REDIS_URL"])

@hears(celery, "say")
def say(word="nothing"):
    os.write(1, f"{word}\\n".encode())
    if word == "nonsense":
        raise ValueError(word)
"""


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


def test_what_is_heard_is_neither_kept_nor_waited_for(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    for word, expires_s in (("late", -1.0), ("one", 30.0), ("nonsense", 30.0), ("two", 30.0)):
        broker.send(sender, "say", "hints", word, expires_s=expires_s)

    told = takewhile(lambda line: line != "two\n", worker.stdout)
    assert [line for line in told if line in SAID] == ["one\n", "nonsense\n"]
    with redis.Redis.from_url(servers.redis_url) as client:
        assert client.llen("hints") == 0
        assert not client.exists("unacked", "unacked_index")
    worker.terminate()
    told = worker.communicate(timeout=30)[1]
    assert worker.returncode == 0, told
    assert "say was not heard" in told


def test_a_nudge_without_a_text_is_heard(servers, worker):
    sender = broker.make_celery("sender", servers.redis_url)
    broker.send(sender, "say", "hints")
    broker.send(sender, "say", "hints", "two")
    told = [*takewhile(lambda line: line != "two\n", worker.stdout)]
    assert "nothing\n" in told
