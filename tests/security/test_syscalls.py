"""System calls that no computation needs, called behind the filter in a process of our own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import json
import mmap
import multiprocessing.shared_memory
import os
import platform
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from workers.process.isolation import sandbox

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls of x86_64"),
]

_libc = ctypes.CDLL(None, use_errno=True)
REFUSED = {
    # other processes, and what they may be
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "pidfd_getfd": 438, "setns": 308, "unshare": 272, "personality": 135, "lsm_set_self_attr": 460,
    # mounts and roots
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "statmount": 457, "listmount": 458, "open_tree_attr": 467, "listns": 470,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "file_setattr": 469,
    "quotactl": 179, "quotactl_fd": 443, "lookup_dcookie": 212,
    # the kernel
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246,
    "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "syslog": 103, "iopl": 172,
    "ioperm": 173, "modify_ldt": 154, "vhangup": 153, "clock_settime": 227, "settimeofday": 164,
    "adjtimex": 159, "clock_adjtime": 305, "keyctl": 250, "add_key": 248, "request_key": 249,
    # memory and queues outside of all limits
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "io_setup": 206,
    "io_destroy": 207, "io_getevents": 208, "io_submit": 209, "io_cancel": 210,
    "io_pgetevents": 333, "memfd_secret": 447, "vmsplice": 278, "shmget": 29, "semget": 64,
    "msgget": 68, "mq_open": 240, "mq_unlink": 241,
}  # fmt: skip
X32, NEGATIVE = 0x40000000, 0x80000000  # bits of a number; the first names the other ABI
#: numbers of i386 for: fork, read, write, open, execve, getpid, mount, ptrace, kill, socketcall,
#: clone, mmap2, socket, memfd_create, bpf
I386 = [2, 3, 4, 5, 11, 20, 21, 26, 37, 102, 120, 192, 359, 356, 357]
# push rbx; mov eax, edi; mov ebx, esi; mov ecx, edx; xor edx, edx; int 0x80; pop rbx; ret
_INT_80 = bytes.fromhex("53 89f8 89f3 89d1 31d2 cd80 5b c3")


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


def _call(number: int, first: int = 0) -> int:
    """Return the call's errno.

    For these arguments an unfiltered kernel gives another errno than EPERM.
    """
    found = _libc.syscall(ctypes.c_long(number), first, 0, 0, 0, 0, 0)
    return ctypes.get_errno() if found < 0 else 0


def _errnos_behind_the_filter(calls: Callable[[], Iterable[int]]) -> list[int]:
    """Return the errnos that `calls` yielded behind the filter."""
    read, write = os.pipe()

    def run() -> int:
        os.write(write, json.dumps([*calls()]).encode())
        return 0

    try:
        assert _behind_the_filter(run) == 0
        found: list[int] = json.loads(os.read(read, 65536))
        return found
    finally:
        os.close(read)
        os.close(write)


@pytest.fixture(scope="module")
def errnos() -> dict[str, int]:
    return dict(
        zip(
            REFUSED,
            _errnos_behind_the_filter(lambda: map(_call, REFUSED.values())),
            strict=True,
        )
    )


@pytest.mark.parametrize("name", REFUSED)
def test_system_call_that_is_not_needed_is_refused(name, errnos):
    assert errnos[name] == errno.EPERM


def test_upper_half_of_a_system_call_number_is_not_ignored():
    numbers = [number | 1 << 32 for number in REFUSED.values()]
    assert set(_errnos_behind_the_filter(lambda: map(_call, numbers))) == {errno.EPERM}


def test_system_call_of_the_x32_abi_or_with_a_negative_number_is_refused():
    numbers = [bit | number for bit in (X32, NEGATIVE) for number in range(600)]
    assert set(_errnos_behind_the_filter(lambda: map(_call, numbers))) == {errno.EPERM}


def _int_80() -> Callable[[int, int, int], int]:
    """Return a function that makes a call of the i386 ABI: (number, two arguments) -> result."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_INT_80)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)(at)
    return lambda *args: int(call(*args))


def _process_id_by_int_80() -> int:
    faulthandler.disable()  # where the kernel has no such calls, this is a segmentation fault
    return int(_int_80()(20, 0, 0) == os.getpid())


def test_system_call_of_the_i386_abi_is_refused():
    child = os.fork()
    if not child:
        os._exit(_process_id_by_int_80())
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 1:
        assert _behind_the_filter(_process_id_by_int_80) == -signal.SIGSEGV
        return

    def calls() -> Iterable[int]:
        int_80 = _int_80()
        return [-int_80(number, 0, 0) for number in I386]

    assert set(_errnos_behind_the_filter(calls)) == {errno.EPERM}


@pytest.mark.parametrize(
    "flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
)
def test_clone_makes_no_new_namespace(flag):
    def clone() -> Iterable[int]:
        if not _call(56, flag | signal.SIGCHLD):
            os._exit(0)  # the child that must not be, or its parent
        return [_call(56, flag | signal.SIGCHLD), _call(435)]

    assert _errnos_behind_the_filter(clone) == [errno.EPERM, errno.ENOSYS]


def test_system_call_newer_than_the_list_is_refused_as_unknown():
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
def test_socket_type_that_is_not_needed_is_refused(family, protocol):
    def make() -> int:
        socket.socket(family, socket.SOCK_STREAM, protocol).close()
        return 0

    is_known = family == socket.AF_INET
    assert _behind_the_filter(make) == (errno.EPERM if is_known else errno.EINVAL)


def test_only_unix_and_internet_sockets_are_allowed():
    families = [family for family in range(64) if family not in (1, 2, 10)]

    def make() -> Iterable[int]:
        for family in families:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                yield _errno_of_socket(socket.socket, family, kind)
                yield _errno_of_socket(socket.socketpair, family, kind)

    found = _errnos_behind_the_filter(make)
    assert len(found) == 6 * len(families)
    assert set(found) == {errno.EINVAL}


def test_only_route_of_netlink_is_allowed_and_only_in_a_network_of_its_own():
    room = sandbox.Room(code=Path("/"), scratch=Path("/"), uid=os.geteuid())

    def protocols(walls: list[str]) -> list[int]:
        """Return the protocols of netlink that a process behind these layers can use."""
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                sandbox.separate(walls)
                sandbox.enclose(room, walls)
                for number in range(64):
                    with contextlib.suppress(OSError):
                        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, number).close()
                        os.write(write, bytes([number]))
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            found = [*file.read()]
        os.waitpid(child, 0)
        return found

    assert protocols(["privileges", "syscalls"]) == []
    assert protocols(["network", "capabilities", "privileges", "syscalls"]) == [0]


def test_process_in_a_network_of_its_own_cannot_change_it():
    room = sandbox.Room(code=Path("/"), scratch=Path("/"), uid=os.geteuid())
    walls = ["network", "capabilities", "privileges", "syscalls"]
    if not (child := os.fork()):
        try:
            sandbox.separate(walls)
            sandbox.enclose(room, walls)
            route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
            # RTM_NEWLINK with NLM_F_REQUEST and NLM_F_ACK: take the interface 1 down
            down = bytes(4) + (1).to_bytes(4, "little") + bytes(4) + (1).to_bytes(4, "little")
            route.send((32).to_bytes(4, "little") + bytes((16, 0, 5, 0)) + bytes(8) + down)
            told = int.from_bytes(route.recv(4096)[16:20], "little", signed=True)
            os._exit(-told)
        finally:
            os._exit(254)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EPERM


def _errno_of_socket(make: Callable[[int, int], Any], family: int, kind: int) -> int:
    try:
        make(family, kind)
    except OSError as error:
        return error.errno or 0
    return 0


def test_system_calls_of_ordinary_programs_are_allowed():
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
