"""Runs CRIU inside the namespaces of a sandbox: a program of its own, for `dump_and_restore`.

    python -I -S -B enter.py REQUEST        with the JSON of `Request`

It enters the namespaces of the stub by its pidfd, forks, and becomes CRIU there.  So CRIU sees the
paths, process ids and addresses that the command sees, and needs no mapping of them.  Nothing of
CRIU is visible in the files of the sandbox: its loader, its libraries and the folder of the images
are passed as descriptors.

This program imports the standard library only, because it starts without any other path.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

JSON = dict[str, Any]

TIMED_OUT, CANNOT_ENTER = 98, 97  # exit statuses of this program that CRIU does not use

#: Capabilities that CRIU keeps, by number; it drops all others. SYS_RESOURCE lets it read the
#: limits of another user's processes, NET_RAW close one end of a restored connection.
RIGHTS = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "DAC_READ_SEARCH": 2,
    "FOWNER": 3,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_ADMIN": 12,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_RESOURCE": 24,
    "SYS_TIME": 25,
}

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_NETFILTER, _NLMSG_ERROR = 12, 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 1, 24, 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def main(request: JSON) -> NoReturn:
    try:
        # opened by paths of the host, so before this process leaves it
        for group in request["groups"]:
            _join(group)
        _checked(
            _libc.setns(request["pidfd"], _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET), "setns"
        )
        _ask_netfilter(request["lock"])
        child = os.fork()
        if not child:
            _become(request)
    except OSError as error:
        sys.stderr.write(f"cannot enter the sandbox: {error}\n")
        os._exit(CANNOT_ENTER)
    status = _wait(child, request["limit_s"])
    with suppress(FileNotFoundError):  # CRIU has removed the lock if it restored all
        _ask_netfilter(request["unlock"])
    # After a failed dump, too: the command begins again, and may be stored later.
    reserved = _begin_above(request["last_pid"]) if request["last_pid"] else 0
    os._exit(status or reserved)


def _ask_netfilter(batch: str) -> None:
    """Send messages for the network that this process has entered; `batch` is hexadecimal."""
    if not batch:
        return
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as netlink:
        netlink.send(bytes.fromhex(batch))
        with suppress(BlockingIOError):  # all answers are there when `send` returns
            while True:
                _, kind, _, _, _, error = struct.unpack_from(
                    "=IHHIIi", netlink.recv(65536, socket.MSG_DONTWAIT)
                )
                if kind == _NLMSG_ERROR and error:
                    raise OSError(-error, f"netfilter: {os.strerror(-error)}")


def _begin_above(last: int) -> int:
    """Have the next process of the sandbox get an id above `last`; return an exit status."""
    child = os.fork()  # only a child is in the PID namespace
    if not child:
        try:
            with open("/proc/sys/kernel/ns_last_pid", "w") as file:
                file.write(str(last))
            os._exit(0)
        finally:
            os._exit(CANNOT_ENTER)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _join(group: str) -> None:
    tasks = os.path.join(group, "tasks")  # the list of threads in version 1; version 2 has none
    with open(tasks if os.path.exists(tasks) else os.path.join(group, "cgroup.procs"), "w") as file:
        file.write("0")


def _wait(child: int, limit_s: float) -> int:
    """Return the exit status of CRIU.

    CRIU is killed at the time limit, or when this process gets SIGTERM. A tree whose dump was
    killed may be damaged, so the caller ends it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.kill(child, signal.SIGKILL)

    late = False

    def too_late(number: int, frame: FrameType | None) -> None:
        nonlocal late
        late = True
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return TIMED_OUT if late else code if code >= 0 else 128 - code


def _become(request: JSON) -> NoReturn:
    try:
        os.setsid()
        os.umask(0o077)
        _limit(request)
        _die_with_helper()  # only after the change of rights, which would undo it
        _close_all_but(request["fds"])
        os.execve(request["argv"][0], request["argv"], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    except OSError as error:
        sys.stderr.write(f"cannot start CRIU: {error}\n")
    os._exit(CANNOT_ENTER)


def _die_with_helper() -> None:
    """Have the kernel kill CRIU when this helper ends, so that no CRIU is left holding
    processes.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _limit(request: JSON) -> None:
    """Drop all rights but those of CRIU, and bound what it writes."""
    with open("/proc/self/status") as status:
        permitted = next(int(line.split()[1], 16) for line in status if line.startswith("CapPrm:"))
    kept = {number for number in RIGHTS.values() if permitted >> number & 1}
    for number in range(64):
        if number not in kept and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            break  # past the last one
    low = sum(1 << number for number in kept)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, struct.pack("=6I", low, low, 0, 0, 0, 0)), "capset")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request["file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)


def _close_all_but(kept: list[int]) -> None:
    before = 2
    for fd in sorted(kept):
        os.closerange(before + 1, fd)
        before = fd
    os.closerange(before + 1, 1 << 20)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
