"""Blocks that executors of a graph need from other hosts: carried there as soon as they are made.

    executor -> land -> carrier  <- one TCP connection ->  carrier -> land -> executors

The executors of one host pass blocks in its land (`workers.passing`).  A carrier is the bridge of
such a gang: what an executor of another host did there it does here as its *deputy*, so that
whoever reads a block finds it as a neighbour's.  Nobody asks for one: its maker knows who reads it.

* A block crosses a connection once, however many read it behind that.  Home passes on what is for
  a third host.
* Behind a connection lie at most WINDOW_BYTES that are read there still, or one block; the next
  ones stay where they were made until there is room.  But what an executor waits for comes at once:
  so whatever fills the window keeps nobody from what it needs next.
* When all behind a connection have let go of a block that is told.  Its maker keeps it as long, as
  on one host, since the images of others do not hold it.
* That the graph is over, who ended it early, and who has come to its own end goes the same ways.
  It may be there before a block that was held back.

Executors stop wherever they are: no step is agreed on for a cut, as for the ranks of a job, and its
number at home is that of all hosts.
"""

from __future__ import annotations

import socket
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from workers import bridge, turns
from workers.accelerator import Accelerator
from workers.bridge import HOME, Bridge, Link, Place, Said
from workers.capture import Surroundings
from workers.ground import Ground
from workers.passing import Held, Passing
from workers.turns import GangFailed, Turns, Wait

WINDOW_BYTES = 1 << 26


# --- at an executor -------------------------------------------------------------------------------


class Carried(Passing):
    """As `Passing`, where some of the executors live on other hosts."""

    def __init__(
        self, turns: Turns, blocks: int, around: Surroundings, accelerator: Accelerator
    ) -> None:
        super().__init__(turns, blocks, around, accelerator)
        self._wanted: Held | None = None
        self._passed = 0
        self._tell("blocks", blocks)

    def post(self, block: int, value: Any, readers: Collection[int]) -> Any:
        value = super().post(block, value, readers)
        if afar := tuple(reader for reader in readers if not self.ground.is_here(reader)):
            posted = self.posted[block]
            self._tell("post", block, self.me, posted.offset, posted.size, afar)
        return value

    def wait(self, held: Held | None, until: Callable[[], bool], text: str) -> None:
        if held is not None and held != self._wanted and not self.ground.is_here(held[1]):
            self._wanted = held
            self._tell("want", *held)
        super().wait(held, until, text)

    def end(self) -> None:
        super().end()
        self._tell("over", self.me)

    def end_early(self, at: int) -> None:
        super().end_early(at)
        self._tell("early", self.me, at)

    def tell_passed(self, at: int) -> None:
        super().tell_passed(at)
        if at != self._passed:
            self._passed = at
            self._tell("passed", self.me, at)

    def _is_dropped(self, held: Held) -> bool:
        is_dropped = super()._is_dropped(held)
        if is_dropped and not self.ground.is_here(held[1]):
            self._tell("drop", *held)
        return is_dropped

    def _tell(self, *said: Any) -> None:
        try:
            self.ground.tell_bridge(said)
        except OSError as error:
            raise GangFailed(f"the bridge of host {self.ground.host} is gone: {error}") from error


# --- at a carrier ---------------------------------------------------------------------------------


class Deputy(Passing):
    """Does on this host what one executor of another did there."""

    def __init__(self, ground: Ground, executor: int, blocks: int) -> None:
        super().__init__(Turns(ground, executor), blocks, Surroundings(), Accelerator("cpu"))
        self.lying: dict[int, tuple[Place, Collection[int]]] = {}

    def place(self, size: int) -> Place:
        offset = self._taken(size)
        return Place(self.ground.view(offset, size), offset)

    def put(self, block: int, place: Place, readers: Collection[int]) -> None:
        """A block of this executor's has come, and lies there."""
        self.lying[block] = place, readers
        entry = self._entry((block, self.me))
        self.words[entry] = place.offset
        with self.turns.board():
            self.turns.ready(Wait.BLOCK, number=entry)

    def is_let_go(self, block: int) -> bool:
        """By all readers of this host; then its land is free."""
        place, readers = self.lying[block]
        first = self._entry((block, self.me)) + 1
        if not all(self.words[first + reader] for reader in readers):
            return False
        self._give_back(place.offset, len(place.view))
        del self.lying[block]
        return True


@dataclass(slots=True)
class _Parcel:
    """A block that lies here and crosses: where, whence, and who reads it behind which connection,
    until all there have let go of it.
    """

    offset: int
    size: int
    source: Link | None  # None: it was made here
    beyond: dict[int, tuple[int, ...]]


@dataclass(slots=True)
class _Way:
    """What goes over one connection.  `wanted` are blocks that somebody behind it waits for."""

    open_bytes: int = 0  # sent, and not let go of there
    held: deque[Held] = field(default_factory=deque)
    wanted: set[Held] = field(default_factory=set)

    def takes(self, size: int) -> bool:
        return not self.open_bytes or self.open_bytes + size <= WINDOW_BYTES


class Carrier(Bridge):
    """The bridge of a gang whose ranks are the executors of a graph."""

    def __init__(self, ground: Ground, links: dict[int, socket.socket]) -> None:
        super().__init__(ground, links)
        self.deputies: dict[int, Deputy] = {}
        self.parcels: dict[Held, _Parcel] = {}
        self.ways = {host: _Way() for host in self.links}
        self.cut_told = 0

    # --- what is said ---

    def hear_rank(self, said: Said) -> None:
        if self.has_failed:
            return
        match said:
            case ("post", block, whose, offset, size, readers):
                self._carry((block, whose), _Parcel(offset, size, None, self._beyond(readers)))
            case ("want", block, whose):
                if (block, whose) not in self.parcels:
                    self._toward(whose).say(said)
            case ("drop", block, whose):
                self._look_whether_over((block, whose))
            case _:
                self._take_word(None, said)

    def place(self, said: Said, size: int) -> Place:
        if self.has_failed:
            return Place(memoryview(bytearray(size)))
        return self.deputies[said[2]].place(size)

    def take(self, link: Link, said: Said, body: Place | None) -> None:
        match said:
            case ("fail" | "bye" | "still" | "give up", *_):
                super().take(link, said, body)
            case _ if self.has_failed:
                pass
            case ("block", block, whose, readers) if body is not None:
                self._arrived(link, (block, whose), readers, body)
            case ("want", block, whose):
                self._is_wanted(link, (block, whose))
            case ("done", block, whose):
                self._is_let_go(link, (block, whose))
            case ("cut", number):
                turns.set_cut(self.ground, number)
            case _:
                self._take_word(link, said)

    def _take_word(self, link: Link | None, said: Said) -> None:
        """What concerns all, and is told on; who is of this host has done it itself."""
        match said:
            case ("blocks", _) if self.deputies:
                return  # others have told already
            case ("blocks", count):
                for executor in range(self.ground.ranks):
                    if not self.ground.is_here(executor):
                        self.deputies[executor] = Deputy(self.ground, executor, count)
            case ("over", executor) if link:
                self.deputies[executor].end()
            case ("early", executor, at) if link:
                self.deputies[executor].end_early(at)
            case ("passed", executor, at) if link:
                self.deputies[executor].tell_passed(at)
        for other in self.links.values():
            if other is not link:
                other.say(said)

    def _toward(self, executor: int) -> Link:
        return self.links[self.ground.hosts[executor] if self.is_home else HOME]

    # --- blocks ---

    def _beyond(self, readers: Collection[int]) -> dict[int, tuple[int, ...]]:
        found = defaultdict[int, tuple[int, ...]](tuple)
        for reader in readers:
            if not self.ground.is_here(reader):
                found[self._toward(reader).host] += (reader,)
        return dict(found)

    def _carry(self, held: Held, parcel: _Parcel) -> None:
        self.parcels[held] = parcel
        for host in parcel.beyond:
            way = self.ways[host]
            if held in way.wanted:
                way.wanted.remove(held)
                self._send(host, held)
            else:
                way.held.append(held)
                self._send_what_may_go(host)

    def _send_what_may_go(self, host: int) -> None:
        way = self.ways[host]
        while way.held and way.takes(self.parcels[way.held[0]].size):
            self._send(host, way.held.popleft())

    def _send(self, host: int, held: Held) -> None:
        """It lies still until it is let go of there, and so until it has been sent."""
        parcel = self.parcels[held]
        self.ways[host].open_bytes += parcel.size
        body = self.ground.view(parcel.offset, parcel.size)
        self.links[host].say(("block", *held, parcel.beyond[host]), body)

    def _arrived(self, link: Link, held: Held, readers: Collection[int], body: Place) -> None:
        block, whose = held
        here = [reader for reader in readers if self.ground.is_here(reader)]
        self.deputies[whose].put(block, body, here)
        self._carry(held, _Parcel(body.offset, len(body.view), link, self._beyond(readers)))
        self._look_whether_over(held)  # who went on from an image may have done with it before

    def _is_wanted(self, link: Link, held: Held) -> None:
        way = self.ways[link.host]
        if held not in self.parcels:
            way.wanted.add(held)
            if not self.ground.is_here(held[1]):
                self._toward(held[1]).say(("want", *held))
        elif held in way.held:
            way.held.remove(held)
            self._send(link.host, held)

    def _is_let_go(self, link: Link, held: Held) -> None:
        """By all behind that connection."""
        parcel, way = self.parcels[held], self.ways[link.host]
        for reader in parcel.beyond.pop(link.host):
            self.deputies[reader].drop(held)
        way.open_bytes -= parcel.size
        self._send_what_may_go(link.host)
        self._look_whether_over(held)

    def _look_whether_over(self, held: Held) -> None:
        parcel = self.parcels.get(held)
        if parcel is None or parcel.beyond:
            return
        if parcel.source is None:
            del self.parcels[held]
        elif self.deputies[held[1]].is_let_go(held[0]):
            del self.parcels[held]
            parcel.source.say(("done", *held))

    # --- the cut ---

    def look_at_cut(self) -> None:
        """Executors of other hosts are called, and let go, with those of home."""
        if self.is_home and self.words[turns.CUT] != self.cut_told:
            self.cut_told = self.words[turns.CUT]
            self.say_all(("cut", self.cut_told))


def main(ground: Ground, links: dict[int, socket.socket]) -> int:
    """As `bridge.main`."""
    return bridge.run(Carrier(ground, links))
