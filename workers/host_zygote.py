"""Forks the zygotes of a host's CPU devices, so that torch is imported once for all of them.

    worker -> host zygote -> zygote of each CPU device -> residents

Each zygote imports the same and gets the same environment, so its pages are those of the host
zygote until it writes to them. An accelerator's driver reads its variables when torch is imported,
so the zygote of an accelerator is a program of its own.

The host zygote runs nothing but forks. Its zygotes end with it, and with their own wires; the next
one that a device asks for starts another host zygote.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import NoReturn

from workers import zygote
from workers.process.isolation import sandbox
from workers.process.wire import Wire


def main(fd: int) -> NoReturn:
    """Fork a zygote for each message, with the zygote's wire and the lock of its device."""
    sandbox.die_with_parent()
    zygote.import_what_jobs_need()
    zygote.must_have_one_thread()
    zygote.keep_pages_shared()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the worker watches the zygotes by their pidfds
    asked = Wire(socket.socket(fileno=fd))
    while not asked.closed:
        asked.wait()
        for _ in asked.receive():
            wire, lock = asked.fds.pop(0), asked.fds.pop(0)
            if not os.fork():
                _become(asked, wire, lock)
            os.close(wire)
            os.close(lock)
    os._exit(0)


def _become(asked: Wire, fd: int, lock_fd: int) -> NoReturn:
    """Become a zygote: tell the device how to watch and end this process, then serve."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    sandbox.die_with_parent()
    asked.close()
    wire, pidfd = Wire(socket.socket(fileno=fd)), os.pidfd_open(os.getpid())
    wire.send({"is": "forked", "pid": os.getpid()}, [pidfd])
    os.close(pidfd)
    zygote.serve(wire, lock_fd)
