"""Remote blocks: carry blocks to executors on other hosts as soon as they are made.

    executor -> heap -> carrier  <- one TCP connection ->  carrier -> heap -> executors

The executors of one host pass blocks through its shared heap (`workers.graph.shared_blocks`). A
carrier is the bridge of such a gang. For each executor of another host it has a *deputy*, which
repeats here what that executor did there. So readers find a remote block like a local one. Blocks
are not requested: their makers know their readers.

* A block crosses a connection once, however many executors read it behind the connection. The
  coordinator host (`home` in code) forwards blocks between other hosts.
* Behind a connection there are at most WINDOW_BYTES of blocks that are still read there, or one
  block. Further blocks stay where they were made until there is room. But a block for which an
  executor waits is sent at once: so a full window never blocks an executor's next input.
* When all readers behind a connection have dropped a block, this is reported. Its maker keeps the
  block until then, as on one host, since the images of other executors do not hold it.
* The coordinator's carrier learns when the executors of all other hosts stand still, from the
  reports that also find deadlocks (`host_bridge`). It tells the first executor, as of which message
  of this host's executors that holds. No remote executor can run before a later message.
* Three further facts travel the same way: the graph is over, a node ended it early, an executor has
  come to its own end. They may arrive before a block that was held back.

Executors stop anywhere: unlike for the ranks of a job, a cut has no agreed step. The cut's number
on the coordinator is that of all hosts.
"""

from __future__ import annotations

import socket
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from workers.capture.capture import Surroundings
from workers.graph.shared_blocks import BlockTable, Held
from workers.hardware.accelerator import Accelerator
from workers.ranks import host_bridge, turns
from workers.ranks.host_bridge import HOME, Bridge, Link, ReceivedPlace, Said
from workers.ranks.shared_memory import Arena
from workers.ranks.turns import GangFailed, Turns, Wait

WINDOW_BYTES = 1 << 26
# Word in the head of the shared table. It has the number of messages of this host's executors after
# which the executors of all other hosts stand still.
_STILL_AFTER = 25


# --- at an executor -------------------------------------------------------------------------------


class RemoteBlockTable(BlockTable):
    """`BlockTable` for a gang with some of the executors on other hosts."""

    def __init__(
        self, turns: Turns, blocks: int, around: Surroundings, accelerator: Accelerator
    ) -> None:
        super().__init__(turns, blocks, around, accelerator)
        self._wanted: Held | None = None
        self._passed = 0
        self._tell("blocks", blocks)

    def post(self, block: int, value: Any, readers: Collection[int]) -> Any:
        value = super().post(block, value, readers)
        if afar := tuple(reader for reader in readers if not self.arena.is_here(reader)):
            posted = self.posted[block]
            self._tell("post", block, self.me, posted.offset, posted.size, afar)
        return value

    def wait(
        self,
        held: Held | None,
        until: Callable[[], bool],
        text: str,
        *,
        outside: int | None = None,
    ) -> None:
        if held is not None and held != self._wanted:
            self._wanted = held
            self.want(held)
        super().wait(held, until, text, outside=outside)

    def want(self, held: Held) -> None:
        if not self.arena.is_here(held[1]):
            self._tell("want", *held)

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

    @property
    def others_are_still(self) -> bool:
        """True if the executors of all hosts stand still; see `BlockTable`.

        A block of another host arrives before the report that the host stands still, and an
        executor of this host waits only after all its messages. So the other hosts are checked
        before the executors here, and once more after them.
        """
        return self._hosts_are_still and super().others_are_still and self._hosts_are_still

    @property
    def _hosts_are_still(self) -> bool:
        arena = self.arena
        told = sum(arena.words[arena.rank(rank) + turns.TOLD] for rank in arena.here())
        return told == arena.words[_STILL_AFTER]

    def _is_dropped(self, held: Held) -> bool:
        is_dropped = super()._is_dropped(held)
        if is_dropped and not self.arena.is_here(held[1]):
            self._tell("drop", *held)
        return is_dropped

    def _tell(self, *said: Any) -> None:
        self.arena.words[self.turns.me + turns.TOLD] += 1
        try:
            self.arena.tell_bridge(said)
        except OSError as error:
            raise GangFailed(f"the bridge of host {self.arena.host} is gone: {error}") from error


# --- in a carrier ---------------------------------------------------------------------------------


class ReaderStandIn(BlockTable):
    """Stands in for one remote executor: repeats on this host what the executor did on its own."""

    def __init__(self, arena: Arena, executor: int, blocks: int) -> None:
        super().__init__(Turns(arena, executor), blocks, Surroundings(), Accelerator("cpu"))
        self.lying: dict[int, tuple[ReceivedPlace, Collection[int]]] = {}

    def place(self, size: int) -> ReceivedPlace:
        offset = self._taken(size)
        return ReceivedPlace(self.arena.view(offset, size), offset)

    def put(self, block: int, place: ReceivedPlace, readers: Collection[int]) -> None:
        """Post a block of this executor that has arrived in this host's heap."""
        self.lying[block] = place, readers
        entry = self._entry((block, self.me))
        self.words[entry] = place.offset
        with self.turns.board():
            self.turns.ready(Wait.BLOCK, number=entry)
        if 0 in readers:
            self.call_first()

    def is_let_go(self, block: int) -> bool:
        """Free a block if all readers on this host have dropped it; True if it was freed."""
        place, readers = self.lying[block]
        first = self._entry((block, self.me)) + 1
        if not all(self.words[first + reader] for reader in readers):
            return False
        self._give_back(place.offset, len(place.view))
        del self.lying[block]
        return True


@dataclass(slots=True)
class _Parcel:
    """Describes a block on this host that other hosts read, until all of them have dropped it.

    `beyond` has its readers, by their host.
    """

    offset: int
    size: int
    source: Link | None  # None: the block was made on this host
    beyond: dict[int, tuple[int, ...]]


@dataclass(slots=True)
class _Way:
    """Tracks the traffic of one connection. `wanted` are blocks for which an executor at its other
    end waits.
    """

    open_bytes: int = 0  # bytes that were sent and not yet dropped behind the connection
    held: deque[Held] = field(default_factory=deque)
    wanted: set[Held] = field(default_factory=set)

    def takes(self, size: int) -> bool:
        return not self.open_bytes or self.open_bytes + size <= WINDOW_BYTES


class BlockBridge(Bridge):
    """Bridges a gang whose ranks are the executors of a graph."""

    def __init__(self, arena: Arena, links: dict[int, socket.socket]) -> None:
        super().__init__(arena, links)
        self.deputies: dict[int, ReaderStandIn] = {}
        self.parcels: dict[Held, _Parcel] = {}
        self.ways = {host: _Way() for host in self.links}
        self.cut_told = 0
        self.told = 0  # number of messages of this host's executors

    # --- messages ---

    def hear_rank(self, said: Said) -> None:
        self.told += 1
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

    def place(self, said: Said, size: int) -> ReceivedPlace:
        if self.has_failed:
            return ReceivedPlace(memoryview(bytearray(size)))
        return self.deputies[said[2]].place(size)

    def take(self, link: Link, said: Said, body: ReceivedPlace | None) -> None:
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
                turns.set_cut(self.arena, number)
            case _:
                self._take_word(link, said)

    def _take_word(self, link: Link | None, said: Said) -> None:
        """Handle a message that is meant for all hosts, and forward it.

        If it comes from an executor of this host, that executor has already applied it.
        """
        match said:
            case ("blocks", _) if self.deputies:
                return  # another executor has reported the number already
            case ("blocks", count):
                for executor in range(self.arena.ranks):
                    if not self.arena.is_here(executor):
                        self.deputies[executor] = ReaderStandIn(self.arena, executor, count)
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
        return self.links[self.arena.hosts[executor] if self.is_home else HOME]

    # --- blocks ---

    def _beyond(self, readers: Collection[int]) -> dict[int, tuple[int, ...]]:
        found = defaultdict[int, tuple[int, ...]](tuple)
        for reader in readers:
            if not self.arena.is_here(reader):
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
        """Send a block to a host.

        The block stays unchanged until the host drops it, so it need not be copied.
        """
        parcel = self.parcels[held]
        self.ways[host].open_bytes += parcel.size
        body = self.arena.view(parcel.offset, parcel.size)
        self.links[host].say(("block", *held, parcel.beyond[host]), body)

    def _arrived(
        self, link: Link, held: Held, readers: Collection[int], body: ReceivedPlace
    ) -> None:
        block, whose = held
        here = [reader for reader in readers if self.arena.is_here(reader)]
        self.deputies[whose].put(block, body, here)
        self._carry(held, _Parcel(body.offset, len(body.view), link, self._beyond(readers)))
        # readers that continued from an image may have dropped the block before
        self._look_whether_over(held)

    def _is_wanted(self, link: Link, held: Held) -> None:
        way = self.ways[link.host]
        if held not in self.parcels:
            way.wanted.add(held)
            if not self.arena.is_here(held[1]):
                self._toward(held[1]).say(("want", *held))
        elif held in way.held:
            way.held.remove(held)
            self._send(link.host, held)

    def _is_let_go(self, link: Link, held: Held) -> None:
        """Handle that all readers behind a connection have dropped a block."""
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

    # --- stillness ---

    def look(self) -> None:
        super().look()
        if self.is_home and not self.has_failed:
            self._look_whether_still()

    def _look_whether_still(self) -> None:
        """Tell the first executor if the executors of all other hosts stand still."""
        are_still = all(link.has_ended or link.is_still for link in self.links.values())
        if are_still and self.words[_STILL_AFTER] != self.told:
            self.words[_STILL_AFTER] = self.told
            self.arena.ring(0)

    # --- the cut ---

    def look_at_cut(self) -> None:
        """Call remote executors to a cut, and release them, with those of the coordinator."""
        if self.is_home and self.words[turns.CUT] != self.cut_told:
            self.cut_told = self.words[turns.CUT]
            self.say_all(("cut", self.cut_told))


def main(arena: Arena, links: dict[int, socket.socket]) -> int:
    """Run a carrier's process, as `host_bridge.main` does a bridge's."""
    return host_bridge.run(BlockBridge(arena, links))
