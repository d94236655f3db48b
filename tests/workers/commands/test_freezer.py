"""Trees of processes stopped: those of this test, without walls."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.processes import name_of, status_of
from workers.commands.freezer import Tree


@pytest.fixture
def ask():
    """In a process of its own, as a tree is all that descends from it: asked over a pipe."""
    stub = subprocess.Popen(
        [sys.executable, "-c", STUB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def asked(what):
        stub.stdin.write(what + "\n")
        stub.stdin.flush()
        return lambda: stub.stdout.readline().strip()

    yield asked
    asked("tree.end(30)")()
    stub.stdin.close()
    stub.wait()
    stub.stdout.close()


@pytest.fixture
def tree(ask):
    """Ask the tree, and wait for its answer."""
    return lambda what: ask(what)()


STUB = """
import os, signal, subprocess, sys, time
from workers.commands import freezer
from workers.commands.freezer import Tree
tree = Tree(is_alone=False)
def start(text):
    return subprocess.Popen(["bash", "-c", text]).pid
def fork_while_looked_at(file):
    # as if a fork had been in progress: the child is born after the processes were listed
    moving = freezer._moving
    def look(pid):
        if not moving(pid):
            freezer._moving = moving
            os.kill(pid, signal.SIGCONT)
            open(file, "w").close()
            while len(tree.pids()) < 2: time.sleep(0.001)
            os.kill(pid, signal.SIGSTOP)
            while moving(pid): time.sleep(0.001)
        return moving(pid)
    freezer._moving = look
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""

BUSY = "while :; do :; done"


def until(true):
    until_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def names(tree):
    return sorted(map(name_of, eval(tree("tree.pids()"))))


def test_orphans_and_processes_of_other_sessions_belong_to_the_tree(tree):
    tree(f"start('(setsid bash -c \"{BUSY}\" &) ; sleep 60')")
    until(lambda: names(tree) == ["bash", "sleep"])  # what only started others has ended
    assert tree("tree.freeze(30)") == "None"
    pids = eval(tree("tree.pids()"))
    assert {*map(status_of, pids)} == {psutil.STATUS_STOPPED}
    tree("tree.thaw()")
    until(lambda: psutil.STATUS_STOPPED not in {*map(status_of, pids)})
    assert tree("tree.end(30)") == "None"
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_process_that_keeps_waking_others_is_stopped_too(tree):
    tree(f"start('bash -c \"{BUSY}\" & while :; do kill -CONT $!; done')")
    until(lambda: len(eval(tree("tree.pids()"))) == 2)
    for _ in range(10):
        assert tree("tree.freeze(30)") == "None"
        pids = eval(tree("tree.pids()"))
        assert {*map(status_of, pids)} == {psutil.STATUS_STOPPED}
        tree("tree.thaw()")


def test_process_that_does_not_stop_in_time_is_named(tree):
    pid = int(tree(f"start('exec -a spinner bash -c \"{BUSY}\"')"))
    until(lambda: psutil.Process(pid).cpu_times().user > 0)
    tree("setattr(tree, 'send', lambda number: None)")  # as if no signal arrived
    said = tree("tree.freeze(0.2)")
    tree("delattr(tree, 'send')")
    assert said.startswith("WontStop within 0.2 s: process ")
    assert "(bash) is in state R" in said


def test_only_process_1_may_signal_all_processes():
    with pytest.raises(ValueError, match="strangers"):
        Tree(is_alone=True)


def test_parent_in_vfork_does_not_delay_a_pause(tree, tmp_path):
    """The parent stands in the kernel, in state D, for as long as its stopped child."""
    begun = tmp_path / "begun"  # its children end too soon for `tree.pids()` to see one
    spawns = (
        "import subprocess, sys\nsubprocess.run(['/bin/true'])\nopen(sys.argv[1], 'w').close()\n"
        "while True: subprocess.run(['/bin/true'])"  # by vfork
    )
    tree(f"subprocess.Popen([sys.executable, '-c', {spawns!r}, {str(begun)!r}]).pid")
    until(begun.exists)
    for _ in range(20):
        assert tree("tree.freeze(30)") == "None"
        tree("tree.thaw()")


def test_memory_of_a_command_is_that_of_its_whole_tree(tree):
    tree("start('sleep 60 & sleep 60')")
    until(lambda: len(eval(tree("tree.pids()"))) >= 2)
    assert 2**17 < int(tree("tree.memory_bytes()")) < 2**26


SPAWNS = """
import os, sys
opens = (os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)
os.waitpid(os.posix_spawn("/bin/sleep", ["sleep", "60"], {}, file_actions=[opens]), 0)
"""


def test_parent_that_waits_for_its_child_to_begin_a_program_stops_too(tree, ask, tmp_path):
    """It stands in the kernel until then, and no program could store it there."""
    fifo = tmp_path / "fifo"  # the child waits for a writer before it begins its program
    os.mkfifo(fifo)
    tree(f"subprocess.Popen([sys.executable, '-c', {SPAWNS!r}, {str(fifo)!r}]).pid")
    until(lambda: len(eval(tree("tree.pids()"))) == 2)
    parent, child = eval(tree("tree.pids()"))
    until(lambda: psutil.Process(parent).status() == psutil.STATUS_DISK_SLEEP)
    tree("setattr(freezer, '_BEGINS_S', 60.0)")
    answer = ask("tree.freeze(60)")
    until(lambda: psutil.Process(child).status() == psutil.STATUS_STOPPED)
    writer = os.open(fifo, os.O_RDWR)
    assert answer() == "None"
    os.close(writer)
    assert {psutil.Process(pid).status() for pid in (parent, child)} == {psutil.STATUS_STOPPED}
    assert psutil.Process(child).name() == "sleep"


FORKS = """
import os, sys, time
open(sys.argv[1] + ".begun", "w").close()
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
os.fork()
time.sleep(60)
"""


def test_child_that_is_born_while_its_parent_is_looked_at_stops_too(tree, tmp_path):
    file = str(tmp_path / "forks")
    tree(f"subprocess.Popen([sys.executable, '-c', {FORKS!r}, {file!r}]).pid")
    until((tmp_path / "forks.begun").exists)  # before, it may wait for a disk, and does not fork
    tree(f"fork_while_looked_at({file!r})")
    assert tree("tree.freeze(30)") == "None"
    pids = eval(tree("tree.pids()"))
    assert [*map(status_of, pids)] == [psutil.STATUS_STOPPED] * 2


@pytest.mark.parametrize(("state", "stands"), [("T", True), ("Z", False), ("X", False)])
def test_process_that_has_ended_does_not_stand(tree, tmp_path, state, stands):
    thread = tmp_path / "7" / "task" / "7"
    thread.mkdir(parents=True)
    (thread / "stat").write_text(f"7 (sh) {state} 1 7 7")
    tree(f"setattr(freezer, '_PROC', freezer.Path({str(tmp_path)!r}))")
    said = tree("tree.stands(7)")
    tree("setattr(freezer, '_PROC', freezer.Path('/proc'))")
    assert said == str(stands)
