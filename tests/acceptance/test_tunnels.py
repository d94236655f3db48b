"""Looking into a running command with the real command-line tool in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.acceptance

PATIENCE_S = 300.0


def _own_terminal():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where pytest runs in the background


class Terminal:
    """A program in a terminal of its own, as a user has it."""

    def __init__(self, system, words, tenant="alpha"):
        env = {**os.environ, "ROUNDHOUSE_URL": system.url, "TERM": "xterm"}
        env["ROUNDHOUSE_KEY"] = system.keys[tenant]["member"]
        self.master, slave = pty.openpty()
        self.resize(40, 160)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.cli.main", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            preexec_fn=_own_terminal,
        )
        os.close(slave)
        self.text = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self.master, text.encode())

    def until(self, word, within_s=PATIENCE_S):
        """Read until the terminal shows the word; return what stood before it."""
        until_s = time.monotonic() + within_s
        while word not in self.text:
            left_s = until_s - time.monotonic()
            ready = select.select([self.master], [], [], max(0.0, left_s))[0]
            assert ready, f"{word!r} is not in {self.text!r}"
            try:
                self.text += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError as error:
                raise AssertionError(f"{word!r} is not in {self.text!r}") from error
        before, _, self.text = self.text.partition(word)
        return before

    def ended(self):
        return self.process.wait(PATIENCE_S)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@contextmanager
def terminal(system, *words, **more):
    made = Terminal(system, words, **more)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def running(system):
    """The id of a task that serves its working folder on port 8123."""
    client = system.client("alpha")
    run = {"command": ["python", "-u", "-m", "http.server", "--bind", "127.0.0.1", "8123"]}
    id = client.submit({"name": "served", "tasks": [{"name": "t", "run": run}]})["id"]
    task_id = client.request(id)["tasks"][0]["id"]
    assert system.until(lambda: any("Serving" in line for line in client.log_text(task_id)))
    yield task_id
    client.post(f"/v1/requests/{id}/cancel")
    client.wait(id)


def test_shell_in_a_real_terminal_and_a_forwarded_port(system, running):
    with terminal(system, "shell", running) as shell:
        shell.until("$ ")
        shell.type("stty size; echo from inside > note.txt; echo rea''dy\r")
        shell.until("40 160")
        shell.until("ready")
        shell.resize(50, 132)
        shell.process.send_signal(signal.SIGWINCH)
        shell.type("bash -c \"echo be''gins; exec sleep 600\"\r")
        shell.until("begins")  # by the program itself, so it has the terminal
        shell.type("\x03")
        shell.until("$ ")
        shell.type("stty size; exit 9\r")
        shell.until("50 132")
        assert shell.ended() == 9
    with terminal(system, "forward", running, "8123", "--local", "0") as forward:
        forward.until("127.0.0.1:")
        port = forward.until(" is port 8123 of the task")
        address = f"http://127.0.0.1:{port}/note.txt"
        for _ in range(3):
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
                assert answer.read() == b"from inside\n"
        forward.type("\x03")
        assert forward.ended() == 130
    client = system.client("alpha")
    request_id = client.get(f"/v1/tasks/{running}")["request_id"]
    events = [event["message"] for event in client.items(f"/v1/requests/{request_id}/events")]
    assert any(told.startswith("A shell was opened by ") for told in events)


def test_ctrl_bracket_leaves_the_shell_and_a_strangers_task_is_not_found(system, running):
    with terminal(system, "shell", running, "--", "cat") as shell:
        shell.type("hello\r")
        shell.until("hello")
        shell.until("hello")
        shell.type("\x1d")
        assert shell.ended() == 0
    with terminal(system, "shell", running, tenant="beta") as shell:
        assert shell.ended() == 5
