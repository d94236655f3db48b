"""Trees of processes stopped: those of this test, without walls."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from workers.commands.freezer import Tree


@pytest.fixture
def tree():
    """In a process of its own, as a tree is all that descends from it: asked over a pipe."""
    stub = subprocess.Popen(
        [sys.executable, "-c", STUB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(what):
        stub.stdin.write(what + "\n")
        stub.stdin.flush()
        return stub.stdout.readline().strip()

    yield ask
    ask("tree.end(5)")
    stub.stdin.close()
    stub.wait()
    stub.stdout.close()


STUB = """
import signal, subprocess, sys, time
from workers.commands.freezer import Tree
tree = Tree(is_alone=False)
def start(text):
    return subprocess.Popen(["bash", "-c", text]).pid
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""

BUSY = "while :; do :; done"


def until(true):
    until_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_orphans_and_other_sessions_belong_to_the_tree(tree):
    tree(f"start('(setsid bash -c \"{BUSY}\" &) ; sleep 60')")
    time.sleep(0.3)  # what only started others has ended
    assert len(eval(tree("tree.pids()"))) == 2
    assert tree("tree.freeze(5)") == "None"
    pids = eval(tree("tree.pids()"))
    assert {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED}
    tree("tree.thaw()")
    until(lambda: psutil.STATUS_STOPPED not in {psutil.Process(pid).status() for pid in pids})
    assert tree("tree.end(5)") == "None"
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_what_keeps_waking_others_is_stopped_all_the_same(tree):
    tree(f"start('bash -c \"{BUSY}\" & while :; do kill -CONT $!; done')")
    until(lambda: len(eval(tree("tree.pids()"))) == 2)
    for _ in range(10):
        assert tree("tree.freeze(5)") == "None"
        pids = eval(tree("tree.pids()"))
        assert {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED}
        tree("tree.thaw()")


def test_who_does_not_stop_in_time_is_named(tree):
    tree(f"start('exec -a spinner bash -c \"{BUSY}\"')")
    tree("setattr(tree, 'send', lambda number: None)")  # as if no signal arrived
    said = tree("tree.freeze(0.2)")
    tree("delattr(tree, 'send')")
    assert said.startswith("WontStop within 0.2 s: process ")
    assert "(bash) is in state R" in said


def test_only_process_1_may_signal_all():
    with pytest.raises(ValueError, match="strangers"):
        Tree(is_alone=True)


def test_a_parent_in_vfork_does_not_hold_up_a_pause(tree, tmp_path):
    """The parent stands in the kernel, in state D, for as long as its stopped child."""
    begun = tmp_path / "begun"  # its children end too soon for `tree.pids()` to see one
    spawns = (
        "import subprocess, sys\nsubprocess.run(['/bin/true'])\nopen(sys.argv[1], 'w').close()\n"
        "while True: subprocess.run(['/bin/true'])"  # by vfork
    )
    tree(f"subprocess.Popen([sys.executable, '-c', {spawns!r}, {str(begun)!r}]).pid")
    until(begun.exists)
    for _ in range(20):
        assert tree("tree.freeze(5)") == "None"
        tree("tree.thaw()")


def test_memory_is_that_of_the_whole_tree(tree):
    tree("start('sleep 60 & sleep 60')")
    until(lambda: len(eval(tree("tree.pids()"))) >= 2)
    assert 2**17 < int(tree("tree.memory_bytes()")) < 2**26
