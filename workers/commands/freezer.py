"""Stops a tree of processes at any moment and continues it, whatever it is doing.

Which processes: with a PID namespace of its own, this process is process 1 there and the tree is
all other processes.  Otherwise the tree is all descendants of this process.  It adopts orphans, so
neither a double fork nor a new session leaves the tree.

How: SIGSTOP, which no process can catch, block or ignore.  A fork in progress ends before or after
the signal, so running processes are signalled again until every thread of every process is stopped
and no process is new.  Only then is the tree `frozen`.  A tree that does not stop in time is
reported, and the caller must kill it.  Processes that the command itself had stopped stay stopped
when the tree continues.

Invariant: between the return of `freeze` and `thaw`, the tree executes no instruction.  A thread in
an uninterruptible system call (state D) stops before it returns to its program.  `freeze` waits for
such a thread only briefly.  A parent in `vfork` stays in this state until its child begins a
program.  It could not be stored in this state, so `freeze` lets the child run until then.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_STILL = frozenset("TtZXx")  # stopped, traced, or dead
_IN_KERNEL = "D"
_PATIENCE_S = 0.25  # how long to wait for threads in uninterruptible system calls
# seconds for the tree to stop, if a process may be waiting for its child to begin a program
_BEGINS_S = 1.0
_RUNS_S = 0.02  # how long such a child runs before all processes are stopped again
_LOOK_AGAIN_S = 0.0005


class WontStop(Exception):
    """Raised when a part of the tree still runs; the message says which processes, in which
    states.
    """


class Tree:
    """Represents the processes of the tree.

    `is_alone`: this process is process 1 of its own PID namespace.
    """

    def __init__(self, *, is_alone: bool) -> None:
        if is_alone and os.getpid() != 1:
            raise ValueError("only process 1 is alone; signalling all would reach strangers")
        self.is_alone = is_alone
        self.is_frozen = False
        self._stopped_before: set[int] = set()  # processes that the command itself had stopped
        if not is_alone:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def pids(self) -> list[int]:
        """Return the process ids of the tree; empty if the sandbox hides /proc.

        Without /proc only `send` reaches the processes, if this process is process 1.
        """
        us = os.getpid()
        if self.is_alone:
            return [pid for pid in _all() if pid != us]
        below, parents = {us}, _parents()
        grew = True
        while grew:
            found = {pid for pid, parent in parents.items() if parent in below} - below
            below |= found
            grew = bool(found)
        return sorted(below - {us})

    def freeze(self, within_s: float) -> None:
        """Suspend every process of the tree; raises WontStop if one does not stop."""
        if self.is_frozen:
            return
        began_s = time.monotonic()
        self._stopped_before = {pid for pid in self.pids() if not _moving(pid) and _stat(pid)}
        while True:
            self.send(signal.SIGSTOP)
            moving = self._find(_moving)
            waited_s = time.monotonic() - began_s
            in_kernel = all(states == _IN_KERNEL for states in moving.values())
            children = self._children(moving) if in_kernel else []
            patience_s = min(within_s, _BEGINS_S if children else _PATIENCE_S)
            if not moving or (in_kernel and waited_s >= patience_s):
                self.is_frozen = True
                return
            if waited_s >= within_s:
                raise WontStop(_describe_moving(moving, within_s))
            time.sleep(_LOOK_AGAIN_S)
            if waited_s >= _RUNS_S:
                self._let_begin(children, moving)

    def _find(self, states_of: Callable[[int], str]) -> dict[int, str]:
        """Return the processes of the tree for which `states_of` returns states, with these.

        A process that is stopped or dead now may have had a child after the processes were listed.
        So they are listed again until none is new, or one runs.
        """
        found, seen = dict[int, str](), set[int]()
        while new := {*self.pids()} - seen:
            found |= {pid: states for pid in sorted(new) if (states := states_of(pid))}
            if any(states != _IN_KERNEL for states in found.values()):
                break
            seen |= new
        return found

    def _children(self, parents: Iterable[int]) -> list[int]:
        """Return the children of these processes that `freeze` has stopped."""
        wanted = {*parents}
        stopped = (pid for pid, parent in _parents().items() if parent in wanted)
        return [pid for pid in stopped if pid not in self._stopped_before]

    def _let_begin(self, children: Iterable[int], parents: Iterable[int]) -> None:
        """Let the children run for a moment, until none of the parents waits in the kernel any
        more.
        """
        for child in children:
            self._send(child, signal.SIGCONT)
        until_s = time.monotonic() + _RUNS_S
        while time.monotonic() < until_s and any(_moving(parent) for parent in parents):
            time.sleep(_LOOK_AGAIN_S)

    @property
    def stopped_before(self) -> frozenset[int]:
        """Processes that the command itself had stopped before the tree was frozen."""
        return frozenset(self._stopped_before)

    def adopt(self, stopped_before: Iterable[int]) -> None:
        """Take over a restored tree, which is stopped."""
        self.is_frozen, self._stopped_before = True, {*stopped_before}

    def thaw(self) -> None:
        self.is_frozen = False
        if not (there := self.pids()):
            self.send(signal.SIGCONT)
        for pid in there:
            if pid not in self._stopped_before:
                self._send(pid, signal.SIGCONT)

    def end(self, within_s: float) -> None:
        """Kill the tree and wait until it is gone; raises WontStop if a part of it stays."""
        until_s = time.monotonic() + within_s
        while True:
            self.send(signal.SIGKILL)
            left = self._find(_alive)
            for _ in reaped():
                pass
            if not left:
                return
            if time.monotonic() >= until_s:
                raise WontStop(_describe_moving(left, within_s))
            time.sleep(_LOOK_AGAIN_S)

    def send(self, number: signal.Signals) -> None:
        if self.is_alone:
            self._send(-1, number)  # atomic: no fork can come in between
        else:
            for pid in self.pids():
                self._send(pid, number)

    def stands(self, pid: int) -> bool:
        """True if a process that `freeze` stopped is still there, and not about to end."""
        return bool(_alive(pid)) and {*_moving(pid)} <= {_IN_KERNEL}

    def memory_bytes(self) -> int:
        """Return the private memory of the tree; memory shared with files does not count."""
        return sum(_memory_bytes(pid) for pid in self.pids())

    def written_maps(self, folder: Path) -> set[str]:
        """Return the files below `folder` that are mapped for writing: writes do not change their
        mtime.
        """
        return {path for pid in self.pids() for path in _written_maps(pid, f"{folder}/")}

    def _send(self, pid: int, number: signal.Signals) -> None:
        # the process is gone, or `freeze` sees that it still runs
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


# --- /proc ----------------------------------------------------------------------------------------


def _all() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    return []


def _parents() -> dict[int, int]:
    found = ((pid, _stat(pid)) for pid in _all())
    return {pid: int(fields[1]) for pid, fields in found if fields}


def _stat(pid: int, thread: str = "") -> list[str]:
    """Return the fields of proc_pid_stat(5) from the third (the state) on; [] if there is no such
    process.
    """
    of = _PROC / str(pid)
    if thread:
        of = of / "task" / thread
    try:
        text = (of / "stat").read_text("utf-8", "replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name may contain anything, even brackets


def _states(pid: int) -> Iterator[str]:
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return
    for thread in threads:
        if fields := _stat(pid, thread):
            yield fields[0]


def _moving(pid: int) -> str:
    """Return the states of the threads of the process that are not stopped; "" if all are."""
    return "".join(sorted({state for state in _states(pid) if state not in _STILL}))


def _alive(pid: int) -> str:
    return "".join(sorted({state for state in _states(pid) if state not in "ZXx"}))


def _memory_bytes(pid: int) -> int:
    try:
        _, resident, shared, *_ = (_PROC / str(pid) / "statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def _written_maps(pid: int, folder: str) -> Iterator[str]:
    try:
        text = (_PROC / str(pid) / "maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return
    for line in text.splitlines():
        _, rights, *_, path = line.split(maxsplit=5)
        if "w" in rights and "s" in rights and path.startswith(folder):
            yield path.removeprefix(folder)


def reaped() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, also orphans that this process adopted; yield the id and
    the exit status of each.
    """
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _describe_moving(moving: dict[int, str], within_s: float) -> str:
    named = [f"process {pid} ({_name(pid)}) is in state {states}" for pid, states in moving.items()]
    more = f", and {len(named) - 3} more" if len(named) > 3 else ""
    return f"within {within_s:g} s: {', '.join(named[:3])}{more}"


def _name(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "gone"
