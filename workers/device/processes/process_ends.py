"""Holds what connects a process with its supervisor, and orders for the process that follows it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from workers.process.wire import TenantWire, tenant_pair
from workers.transfer import peer_auth

JSON = dict[str, Any]

BULK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RepeatedOrder:
    """Holds an order for the next process, with copies of its descriptors if they are kept."""

    word: str
    said: JSON
    fds: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnds:
    """Holds both ends of what connects a process with its supervisor."""

    wire: TenantWire
    bulk: socket.socket
    pipes: dict[int, str]  # descriptor to read from -> "stdout" or "stderr"
    control: socket.socket  # the end of the process
    bulk_end: socket.socket  # the end of the process
    writes: dict[str, int]  # the ends of the process, by stream

    @classmethod
    def made(cls) -> ProcessEnds:
        wire, control = tenant_pair()
        bulk, bulk_end = socket.socketpair()
        peer_auth.wait_for(bulk, BULK_TIMEOUT_S)
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        for read, _ in pipes.values():
            os.set_blocking(read, False)
        return cls(
            wire=wire,
            bulk=bulk,
            pipes={read: name for name, (read, _) in pipes.items()},
            control=control,
            bulk_end=bulk_end,
            writes={name: write for name, (_, write) in pipes.items()},
        )

    def given(self, trust: int, slab: int) -> list[int]:
        """Return the descriptors of a new process, in the order of `wire.FDS_PER_RESIDENT`."""
        return [
            *(self.control.fileno(), self.bulk_end.fileno(), trust),
            *(*self.writes.values(), slab),
        ]

    def close_given(self) -> None:
        """Close the ends of the process, which has them now."""
        for end in (self.control, self.bulk_end):
            end.close()
        for write in self.writes.values():
            os.close(write)


def close_all(fds: list[int]) -> None:
    """Close these descriptors, and empty the list so that none is closed twice."""
    for fd in fds:
        os.close(fd)
    fds.clear()
