"""Real processes, started, watched and stopped; no Postgres, no Roundhouse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from app.local import process_supervisor
from app.local.process_supervisor import Child, NotReady, ProcessSupervisor, Spec

pytestmark = pytest.mark.slow


def sleeper(name="sleeper", **more):
    return Spec(name=name, command=("/bin/sleep", "300"), env={}, **more)


def script(name, text, **more):
    command = (sys.executable, "-c", textwrap.dedent(text))
    return Spec(name=name, command=command, env={}, **more)


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(what, timeout_s=60.0):
    until_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until_s, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def supervisor(tmp_path):
    supervisor = ProcessSupervisor(tmp_path / "logs")
    yield supervisor
    supervisor.stop()


@pytest.fixture
def watched(supervisor):
    """The supervisor, with somebody watching; start children before."""
    watcher = threading.Thread(target=supervisor.watch)
    yield lambda: watcher.start()
    supervisor.ask_to_stop()
    watcher.join()


def test_a_killed_child_is_started_again(supervisor, watched):
    supervisor.start(sleeper())
    watched()
    first = supervisor.pids()["sleeper"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: supervisor.pids()["sleeper"] != first)
    assert runs(supervisor.pids()["sleeper"])


def test_child_that_hangs_is_killed_and_started_again(supervisor, watched, monkeypatch):
    monkeypatch.setattr(process_supervisor, "CHECK_S", 0.1)
    monkeypatch.setattr(process_supervisor, "HUNG_S", 0.3)
    first: list[int] = []
    supervisor.start(sleeper(answers=lambda: supervisor.pids()["sleeper"] not in first))
    first.append(supervisor.pids()["sleeper"])
    watched()
    wait_until(lambda: not runs(first[0]))
    wait_until(lambda: supervisor.pids()["sleeper"] != first[0])


def test_child_that_dies_again_and_again_is_started_ever_less_often(tmp_path):
    child, now_s, waits_s = Child(script("moody", ""), tmp_path / "moody.log"), 0.0, []
    child.start(now_s)
    for _ in range(4):
        child.process.wait()
        assert child.look(now_s) == "ended with status 0 after 0.0 s"
        waits_s.append(child.again_s - now_s)
        assert child.look(child.again_s - 0.01) == ""
        now_s = child.again_s
        assert child.look(now_s) == "starts again"
    child.process.wait()
    assert waits_s == pytest.approx([0.2, 0.4, 0.8, 1.6])


def test_child_that_never_gets_ready_is_named_with_the_end_of_its_log(supervisor):
    with pytest.raises(NotReady, match=r"(?s)broken ended 5 times; .*broken\.log.*no such luck"):
        supervisor.start(script("broken", "raise SystemExit('no such luck')", ready=lambda: False))


def test_stop_ends_children_in_reverse_order_and_waits(supervisor, tmp_path):
    order = tmp_path / "order"
    polite = f"""
        import signal, sys, time
        def leave(*_):
            time.sleep(0.2)
            open({str(order)!r}, "a").write(sys.argv[1])
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
        open({str(tmp_path)!r} + "/" + sys.argv[1], "w")
        signal.pause()
    """
    for name in "abc":
        command = (sys.executable, "-c", textwrap.dedent(polite), name)
        ready = (tmp_path / name).exists
        supervisor.start(Spec(name=name, command=command, env={}, ready=ready))
    supervisor.stop()
    assert order.read_text() == "cba"


def test_child_that_ignores_the_stop_is_killed(supervisor, tmp_path):
    stubborn = f"""
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(tmp_path / "ready")!r}, "w")
        while True: signal.pause()
    """
    supervisor.start(script("stubborn", stubborn, grace_s=0.3, ready=(tmp_path / "ready").exists))
    pid = supervisor.pids()["stubborn"]
    supervisor.stop()
    assert not runs(pid)


def test_children_die_with_a_supervisor_that_is_killed(tmp_path):
    program = f"""
        import pathlib, sys
        from app.local.process_supervisor import ProcessSupervisor, Spec
        supervisor = ProcessSupervisor(pathlib.Path({str(tmp_path)!r}))
        supervisor.start(Spec(name="sleeper", command=("/bin/sleep", "300"), env={{}}))
        print(supervisor.pids()["sleeper"], flush=True)
        supervisor.watch()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        wait_until(lambda: b"sleep" in command_of(child))  # no longer our leash
        parent.kill()
    wait_until(lambda: not runs(child))


def command_of(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().split(b"\0")[0]
