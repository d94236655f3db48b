"""Shells and forwarded ports in a running command, with real processes, on a real device."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import asdict

import psutil
import pytest

from app.core.model.protocol.messages import Finished, Paused, Started
from app.core.model.provisions import running_files, tunnel
from app.core.model.provisions.running_files import LIST, READ
from app.core.model.provisions.tunnel import WINDOW_BYTES, FrameKind
from app.core.security import peer_proof
from app.storage.signing import tunnel_key
from tests.ports import free_port
from tests.processes import children, status_of, words_of
from tests.workers.commands.test_runner import its_processes, shell
from tests.workers.conftest import PATIENCE_S
from tests.workers.tunnels import FarEnd, ticket_for
from workers.commands.shells import tunnel_end
from workers.commands.shells.tunnels import InnerEnds
from workers.device.tunnels import TUNNELS_MAX
from workers.transfer import peer_auth

WAITS = shell("touch here; echo up; while :; do sleep 0.05; done")


@pytest.fixture
def running(rig):
    rig.launch("t1", WAITS)
    rig.until(lambda: "up" in rig.printed("t1"))
    return rig


def test_frames_inside_are_those_of_the_core():
    assert tunnel_end.HEAD.format == tunnel.FRAME_HEAD.format
    ours = ("FRAME_BYTES", "WINDOW_BYTES", "CHANNELS_MAX")
    assert [getattr(tunnel_end, name) for name in ours] == [getattr(tunnel, name) for name in ours]
    for kind in FrameKind:
        if kind < FrameKind.OPENED:
            assert getattr(tunnel_end, kind.name) == kind


# --- a shell --------------------------------------------------------------------------------------


def test_shell_is_a_terminal_inside_the_walls_of_the_task(running):
    with FarEnd(running, ticket_for("t1", rows=40, columns=120, term="vt100")) as far:
        far.type("ls; stty size; tty; echo $TERM $ROUNDHOUSE_TASK; id -u; exit 3\n")
        assert far.to_the_end() == 3
    said = far.text.decode()
    assert "here" in said
    assert "40 120" in said
    assert "/dev/pts/" in said
    assert "vt100 t1" in said
    walls = running.reports[-1].facts["sandbox"]
    if "user" in walls:
        assert "\r\n0\r\n" not in said
    if "processes" in walls:  # the device worker and other tasks cannot be seen
        with FarEnd(running, ticket_for("t1", words=("ls", "/proc"))) as far:
            assert far.to_the_end() == 0
        assert str(os.getpid()) not in far.text.decode().split()


def commands(rig):
    """The processes of the task as (process id, words); some may end meanwhile."""
    (resident,) = rig.supervisor.stays.residents.values()
    return [(each.pid, words_of(each)) for each in children(resident.pid, recursive=True)]


def has_words(rig, *words):
    return any(said[: len(words)] == list(words) for _, said in commands(rig))


def test_shell_follows_the_size_of_the_users_window_and_passes_interrupts(running):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("sleep 600\n")
        running.until(lambda: has_words(running, "sleep", "600"))
        far.send(FrameKind.RESIZE, (50).to_bytes(2, "big") + (132).to_bytes(2, "big"))
        far.type("\x03")
        running.until(lambda: not has_words(running, "sleep", "600"))
        far.type("stty size; exit 5\n")
        far.until("50 132")
        assert far.to_the_end() == 5


def test_shell_of_a_program_gives_its_output_and_status(running):
    for words, status, said in (
        (("echo", "one two"), 0, "one two"),
        (("sh", "-c", "exit 9"), 9, ""),
        (("no-such-program",), 127, "No such file"),
    ):
        with FarEnd(running, ticket_for("t1", words=words)) as far:
            assert far.to_the_end() == status
            assert said in far.text.decode()


def test_output_of_any_length_comes_whole(running):
    with FarEnd(running, ticket_for("t1", words=("seq", "300000"))) as far:
        assert far.to_the_end() == 0
    assert far.text.decode().split() == [str(n) for n in range(1, 300001)]


def test_shell_gets_the_hangup_when_the_user_is_gone(running):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("exec sleep 600\n")
        running.until(lambda: has_words(running, "sleep", "600"))
    running.until(lambda: not has_words(running, "sleep", "600"))


def test_background_of_a_shell_gets_the_hangup_too_unless_it_was_told_otherwise(running):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("sleep 601 & nohup sleep 602 >/dev/null & echo rea''dy\n")
        far.until("ready")
        running.until(lambda: has_words(running, "sleep", "601"))
        running.until(lambda: has_words(running, "sleep", "602"))
    running.until(lambda: not has_words(running, "sleep", "601"))
    assert has_words(running, "sleep", "602")


def test_shell_ends_with_its_command(rig):
    rig.launch(
        "t1", shell("read -t 60 < <(sleep 60) & touch up; while [ ! -e over ]; do sleep 0.02; done")
    )
    rig.event(Started, "t1")
    with FarEnd(rig, ticket_for("t1")) as far:
        far.type("touch over; sleep 600\n")
        assert far.to_the_end() is None
    rig.event(Finished, "t1")
    rig.until(lambda: not rig.supervisor.stays.residents)


def test_shell_cannot_reach_the_stub(running):
    if "processes" not in running.reports[-1].facts["sandbox"]:
        pytest.skip("this machine gives no process namespaces")
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("head -c 1 /proc/1/mem; ls /proc/1/fd; kill -KILL 1; kill -STOP 1; echo o''n\n")
        far.until("on")
        far.type("exit\n")
        assert far.to_the_end() is not None
    assert running.view("t1").state == "running"


# --- while its task is frozen ---------------------------------------------------------------------


def test_shell_stands_still_with_its_paused_task_and_goes_on(running):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("x=41; echo rea''dy\n")
        far.until("ready")
        far.until("$ ")  # its prompt
        while far.is_readable(0.3):
            far.take()
        running.pause("t1")
        running.event(Paused, "t1")
        stopped = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        running.until(lambda: {*map(status_of, its_processes(running))} <= stopped)
        far.type("echo is $((x + 1))\n")
        assert not far.is_readable(0.3)
        running.launch("t1", WAITS, epoch=2)
        far.until("is 42")
        far.type("exit\n")
        assert far.to_the_end() == 0


def test_tunnel_to_a_paused_task_begins_when_that_goes_on(running):
    running.pause("t1")
    running.event(Paused, "t1")
    with FarEnd(running, ticket_for("t1", words=("echo", "there"))) as far:
        assert not far.is_readable(0.3)
        running.launch("t1", WAITS, epoch=2)
        assert far.to_the_end() == 0
        assert "there" in far.text.decode()


def test_session_tells_for_how_long_it_has_computed_nothing(rig):
    rig.launch("t1", ["sleep", "600"], session={"idle_s": 5})
    rig.until(lambda: rig.view("t1") and rig.view("t1").idle_us >= 2_500_000)
    with FarEnd(rig, ticket_for("t1")) as far:
        far.type("while :; do :; done\n")  # what a shell computes counts too
        rig.until(lambda: rig.view("t1").idle_us == 0)
        far.type("\x03")
        rig.until(lambda: rig.view("t1").idle_us >= 2_500_000)


def test_session_that_takes_turns_adds_up_the_time_in_which_it_computes_nothing(rig):
    rig.launch("t1", ["sleep", "600"], session={"idle_s": 5})
    rig.until(lambda: rig.view("t1") and rig.view("t1").idle_us >= 2_500_000)
    before_us = rig.view("t1").idle_us
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.launch("t1", ["sleep", "600"], epoch=2, session={"idle_s": 5})
    rig.until(lambda: (v := rig.view("t1", 2)) and v.idle_us >= before_us + 1_000_000)
    views = [view for report in rig.reports for view in report.residents if view.epoch == 2]
    assert min(view.idle_us for view in views) >= before_us, "it began anew with the turn"


# --- a forwarded port -----------------------------------------------------------------------------

ECHO = (
    "import socket, sys, threading\n"
    "s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "def serve(c):\n"
    "    while p := c.recv(65536): c.sendall(p)\n"
    "    c.close()\n"
    "print('listens', flush=True)\n"
    "while True: threading.Thread(target=serve, args=s.accept()[:1], daemon=True).start()\n"
)


@pytest.fixture
def echoing(rig):
    port = free_port()
    rig.launch("t1", ["python", "-c", ECHO, str(port)])
    rig.until(lambda: "listens" in rig.printed("t1"))
    return port


def test_port_of_the_task_serves_several_connections_at_once(rig, echoing):
    with FarEnd(rig, ticket_for("t1", kind="forward", port=echoing)) as far:
        for channel in (1, 2):
            far.send(FrameKind.OPEN, channel=channel)
        # nobody takes what comes on channel 1: it stops after a window, and holds up no other
        for _ in range(3 * WINDOW_BYTES // 2**15):
            far.send(FrameKind.DATA, b"a" * 2**15, 1)
        got, came = b"", 0
        for n in range(40):
            far.send(FrameKind.DATA, f"{n},".encode(), 2)
            while not got.endswith(f"{n},".encode()):
                kind, channel, body = far.read()
                if kind == FrameKind.DATA and channel == 2:
                    got += body
                    far.send(FrameKind.WINDOW, len(body).to_bytes(4, "big"), 2)
                came += len(body) if (kind, channel) == (FrameKind.DATA, 1) else 0
        assert got.decode() == "".join(f"{n}," for n in range(40))
        assert came <= WINDOW_BYTES


def test_port_without_a_listener_is_said(rig, echoing):
    nothing = free_port()
    with FarEnd(rig, ticket_for("t1", kind="forward", port=nothing)) as far:
        far.send(FrameKind.OPEN, channel=1)
        while not far.failed:
            far.take()
        assert f"nothing listens on port {nothing} in the task" in far.failed


def test_end_of_either_side_reaches_the_other(rig, echoing):
    with FarEnd(rig, ticket_for("t1", kind="forward", port=echoing)) as far:
        far.send(FrameKind.OPEN, channel=5)
        far.send(FrameKind.DATA, b"last words", 5)
        far.send(FrameKind.END, channel=5)
        while far.take()[:2] != (FrameKind.END, 5):
            pass
        assert far.text == b"last words"


# --- who may not ----------------------------------------------------------------------------------


@pytest.mark.security
def test_forged_altered_replayed_and_expired_tickets_open_nothing(running):
    good = ticket_for("t1", words=("echo", "in"))
    with pytest.raises(OSError, match=r"closed|secret|reset"):
        FarEnd(running, good, secret="ab" * 32)
    altered = ticket_for("t1", words=("echo", "other"))
    with FarEnd(running, good, sent=altered.encoded()) as far:
        assert "not the one that was named" in far.refused
    with FarEnd(running, good) as far:
        assert far.to_the_end() == 0
    with FarEnd(running, good) as far:
        assert "used before" in far.refused
    with FarEnd(running, ticket_for("t1", expires_s=int(time.time()) - 1)) as far:
        assert "expired" in far.refused
    for body in (b"{}", b"[" * 4000, b"\xff", b'"shell"'):
        with FarEnd(running, good, sent=body) as far:
            assert far.refused
    running.until(lambda: len(commands(running)) <= 3)  # the ends that were opened have gone


@pytest.mark.security
def test_task_or_launch_that_is_not_here_opens_nothing(running):
    for ticket in (ticket_for("t2"), ticket_for("t1", epoch=2)):
        with FarEnd(running, ticket) as far:
            assert far.refused == "the task is not on this device any more"


@pytest.mark.security
def test_tunnels_of_a_task_are_limited(running):
    opened = [FarEnd(running, ticket_for("t1")) for _ in range(tunnel.PER_TASK)]
    assert not [far.refused for far in opened if far.refused]
    with FarEnd(running, ticket_for("t1")) as far:
        assert f"has {tunnel.PER_TASK} open tunnels" in far.refused
    opened.pop().sock.close()

    until_s = time.monotonic() + PATIENCE_S
    is_open = False
    while not is_open:  # not by `until`, which holds up the reports while it looks
        assert time.monotonic() < until_s
        with FarEnd(running, ticket_for("t1")) as far:
            is_open = not far.refused
    for far in opened:
        far.sock.close()
    assert TUNNELS_MAX >= tunnel.PER_TASK


# --- floods, silence and death --------------------------------------------------------------------


@pytest.mark.security
def test_flood_that_nobody_reads_waits_in_the_task_and_holds_up_nothing(running):
    """Its memory stays bounded, and the supervisor goes on reporting."""
    ours = psutil.Process()
    with FarEnd(running, ticket_for("t1", words=("cat", "/dev/zero"))) as far:
        before_bytes, reports = ours.memory_info().rss, len(running.reports)
        running.until(lambda: len(running.reports) >= reports + 4)
        assert ours.memory_info().rss - before_bytes < 32 * 2**20
        with FarEnd(running, ticket_for("t1", words=("echo", "beside"))) as other:
            assert other.to_the_end() == 0
    assert far.status is None


@pytest.mark.security
def test_user_that_breaks_the_rules_of_frames_ends_only_the_own_tunnel(running):
    for frame in (
        tunnel.FRAME_HEAD.pack(FrameKind.DATA, 0, 2**31) + b"x" * 100,
        tunnel.FRAME_HEAD.pack(FrameKind.DATA, 2**15, 1) + b"x",
        (tunnel.frame_of(FrameKind.DATA, 0, b"\x13" + b"x" * (2**15 - 1))) * 40,
    ):
        with FarEnd(running, ticket_for("t1")) as far:
            far.until("$ ")
            try:
                far.sock.sendall(frame)
            except ConnectionError:
                continue
            far.to_the_end()
    assert running.view("t1").state == "running"


@pytest.mark.security
@pytest.mark.parametrize("victim", ["end", "shell", "command"])
def test_killed_process_ends_the_tunnel(running, victim):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("echo rea''dy\n")
        far.until("ready")
        named = {"end": "tunnel_end", "shell": "bash", "command": "while"}[victim]
        for pid, words in commands(running):
            if named in " ".join(words) and (victim != "shell" or len(words) == 1):
                with contextlib.suppress(ProcessLookupError):  # of the command, a child just begun
                    os.kill(pid, signal.SIGKILL)
        assert far.to_the_end() == {"shell": -signal.SIGKILL}.get(victim)


@pytest.mark.security
def test_silent_connection_is_closed(running, monkeypatch):
    monkeypatch.setattr("workers.device.tunnels.TICKET_WITHIN_S", 0.3)
    named = "ab" * 32
    key = tunnel_key(running.reports[-1].secret, named)
    with peer_auth.at_desk(peer_proof.TUNNEL, running.reports[-1].links, key, named) as sock:
        sock.settimeout(PATIENCE_S)
        assert sock.recv(1) == b""


# --- files ----------------------------------------------------------------------------------------


def read_by(rig, operation, path):
    """What the inner end sends for this; it is only read."""
    with FarEnd(rig, ticket_for("t1", kind=tunnel.FILES, words=(operation, path))) as far:
        sent = b""
        while (frame := far.read())[0] == FrameKind.DATA:
            sent += frame[2]
        return frame[0], sent


def test_files_of_a_running_command_are_read_within_its_walls(running):
    kind, body = read_by(running, LIST, "")
    assert kind == FrameKind.END
    files = {file.path: file.size_bytes for file in running_files.read_list(body).files}
    assert files["here"] == 0
    assert not any(path.startswith(".roundhouse") for path in files)
    kind, body = read_by(running, READ, "here")
    assert (kind, running_files.read_head(body).size_bytes) == (FrameKind.END, 0)
    assert not has_words(running, "files_end")


def test_files_are_not_read_while_the_command_is_paused(running):
    running.pause("t1")
    running.event(Paused, "t1")
    with FarEnd(running, ticket_for("t1", kind=tunnel.FILES, words=(LIST, ""))) as far:
        assert not far.is_readable(0.5)
        running.launch("t1", WAITS, epoch=2)
        assert far.read()[0] == FrameKind.DATA


def test_reads_of_files_end_before_the_processes_are_stored(tmp_path):
    """So a download does not keep a command from moving; its caller may ask again."""
    size = 8 * 2**20  # more than the socket takes
    (tmp_path / "big").write_bytes(bytes(size))
    ends, (ours, theirs) = InnerEnds(), socket.socketpair()
    ticket = ticket_for("t1", kind=tunnel.FILES, words=(READ, "big"))
    ends.add(asdict(ticket), theirs.detach())
    ends.start(str(tmp_path), dict(os.environ), None)
    with ours:
        began = len(ours.recv(1))
        [process] = ends._started.values()
        assert ends.are_open
        ends.end_reads()
        assert not ends.are_open
        assert process.returncode == -signal.SIGKILL
        came = began
        while piece := ours.recv(2**16):
            came += len(piece)
        assert came < size
