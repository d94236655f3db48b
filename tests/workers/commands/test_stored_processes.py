"""What the stub says of a stopped tree before its processes are stored."""

from __future__ import annotations

import subprocess
import sys

import pytest

from workers.commands.stored_processes import NotStored, announced
from workers.hardware.cuda_checkpoint import TreeMemory

FULL = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
opened = []
try:
    while True: opened.append(os.open("/dev/null", 0))
except OSError: pass
for _ in range(3): os.close(opened.pop())
print(flush=True); input(); os.close(opened.pop()); print(flush=True); input()
"""
GOOD = {"devices": TreeMemory.found("cpu"), "has_beside": True, "has_tunnels": False}


class Below:
    """The tree of one process."""

    def __init__(self, process):
        self.process = process

    def pids(self):
        return [self.process.pid]


def test_process_that_can_open_no_more_files_is_not_stored():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FULL], text=True, **pipes) as process:
        process.stdout.readline()
        told = f"process {process.pid} may open 3 more files, and storing it takes 4"
        with pytest.raises(NotStored, match=told):
            announced(Below(process), process, **GOOD)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        found = {"first_pid": process.pid, "pids": [process.pid]}
        assert announced(Below(process), process, **GOOD) == found
        process.kill()
