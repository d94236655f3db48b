"""Gangs over several hosts: the remote ranks of a gang, and the conductor that speaks with them.

    coordinator: conductor, its ranks, bridge  <- line, link ->  outpost, its ranks, bridge: remote

The coordinator host (`home` in code) runs the gang's conductor. On every other host an outpost
stands in for the conductor as far as possible: it forks the remote ranks there, and forwards their
reports, their output and the orders for them. The conductor does everything else for all ranks of
the gang. So to its supervisor the gang is an ordinary resident with one image. Two connections join
each outpost with the coordinator: the *line*, which this module uses, and the *link* of the two
bridges.

*Image.* The coordinator's slab holds the parts of all ranks. What a remote rank stages is sent to
the coordinator before its report that it is staged. When the gang goes on from an image, the
coordinator first sends each outpost the parts of its ranks. Equal storages, such as those of
replicas, cross once. So an image made on any hosts goes on on any others.

*A change of hosts* works the same way. The new outposts are connected while the ranks still run.
Then all ranks stage at a cut, end, and are forked anew, on all hosts, from the image in the slab.
Nothing of it goes to the store, and the gang holds its slot on the coordinator all the time.

*A change of accelerators* of the coordinator host needs another sandbox, as a sandbox shows the
nodes of certain devices. So the conductor ends, too, with the image in the slab, and the supervisor
starts a new one from there.

*Ends.* If its line ends, an outpost ends its ranks. A gang that loses an outpost fails, with the
host as the cause.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import xxhash

from app.core.model import codec
from workers.graph import remote_blocks
from workers.process.image_layout import Layout, from_json
from workers.process.isolation import sandbox
from workers.process.slab import Slab
from workers.process.task_start import SlabImage
from workers.ranks import host_bridge, shared_memory, turns
from workers.ranks.host_bridge import HOME, Link, ReceivedPlace, Said
from workers.ranks.shared_memory import Arena
from workers.residents.coordinator import JSON, Conductor, RankProcess, Region, fork, parted, unsaid

if TYPE_CHECKING:
    from workers.residents.work import Work

Live = Callable[["Work"], int]

PRINTED_BYTES = 1 << 16  # most bytes of output to read at once
PRINTED_PIECES = 256  # most pieces of output that are kept if the log is not read fast enough
PRINTED_WITHIN_S = 5.0  # seconds to wait for the log at the end, for each piece


def conduct(work: Work, live: Live) -> int:
    """Fork the ranks, each of which runs `live`, and conduct them; returns the exit status.

    The start gives the number of the gang's slots on each host, the coordinator's first, and which
    `host` this is. The coordinator's last file descriptors are the line and the link of each other
    host. An outpost gets its line and link when it is connected.
    """
    if work.start.host != HOME:
        return Outpost(work, live).run()
    home = Home(work, live)
    try:
        home.begin(Seats.taken(work.start.seats, work.fds))
        return home.run()
    finally:
        home.end_all()


@dataclass(frozen=True, slots=True)
class Seats:
    """Describes the slots of a gang: their number on each host, the coordinator's first, and the
    connections.
    """

    numbers: tuple[int, ...]
    lines: dict[int, socket.socket] = field(default_factory=dict)
    links: dict[int, socket.socket] = field(default_factory=dict)
    # True for devices that this sandbox does not show; the connections are for the next one
    are_elsewhere: bool = False

    @staticmethod
    def taken(numbers: Sequence[int], fds: list[int]) -> Seats:
        """Take the connections from the end of `fds`."""
        seats = Seats(tuple(numbers))
        for host in reversed(range(1, len(numbers))):
            seats.links[host] = socket.socket(fileno=fds.pop())
            seats.lines[host] = socket.socket(fileno=fds.pop())
        return seats

    @staticmethod
    def taken_first(numbers: list[int], fds: list[int]) -> Seats:
        """Take the connections from the front of `fds`; the rest belongs to orders that follow."""
        first = 2 * (len(numbers) - 1)
        own, fds[:] = fds[:first], fds[first:]
        return Seats.taken(numbers, own)

    def close(self) -> None:
        for sock in (*self.lines.values(), *self.links.values()):
            sock.close()


def _arena(ranks: int, seats: tuple[int, ...], host: int) -> Arena:
    """Create an arena on this host, with the ranks assigned to slots."""
    hosts = turns.hosts_of(ranks, seats) if len(seats) > 1 else ()
    board = Arena(shared_memory.make(ranks, hosts, host))
    turns.seat_all(board, sum(seats))
    return board


def _fork_all(
    work: Work, live: Live, board: Arena, not_theirs: list[socket.socket]
) -> dict[int, RankProcess]:
    """Fork the ranks of this host; `not_theirs` are sockets that no rank may hold."""
    ranks, held = work.spec.world_size, tuple(sock.fileno() for sock in not_theirs)
    before = sum(work.start.seats[: board.host])  # slots of the hosts before this one
    slots = {rank: turns.slot_of(board, rank) - before for rank in board.here()}
    return {
        rank: fork(
            *(work, live, board.handles, rank, slot),
            *(Region.of(rank, ranks, work.slab.limit_bytes), held),
        )
        for rank, slot in slots.items()
    }


def _fork_bridge(
    work: Work, board: Arena, lines: list[socket.socket], links: dict[int, socket.socket]
) -> int:
    """Fork the bridge and return its process id.

    After this only the bridge may use the links.
    """
    pid = os.fork()
    if not pid:
        status = 1
        try:
            sandbox.die_with_parent()
            work.wire.close()
            for line in lines:
                line.close()
            joins = remote_blocks if work.is_graph else host_bridge
            status = joins.main(board, links)
        except BaseException:
            traceback.print_exc()  # goes to the job's log
        finally:
            os._exit(status)
    for sock in links.values():
        sock.close()
    return pid


def _end(ranks: Iterable[RankProcess], bridge_pid: int) -> None:
    """Kill the ranks and the bridge, and wait until they are gone."""
    for rank in ranks:
        if not rank.is_gone:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
        os.close(rank.pidfd)
        rank.wire.close()
    if bridge_pid:
        with suppress(ProcessLookupError):
            os.kill(bridge_pid, signal.SIGKILL)
        os.waitpid(bridge_pid, 0)


# --- parts of an image ----------------------------------------------------------------------------


class ImageParts:
    """Sends and takes parts of images over one line: a part has the same offset in the slabs of
    both ends.
    """

    def __init__(self, slab: Slab, line: Link) -> None:
        self.slab, self.line = slab, line
        self._crossed: dict[tuple[bytes, int], int] = {}  # (digest, size) -> its offset in the slab

    def begin(self) -> None:
        """Start a new image; bytes that crossed before belong to another one."""
        self._crossed.clear()

    def send(self, start: int, layout: Layout) -> None:
        """Send a layout's bytes, which must not change until they are sent.

        `start` is added to all offsets.
        """
        for extent in (layout.graph, *layout.storages):
            view, offset = self.slab.view(start + extent.offset, extent.size), start + extent.offset
            equal = self._crossed.setdefault((xxhash.xxh3_128_digest(view), extent.size), offset)
            if equal == offset:
                self.line.say(("part", offset), view)
            else:
                self.line.say(("copy", offset, extent.size, equal))

    def send_index(self, start: int, size: int) -> None:
        """Send the index of an image, or of a rank's part; it lies behind the content in the
        slab.
        """
        self.line.say(("index", start), memoryview(os.pread(self.slab.fd, size, start)))

    def place(self, said: Said, size: int) -> ReceivedPlace:
        if said[0] == "part":
            return ReceivedPlace(self._view(said[1], size))
        return ReceivedPlace(memoryview(bytearray(size)))

    def take(self, said: Said, body: ReceivedPlace | None) -> bool:
        """Store the part of an image that a message carries; False if the message carries none.

        Raises OSError for offsets that are outside the slab.
        """
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


# --- on the coordinator host ---------------------------------------------------------------------


class _Away:
    """Takes the place of a remote rank's wire in the conductor; sends orders over the line."""

    def __init__(self, line: Link, rank: int) -> None:
        self.line, self.rank = line, rank

    def send(self, message: JSON) -> None:
        self.line.say(("tell", self.rank, message))


class Home(Conductor):
    """Conducts a gang that may have remote ranks.

    `wanted` are the slots to which the gang is to change. `changes` is True from the cut until the
    ranks run on those slots. Orders that arrive meanwhile wait in `later`.
    """

    def __init__(self, work: Work, live: Live) -> None:
        super().__init__(work)
        image = work.start.image
        self.live = live
        self.lines: dict[int, Link] = {}
        self.parts: dict[int, ImageParts] = {}
        self.bridge_pid = 0
        self.wanted: Seats | None = None
        self.changes = work.start.goes_on
        # True for a change by a "go" order, which needs no "resized" report
        self.is_silent = False
        self.has_left = False  # True once the image is ready for the next sandbox
        # True if the worker of a host stops: the gang then ends when the image of the cut is stored
        self.is_left = False
        self.has_begun = work.start.goes_on  # True once the gang has run on its slots
        # True once all ranks are off their slots; then no rank begins to send an output
        self.is_off = True
        # the step after which all ranks stand during a pause or a change; -1 before that
        self.stand_at = image.step if image is not None and work.start.goes_on else -1
        self.later: list[JSON] = []
        self.printed = Printed()

    def begin(self, seats: Seats) -> None:
        """Fork the ranks of this host.

        An outpost forks its own ranks once it has received their parts of the image.
        """
        self.seats = seats.numbers
        ranks, work = self.work.spec.world_size, self.work
        board = _arena(ranks, seats.numbers, HOME)
        socks = [*seats.lines.values(), *seats.links.values()]
        members = _fork_all(work, self.live, board, socks)
        if seats.lines:
            self.bridge_pid = _fork_bridge(work, board, list(seats.lines.values()), seats.links)
        self.lines = {host: Link(host, sock) for host, sock in seats.lines.items()}
        self.parts = {host: ImageParts(work.slab, line) for host, line in self.lines.items()}
        for rank in range(ranks):
            if rank not in members:
                members[rank] = self._far(rank, self.lines[board.hosts[rank]])
        self.take_up(board, [members[rank] for rank in range(ranks)])
        for host, line in self.lines.items():
            self.poll.register(line.sock, select.POLLIN)
            self._brief(host, line)
        self._flush()

    def _far(self, rank: int, line: Link) -> RankProcess:
        region = Region.of(rank, self.work.spec.world_size, self.work.slab.limit_bytes)
        wire: Any = _Away(line, rank)
        return RankProcess(rank, 0, -1, wire, region, region.slab(self.work.slab.fd))

    def _brief(self, host: int, line: Link) -> None:
        slab, image = self.work.slab, self.work.start.image
        if image is not None:
            self._send_parts(self.parts[host], host, image.index_bytes)
        line.say(("begin", slab.limit_bytes, codec.to_json(image)))

    def _send_parts(self, parts: ImageParts, host: int, index_bytes: int) -> None:
        slab = self.work.slab
        index = slab.read_index(index_bytes)["layout"]
        whole = from_json(index, limit_bytes=slab.limit_bytes)
        parts.send(0, replace(whole, storages=()))
        for rank, its_host in enumerate(self.board.hosts):
            if its_host == host:
                parts.send(0, parted(slab, whole, rank))
        parts.send_index(slab.limit_bytes, index_bytes)

    def end_all(self) -> None:
        self.printed.write(PRINTED_WITHIN_S)
        _end(self.here, self.bridge_pid)
        self.bridge_pid = 0
        for line in self.lines.values():
            line.sock.close()

    # --- a change of hosts ---

    def order(self, message: JSON) -> None:
        self._take_connections(message)
        match message["is"]:
            case "kept" | "leave" | "return" | "block":
                super().order(message)
            case _ if self.changes:
                self.later.append(message)
            case "resize" if self.lines or len(message["seats"]) > 1 or message.get("elsewhere"):
                self._want(message["to"])
            case "go" if message["linked"] or (self.lines and len(message["seats"]) == 1):
                self._go_to(message["to"])
            case _:
                super().order(message)

    def _take_connections(self, message: JSON) -> None:
        """Take the connections that came with an order, even if the order itself must wait."""
        if message["is"] not in ("resize", "go") or "to" in message:
            return
        seats = message["seats"]
        if message.get("elsewhere"):
            message["to"] = Seats(tuple(seats), are_elsewhere=True)
        elif message["is"] == "resize" or message["linked"]:
            message["to"] = Seats.taken_first(seats, self.work.wire.fds)
        else:
            message["to"] = Seats(tuple(seats))

    def go(self, seats: list[int]) -> None:
        self.has_begun, self.is_off = True, False
        super().go(seats)

    def _want(self, seats: Seats) -> None:
        self._want_no_more()
        if self.is_seated:
            self.wanted = seats
            self.ask({"is": "change"})
        else:
            seats.close()

    def _go_to(self, seats: Seats) -> None:
        """Move the gang to other hosts, out of a pause or before it has begun."""
        self.wanted, self.changes, self.is_silent = seats, True, True
        if self.has_begun and self.stand_at != self.saved_step:
            self.tell({"is": "save"}, self.ranks)

    def _want_no_more(self) -> None:
        if self.wanted is not None:
            self.wanted.close()
        self.wanted = None

    def at_cut(self, step: int, asked: dict[str, JSON], here: list[RankProcess]) -> None:
        self.is_left = asked.pop("leave", None) is not None
        changes = asked.pop("change", None) is not None and not self.is_left
        if asked.keys() & {"pause", "cancel"} or not (changes or self.is_left):
            self.is_left = False
            self._want_no_more()
            super().at_cut(step, asked, here)
            return
        self.changes, self.is_seated, self.stand_at = True, False, step
        self.later += asked.values()
        self.tell({"is": "pause"}, here)
        if step != self.saved_step:
            self.tell({"is": "save"}, here)

    def together(self, word: str, said: list[JSON]) -> None:
        match word:
            case "prepared" if self.changes:
                self._go_on(said[0]["step"])
            case "paused" if self.changes:
                self.is_off = True
            case "paused":
                self.is_off = True
                self.stand_at = said[0]["step"]
                for line in self.lines.values():
                    line.say(("off", self.stand_at))
                super().together(word, said)
            case "saving" if self.changes and not self.is_left:
                self.write_index(said)
                self.is_saving = False  # the supervisor does not keep this image
            case _:
                super().together(word, said)

    def keep_time(self) -> None:
        lies = not self.has_begun or self.saved_step == self.stand_at
        busy = self.is_saving or self.leaving or not self.is_off
        if self.changes and self.wanted is not None and lies and not busy:
            seats, self.wanted = self.wanted, None
            self._begin_again(seats)
        super().keep_time()

    def _begin_again(self, seats: Seats) -> None:
        """End all ranks and fork them on the new hosts, or leave that to the next sandbox.

        At this point all ranks are still, and the image is in the slab.
        """
        if seats.are_elsewhere:
            self.has_left = True
            return
        for fd in (fd for rank in self.here for fd in (rank.wire.fileno(), rank.pidfd)):
            self.poll.unregister(fd)
        for line in self.lines.values():
            if not line.is_over:
                self.poll.unregister(line.sock)
        before = self.ranks
        self.end_all()
        shared_memory.close(self.board.handles)
        if self.has_begun:
            image = SlabImage(step=self.stand_at, index_bytes=self.index_bytes, is_kept=False)
            self.work.start = replace(self.work.start, image=image)
        self.saved_step = -1
        self.begin(seats)
        for rank in self.ranks:
            rank.progress = before[rank.number].progress

    def _go_on(self, step: int) -> None:
        self.changes = False
        self.go(list(self.seats))
        if not self.is_silent:
            self.work.say("resized", seats=list(self.seats), step=step)
        self.is_silent = False
        later, self.later = self.later, []
        for message in later:
            self.order(message)

    def look_in_ms(self) -> float:
        return 0 if self.has_left else super().look_in_ms()

    def take(self, rank: RankProcess, message: JSON) -> None:
        if message["is"] == "unsaved" and self.changes:
            self._want_no_more()  # the rank reports the reason when it runs again
            self.changes, self.is_seated, self.is_off = False, True, False
            self.tell({"is": "go"}, self.ranks)
        super().take(rank, message)

    # --- lines ---

    def hear_all(self) -> None:
        super().hear_all()
        for host, line in self.lines.items():
            if not line.is_over:
                self._hear_line(host, line)
        self._flush()
        self.printed.write()

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
                self.take(self.ranks[rank], message)
            case ("printed", fd, data):
                self.printed.add(fd, data)
            case ("leaves",) if self.is_seated:
                self.ask({"is": "leave"})
            case ("gone", rank, code):
                gone = self.ranks[rank]
                gone.is_gone, gone.last = True, gone.last or unsaid(rank, code)

    def _is_lost(self, host: int, line: Link, why: str) -> None:
        self.poll.unregister(line.sock)
        line.sock.close()
        told = f"the connection to its host {host} is lost: {why}"
        for rank in self.ranks:
            if self.board.hosts[rank.number] == host and rank.last is None:
                rank.is_gone = True
                rank.last = {**_fault(told), "step": self.step()}

    def last_word(self) -> JSON | None:
        """Return how the gang ended, or that it goes on in another sandbox.

        If a host is lost, that is the cause. Without the host the bridges fail too, and ranks may
        hear of their failure first.
        """
        if self.has_left:
            about = {"step": self.stand_at, "index_bytes": self.index_bytes}
            return {"is": "left", "came": [*self.came], **about}
        if self.is_left and self.saved_step == self.stand_at and not self.is_saving:
            told = "one of its hosts is stopping; no step is lost"
            return {**_fault(told), "step": self.stand_at}
        word = super().last_word()
        if word and word["is"] == "failed" and any(line.is_over for line in self.lines.values()):
            return {**word, "cause": "host"}
        return word

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
                self.poll.register(line.sock, _events(line))


def _fault(told: str) -> JSON:
    """Return the final report of a gang that lost a host."""
    return {"is": "failed", "cause": "host", "message": told, "detail": ""}


def _events(line: Link) -> int:
    return select.POLLIN | (select.POLLOUT if line.is_waiting else 0)


class Printed:
    """Buffers the output of remote ranks on its way to the job's log.

    Writing to the buffer never blocks the gang.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._dropped = 0

    def add(self, fd: int, data: bytes) -> None:
        """Add output; some is dropped if it comes faster than the log is read."""
        if len(self._pieces) >= PRINTED_PIECES:
            self._dropped += len(data)
            return
        if self._dropped:
            told = f"… {self._dropped} bytes dropped: printed faster than they are kept\n"
            self._pieces.append((2, told.encode()))
            self._dropped = 0
        size = select.PIPE_BUF  # a pipe takes this many bytes completely or not at all
        self._pieces.extend((fd, data[at : at + size]) for at in range(0, len(data), size))

    def write(self, timeout_s: float = 0.0) -> None:
        """Write as much as the log takes, waiting up to `timeout_s` for each piece."""
        while self._pieces:
            fd, piece = self._pieces[0]
            if not select.select([], [fd], [], timeout_s)[1]:
                return
            os.write(fd, piece)
            self._pieces.popleft()


# --- on an outpost --------------------------------------------------------------------------------


class Outpost:
    """Runs the remote ranks of this host: forks them on request, and forwards their reports."""

    line: Link
    links: dict[int, socket.socket]

    def __init__(self, work: Work, live: Live) -> None:
        self.work, self.live = work, live
        self.board = _arena(work.spec.world_size, work.start.seats, work.start.host)
        self.ranks: dict[int, RankProcess] = {}
        self.bridge_pid = 0
        self.brief: Said = ()  # arguments of the "begin" message, until they are used
        self.is_seated = False  # True once this host's slot is free for the gang
        self.round = 0  # as `Conductor.round`
        # read end of a pipe with the ranks' output -> the rank's file descriptor (1 or 2)
        self.printed: dict[int, int] = {}

    def run(self) -> int:
        """Serve until the coordinator no longer needs this outpost, or is lost.

        Returns the exit status.
        """
        self.work.say("prepared", preset={}, capabilities=[])
        try:
            if self._is_linked():
                # Close the line before the bridge ends: the coordinator must learn that this host
                # is gone before its own ranks fail because of that.
                with self.line.sock:
                    self._serve()
        except OSError as error:
            sys.stderr.write(f"the coordinator host of the gang is lost: {error}\n")
        finally:
            _end(self.ranks.values(), self.bridge_pid)
        return 0

    def _is_linked(self) -> bool:
        """Wait for the connections to the coordinator.

        Returns False if the supervisor will never make them.
        """
        wire = self.work.wire
        while not wire.closed and not wire.fds:
            wire.wait()
            self._take_orders()
        if not wire.fds:
            return False
        sockets = Seats.taken([0, 0], wire.fds)  # there is one other host: the coordinator
        self.line, self.links = Link(HOME, sockets.lines[1]), {HOME: sockets.links[1]}
        self.parts = ImageParts(self.work.slab, self.line)
        return True

    def _take_orders(self) -> None:
        """Handle the supervisor's orders.

        Few orders come this way; all others go through the coordinator.
        """
        for order in self.work.wire.receive():
            self.is_seated |= order["is"] == "go"
            if order["is"] == "pause" and self.ranks:
                self.line.say(("leaves",))  # this host's worker stops

    def _serve(self) -> None:
        while not self.line.is_over and not self.work.wire.closed:
            self._wait()
            self._take_orders()
            for said, body in self.line.receive(self.parts.place):
                if not self.parts.take(said, body):
                    self._take(said)
            if self.brief and self.is_seated:
                self._begin()
            self._pass_on_printed()
            for rank in list(self.ranks.values()):
                self._hear(rank)
            self.line.flush()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.work.wire.fileno(), select.POLLIN)
        poll.register(self.line.sock, _events(self.line))
        for rank in self.ranks.values():
            if not rank.is_gone:
                poll.register(rank.pidfd, select.POLLIN)
            if not rank.wire.closed:
                poll.register(rank.wire.fileno(), select.POLLIN)
        if not self.line.is_waiting:  # otherwise ranks that print would wait, too
            for fd in self.printed:
                poll.register(fd, select.POLLIN)
        poll.poll()

    # --- messages of the coordinator ---

    def _take(self, said: Said) -> None:
        match said:
            case ("begin", *brief):
                self.brief = tuple(brief)
            # the next task may use the slot while our part of the image is being stored
            case ("off", step):
                self.work.say("paused", has_state=True, step=step)
            case ("tell", rank, message) if rank in self.ranks:
                if message["is"] in ("kept", "call_off"):
                    self.round = message.get("round", self.round)
                    self.parts.begin()
                with suppress(OSError):  # the rank is ending; its exit is noticed elsewhere
                    self.ranks[rank].wire.send(message)

    def _begin(self) -> None:
        (limit_bytes, image), self.brief = self.brief, ()
        if (own := self.work.slab.limit_bytes) != limit_bytes:
            told = (
                f"the hosts of a gang keep images of different lengths: {limit_bytes} bytes at "
                f"home, {own} here (ROUNDHOUSE_HOST_MEMORY_BYTES)"
            )
            said = {"is": "failed", "cause": "exit", "message": told, "detail": "", "step": 0}
            for rank in self.board.here():
                self.line.say(("said", rank, said))
            return
        found = codec.from_json(SlabImage, image) if image else None
        self.work.start = replace(self.work.start, image=found)
        self._redirect()
        sockets = [self.line.sock, *self.links.values()]
        self.ranks = _fork_all(self.work, self.live, self.board, sockets)
        self.bridge_pid = _fork_bridge(self.work, self.board, [self.line.sock], self.links)

    def _redirect(self) -> None:
        """Redirect standard output and error into pipes that are forwarded to the coordinator."""
        for fd in (1, 2):
            reads, writes = os.pipe()
            os.set_blocking(reads, False)
            os.dup2(writes, fd)
            os.close(writes)
            self.printed[reads] = fd

    def _pass_on_printed(self) -> None:
        """Forward the output so far.

        Call it before a rank's report, so that output and report keep their order.
        """
        for reads, fd in self.printed.items():
            with suppress(BlockingIOError):
                while data := os.read(reads, PRINTED_BYTES):
                    self.line.say(("printed", fd, data))

    # --- reports of ranks ---

    def _hear(self, rank: RankProcess) -> None:
        for message in rank.wire.receive():
            self._pass_on(rank, message)
        if not rank.is_gone and select.select([rank.pidfd], [], [], 0)[0]:
            for message in rank.wire.receive():
                self._pass_on(rank, message)
            _, status = os.waitpid(rank.pid, 0)
            rank.is_gone = True
            self._pass_on_printed()
            self.line.say(("gone", rank.number, os.waitstatus_to_exitcode(status)))

    def _pass_on(self, rank: RankProcess, message: JSON) -> None:
        self._pass_on_printed()
        is_image = message["is"] == "saving" and message["what"] == "image"
        if is_image and message["round"] == self.round:  # otherwise the image has been called off
            self._send_image(rank, message["index_bytes"])
        self.line.say(("said", rank.number, message))

    def _send_image(self, rank: RankProcess, index_bytes: int) -> None:
        """Send a rank's staged image.

        The image does not change until the coordinator says that it is stored.
        """
        region = rank.region
        layout = from_json(
            rank.part.read_index(index_bytes)["layout"], limit_bytes=region.limit_bytes
        )
        self.parts.send(region.start, layout)
        self.parts.send_index(region.start + region.limit_bytes, index_bytes)
