"""Exchange: combine what the ranks of a group contribute, in rank order, and give it to all
members.

A call is identified by its group and its number in the group. Each member posts its contribution at
once, without waiting, into shared host memory; the last arrival completes the call. Two kinds:

* *kept*: every contribution stays until all members have taken what they need of it (gathering,
  scattering, broadcasting);
* *folded*: contributions are combined pairwise as they arrive, along a binary tree over the
  members' ranks: ((0+1)+(2+3))+4. The tree depends only on the size of the group. So the bits
  depend neither on the number of slots nor on the order of arrival. Ranks of one slot are
  neighbours in the tree, so a device mostly sends one sum to another device.

Invariants:
* the members of a group make the same calls in the same order. Where two members differ the gang
  fails, and the error names both ranks and both calls;
* a member that is DEPTH calls ahead waits for the slowest member;
* no contribution changes once it is posted, and none is freed before all members have taken it.

`Rendezvous`, `Group` and `CallView` are the only transport interface of `process_group` and
`replica_dedup`.  Where members of a group live on several hosts, a rank folds as far up the tree as
the branches lie on its own host, and tells this host's bridge of each call
(`workers.ranks.host_bridge`). The bridge sends the contributions of this host, receives those of
other hosts, and folds the rest of the way.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from workers.ranks.shared_memory import DEPTH, GROUPS, SLOT_WORDS, Arena, aligned, rounded
from workers.ranks.turns import ABOUT, NUMBER, Turns, Wait, are_still, fail, waits_for

EVERYBODY, NOBODY = -1, -2  # stands for the awaited member if more than one is awaited

_NAME, _SIZE, _CLOSED = 0, 1, 2  # words of a group
_MEMBERS = 16
_CALL, _SIGNATURE, _ARRIVED, _TAKEN, _DONE, _GIVEN_UP, _FIRST, _OUTCOME, _OUTCOME_BYTES = range(9)
_TEXT = 16
BRIDGE_WAITS = 10  # word in the table's head: 1 if the bridge must be woken when a call is over
_POSTED, _OFFSET, _BYTES, _MERGED = range(4)

# number of `take` calls after which unused memory goes back to the host
UNUSED_TAKES = 64
GIVE_BACK_BYTES = 1 << 20

#: How two contributions become one, by name: (into, from) changes `into`.
FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda into, other: into.add_(other),
    "mean": lambda into, other: into.add_(other),
    "product": lambda into, other: into.mul_(other),
    "min": lambda into, other: torch.minimum(into, other, out=into),
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "and": lambda into, other: into.bitwise_and_(other),
    "or": lambda into, other: into.bitwise_or_(other),
    "xor": lambda into, other: into.bitwise_xor_(other),
}


@cache
def ascent(size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each leaf the (sibling, parent) pairs on its way to the root of the folding tree.

    Leaves are 0..size-1. The left branch of a node holds the largest power of two of its leaves
    that is smaller than their number.
    """
    ways: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    fresh = iter(range(size, 2 * size))

    def build(low: int, high: int) -> int:
        if high - low == 1:
            return low
        middle = low + (1 << (high - low - 1).bit_length() - 1)
        left, right = build(low, middle), build(middle, high)
        node = next(fresh)
        for leaf in range(low, high):
            ways[leaf].append((right if leaf < middle else left, node))
        return node

    build(0, size)
    return tuple(map(tuple, ways))


@cache
def leaves(size: int) -> tuple[tuple[int, ...], ...]:
    """Return for each node of the folding tree the leaves under it, from left to right."""
    found: list[list[int]] = [[leaf] for leaf in range(size)] + [[] for _ in range(size - 1)]
    for leaf, way in enumerate(ascent(size)):
        for _, parent in way:
            found[parent].append(leaf)
    return tuple(map(tuple, found))


@dataclass(frozen=True, slots=True)
class Branches:
    """The folding tree of a group over several hosts, split by host."""

    # for each leaf as in `ascent`, up to the highest node with leaves of one host only
    ways: tuple[tuple[tuple[int, int], ...], ...]
    # (node, host): the highest nodes with all leaves on that host
    tops: tuple[tuple[int, int], ...]
    # (left, right, parent) of the nodes above `tops`, children first
    joins: tuple[tuple[int, int, int], ...]


@cache
def branches(hosts: tuple[int, ...]) -> Branches:
    """Split the folding tree by host; `hosts` has the host of each member of the group."""
    size = len(hosts)
    under = [{hosts[leaf] for leaf in node} for node in leaves(size)]
    ways, tops, joins = [], set(), set()
    for leaf, way in enumerate(ascent(size)):
        own = tuple((sibling, parent) for sibling, parent in way if len(under[parent]) == 1)
        at = own[-1][1] if own else leaf
        ways.append(own)
        tops.add((at, hosts[leaf]))
        for sibling, parent in way[len(own) :]:
            joins.add((parent, *sorted((at, sibling), key=lambda node: leaves(size)[node])))
            at = parent
    return Branches(
        ways=tuple(ways),
        tops=tuple(sorted(tops)),
        joins=tuple((left, right, parent) for parent, left, right in sorted(joins)),
    )


@dataclass(slots=True)
class Group:
    """Describes a group: `members` are ranks of the gang; `me` is this rank's index among them."""

    name: str
    index: int
    members: tuple[int, ...]
    me: int
    hosts: tuple[int, ...] = ()  # host of each member; empty if all members live on this host
    calls: int = 0  # number of calls that this member has made

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def way(self) -> tuple[tuple[int, int], ...]:
        """The nodes of the folding tree above this member that combine only ranks of this host."""
        if self.hosts:
            return branches(self.hosts).ways[self.me]
        return ascent(self.size)[self.me]


@dataclass(slots=True)
class CallView:
    """A member's view of one call."""

    exchange: Rendezvous
    group: Group
    number: int
    slot: int
    text: str
    needs: int
    shapes: list[tuple[int, torch.dtype]] = field(default_factory=list)
    taken: bool = False

    def ready(self) -> bool:
        words = self.exchange.arena.words
        if self.needs == EVERYBODY:
            return bool(words[self.slot + _DONE])
        return self.needs == NOBODY or bool(words[self.exchange.member(self, self.needs)])

    def wait(self, timeout_s: float) -> None:
        """Wait until what this member needs has been posted. Raises GangFailed, TimeoutError."""
        self.exchange.turns.wait(
            Wait.CALL,
            self.group.index,
            self.number,
            self.needs,
            until=self.ready,
            text=self.described,
            timeout_s=timeout_s,
        )

    @property
    def described(self) -> str:
        return f"{self.text}, call {self.number + 1} of group {self.group.name!r}"

    def row(self, member: int) -> list[torch.Tensor]:
        """Return a kept contribution as bytes: one tensor per part."""
        arena = self.exchange.arena
        at = self.exchange.member(self, member)
        offset, length = arena.words[at + _OFFSET], arena.words[at + _BYTES]
        if not length:
            return []
        parts = int(arena.at(offset, 8).view(torch.int64))
        sizes = arena.at(offset, 8 * (parts + 1)).view(torch.int64)[1:].tolist()
        start, rows = offset + aligned(8 * (parts + 1)), []
        for size in sizes:
            rows.append(arena.at(start, size))
            start += aligned(size)
        return rows

    def sums(self, *, apart: bool = False) -> list[torch.Tensor]:
        """Return the folded result as flat tensors, with the types of the parts.

        The tensors lie in the shared heap, are shared by all members, and are invalid after `take`.
        With `apart` each tensor has a storage of its own.
        """
        way = ascent(self.group.size)[0]
        words = self.exchange.arena.words
        holder = words[self.exchange.node(self, way[-1][1])] - 1 if way else 0
        return self.exchange.parts_of(self, holder, apart=apart)

    def take(self) -> None:
        """Declare that this member no longer needs the call's memory."""
        if not self.taken:
            self.taken = True
            self.exchange.taken(self)


class Rendezvous:
    """A rank's side of all calls."""

    def __init__(self, turns: Turns, *, timeout_s: float) -> None:
        self.turns, self.arena, self.timeout_s = turns, turns.arena, timeout_s
        self.heap = _ContributionHeap(self.arena)
        self.posted = 0
        turns.lacking, turns.give_up_vote = self._lacking, self._give_up_vote

    # --- groups ---

    def open(self, name: str, members: Sequence[int]) -> Group:
        """Return the group of this name.

        Every member must open it; the order does not matter.
        """
        index = self.index(name, members)
        me = members.index(self.turns.rank)
        hosts = self.hosts_of(members)
        if hosts:
            self.arena.tell_bridge(("open", index, name, tuple(members)))
        return Group(name=name, index=index, members=tuple(members), me=me, hosts=hosts)

    def hosts_of(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the value for `Group.hosts`."""
        if all(map(self.arena.is_here, members)):
            return ()
        return tuple(self.arena.hosts[member] for member in members)

    def close(self, group: Group) -> None:
        """Leave the group. When the last member leaves, another group may take its place in the
        table.
        """
        self.left(group.index, group.size)
        if group.hosts:
            self.arena.tell_bridge(("close", group.index))

    def left(self, index: int, size: int, members: int = 1) -> None:
        """Count `members` that have left a group of `size`; clear the group once all have left."""
        with self.arena.locked():
            at = self.arena.group(index)
            self.arena.words[at + _CLOSED] += members
            if self.arena.words[at + _CLOSED] == size:
                self.arena.clear_group(index)

    def index(self, name: str, members: Sequence[int]) -> int:
        key, words = group_key(name, members), self.arena.words
        with self.arena.locked():
            free = None
            for index in range(GROUPS):
                at = self.arena.group(index)
                if words[at + _NAME] == key:
                    return index
                if free is None and not words[at + _NAME]:
                    free = index
            if free is None:
                raise RuntimeError(f"a gang may have {GROUPS} groups at a time; {name!r} is more")
            at = self.arena.group(free)
            words[at + _NAME], words[at + _SIZE] = key, len(members)
            for place, rank in enumerate(members):
                words[at + _MEMBERS + place] = rank
        return free

    # --- calls ---

    def post(
        self,
        group: Group,
        text: str,
        parts: Sequence[torch.Tensor] | None = None,
        *,
        fold: str = "",
        needs: int = EVERYBODY,
    ) -> CallView:
        """Post this member's contribution to the group's next call; returns a view of the call.

        `parts` are flat tensors, which are copied before this returns. `fold` is one of FOLDS, by
        which contributions are combined; without it each one is kept as it is. `text` describes the
        call, and must be the same on all members.
        """
        ticket = self._enter(group, text, needs)
        self.posted += 1
        if fold and parts is not None:
            ticket.shapes = [(part.numel(), part.dtype) for part in parts]
            self._fold(ticket, parts, fold)
        elif parts:
            self._keep(ticket, parts)
        with self.turns.board():
            self.arrive(ticket)
        if group.hosts:
            shapes = tuple((count, _type_name(dtype)) for count, dtype in ticket.shapes)
            told = (group.index, ticket.number, group.me, text, fold, shapes)
            self.arena.tell_bridge(("post", *told))
        return ticket

    def call(self, rank: int) -> None:
        """Wake a rank that waits for a message from any rank.

        If the rank is on another host, that host's bridge wakes it.
        """
        if self.arena.is_here(rank):
            with self.turns.board():
                self.turns.ready(Wait.MESSAGE, rank)

    def meet(
        self,
        group: Group,
        text: str,
        bring: Callable[[bytes | None], bytes],
        decide: Callable[[list[bytes]], bytes],
    ) -> bytes | None:
        """Let all members bring bytes; the last member decides, and all get its decision.

        `bring` gets the bytes of the first member, or None if this rank is the first. Returns None
        if the vote was given up, because otherwise no rank could move, or because the members'
        texts differ. Unlike a collective, a vote may fail without harm.
        """
        ticket = self._enter(group, text, EVERYBODY, vote=True)
        words, slot = self.arena.words, ticket.slot
        if words[slot + _CALL] != ticket.number + 1 or words[slot + _GIVEN_UP]:
            return None
        first = words[slot + _FIRST]
        payload = bring(None if first == group.me else self._payload(ticket, first))
        self.arena.write(self._own_land(ticket, len(payload)), payload)
        with self.turns.board():
            last = words[slot + _ARRIVED] == group.size - 1
            if not last:
                self.arrive(ticket)
        if last:
            rows = [self._payload(ticket, member) for member in range(group.size)]
            self._set_outcome(ticket, decide(rows))
        else:
            self.turns.wait(
                Wait.VOTE,
                group.index,
                ticket.number,
                until=lambda: bool(words[slot + _DONE] or words[slot + _GIVEN_UP]),
                text=ticket.described,
                timeout_s=self.timeout_s,
            )
        return self._outcome(ticket)

    def _payload(self, ticket: CallView, member: int) -> bytes:
        at = self.member(ticket, member)
        return self.arena.read(self.arena.words[at + _OFFSET], self.arena.words[at + _BYTES])

    def _set_outcome(self, ticket: CallView, outcome: bytes) -> None:
        words, offset = self.arena.words, self.heap.take(ticket, len(outcome))
        self.arena.write(offset, outcome)
        words[ticket.slot + _OUTCOME] = offset
        words[ticket.slot + _OUTCOME_BYTES] = len(outcome)
        with self.turns.board():
            self.arrive(ticket)
            self.turns.ready(Wait.VOTE, ticket.group.index, ticket.number)

    def _outcome(self, ticket: CallView) -> bytes | None:
        words = self.arena.words
        if words[ticket.slot + _GIVEN_UP]:
            return None
        offset, size = words[ticket.slot + _OUTCOME], words[ticket.slot + _OUTCOME_BYTES]
        outcome = self.arena.read(offset, size)
        ticket.take()
        return outcome

    def _give_up_vote(self, index: int, number: int) -> None:
        self.arena.words[self.arena.slot(index, number) + _GIVEN_UP] = 1
        self.turns.ready(Wait.VOTE, index, number)

    # --- entering and posting ---

    def _enter(self, group: Group, text: str, needs: int, *, vote: bool = False) -> CallView:
        number = group.calls
        group.calls += 1
        slot = self.arena.slot(group.index, number)
        ticket = CallView(self, group, number, slot, text, needs)
        self.turns.check()
        while not self.claimed(ticket, vote):
            self.turns.wait(
                Wait.ROOM,
                group.index,
                number % DEPTH,
                until=lambda: self._is_free(ticket),
                text=f"{ticket.described}: {DEPTH} calls before it are still being read",
                timeout_s=self.timeout_s,
            )
        return ticket

    def _is_free(self, ticket: CallView) -> bool:
        words, slot = self.arena.words, ticket.slot
        unused = not words[slot + _CALL] or words[slot + _CALL] == ticket.number + 1
        over = words[slot + _TAKEN] == ticket.group.size or words[slot + _GIVEN_UP]
        return bool(unused or over)

    def claimed(self, ticket: CallView, vote: bool) -> bool:
        """Claim the call slot, or check that our call equals that of the first member.

        Returns False while the call slot is still in use by an earlier call.
        """
        words, slot, signature = self.arena.words, ticket.slot, _number(ticket.text)
        with self.turns.board():
            if vote and words[slot + _CALL] > ticket.number + 1:
                return True
            if words[slot + _CALL] != ticket.number + 1:
                if not self._is_free(ticket):
                    return False
                self.arena.clear_slot(slot)
                words[slot + _CALL], words[slot + _SIGNATURE] = ticket.number + 1, signature
                words[slot + _FIRST] = ticket.group.me
                self.arena.write_text(slot + _TEXT, ticket.text)
                return True
            same = words[slot + _SIGNATURE] == signature
            if vote and not same:
                self._give_up_vote(ticket.group.index, ticket.number)
        if not same and not vote:
            self._mismatch(ticket)
        return True

    def _mismatch(self, ticket: CallView) -> None:
        members, first = ticket.group.members, self.arena.words[ticket.slot + _FIRST]
        theirs = self.arena.read_text(ticket.slot + _TEXT)
        told = (
            f"mismatched collectives: as call {ticket.number + 1} of group {ticket.group.name!r} "
            f"rank {members[first]} called {theirs}, "
            f"rank {members[ticket.group.me]} called {ticket.text}"
        )
        fail(self.arena, told)
        self.turns.check()

    def arrive(self, ticket: CallView) -> None:
        """Record that this rank has made the call, and wake the ranks that waited for it; call
        under the lock.
        """
        words, slot, group = self.arena.words, ticket.slot, ticket.group
        words[self.member(ticket, group.me) + _POSTED] = 1
        words[slot + _ARRIVED] += 1
        if words[slot + _ARRIVED] == group.size:
            words[slot + _DONE] = 1
            if group.size == self.arena.ranks:
                self.turns.regroup_here()
            self.turns.ready(Wait.CALL, group.index, ticket.number)
        else:
            self.turns.ready(Wait.CALL, group.index, ticket.number, group.me)

    def has_come(self, channel: Group) -> bool:
        """True if the channel's first member has made the call that this member makes next."""
        words, slot = self.arena.words, self.arena.slot(channel.index, channel.calls)
        # otherwise the call slot holds another call
        is_made = words[slot + _CALL] == channel.calls + 1
        return is_made and bool(words[slot + SLOT_WORDS + _POSTED])

    def taken(self, ticket: CallView, members: int = 1) -> None:
        words = self.arena.words
        with self.turns.board():
            words[ticket.slot + _TAKEN] += members
            if words[ticket.slot + _TAKEN] == ticket.group.size:
                self.turns.ready(Wait.ROOM, ticket.group.index, ticket.number % DEPTH)
                if words[BRIDGE_WAITS]:
                    self.turns.call_bridge()

    # --- contributions ---

    def member(self, ticket: CallView, member: int) -> int:
        return ticket.slot + SLOT_WORDS + 4 * member

    def node(self, ticket: CallView, node: int) -> int:
        return ticket.slot + SLOT_WORDS + 4 * self.arena.ranks + node

    def parts_of(self, ticket: CallView, member: int, *, apart: bool = False) -> list[torch.Tensor]:
        """Return a member's folded contribution as tensors with the types of the parts, in the
        shared heap.
        """
        start, parts = self.arena.words[self.member(ticket, member) + _OFFSET], []
        place = self.arena.apart if apart else self.arena.at
        for count, dtype in ticket.shapes:
            size = count * dtype.itemsize
            parts.append(place(start, size).view(dtype))
            start += aligned(size)
        return parts

    def _keep(self, ticket: CallView, parts: Sequence[torch.Tensor]) -> None:
        sizes = [part.numel() * part.element_size() for part in parts]
        sized = torch.tensor([len(sizes), *sizes], dtype=torch.int64, device="cpu")
        table = sized.view(torch.uint8)
        length = aligned(len(table)) + sum(map(aligned, sizes))
        start = self._own_land(ticket, length)
        self.arena.at(start, len(table)).copy_(table)
        start += aligned(len(table))
        for part, size in zip(parts, sizes, strict=True):
            if size:
                self.arena.at(start, size).view(part.dtype).copy_(part)
            start += aligned(size)

    def _own_land(self, ticket: CallView, length: int) -> int:
        offset = self.heap.take(ticket, length)
        at = self.member(ticket, ticket.group.me)
        self.arena.words[at + _OFFSET], self.arena.words[at + _BYTES] = offset, length
        return offset

    def _fold(self, ticket: CallView, parts: Sequence[torch.Tensor], fold: str) -> None:
        """Fold up the tree as far as the other branches have arrived, and leave this rank's sum
        there.

        At each node the member that arrives second does the combining, so no two ever write to the
        same sum.
        """
        words, me = self.arena.words, ticket.group.me
        way = ticket.group.way
        # `at`: current node; `holder`: the member with the sum in its memory, -1 if not yet copied
        at, holder = me, -1
        for sibling, parent in (*way, (-1, -1)):
            other = words[self.node(ticket, sibling)] - 1 if parent >= 0 else -1
            if other < 0:
                if holder < 0:
                    holder = self._copied_in(ticket, parts)
                other = self._leave_at(ticket, at, holder, sibling, parent)
            if other < 0:
                return
            holder = self.combine(ticket, parts, holder, other, fold)
            at = parent

    def _copied_in(self, ticket: CallView, parts: Sequence[torch.Tensor]) -> int:
        self._own_land(ticket, sum(aligned(p.numel() * p.element_size()) for p in parts))
        for place, part in zip(self.parts_of(ticket, ticket.group.me), parts, strict=True):
            place.copy_(part)
        return ticket.group.me

    def _leave_at(self, ticket: CallView, at: int, holder: int, sibling: int, parent: int) -> int:
        """Put this rank's sum at its node, unless the other branch's sum is there already.

        Returns the member with the other branch's sum, or -1.
        """
        words = self.arena.words
        with self.arena.locked():
            other = words[self.node(ticket, sibling)] - 1 if parent >= 0 else -1
            if other < 0:
                words[self.node(ticket, at)] = holder + 1
        return other

    def combine(
        self, ticket: CallView, parts: Sequence[torch.Tensor], ours: int, theirs: int, fold: str
    ) -> int:
        """Add the sum of `ours` to the sum of `theirs`; return the member that holds the result."""
        into = self.parts_of(ticket, theirs)
        mine = parts if ours < 0 else self.parts_of(ticket, ours)
        for target, part in zip(into, mine, strict=True):
            FOLDS[fold](target, part if part.device == target.device else part.to(target.device))
        if ours >= 0:
            self.arena.words[self.member(ticket, ours) + _MERGED] = 1
        return theirs

    def _lacking(self, index: int, number: int) -> list[int]:
        return lacking(self.arena, index, number)


def lacking(arena: Arena, index: int, number: int) -> list[int]:
    """Return the ranks that have not made call `number` of the group `index`.

    The list is empty if the call is over.
    """
    words, slot, at = arena.words, arena.slot(index, number), arena.group(index)
    if words[slot + _CALL] != number + 1:
        return []
    return [
        words[at + _MEMBERS + member]
        for member in range(min(words[at + _SIZE], arena.ranks))
        if not words[slot + SLOT_WORDS + 4 * member + _POSTED]
    ]


# --- a bridge's side ------------------------------------------------------------------------------


class RemoteMembers:
    """Stands in for a group's members on other hosts; this host's bridge makes their calls here."""

    def __init__(self, turns: Turns) -> None:
        self.exchange = Rendezvous(turns, timeout_s=0.0)
        self.turns, self.arena = turns, turns.arena

    def ticket(self, group: Group, number: int, text: str) -> CallView:
        """Return the ticket of the member `group.me` for this call."""
        slot = self.arena.slot(group.index, number)
        return CallView(self.exchange, group, number, slot, text, EVERYBODY)

    def brought(self, ticket: CallView) -> memoryview:
        """Return the contribution of this member that is kept, or its sum, as a view of the shared
        heap.
        """
        at = self.exchange.member(ticket, ticket.group.me)
        offset, size = self.arena.words[at + _OFFSET], self.arena.words[at + _BYTES]
        return self.arena.view(offset, size)

    def holder(self, ticket: CallView, node: int) -> int:
        """Return the member whose memory holds the sum of this tree node."""
        return self.arena.words[self.exchange.node(ticket, node)] - 1

    def has_room(self, ticket: CallView) -> bool:
        """True if the call slot could be claimed.

        Fails the gang if the call differs from the other members' calls.
        """
        return self.exchange.claimed(ticket, vote=False)

    def differs(self, ticket: CallView) -> bool:
        words, slot = self.arena.words, ticket.slot
        with self.arena.locked():  # a member of this host may be claiming the slot now
            known = words[slot + _CALL] == ticket.number + 1
            return known and words[slot + _SIGNATURE] != _number(ticket.text)

    def bring(self, ticket: CallView, piece: tuple[int, int]) -> None:
        """Use heap memory that already holds the bytes as the member's contribution to the call."""
        at = self.exchange.member(ticket, ticket.group.me)
        self.arena.words[at + _OFFSET], self.arena.words[at + _BYTES] = piece
        self.exchange.heap.hold(ticket, *piece)

    def come(self, ticket: CallView, *, folded: bool) -> None:
        """Record that the member has made its call.

        If the call is folded, only the member is marked as posted: `join` counts arrivals when the
        whole sum is there.
        """
        with self.turns.board():
            if folded:
                self.arena.words[self.exchange.member(ticket, ticket.group.me) + _POSTED] = 1
            else:
                self.exchange.arrive(ticket)
            if ticket.group.size == 2:
                self.turns.ready(Wait.MESSAGE, ticket.group.members[1])

    def join(self, ticket: CallView, sums: dict[int, int], fold: str, members: int) -> None:
        """Combine the hosts' sums at the root, add `members` arrivals and complete the call."""
        words, group = self.arena.words, ticket.group
        for left, right, parent in branches(group.hosts).joins:
            sums[parent] = self.exchange.combine(ticket, (), sums[right], sums[left], fold)
            words[self.exchange.node(ticket, parent)] = sums[parent] + 1
        with self.turns.board():
            words[ticket.slot + _ARRIVED] += members
            words[ticket.slot + _DONE] = 1
            self.turns.ready(Wait.CALL, group.index, ticket.number)

    def give_up_votes(self) -> None:
        """Give up the votes of this host's waiting ranks.

        Nothing can move, here or on other hosts.
        """
        words = self.arena.words
        with self.turns.board():
            for rank in self.arena.here() if are_still(self.arena) else ():
                at = self.arena.rank(rank)
                if waits_for(self.arena, rank) == Wait.VOTE:
                    self.turns.give_up_vote(words[at + ABOUT], words[at + NUMBER])


class _ContributionHeap:
    """Manages this rank's own heap memory for contributions, and reuses it.

    A piece is free again when all members have taken the call that it belongs to, or when it was
    folded into another member's sum.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.in_use: deque[tuple[CallView, int, int]] = deque()
        self.free: dict[
            int, list[tuple[int, int]]
        ] = {}  # size -> (offset, `takes` when it was freed)
        self.takes = 0

    def take(self, ticket: CallView, size_bytes: int) -> int:
        offset = self.piece(size_bytes)
        self.hold(ticket, offset, size_bytes)
        return offset

    def piece(self, size_bytes: int) -> int:
        """Return the offset of free memory of this size.

        The caller then assigns the memory to a call by `hold`.
        """
        self.takes += 1
        self._reclaim()
        if self.takes % UNUSED_TAKES == 0:
            self._give_back()
        pieces = self.free.get(rounded(size_bytes))
        if pieces:
            return pieces.pop()[0]
        with self.arena.locked():
            return self.arena.take_land(rounded(size_bytes))

    def hold(self, ticket: CallView, offset: int, size_bytes: int) -> None:
        self.in_use.append((ticket, offset, rounded(size_bytes)))

    def _reclaim(self) -> None:
        for _ in range(len(self.in_use)):
            piece = self.in_use.popleft()
            if self._is_over(*piece[:2]):
                self.free.setdefault(piece[2], []).append((piece[1], self.takes))
            else:
                self.in_use.append(piece)

    def _is_over(self, ticket: CallView, offset: int) -> bool:
        words, slot, group = self.arena.words, ticket.slot, ticket.group
        if words[slot + _CALL] != ticket.number + 1 or words[slot + _GIVEN_UP]:
            return True
        if words[slot + _TAKEN] == group.size:
            return True
        at = ticket.exchange.member(ticket, group.me)
        return bool(words[at + _MERGED]) and words[at + _OFFSET] == offset

    def _give_back(self) -> None:
        for size, pieces in self.free.items():
            if size < GIVE_BACK_BYTES:
                continue
            for index, (offset, since) in enumerate(pieces):
                if 0 <= since < self.takes - UNUSED_TAKES:
                    self.arena.give_back(offset, size)
                    pieces[index] = (offset, self.takes)


@cache
def _type_name(dtype: torch.dtype) -> str:
    """Return the dtype's name; cached, so that thousands of tensors share one string object."""
    return str(dtype).removeprefix("torch.")


def group_key(name: str, members: Sequence[int]) -> int:
    """Return the key of a group. It is the same on every host."""
    return _number(f"{name} {list(members)}")


def _number(text: str) -> int:
    """Hash a text to a 64-bit word that is not 0."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
