"""Runs the inner end of a tunnel beside a job: in its sandbox, but not below its process.

    zygote -> keeper -> this -> inner end (`tunnel_end`) -> a shell

The process of a job is captured as a whole, so nothing is started in it.  The zygote forks this
process instead, which enters the job's sandbox (`sandbox.enter`) as the job's user.

Invariant: as those of a command, the processes below this one run only while the job has the slot
and the device is trusted.  They end with the tunnel, even processes that a shell left in the
background.  They also end with the job, which is process 1 of their namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
from typing import Any

from workers.commands.freezer import Tree, WontStop, reaped
from workers.commands.runner import END_WITHIN_S, FREEZE_WITHIN_S
from workers.commands.shells import tunnels
from workers.commands.wakeups import Wakeups
from workers.process.isolation import sandbox
from workers.process.wire import TrustSeen, Wire

JSON = dict[str, Any]

LOOK_AGAIN_S = 0.25  # interval of looks whether the device is trusted again


def serve(control: socket.socket, outer: int, trust: TrustSeen, begin: int) -> int:
    """Run one inner end until it ends, or until the supervisor is gone; return an exit status.

    `begin` is a file with the ticket, the variables of the task, and whether the job has the slot.
    """
    sandbox.hide_memory()
    message = json.loads(os.pread(begin, os.fstat(begin).st_size, 0))
    os.close(begin)
    shell = JobShell(Wire(control), outer, trust, message)
    try:
        while shell.turn():
            pass
        return 0
    except WontStop:
        return 1
    finally:
        with contextlib.suppress(WontStop):  # a process that does not end now ends with the job
            shell.tree.end(END_WITHIN_S)


class JobShell:
    """Starts the inner end. Its processes run only while the job has the slot."""

    def __init__(self, control: Wire, outer: int, trust: TrustSeen, message: JSON) -> None:
        self.control, self.outer, self.trust, self.message = control, outer, trust, message
        self.environment = {**os.environ, **message["environment"]}
        self.is_seated = bool(message["is_seated"])
        self.tree = Tree(is_alone=False)
        self.wakeups = Wakeups()
        self.end: subprocess.Popen[bytes] | None = None

    @property
    def may_run(self) -> bool:
        return self.is_seated and self.trust.left_us() > 0

    def turn(self) -> bool:
        """Do what is due, then wait for the next event; return False once the inner end has
        ended.
        """
        if self.may_run:
            self._run()
        elif self.end is not None:
            self.tree.freeze(FREEZE_WITHIN_S)
        self._wait()
        self._reap()
        is_over = self.end is not None and self.end.returncode is not None
        return not is_over and not self.control.closed

    def _run(self) -> None:
        if self.end is None:
            ticket, environment = self.message["ticket"], self.environment
            bound = sandbox.die_with_parent
            self.end = tunnels.start_end(ticket, self.outer, os.getcwd(), environment, bound)
            os.close(self.outer)
        elif self.tree.is_frozen:
            self.tree.thaw()

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self.control.fileno(), self.wakeups.fd):
            poll.register(fd, select.POLLIN)
        poll.poll(self._quiet_ms())
        self.wakeups.clear()
        for message in self.control.receive():
            self.is_seated = message["is"] == "go"

    def _quiet_ms(self) -> float | None:
        if not self.is_seated:
            return None
        return max(1000 * LOOK_AGAIN_S, self.trust.left_us() / 1000)

    def _reap(self) -> None:
        for pid, status in reaped():
            if self.end is not None and pid == self.end.pid:
                self.end.returncode = status
