"""Programs that take all that they can get, and change as fast as they can, while they are stored.

Such a program goes on with the right result, or begins again and its owner is told why.  Both
device workers run the next task, and a neighbour on a third device ends with its bits.
"""

from __future__ import annotations

import os
import random

import pytest

from app.core.model.protocol.messages import Finished
from tests.workers.criu.moving import END_S, SEED, alone, hosts, moved
from tests.workers.criu.programs import PROGRAMS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")

_WAITS = """
print("all"); time.sleep(1); print("sum", 1); sys.stdout.flush(); os._exit(0)
"""
_THREADS = """
import os, sys, threading, time
threading.stack_size(1 << 16); never = threading.Event()
try:
    for _ in range(100_000): threading.Thread(target=never.wait, daemon=True).start()
except RuntimeError: pass
"""
_MAPS = """
import mmap, os, sys, time
kept = []
try:
    for n in range(100_000): kept.append(mmap.mmap(-1, 4096, prot=1 + 2 * (n % 2)))
except (OSError, ValueError): pass
del kept[:100]
"""
_FILES = """
import os, sys, time
kept = []
try:
    for n in range(100_000): kept.append(os.open(f"f{n}", os.O_CREAT | os.O_RDWR))
except OSError: pass
os.close(kept.pop()); os.close(kept.pop())
"""
_PROC = """
import os, sys, time
kept = [os.open(f"/proc/self/{n}", 0) for n in ("maps", "mem", "fd", "ns", "status") * 50]
child = os.fork()
if not child: time.sleep(0.05); os._exit(0)
kept += [os.open(f"/proc/{child}/status", 0), os.open(f"/proc/{child}", 0)]; os.wait()
"""
_ORPHANS = """
import os, sys, time
for _ in range(50):
    if not os.fork():
        os.setsid()
        if not os.fork(): time.sleep(1000)
        os._exit(0)
    os.wait()
"""
_WRITES = """
import mmap, os, sys, threading, time
shared = mmap.mmap(-1, 1 << 24)
def write():
    while True: shared[:] = os.urandom(1 << 24)
def fork():
    while True:
        if not (child := os.fork()): shared[:9] = b"123456789"; os._exit(0)
        os.waitpid(child, 0)
for target in (write, fork): threading.Thread(target=target, daemon=True).start()
"""
#: Program -> a part of the reason why it begins again; "": it goes on.
HOSTILE = {
    "threads": (_THREADS, "Unable to create a thread"),
    "maps": (_MAPS, "its memory lies in too many pieces"),
    "files": (_FILES, "may open 2 more files, and storing it takes 4"),
    "descriptors of /proc": (_PROC, "is of a process outside the tree"),
    "orphans": (_ORPHANS, "has outlived its parent"),
    "forks and writes": (_WRITES, ""),
}
IN_TEST = ("forks and writes",)


@pytest.fixture(scope="module")
def trio(tmp_path_factory, criu):
    with hosts(tmp_path_factory.mktemp("hostile"), criu, 3) as made:
        yield made


@pytest.mark.parametrize(
    "name",
    [name if name in IN_TEST else pytest.param(name, marks=pytest.mark.long) for name in HOSTILE],
)
def test_hostile_program_goes_on_or_is_told_why_and_harms_nobody(trio, name):
    *pair, third = trio
    source, why = HOSTILE[name]
    neighbour = PROGRAMS[0].source.replace("range(120)", "range(400)")
    number = [*HOSTILE].index(name)
    third.launch(f"beside-{number}", ["python", "-c", neighbour])
    third.until(lambda: third.printed(f"beside-{number}"), timeout_s=END_S)
    run = moved(pair, f"hostile-{number}", source + _WAITS, random.Random(f"{SEED} {name}"), 1)
    print(name, run.begun, run.end, run.printed, run.told)  # noqa: T201
    assert (run.end, run.printed) == ("Finished", ["all", "sum 1"])
    assert run.begun[0] == "fresh"
    if run.times_begun_again:
        assert why, run.told
        assert any(why in line for line in run.told), run.told
    for rig in pair:
        rig.launch(f"next-{number}", ["true"])
        rig.event(Finished, f"next-{number}", timeout_s=END_S)
    third.event(Finished, f"beside-{number}", timeout_s=END_S)
    third.until(lambda: third.view(f"beside-{number}") is None, timeout_s=END_S)
    assert third.printed(f"beside-{number}") == alone(neighbour)


def test_command_with_all_threads_that_it_may_have_is_paused_and_stored(trio):
    rig = trio[-1]
    rig.launch("full", ["python", "-c", f"{_THREADS}print('all', flush=True); time.sleep(1000)"])
    rig.until(lambda: rig.printed("full"), timeout_s=END_S)
    assert rig.paused_and_saved("full", 1)
    rig.cancel("full")
    rig.until(lambda: rig.view("full") is None, timeout_s=END_S)
    assert rig.printed("full") == ["all"]
