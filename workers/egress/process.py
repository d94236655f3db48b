"""The process of the proxy: shuts itself off from the host, then serves the outlets of tasks.

    supervisor (a thread of the device worker) -> (keeper ->) proxy

The proxy has the layers of a resident's sandbox but one: it is in the network of its host.  It has
a user of its own where the worker runs as root, no secret, no file of the service, no other
process in sight.  It ends with its worker, or when the worker closes the socket between them.

Messages: `begin`, `open`, `rules` and `close` come in; `ready`, `used`, `refused` and `closed` go
back.
"""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from app.core.model.provisions.network_policy import destinations
from app.core.security.addresses import networks
from workers.egress.addresses import Connector
from workers.egress.outlet import Outlet, OutletRules
from workers.process.isolation import sandbox
from workers.process.isolation.sandbox import Room
from workers.process.wire import Wire

JSON = dict[str, Any]

REPORT_S = 1.0  # interval at which new figures are reported
NICE = 5  # low priority, so that computations of the host go first
#: Files that the system's resolver reads.
RESOLVER_FILES = ("resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf")


def main(fd: int) -> NoReturn:
    """Run the proxy at the end `fd` of a socket to the supervisor."""
    sandbox.die_with_parent()
    wire = Wire(socket.socket(fileno=fd))
    messages: list[JSON] = []
    while not messages and not wire.closed:
        wire.wait()
        messages = wire.receive()
    if not messages:
        os._exit(0)  # the supervisor is gone
    begin, *early = messages
    os.nice(NICE)
    shut_off(begin["walls"], begin["folder"], begin["uid"])
    connector = Connector(private=networks(begin["private"]), hosts=begin["hosts"])
    asyncio.run(Proxy(wire, connector).serve(early))
    os._exit(0)


def resolver_files() -> tuple[Path, ...]:
    """Return the files by which the host resolves names, and the targets of links among them."""
    found = [path for name in RESOLVER_FILES if (path := Path("/etc") / name).exists()]
    return tuple(dict.fromkeys(each for path in found for each in (path, path.resolve())))


def shut_off(walls: list[str], folder: str, uid: int) -> None:
    """Apply all layers of the sandbox to this process, except the network layer."""
    walls = [name for name in walls if name != "network"]
    sandbox.separate(walls)
    if "processes" in walls and (inner := os.fork()):
        _, status = os.waitpid(inner, 0)
        os._exit(abs(os.waitstatus_to_exitcode(status)))
    sandbox.die_with_parent()
    room = Room(code=Path(folder), scratch=Path(folder), uid=uid, folders=resolver_files())
    sandbox.enclose(room, walls)
    sandbox.die_with_parent()  # set again, as a change of the user has undone it
    if "files" not in walls:
        os.chdir("/")


class Proxy:
    """Serves the outlets that the supervisor opens, until the supervisor is gone."""

    def __init__(self, wire: Wire, connector: Connector) -> None:
        self.wire, self.connector = wire, connector
        self.outlets: dict[int, Outlet] = {}
        self._told: dict[int, list[int]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def serve(self, early: list[JSON]) -> None:
        """Obey the messages that came with the first one, then later messages."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        self.wire.send({"is": "ready"})
        for message in early:
            self._obey(message)
        loop.add_reader(self.wire.fileno(), self._hear, gone)
        while not gone.is_set():
            try:
                await asyncio.wait_for(gone.wait(), REPORT_S)
            except TimeoutError:
                self._report()

    def _hear(self, gone: asyncio.Event) -> None:
        for message in self.wire.receive():
            self._obey(message)
        if self.wire.closed:
            gone.set()

    def _obey(self, message: JSON) -> None:
        match message["is"]:
            case "open":
                self._open(message["outlet"], message, self.wire.fds.pop(0))
            case "rules":
                self.outlets[message["outlet"]].rules = _rules(message)
            case "close":
                self._close(message["outlet"])

    def _open(self, id: int, message: JSON, fd: int) -> None:
        self.outlets[id] = Outlet(
            listener=socket.socket(fileno=fd),
            rules=_rules(message),
            connector=self.connector,
            tell=partial(self._refused, id),
        )

    def _close(self, id: int) -> None:
        closing = asyncio.create_task(self._closed(id, self.outlets.pop(id)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _closed(self, id: int, outlet: Outlet) -> None:
        await outlet.close()
        self._told.pop(id, None)
        self.wire.send({"is": "closed", "outlet": id, "figures": outlet.use.numbers()})

    def _refused(self, id: int, told: str) -> None:
        self.wire.send({"is": "refused", "outlet": id, "told": told})

    def _report(self) -> None:
        """Report the figures of outlets that have changed."""
        for id, outlet in self.outlets.items():
            figures = outlet.use.numbers()
            if self._told.get(id) != figures:
                self._told[id] = figures
                self.wire.send({"is": "used", "outlet": id, "figures": figures})


def _rules(message: JSON) -> OutletRules:
    return OutletRules(
        allow=destinations(message["allow"]), withdrawn=destinations(message["withdrawn"])
    )
