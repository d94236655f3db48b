"""Shells in running jobs: in the walls of the job, stopped and ended with it, without a trace."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import psutil
import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Started
from tests.processes import children, name_of, status_of
from tests.workers.conftest import alone, words_in_memory
from tests.workers.tunnels import FarEnd, ticket_for

pytestmark = pytest.mark.slow


@pytest.fixture
def running(rig):
    rig.launch("t1", "jobs:Count")
    rig.event(Started, "t1")
    if not rig.supervisor.spawner.enters_jobs:
        pytest.skip("this machine has not all that a shell in a job needs")
    return rig


def beside(rig):
    """Processes that the zygote started, but for residents."""
    zygote = rig.supervisor.spawner.zygote.process.pid
    residents = {each.pid for each in list(rig.supervisor.stays.residents.values())}
    return [each for child in children(zygote) if child.pid not in residents
            for each in (child, *children(child, recursive=True))]  # fmt: skip


def test_shell_is_in_the_walls_of_the_job(running):
    resident = next(iter(running.supervisor.stays.residents.values()))
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("echo $(id -u) $PWD $ROUNDHOUSE_TASK; exit 3\n")
        assert far.to_the_end() == 3
    assert f"{resident.room.uid} /scratch t1\r\n" in far.text.decode()
    names = ("mnt", "pid", "net", "ipc", "uts")
    show = "for n in mnt pid net ipc uts; do readlink /proc/self/ns/$n; done; cat /proc/self/status"
    with FarEnd(running, ticket_for("t1", words=("sh", "-c", show))) as far:
        assert far.to_the_end() == 0
    said = far.text.decode().replace("\r", "")
    ours = {name: os.readlink(f"/proc/{resident.pid}/ns/{name}") for name in names}
    assert said.splitlines()[:5] == list(ours.values())
    status = Path(f"/proc/{resident.pid}/status").read_text()
    rows = dict(line.split(":\t", 1) for line in status.splitlines())
    for row in ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd"):
        assert f"\n{row}:\t{rows[row]}\n" in said
    limits = Path(f"/proc/{resident.pid}/limits").read_text()
    with FarEnd(running, ticket_for("t1", words=("cat", "/proc/self/limits"))) as far:
        assert far.to_the_end() == 0
    assert far.text.decode().replace("\r", "") == limits


def test_shell_has_the_control_groups_of_the_job(running):
    resident = next(iter(running.supervisor.stays.residents.values()))
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("echo rea''dy\n")
        far.until("ready")
        pids = [resident.pid, *(each.pid for each in beside(running))]
        groups = [Path(f"/proc/{pid}/cgroup").read_text() for pid in pids]
        assert len(groups) >= 4  # the job; the keeper, the end and its shell
        assert len({*groups}) == 1


@pytest.mark.security
def test_zygote_never_has_what_a_shell_gets(rig):
    mark = secrets.token_hex(12)
    rig.launch("t1", "jobs:Count", env={"MARK": f"env-{mark}"})
    rig.event(Started, "t1")
    if not rig.supervisor.spawner.enters_jobs:
        pytest.skip("this machine has not all that a shell in a job needs")
    with FarEnd(rig, ticket_for("t1", words=("sh", "-c", f"echo $MARK; : word-{mark}"))) as far:
        assert far.to_the_end() == 0
    assert f"env-{mark}" in far.text.decode()
    zygote, there = rig.supervisor.spawner.zygote.process.pid, "import_what_jobs_need"
    assert words_in_memory(zygote, there, mark) == [there]


@pytest.mark.security
def test_shell_reaches_neither_the_platform_nor_other_privileges(running):
    resident = next(iter(running.supervisor.stays.residents.values()))
    inner_end, tried = "set -- $(cat /proc/$PPID/stat); p=$4", (
        "mount -t tmpfs x /tmp", "unshare -U true", "chroot / true", "true >> /etc/passwd",
        "cat /proc/$p/maps", "cat /proc/$p/environ", "ls /proc/$p/fd", "ls /proc/$p/root/",
        "echo 1 > /proc/sys/kernel/core_pattern", f"ls {running.house.folder}",
    )  # fmt: skip
    with FarEnd(running, ticket_for("t1")) as far:
        far.type(f"{inner_end}; test -e /proc/$p/stat && echo st''art\n")
        far.until("start")
        far.type("PATH=$PATH:/usr/sbin:/sbin\n")
        far.type("for w in mount unshare chroot; do command -v $w || echo MIS''SING; done\n")
        for one in tried:
            far.type(f"{one} && echo BA''D\n")
        far.type("kill -KILL 1; kill -STOP 1; echo fin''ished\n")
        said = far.until("finished")
        assert "BAD" not in said
        assert "MISSING" not in said
        far.type("exit\n")
        assert far.to_the_end() is not None
    assert running.view("t1").state == "running"
    assert psutil.Process(resident.pid).status() != psutil.STATUS_STOPPED


@pytest.mark.security
@pytest.mark.parametrize("number", ["STOP", "KILL"])
def test_job_ends_with_the_process_that_would_stop_its_shell(running, number):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type(f"sleep 600 & set -- $(cat /proc/$PPID/stat); kill -{number} $4\n")
        assert "SIGKILL" in running.event(Failed, "t1").message
    running.until(lambda: not running.supervisor.stays.residents and not beside(running))


def test_shell_stands_still_with_its_paused_job_and_goes_on(running):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("sleep 600 & x=41; echo rea''dy\n")
        far.until("ready")
        far.until("$ ")  # its prompt
        while far.is_readable(0.3):
            far.take()
        running.pause("t1")
        running.event(Paused, "t1")

        def is_still():
            below = [each for each in beside(running) if name_of(each) in ("bash", "sleep")]
            return len(below) == 2 and {*map(status_of, below)} == {psutil.STATUS_STOPPED}

        running.until(is_still)
        far.type("echo is $((x + 1))\n")
        assert not far.is_readable(0.3)
        with FarEnd(running, ticket_for("t1", words=("echo", "late"))) as late:
            assert not late.is_readable(0.3)
            running.launch("t1", "jobs:Count", epoch=2)
            far.until("is 42")
            assert late.to_the_end() == 0
        far.type("exit\n")
        assert far.to_the_end() == 0
    running.until(lambda: not beside(running))  # nor the process in the background


def test_shell_changes_no_bit_of_its_job_and_ends_with_it(rig):
    params = {"steps": 40, "nap_s": 0.01}
    rig.launch("t1", "jobs:Patient", params=params)
    rig.event(Started, "t1")
    if not rig.supervisor.spawner.enters_jobs:
        pytest.skip("this machine has not all that a shell in a job needs")
    with FarEnd(rig, ticket_for("t1")) as far:
        far.type("echo bu''sy; while :; do :; done\n")
        far.until("busy")
        rig.steps("t1", rig.view("t1").step + 10)
        rig.let_end("t1")
        assert rig.event(Finished, "t1").result == alone("jobs:Everything", params)["result"]
        assert far.to_the_end() is None
    rig.until(lambda: not rig.supervisor.stays.residents and not beside(rig))


def test_shell_ends_when_its_user_is_gone(running):
    with FarEnd(running, ticket_for("t1")) as far:
        far.type("(trap '' HUP; exec sleep 600) & echo rea''dy\n")
        far.until("ready")
    running.until(lambda: not beside(running))
    assert running.view("t1").state == "running"
