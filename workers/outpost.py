"""Ranks of a gang on hosts other than its home: outposts, and the conductor that speaks with them.

    home: conductor, its ranks, bridge  <- line, link ->  outpost, its ranks, bridge: another host

An outpost is what conducts the ranks of its host, as far as that can be done there: it forks them
and passes on what they say, and what is said to them.  Everything else the conductor at home does
for all ranks of the gang, so to its supervisor the gang is a resident as ever, with one image.
Two connections join each outpost with home: the *line*, of which this module speaks, and the
*link* of the two bridges.

*Image.*  Home's slab holds the parts of all ranks.  What a rank of an outpost stages is sent home
before it is said that it lies there; when the gang goes on from an image, home first sends each
outpost the parts of its ranks.  Storages that are equal, as those of replicas are, cross once.  So
an image made on any hosts goes on on any others, and a change of hosts is that: from the image of a
cut, all ranks begin again.

*Ends.*  An outpost whose line ends, ends its ranks; a gang that loses an outpost fails.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from workers import bridge, ground, sandbox, turns
from workers.bridge import HOME, Link, Place, Said
from workers.gang import JSON, Conductor, RankProcess, Region, fork, parted, unsaid
from workers.ground import Ground
from workers.layout import Layout, from_json
from workers.slab import Slab

if TYPE_CHECKING:
    from workers.executor import Work

Live = Callable[["Work"], int]


def conduct(work: Work, live: Live) -> int:
    """As `gang.conduct`, for a gang whose spec says how many of its seats lie on which `hosts`.

    The last of the file descriptors are, for each other host, its line and its link; of an outpost,
    whose spec says which `host` it is, those to home.
    """
    hosts = turns.hosts_of(work.spec["world_size"], tuple(work.spec["hosts"]))
    host = work.spec["host"]
    others = range(1, max(hosts) + 1) if host == HOME else [HOME]
    lines, links = {}, {}
    for other in reversed(others):
        links[other] = socket.socket(fileno=work.fds.pop())
        lines[other] = Link(other, socket.socket(fileno=work.fds.pop()))
    board = Ground(ground.make(work.spec["world_size"], hosts, host))
    turns.seat_all(board, sum(work.spec["hosts"]))
    if host == HOME:
        return _at_home(work, live, board, lines, links)
    return Outpost(work, live, board, lines[HOME], links).run()


def _processes(
    work: Work, live: Live, board: Ground, lines: list[Link], links: dict[int, socket.socket]
) -> tuple[list[RankProcess], int]:
    """Of each rank of this host; and the process id of its bridge.  The links are theirs only."""
    ranks = work.spec["world_size"]
    sockets = (*(line.sock for line in lines), *links.values())
    held = tuple(sock.fileno() for sock in sockets)
    regions = {rank: Region.of(rank, ranks, work.slab.limit_bytes) for rank in board.here()}
    members = [
        fork(work, live, board.handles, rank, region, held) for rank, region in regions.items()
    ]
    for fd in work.fds:
        os.close(fd)
    pid = _fork_bridge(work, board, lines, links)
    for sock in links.values():
        sock.close()
    return members, pid


def _fork_bridge(
    work: Work, board: Ground, lines: list[Link], links: dict[int, socket.socket]
) -> int:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            sandbox.die_with_parent()
            work.wire.close()
            for line in lines:
                line.sock.close()
            status = bridge.main(board, links)
        except BaseException:
            traceback.print_exc()  # into the job's log
        finally:
            os._exit(status)
    return pid


# --- parts of an image ----------------------------------------------------------------------------


class Parts:
    """One end of a line, for images: each part lies at the same place of both slabs."""

    def __init__(self, slab: Slab, line: Link) -> None:
        self.slab, self.line = slab, line
        self._crossed: dict[tuple[bytes, int], int] = {}  # (digest, size) -> where it lies

    def begin(self) -> None:
        """What crossed before belongs to another image."""
        self._crossed.clear()

    def send(self, start: int, layout: Layout) -> None:
        """What lies there must not change until it has crossed; `start` is added to all offsets."""
        for extent in (layout.graph, *layout.storages):
            view, offset = self.slab.view(start + extent.offset, extent.size), start + extent.offset
            equal = self._crossed.setdefault((xxhash.xxh3_128_digest(view), extent.size), offset)
            if equal == offset:
                self.line.say(("part", offset), view)
            else:
                self.line.say(("copy", offset, extent.size, equal))

    def send_index(self, start: int, size: int) -> None:
        """It lies behind what the slab, or a rank's region of it, may hold."""
        self.line.say(("index", start), memoryview(os.pread(self.slab.fd, size, start)))

    def place(self, said: Said, size: int) -> Place:
        if said[0] == "part":
            return Place(self._view(said[1], size))
        return Place(memoryview(bytearray(size)))

    def take(self, said: Said, body: Place | None) -> bool:
        """Whether this was of an image.  Raises OSError for what cannot lie in the slab."""
        match said:
            case ("part", _):
                return True
            case ("copy", offset, size, equal):
                self._view(offset, size)[:] = self._view(equal, size)
                return True
            case ("index", start) if body is not None:
                at = 0
                while at < len(body.view):
                    at += os.pwrite(self.slab.fd, body.view[at:], start + at)
                return True
        return False

    def _view(self, offset: int, size: int) -> memoryview:
        if not 0 <= offset <= offset + size <= self.slab.limit_bytes:
            raise OSError(f"{size} bytes of an image at {offset}, where none can lie")
        return self.slab.view(offset, size)


# --- at home --------------------------------------------------------------------------------------


class _Away:
    """What stands where the conductor has a rank's wire, for a rank of an outpost."""

    def __init__(self, line: Link, rank: int) -> None:
        self.line, self.rank = line, rank

    def send(self, message: JSON) -> None:
        self.line.say(("tell", self.rank, message))


def _at_home(
    work: Work, live: Live, board: Ground, lines: dict[int, Link], links: dict[int, socket.socket]
) -> int:
    ranks = work.spec["world_size"]
    here, bridge_pid = _processes(work, live, board, list(lines.values()), links)
    members = {member.number: member for member in here}
    for rank in range(ranks):
        if rank not in members:
            region = Region.of(rank, ranks, work.slab.limit_bytes)
            wire: Any = _Away(lines[board.hosts[rank]], rank)
            part = region.slab(work.slab.fd)
            members[rank] = RankProcess(rank, 0, -1, wire, region, part)
    home = Home(work, board, [members[rank] for rank in range(ranks)], lines)
    try:
        home.begin()
        return home.run()
    finally:
        home.end_all()
        with suppress(ProcessLookupError):
            os.kill(bridge_pid, signal.SIGKILL)


class Home(Conductor):
    """A conductor some of whose ranks are at outposts."""

    def __init__(
        self, work: Work, board: Ground, ranks: list[RankProcess], lines: dict[int, Link]
    ) -> None:
        super().__init__(work, board, ranks)
        self.lines = lines
        self.parts = {host: Parts(work.slab, line) for host, line in lines.items()}
        for line in lines.values():
            self._poll.register(line.sock, select.POLLIN)

    def begin(self) -> None:
        """Each outpost gets the parts of its ranks; then it may fork them."""
        slab, image = self.work.slab, self.work.spec["image"]
        for host, line in self.lines.items():
            if image:
                self._send_parts(self.parts[host], host, image["index_bytes"])
            line.say(("begin", slab.limit_bytes, image))
        self._flush()

    def _send_parts(self, parts: Parts, host: int, index_bytes: int) -> None:
        slab = self.work.slab
        index = slab.read_index(index_bytes)["layout"]
        whole = from_json(index, limit_bytes=slab.limit_bytes)
        parts.send(0, replace(whole, storages=()))
        for rank, its_host in enumerate(self.board.hosts):
            if its_host == host:
                parts.send(0, parted(slab, whole, rank))
        parts.send_index(slab.limit_bytes, index_bytes)

    def hear_all(self) -> None:
        super().hear_all()
        for host, line in self.lines.items():
            if not line.is_over:
                self._hear_line(host, line)
        self._flush()

    def _hear_line(self, host: int, line: Link) -> None:
        why = "its line was closed"
        try:
            for said, body in line.receive(self.parts[host].place):
                if not self.parts[host].take(said, body):
                    self._take_from(said)
        except OSError as error:
            why = error.strerror or str(error)
            line.drop()
        if line.is_over:
            self._is_lost(host, line, why)

    def _take_from(self, said: Said) -> None:
        match said:
            case ("said", rank, message):
                self._take(self.ranks[rank], message)
            case ("gone", rank, code):
                gone = self.ranks[rank]
                gone.is_gone, gone.last = True, gone.last or unsaid(rank, code)

    def _is_lost(self, host: int, line: Link, why: str) -> None:
        self._poll.unregister(line.sock)
        line.sock.close()
        told = f"the connection to its host {host} is lost: {why}"
        for rank in self.ranks:
            if self.board.hosts[rank.number] == host and rank.last is None:
                rank.is_gone = True
                rank.last = {"is": "failed", "cause": "exit", "message": told, "detail": ""}

    def _flush(self) -> None:
        for host, line in self.lines.items():
            if line.is_over:
                continue
            try:
                line.flush()
            except OSError as error:
                line.drop()
                self._is_lost(host, line, error.strerror or str(error))
            else:
                self._poll.register(line.sock, _events(line))


def _events(line: Link) -> int:
    return select.POLLIN | (select.POLLOUT if line.is_waiting else 0)


# --- at an outpost --------------------------------------------------------------------------------


class Outpost:
    """The ranks of this host: forked when home says so, and passed on to what they say."""

    def __init__(
        self,
        work: Work,
        live: Live,
        board: Ground,
        line: Link,
        links: dict[int, socket.socket],
    ) -> None:
        self.work, self.live, self.board = work, live, board
        self.line, self.links = line, links
        self.parts = Parts(work.slab, line)
        self.ranks: dict[int, RankProcess] = {}
        self.bridge_pid = 0

    def run(self) -> int:
        """Until home is done with us, or lost; the exit status."""
        try:
            while not self.line.is_over and not self.work.wire.closed:
                self._wait()
                self.work.wire.receive()  # nothing: home says what is to be done
                for said, body in self.line.receive(self.parts.place):
                    if not self.parts.take(said, body):
                        self._take(said)
                for rank in list(self.ranks.values()):
                    self._hear(rank)
                self.line.flush()
        except OSError as error:
            sys.stderr.write(f"the gang's home is lost: {error}\n")
        finally:
            self._end_all()
        return 0

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.work.wire.fileno(), select.POLLIN)
        poll.register(self.line.sock, _events(self.line))
        for rank in self.ranks.values():
            if not rank.is_gone:
                poll.register(rank.pidfd, select.POLLIN)
            if not rank.wire.closed:
                poll.register(rank.wire.fileno(), select.POLLIN)
        poll.poll()

    # --- what home says ---

    def _take(self, said: Said) -> None:
        match said:
            case ("begin", limit_bytes, image):
                self._begin(limit_bytes, image)
            case ("tell", rank, message) if rank in self.ranks:
                if message["is"] == "kept":
                    self.parts.begin()
                with suppress(OSError):  # it is ending: its exit is heard
                    self.ranks[rank].wire.send(message)

    def _begin(self, limit_bytes: int, image: JSON | None) -> None:
        own = self.work.slab.limit_bytes
        if own != limit_bytes:
            told = (
                f"the hosts of a gang keep images of different lengths: {limit_bytes} bytes at "
                f"home, {own} here (ROUNDHOUSE_HOST_MEMORY_BYTES)"
            )
            said = {"is": "failed", "cause": "exit", "message": told, "detail": "", "step": 0}
            for rank in self.board.here():
                self.line.say(("said", rank, said))
            return
        self.work.spec = {**self.work.spec, "image": image}
        members, self.bridge_pid = _processes(
            self.work, self.live, self.board, [self.line], self.links
        )
        self.ranks = {member.number: member for member in members}

    # --- what ranks say ---

    def _hear(self, rank: RankProcess) -> None:
        for message in rank.wire.receive():
            self._pass_on(rank, message)
        if not rank.is_gone and select.select([rank.pidfd], [], [], 0)[0]:
            for message in rank.wire.receive():
                self._pass_on(rank, message)
            _, status = os.waitpid(rank.pid, 0)
            rank.is_gone = True
            self.line.say(("gone", rank.number, os.waitstatus_to_exitcode(status)))

    def _pass_on(self, rank: RankProcess, message: JSON) -> None:
        if message["is"] == "saving" and message["what"] == "image":
            self._send_image(rank, message["index_bytes"])
        self.line.say(("said", rank.number, message))

    def _send_image(self, rank: RankProcess, index_bytes: int) -> None:
        """It lies still until home says that it is kept."""
        region = rank.region
        layout = from_json(
            rank.part.read_index(index_bytes)["layout"], limit_bytes=region.limit_bytes
        )
        self.parts.send(region.start, layout)
        self.parts.send_index(region.start + region.limit_bytes, index_bytes)

    def _end_all(self) -> None:
        for rank in self.ranks.values():
            if not rank.is_gone:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        if self.bridge_pid:
            with suppress(ProcessLookupError):
                os.kill(self.bridge_pid, signal.SIGKILL)
