"""System calls that no computation needs, called behind the filter in a process of our own."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing.shared_memory
import os
import platform
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.process import sandbox

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls of x86_64"),
]

_libc = ctypes.CDLL(None, use_errno=True)
REFUSED = {
    **{"memfd_secret": 447, "io_setup": 206, "vmsplice": 278, "pidfd_getfd": 438, "shmget": 29},
    **{"semget": 64, "msgget": 68, "mq_open": 240, "fanotify_init": 300, "statmount": 457},
    **{"listmount": 458, "open_tree_attr": 467, "file_setattr": 469, "quotactl_fd": 443},
}


def _behind_the_filter(run: Callable[[], int]) -> int:
    """Return the value that `run` returned behind the filter; it must be below 256."""
    child = os.fork()
    if not child:
        try:
            room = sandbox.Room(code=Path("/"), scratch=Path("/"), uid=os.geteuid())
            sandbox.enclose(room, ["privileges", "syscalls"])
            os._exit(run())
        except OSError as error:
            os._exit(error.errno or 255)
        finally:
            os._exit(254)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _call(number: int) -> int:
    """Return the call's errno.

    For these arguments an unfiltered kernel gives another errno than EPERM.
    """
    found = _libc.syscall(number, 0, 0, 0, 0, 0, 0)
    return ctypes.get_errno() if found < 0 else 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_no_computation_needs_is_refused(name):
    assert _behind_the_filter(lambda: _call(REFUSED[name])) == errno.EPERM


def test_a_call_newer_than_the_list_does_not_exist():
    assert _behind_the_filter(lambda: _call(471)) == errno.ENOSYS


@pytest.mark.parametrize(
    ("family", "protocol"),
    [
        (socket.AF_INET, 262),  # mptcp
        (socket.AF_INET, 136),  # udplite
        (socket.AF_INET, 132),  # sctp
        (socket.AF_NETLINK, 0),
        (socket.AF_PACKET, 0),
        (socket.AF_ALG, 0),
        (30, 0),  # tipc
        (43, 0),  # smc
    ],
)
def test_a_socket_that_no_computation_needs_is_refused(family, protocol):
    def make() -> int:
        socket.socket(family, socket.SOCK_STREAM, protocol).close()
        return 0

    assert _behind_the_filter(make) == errno.EPERM


def test_what_a_computation_needs_is_there():
    """Use sockets, threads, POSIX shared memory, pidfds of own children, memfds."""

    def use() -> int:
        for family in (socket.AF_UNIX, socket.AF_INET):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                socket.socket(family, kind).close()
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP).close()
        for end in socket.socketpair():
            end.close()
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        shared = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
        shared.close()
        shared.unlink()
        os.close(os.memfd_create("x"))
        child = os.fork()
        if not child:
            os._exit(0)
        os.close(os.pidfd_open(child))
        os.waitpid(child, 0)
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        return 0

    assert _behind_the_filter(use) == 0
