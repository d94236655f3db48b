"""Serves a build of packages: connects to the hosts of the administrator's index, and to no others.

The build has a network of its own, in which it can connect to this proxy only. The proxy is a
process of the build and ends with it. It has all layers of the sandbox except the network's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from app.core.model.provisions.network_policy import Destination, destinations, is_allowed
from app.core.security.addresses import networks
from app.core.security.proxy_request import NotServed
from workers.egress.addresses import Connector
from workers.egress.outlet import Outlet, OutletRules
from workers.egress.process import shut_off
from workers.process.isolation import sandbox

ANYWHERE = "0.0.0.0/0,::/0"  # the administrator named this host, which may have a private address


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRules(OutletRules):
    """Allows the hosts of the index."""

    def check(self, wanted: Destination) -> None:
        if not is_allowed(self.allow, wanted):
            allowed = ", ".join(map(str, self.allow)) or "none"
            raise NotServed(
                403, f"{wanted} is not among the hosts of the index of packages ({allowed})"
            )


def start(allow: Sequence[str], walls: Sequence[str], folder: Path) -> int:
    """Start the proxy; return the descriptor through which it takes its listener.

    `walls` are the sandbox layers that work here; `folder` is an empty folder.
    """
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours.detach()
    ours.close()
    _run(theirs, allow, walls, folder)


def _run(
    build: socket.socket, allow: Sequence[str], walls: Sequence[str], folder: Path
) -> NoReturn:
    sandbox.die_with_parent()
    try:
        shut_off([*walls], str(folder), os.geteuid())
        _, fds, _, _ = socket.recv_fds(build, 1, 1)
        if fds:
            asyncio.run(_serve(socket.socket(fileno=fds[0]), destinations(allow)))
    finally:
        os._exit(1)


async def _serve(listener: socket.socket, allow: tuple[Destination, ...]) -> None:
    Outlet(
        listener=listener,
        rules=IndexRules(allow=allow),
        connector=Connector(private=networks(ANYWHERE)),
        tell=_tell,
    )
    await asyncio.Event().wait()  # the process is killed with the build


def _tell(told: str) -> None:
    """Write a refusal beside the messages of uv."""
    sys.stderr.write(f"Roundhouse refused a connection: {told}\n")
    sys.stderr.flush()
