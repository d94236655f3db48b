"""Tells the processes beside a job when it has the slot (`workers.commands.shells.job_shell`)."""

from __future__ import annotations

from contextlib import suppress

from workers.process.wire import TenantWire


class JobShells:
    """Tracks the processes beside one job; each ends by itself, and this closes its wire."""

    def __init__(self) -> None:
        self.is_seated = False
        self._wires: list[TenantWire] = []

    def add(self, wire: TenantWire) -> None:
        self._forget_ended()
        self._wires.append(wire)

    def is_there(self) -> bool:
        """True if a process is beside the job."""
        self._forget_ended()
        return bool(self._wires)

    def seat(self, *, is_seated: bool) -> None:
        """Let the processes run, or stop them."""
        if is_seated == self.is_seated:
            return
        self.is_seated = is_seated
        self._forget_ended()
        for wire in self._wires:
            with suppress(OSError):  # the shell has just ended
                wire.send({"is": "go" if is_seated else "hold"})

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        self._wires = []

    def _forget_ended(self) -> None:
        for wire in self._wires:
            if wire.wait(0):  # shells send nothing, so this is the end of one
                wire.close()
        self._wires = [wire for wire in self._wires if wire.sock.fileno() >= 0]
