"""The bridge: one process per host that joins the ranks of a gang that lives on several hosts.

    host 0                                          host 1
    arena, ranks 0 1 2, bridge  <- one TCP connection ->  bridge, ranks 3 4, arena

Each host has a shared memory arena of its own, with room for all ranks. A bridge repeats in its
arena what the ranks of other hosts do in theirs, in the same order: it puts their contributions to
a call into the heap, and marks them as arrived. So a rank deals with remote ranks as with its
neighbours, and needs no slot on their hosts.

*Sums.* The ranks of a host fold up the tree as far as all branches lie there. Their sums then cross
once, and each bridge folds the rest along the same tree. So the result has the same bits as on one
host.

*Order.* Host 0 is the gang's coordinator (`home` in code). The other hosts are connected only to
it, and it forwards messages between them. All hosts apply changes of the store in the order in
which the coordinator applied them.

*Deadlock.* The coordinator detects ranks that wait for each other across hosts. All ranks of each
host must wait, and each host must have received everything sent to it. The host must have said so
in a report that comes after everything else it sent.

*The cut.* A host that is called to a cut lets none of its ranks begin a step, and answers with a
step that none has begun. The coordinator picks the latest of these steps.

*Ends.* The first failure anywhere is sent to all ranks everywhere. A broken connection is a
failure. A bridge reports when all ranks of its host have ended. It exits when the ranks of the
other hosts have ended too.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from workers.ranks import turns
from workers.ranks.kv_store import Change, Keys
from workers.ranks.rendezvous import (
    BRIDGE_WAITS,
    CallView,
    Group,
    RemoteMembers,
    branches,
    group_key,
)
from workers.ranks.shared_memory import TOLD_LIMIT_BYTES, Arena
from workers.ranks.turns import GangFailed, RankState, Turns, Wait

HOME = 0
QUIET_S = 0.05  # seconds without any message before the bridge checks for a deadlock
READ_BYTES = 1 << 18
#: TCP keepalive: seconds of silence before and between probes; number of probes; seconds until a
#: peer that does not answer counts as lost.
KEEPALIVE_S, KEEPALIVES, UNANSWERED_S = 5, 3, 20

Said = tuple[Any, ...]  # (what, ...): a message of plain values only
_LENGTHS = struct.Struct("!IQ")  # sizes of the message, and of the bytes that follow it
_HEADER_LIMIT_BYTES = 2 * TOLD_LIMIT_BYTES
_UNCOUNTED = ("still", "bye", "fail")


@dataclass(frozen=True, slots=True)
class ReceivedPlace:
    """Describes memory for received bytes: a part of the heap at `offset`, or private memory
    (offset -1).
    """

    view: memoryview
    offset: int = -1


# --- one connection -------------------------------------------------------------------------------


class Link:
    """A connection to another host; nothing here blocks."""

    def __init__(self, host: int, sock: socket.socket) -> None:
        self.host, self.sock = host, sock
        self.sent = self.heard = 0  # number of messages that may make ranks move
        # the peer's last "still" report; None if another message has come since
        self.still: Said | None = None
        self.has_failed = False  # True if the peer reported a failure
        self.has_ended = False  # True if all its ranks have ended without failure
        self.is_over = False  # True if the peer will send nothing more
        self._out: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._in = bytearray()
        self._header: Said | None = None
        self._into: ReceivedPlace | None = None
        self._filled = 0
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _must_answer(sock)

    def say(
        self, said: Said, body: memoryview | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """Queue a message; `body` must not change until `then` is called."""
        self.sent += said[0] not in _UNCOUNTED
        header = marshal.dumps(said)
        head = _LENGTHS.pack(len(header), len(body) if body else 0) + header
        self._out.append((memoryview(head), None if body else then))
        if body:
            self._out.append((body, then))

    @property
    def is_still(self) -> bool:
        """True if the peer's ranks all wait, and have received everything that was sent to them."""
        return self.still is not None and self.still[1] == self.sent

    @property
    def is_waiting(self) -> bool:
        """True if messages wait to be sent."""
        return bool(self._out)

    def flush(self) -> None:
        """Send as much as the socket takes now; raises OSError."""
        while self._out:
            piece, then = self._out[0]
            try:
                sent = self.sock.send(piece)
            except BlockingIOError:
                return
            if sent < len(piece):
                self._out[0] = piece[sent:], then
                continue
            self._out.popleft()
            if then is not None:
                then()

    def finish(self) -> None:
        """Close the sending side: nothing more will be said."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        """Mark the connection as broken and drop what was queued."""
        self.is_over = True
        self._out.clear()

    def receive(
        self, place: Callable[[Said, int], ReceivedPlace]
    ) -> Iterator[tuple[Said, ReceivedPlace | None]]:
        """Yield complete messages; `place` returns memory for bytes that follow. Raises OSError."""
        while True:
            if self._header is None:
                if not (self._has_begun(place) or self._read()):
                    return
            elif self._into is not None and self._filled < len(self._into.view):
                if not self._fill(self._into.view):
                    return
            else:
                said, body = self._header, self._into
                self._header = self._into = None
                self.heard += said[0] not in _UNCOUNTED
                self.still = None
                yield said, body

    def _has_begun(self, place: Callable[[Said, int], ReceivedPlace]) -> bool:
        """True if a complete header has come; it is then stored in `_header`."""
        if len(self._in) < _LENGTHS.size:
            return False
        length, body = _LENGTHS.unpack_from(self._in)
        if length > _HEADER_LIMIT_BYTES:
            raise OSError(f"host {self.host} said {length} bytes at once, which no bridge does")
        end = _LENGTHS.size + length
        if len(self._in) < end:
            return False
        self._header = marshal.loads(self._in[_LENGTHS.size : end])
        del self._in[:end]
        if body:
            self._into = place(self._header, body)
            self._filled = min(len(self._in), body)
            self._into.view[: self._filled] = self._in[: self._filled]
            del self._in[: self._filled]
        return True

    def _read(self) -> bool:
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        self.is_over = not data
        self._in += data
        return bool(data)

    def _fill(self, into: memoryview) -> bool:
        try:
            size = self.sock.recv_into(into[self._filled :])
        except BlockingIOError:
            return False
        self.is_over = not size
        self._filled += size
        return bool(size)


def _must_answer(sock: socket.socket) -> None:
    """Turn on TCP keepalive, so that a host that vanishes silently is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_S * 1000)


# --- groups and calls that cross ------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """Tracks a call of a group over several hosts, until all members have made it and everything is
    sent.
    """

    ticket: CallView
    fold: str = ""
    here: int = 0  # number of arrived members of this host
    there: int = 0  # number of arrived members of other hosts
    unsent: int = 0  # number of pieces of the heap that are still being sent
    sums: dict[int, int] = field(default_factory=dict)  # node -> the member that holds its sum


@dataclass(slots=True)
class _Crossing:
    """Tracks a group with members on this host and on others; `key` is its name between bridges."""

    key: int
    group: Group
    here: int  # number of members on this host; `there` on other hosts
    there: int
    calls: dict[int, _Call] = field(default_factory=dict)
    # messages that wait for a free call slot
    held: deque[tuple[Said, ReceivedPlace | None]] = field(default_factory=deque)
    left_here: int = 0
    left_there: int = 0
    unsent: int = 0  # number of "close" messages that are still being sent


class Bridge:
    """The bridge of one host for one gang.

    `links` has a connection to each other host on the coordinator, and elsewhere only the one to
    the coordinator.
    """

    def __init__(self, arena: Arena, links: dict[int, socket.socket]) -> None:
        self.arena, self.host = arena, arena.host
        self.words = arena.words
        self.turns = Turns(arena, arena.here()[0])
        self.abroad, self.keys = RemoteMembers(self.turns), Keys(self.turns)
        self.links = {host: Link(host, sock) for host, sock in links.items()}
        self.crossings: dict[int, _Crossing] = {}  # by key
        self.by_index: dict[int, _Crossing] = {}
        self.hosts: dict[int, set[int]] = {}  # key of any group -> the hosts of its members
        self.is_ending = self.has_failed = self.has_told_still = False
        self.cut: dict[int, int] | None = None  # on the coordinator: the hosts' answers so far
        self.in_cut = False
        self.must_hold = False  # True from a call to a cut until it is answered

    def run(self) -> None:
        """Run until the gang ends, well or not."""
        self.arena.bridge_comes()
        while not self.is_done:
            if not self._wait() and not self.has_failed:
                self._is_quiet()
            self._hear_ranks()
            for link in self.links.values():
                self._hear(link)
            self.look()
            for link in self.links.values():
                self._flush(link)

    @property
    def is_home(self) -> bool:
        return self.host == HOME

    @property
    def is_done(self) -> bool:
        over = all(link.is_over and not link.is_waiting for link in self.links.values())
        return self.is_ending and over

    # --- the loop ---

    def _wait(self) -> bool:
        """Wait for messages and events.

        Returns False if nothing has come for QUIET_S and all ranks of this host stood still.
        """
        poll, bell = select.poll(), self.arena.handles.bells[self.arena.bridge]
        poll.register(bell, select.POLLIN)
        poll.register(self.arena.handles.outbox[1], select.POLLIN)
        for link in self.links.values():
            events = 0 if link.is_over else select.POLLIN
            events |= select.POLLOUT if link.is_waiting else 0
            if events:
                poll.register(link.sock, events)
        quiet = turns.are_still(self.arena) and not self.has_told_still and not self.has_failed
        come = poll.poll(QUIET_S * 1000 if quiet else None)
        if any(fd == bell for fd, _ in come):
            os.eventfd_read(bell)
            self.has_told_still = False
        return bool(come)

    def _hear(self, link: Link) -> None:
        try:
            for said, body in link.receive(self.place):
                self.take(link, said, body)
                self.has_told_still = False
        except OSError as error:
            self._is_lost(link, error.strerror or str(error))
        else:
            if link.is_over and not (link.has_failed or link.has_ended):
                self._is_lost(link, "it was closed")

    def _flush(self, link: Link) -> None:
        try:
            link.flush()
        except OSError as error:
            self._is_lost(link, error.strerror or str(error))
        if self.is_ending and not link.is_waiting:
            link.finish()

    def _is_lost(self, link: Link, why: str) -> None:
        link.drop()
        if self.has_failed or self.is_ending:
            return
        ranks = ", ".join(map(str, self._ranks_of(link)))
        turns.fail(
            self.arena, f"the connection to host {link.host}, of rank {ranks}, is lost: {why}"
        )

    def _ranks_of(self, link: Link) -> list[int]:
        return [rank for rank, host in enumerate(self.arena.hosts) if host == link.host]

    def look(self) -> None:
        """Check the arena for a failure, a cut, room for messages that were held back, and
        the end.
        """
        if not self.has_failed and (text := turns.failure(self.arena)):
            self._has_failed(text)
        if self.has_failed:
            return
        self.look_at_cut()
        self._try_again()
        if not self.is_ending and self._all_have_ended():
            self._hear_ranks()  # the ranks' last messages; nothing comes after them
            self.is_ending = True
            for link in self.links.values():
                link.say(("bye",))

    def _has_failed(self, text: str) -> None:
        self.has_failed = self.is_ending = True
        for link in self.links.values():
            if not link.has_failed:
                link.say(("fail", text))

    def _all_have_ended(self) -> bool:
        if self.is_home and not all(link.has_ended for link in self.links.values()):
            return False  # the other hosts may need us to forward messages
        return all(turns.state(self.arena, r) == RankState.DONE for r in self.arena.here())

    # --- what ranks of this host do ---

    def _hear_ranks(self) -> int:
        """Handle all messages of this host's ranks; returns their number."""
        told = 0
        while True:
            try:
                data = os.read(self.arena.handles.outbox[1], TOLD_LIMIT_BYTES)
            except BlockingIOError:
                return told
            self.hear_rank(marshal.loads(data))
            self.has_told_still = False
            told += 1

    def hear_rank(self, said: Said) -> None:
        if self.has_failed:
            return
        match said:
            case ("open", index, name, members):
                self.by_index[index] = crossing = self._opened(name, members)
                self._say(crossing, ("open", name, members))
            case ("post", index, number, me, text, fold, shapes):
                self._posted(self.by_index[index], number, me, text, fold, shapes)
            case ("close", index):
                self._left(self.by_index[index])
            case ("change", rank, number, change) if self.is_home:
                self._change(rank, number, change)
            case ("change", *_):
                self.links[HOME].say(said)

    def _posted(
        self, crossing: _Crossing, number: int, me: int, text: str, fold: str, shapes: Any
    ) -> None:
        call = self._call(crossing, number, fold, shapes)
        call.here += 1
        body = None if fold else self.abroad.brought(self._ticket(crossing, number, me))
        said = ("post", crossing.key, number, me, text, fold, shapes)
        call.unsent += self._say(crossing, said, body, self._sent(crossing, call))
        if fold and call.here == crossing.here:
            self._send_sums(crossing, call)
        self._advance(crossing, call)

    def _send_sums(self, crossing: _Crossing, call: _Call) -> None:
        """Send the partial sums of the tree nodes whose leaves are all on this host."""
        number = call.ticket.number
        for node, host in branches(crossing.group.hosts).tops:
            if host == self.host:
                call.sums[node] = holder = self.abroad.holder(call.ticket, node)
                total = self.abroad.brought(self._ticket(crossing, number, holder))
                said = ("sum", crossing.key, number, node, holder)
                call.unsent += self._say(crossing, said, total, self._sent(crossing, call))

    def _sent(self, crossing: _Crossing, call: _Call) -> Callable[[], None]:
        def then() -> None:
            call.unsent -= 1
            self._advance(crossing, call)

        return then

    def _left(self, crossing: _Crossing) -> None:
        def then() -> None:
            crossing.unsent -= 1
            self._try_to_close(crossing)

        crossing.left_here += 1
        crossing.unsent += self._say(crossing, ("close", crossing.key), then=then)

    def _say(
        self,
        crossing: _Crossing,
        said: Said,
        body: memoryview | None = None,
        then: Callable[[], None] | None = None,
    ) -> int:
        """Send to the hosts of the group's other members; returns the number of connections
        used.
        """
        links = self._links_to(set(crossing.group.hosts))
        for link in links:
            link.say(said, body, then)
        return len(links)

    def _links_to(self, hosts: set[int]) -> list[Link]:
        """Return the connections to use; the coordinator forwards messages between other hosts."""
        if self.is_home:
            return [self.links[host] for host in sorted(hosts - {self.host})]
        return [self.links[HOME]]

    # --- what comes from other hosts ---

    def place(self, said: Said, size: int) -> ReceivedPlace:
        if said[1] in self.crossings:
            offset = self.abroad.exchange.heap.piece(size)
            return ReceivedPlace(self.arena.view(offset, size), offset)
        return ReceivedPlace(memoryview(bytearray(size)))

    def take(self, link: Link, said: Said, body: ReceivedPlace | None) -> None:
        match said:
            case ("fail", text):
                link.has_failed = True
                turns.fail(self.arena, text)
            case ("bye",):
                link.has_ended = True
            case _ if self.has_failed:
                pass
            case ("still", *_):
                link.still = said
            case ("give up",):
                self.abroad.give_up_votes()
            case ("open" | "post" | "sum" | "close", *_):
                self._take_of_group(link, said, body)
            case ("change", rank, number, change):
                self._change(rank, number, change)
            case ("changed", rank, number, change):
                self._changed(rank, number, change)
            case _:
                self._take_of_cut(link, said)

    def _take_of_group(self, link: Link, said: Said, body: ReceivedPlace | None) -> None:
        if said[0] == "open":
            _, name, members = said
            key = group_key(name, members)
            self.hosts[key] = {self.arena.hosts[member] for member in members}
            self._pass_on(link, key, said, None)
            if self.host in self.hosts[key]:
                self._opened(name, members)
            return
        key = said[1]
        self._pass_on(link, key, said, body)
        if key in self.crossings:
            self._come(self.crossings[key], said, body)

    def _pass_on(self, link: Link, key: int, said: Said, body: ReceivedPlace | None) -> None:
        others = self._links_to(self.hosts[key] - {link.host}) if self.is_home else []
        then = None
        if others and body and key in self.crossings:
            crossing = self.crossings[key]
            call = self._call(crossing, said[2])
            call.unsent += len(others)
            then = self._sent(crossing, call)
        for other in others:
            other.say(said, body.view if body else None, then)

    def _opened(self, name: str, members: tuple[int, ...]) -> _Crossing:
        key = group_key(name, members)
        self.hosts[key] = {self.arena.hosts[member] for member in members}
        if key not in self.crossings:
            index = self.abroad.exchange.index(name, members)
            hosts = self.abroad.exchange.hosts_of(members)
            group = Group(name=name, index=index, members=members, me=0, hosts=hosts)
            here = hosts.count(self.host)
            self.crossings[key] = _Crossing(key, group, here, len(hosts) - here)
        return self.crossings[key]

    def _come(self, crossing: _Crossing, said: Said, body: ReceivedPlace | None) -> None:
        if crossing.held or not self._is_taken_in(crossing, said, body):
            crossing.held.append((said, body))
            # another pass is needed: a call slot may just have become free
            self.words[BRIDGE_WAITS] = 1

    def _try_again(self) -> None:
        if not self.words[BRIDGE_WAITS]:
            return
        for crossing in list(self.crossings.values()):
            while crossing.held and self._is_taken_in(crossing, *crossing.held[0]):
                crossing.held.popleft()
        self.words[BRIDGE_WAITS] = int(any(c.held for c in self.crossings.values()))

    def _is_taken_in(self, crossing: _Crossing, said: Said, body: ReceivedPlace | None) -> bool:
        """Repeat here what a remote member did on its host; False if there is no free call slot
        yet.
        """
        match said:
            case ("post", _, number, me, text, fold, shapes):
                return self._post(crossing, number, me, text, fold, shapes, body)
            case ("sum", _, number, node, holder):
                call = self._call(crossing, number)
                self._bring(self._ticket(crossing, number, holder), body)
                call.sums[node] = holder
                self._advance(crossing, call)
            case ("close", _):
                crossing.left_there += 1
                self._try_to_close(crossing)
        return True

    def _post(
        self,
        crossing: _Crossing,
        number: int,
        me: int,
        text: str,
        fold: str,
        shapes: Any,
        body: ReceivedPlace | None,
    ) -> bool:
        ticket = self._ticket(crossing, number, me, text)
        if self.abroad.differs(ticket) and self.host != min(crossing.group.hosts):
            return True  # only the lowest host reports that the gang failed; all hosts get its text
        try:
            if not self.abroad.has_room(ticket):
                return False
        except GangFailed:
            return True
        call = self._call(crossing, number, fold, shapes)
        call.there += 1
        self._bring(ticket, body)
        self.abroad.come(ticket, folded=bool(fold))
        self._advance(crossing, call)
        return True

    def _bring(self, ticket: CallView, body: ReceivedPlace | None) -> None:
        if body is not None:
            self.abroad.bring(ticket, (body.offset, len(body.view)))

    # --- calls and groups to their ends ---

    def _ticket(self, crossing: _Crossing, number: int, me: int, text: str = "") -> CallView:
        return self.abroad.ticket(replace(crossing.group, me=me), number, text)

    def _call(self, crossing: _Crossing, number: int, fold: str = "", shapes: Any = ()) -> _Call:
        if number not in crossing.calls:
            crossing.calls[number] = _Call(self._ticket(crossing, number, 0))
        call = crossing.calls[number]
        if fold and not call.fold:
            call.fold = fold
            call.ticket.shapes = [(count, getattr(torch, dtype)) for count, dtype in shapes]
        return call

    def _advance(self, crossing: _Crossing, call: _Call) -> None:
        """Finish the call on this host once all members have come and everything is sent."""
        if (call.here, call.there, call.unsent) != (crossing.here, crossing.there, 0):
            return
        if call.fold:
            if len(call.sums) < len(branches(crossing.group.hosts).tops):
                return
            self.abroad.join(call.ticket, call.sums, call.fold, crossing.there)
        del crossing.calls[call.ticket.number]
        self.abroad.exchange.taken(call.ticket, crossing.there)

    def _try_to_close(self, crossing: _Crossing) -> None:
        """Close the group once all members have left and all "close" messages are sent."""
        left = crossing.left_here, crossing.left_there, crossing.unsent
        if left == (crossing.here, crossing.there, 0):
            del self.crossings[crossing.key]
            index, size = crossing.group.index, crossing.group.size
            self.abroad.exchange.left(index, size, crossing.there)

    # --- the store ---

    def _change(self, rank: int, number: int, change: Change) -> None:
        """Apply a change of the store on the coordinator, which defines the order, and send it to
        all hosts.
        """
        for link in self.links.values():
            link.say(("changed", rank, number, change))
        self._changed(rank, number, change)

    def _changed(self, rank: int, number: int, change: Change) -> None:
        self.keys.change(change, (rank, number) if self.arena.is_here(rank) else None)

    # --- deadlock detection ---

    def _is_quiet(self) -> None:
        """Report that all ranks of this host wait; called when nothing has come for QUIET_S."""
        self.has_told_still = True
        if self.is_ending or not turns.are_still(self.arena):
            return
        if self._hear_ranks():
            return  # messages sent before the ranks waited: these may make others move
        here = self.arena.here()
        waits = {rank: turns.waits_for(self.arena, rank) for rank in here}
        if Wait.CUT in waits.values():
            return
        standing = {rank: self.turns.standing_of(rank) for rank in here}
        any_waits, any_votes = any(waits.values()), Wait.VOTE in waits.values()
        if self.is_home:
            self._judge(standing, any_waits, any_votes)
        else:
            link = self.links[HOME]
            link.say(("still", link.heard, standing, any_waits, any_votes))

    def _judge(self, standing: dict[int, str], any_waits: bool, any_votes: bool) -> None:
        """Decide on the coordinator if the ranks of all hosts wait for each other; then act."""
        votes = [link for link in self.links.values() if link.still and link.still[4]]
        for link in self.links.values():
            if link.has_ended:
                standing.update({r: f"rank {r} has ended" for r in self._ranks_of(link)})
            elif link.still is None or not link.is_still:
                return  # the host still has something to receive, or its report is on its way
            else:
                standing.update(link.still[2])
                any_waits |= link.still[3]
        if votes or any_votes:
            self.abroad.give_up_votes()
            for link in votes:
                link.say(("give up",))
        elif any_waits:
            told = "; ".join(text for _, text in sorted(standing.items()))
            turns.fail(self.arena, f"the ranks wait for each other: {told}")

    # --- the cut ---

    def look_at_cut(self) -> None:
        asked, named = self.words[turns.CUT], self.words[turns.CUT_AT]
        if self.is_home:
            if asked and not named and self.cut is None:
                self.cut, self.in_cut = {}, True
                self.say_all(("hold",))
            if not asked and self.in_cut:
                self.cut, self.in_cut = None, False
                self.say_all(("go on",))
                turns.wake_at_cut(self.turns)
            if self.cut is not None and len(self.cut) == len(self.links):
                self._name_cut()
        elif self.must_hold and (step := turns.unbegun(self.arena)):
            self.must_hold = False
            self.links[HOME].say(("held", step))

    def _name_cut(self) -> None:
        step = turns.unbegun(self.arena)
        if not step:
            # no rank of this host has reached the boundary of a step: the first one that does wakes
            # the bridge
            return
        assert self.cut is not None
        step = max(step, *self.cut.values())
        self.cut = None
        self.say_all(("cut", step))
        turns.name_cut(self.turns, step)

    def _take_of_cut(self, link: Link, said: Said) -> None:
        match said:
            case ("hold",):
                self.must_hold = True
                turns.end_cut(self.arena)  # ends a cut whose end was not reported to this host
                turns.call_to_cut(self.arena)
            case ("held", step) if self.cut is not None:
                self.cut[link.host] = step
            case ("cut", step):
                turns.name_cut(self.turns, step)
            case ("go on",):
                self.must_hold = False
                turns.end_cut(self.arena)
                turns.wake_at_cut(self.turns)

    def say_all(self, said: Said) -> None:
        for link in self.links.values():
            link.say(said)


def main(arena: Arena, links: dict[int, socket.socket]) -> int:
    """Run a bridge's process; returns its exit status."""
    return run(Bridge(arena, links))


def run(bridge: Bridge) -> int:
    try:
        bridge.run()
    except BaseException as error:
        host = bridge.arena.host
        turns.fail(bridge.arena, f"the bridge of host {host} failed: {error!r}")
        raise
    return 0
