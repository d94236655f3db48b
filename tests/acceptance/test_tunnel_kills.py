"""`kill -9` of the API process and of the device worker under open shells, ports and notebooks.

The user is told in a sentence, gets the terminal back as it was, and connects again; nothing stays
behind on the device's host, and no tunnel stays open in the database.
"""

from __future__ import annotations

import contextlib
import os
import termios
import urllib.error
import urllib.request

import pytest

from tests.acceptance.test_tunnels import PATIENCE_S, Terminal, running, terminal
from tests.processes import children, is_living, runs, words_of

pytestmark = pytest.mark.acceptance

__all__ = ["Terminal", "running"]

NO_ANSWER = 6  # exit code (docs/reference/cli.md)
LOST_API = "the connection was lost"
LOST_DEVICE = "the task's side was closed: its processes have ended, or its device was lost"
LONG = pytest.param("device.0", LOST_DEVICE, marks=pytest.mark.long)


def settings_of(shown):
    return termios.tcgetattr(shown.master)


def inner_ends(system):
    """Return the platform's processes of open tunnels in the tasks, and their shells."""
    below = [each for zygote in system.zygotes() for each in children(zygote, recursive=True)]
    found = []
    for process in below:
        if runs(process, "tunnel_end"):
            found += [process, *children(process, recursive=True)]
    return [(process, words_of(process)) for process in found]


def sockets(system, name):
    """Return how many sockets a process of the system has."""
    folder = f"/proc/{system.handle.pids()[system.handle.process_of(name)]}/fd"
    count = 0
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):
            count += os.readlink(f"{folder}/{fd}").startswith("socket:")
    return count


def of_task(system, task_id):
    """Return (opened, not ended) tunnels of the task, after the minute in which one may be quiet.

    Only the clock of those that are not ended is turned on; control ends them at its next chores.
    """
    system.sql(
        "update tunnels set seen_at = seen_at - interval '2 minutes' where task_id = %s"
        " and ended_at is null returning id",
        task_id,
    )
    query = "select count(*), count(*) filter (where ended_at is null) from tunnels"
    return system.sql(f"{query} where task_id = %s", task_id)[0]


def device_of(system, task_id):
    return system.sql("select seat from tasks where id = %s", task_id)[0][0]


@pytest.mark.parametrize(("victim", "why"), [("api", LOST_API), LONG])
def test_killed_process_ends_shell_and_port_in_a_sentence_and_leaves_nothing(
    system, running, victim, why
):
    seat = device_of(system, running)
    device = f"device.{seat.rpartition('.')[2]}"
    victim = victim if victim == "api" else device
    before = sockets(system, device)
    with contextlib.ExitStack() as stack:
        shell = stack.enter_context(terminal(system, "shell", running))
        forward = stack.enter_context(terminal(system, "forward", running, "8123", "--local", "0"))
        was = settings_of(forward)
        shell.until("$ ")
        shell.type("sleep 600 & echo rea''dy\r")
        shell.until("ready")
        assert settings_of(shell) != was, "it is raw while the shell is open"
        forward.until("127.0.0.1:")
        port = forward.until(" is port 8123 of the task")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        ends = inner_ends(system)
        assert len(ends) >= 3
        system.handle.kill(victim)
        shell.until(f"The shell was closed: {why}.")
        forward.until(f"The tunnel has ended: {why}.")
        assert (shell.ended(), forward.ended()) == (NO_ANSWER, NO_ANSWER)
        assert settings_of(shell) == was
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S)
    left = lambda: [words for process, words in ends if is_living(process)]  # noqa: E731
    assert system.until(lambda: not left()), left()
    client = system.client("alpha")
    assert system.until(lambda: client.get(f"/v1/tasks/{running}")["state"] == "running")
    with terminal(system, "shell", running, "--", "echo", "again") as again:
        again.until("again")
        assert again.ended() == 0
    if victim == "api":
        assert system.until(lambda: sockets(system, device) <= before)
    assert system.until(lambda: not inner_ends(system))


def test_session_outlives_its_lost_connection(system):
    client = system.client("alpha")
    with terminal(system, "run", "--interactive", "--name", "kept") as desk:
        desk.until("$ ")
        desk.type("x=41; echo rea''dy\r")
        desk.until("ready")
        request_id = next(iter(client.items("/v1/requests", name="kept")))["id"]
        system.handle.kill("api")
        desk.until(f"The session goes on.  `roundhouse shell {request_id}`")
        desk.until(f"The shell was closed: {LOST_API}.")
        assert desk.ended() == NO_ANSWER
    task = client.request(request_id)["tasks"][0]
    assert (task["state"], task["cancel_asked"]) == ("running", False)
    client.post(f"/v1/tasks/{task['id']}/cancel")
    assert client.wait(request_id)["state"] == "cancelled"


@pytest.mark.long
def test_tunnel_of_a_killed_api_process_does_not_stay_open_in_the_database(system, running):
    """Control ends it at its chores, once a minute."""
    with terminal(system, "shell", running) as shell:
        shell.until("$ ")
        system.kill("api")
        assert shell.ended() == NO_ANSWER
    assert of_task(system, running)[1] == 1
    ended = lambda: of_task(system, running) == (1, 0)  # noqa: E731
    assert system.until(ended) or system.until(ended)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["api", "device"])
def test_notebook_is_told_and_reached_again(system, victim):
    pytest.importorskip("jupyterlab")
    client = system.client("alpha")
    words = ("notebook", "--no-browser", "--local", "0", "--name", f"lab-{victim}")
    with terminal(system, *words) as shown:
        shown.until("JupyterLab: ")
        url = "".join(shown.until("Ctrl-C").split())
        was = settings_of(shown)
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        request_id = next(iter(client.items("/v1/requests", name=f"lab-{victim}")))["id"]
        task_id = client.request(request_id)["tasks"][0]["id"]
        seat = device_of(system, task_id)
        name = "api" if victim == "api" else f"device.{seat.rpartition('.')[2]}"
        system.handle.kill(name)
        shown.until("The tunnel has ended: ")
        shown.until(LOST_API if victim == "api" else "its device was lost")
        assert shown.ended() == NO_ANSWER
        assert settings_of(shown) == was
    assert system.until(lambda: client.get(f"/v1/tasks/{task_id}")["state"] == "running")
    token = url.partition("token=")[2]
    with terminal(system, "forward", task_id, "8888", "--local", "0") as forward:
        forward.until("127.0.0.1:")
        port = forward.until(" is port 8888 of the task")

        def answers():
            with contextlib.suppress(OSError):  # it begins again after the death of its device
                address = f"http://127.0.0.1:{port}/api/status?token={token}"
                with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
                    return answer.status == 200
            return False

        assert system.until(answers)
        forward.type("\x03")
        assert forward.ended() == 130
    client.post(f"/v1/tasks/{task_id}/cancel")
    assert client.wait(request_id)["state"] == "cancelled"
