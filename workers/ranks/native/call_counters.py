"""Shows, in a gang's shared table, which calls the ranks have begun, and closes the gate before
further calls.

The ranks write the counters and read the gate; their host reads the counters and writes the gate
(`workers.commands.gang.gathering`).  A rank raises `INSIDE` before it reads the gate, and its host
closes the gate before it reads `INSIDE`.  So a rank that finds the gate open is seen by its host.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from workers.ranks.shared_memory import GROUPS, Arena
from workers.ranks.turns import TEXT, Turns, fail

# Words of the table's head, behind those of `turns`, `rendezvous` and `kv_store`.
HOLD = 24  # number of the order that lasts; 0 while the gate is open
DROP = 25  # number of the last order at which all ranks were told to let go of their groups
ALL_PASS = 26  # 1 while the gate lets every rank through

# Words of a rank, behind those of `turns`.
INSIDE, CALLS, SETTLED, OPEN_RECEIVES, DROPPED, BUILT = range(16, 22)

# Words of a group.  Behind its members stand, for each rank, the calls that it has begun (-1: it is
# no member), and what the last one was.
NAME, SIZE, LIMIT = 0, 1, 8
MEMBERS = 16

GATE_S = 0.001  # how often a rank at the gate looks whether it may pass


def counts_at(arena: Arena, index: int) -> int:
    """Return the place of the first rank's counter in the group."""
    return arena.group(index) + MEMBERS + arena.ranks


class CallCounters:
    """A rank's view of the counters and of the gate."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.arena = turns, turns.arena
        self.words, self.me, self.rank = turns.words, turns.me, turns.rank
        self._lock = threading.Lock()
        self._shown: object = None
        self.error: BaseException | None = None  # why they could not be built

    # --- groups ---

    def open(self, index: int, members: list[int]) -> None:
        """Say in the table who belongs to the group; every member does, and all say the same."""
        first = counts_at(self.arena, index)
        with self.arena.locked():
            for rank in range(self.arena.ranks):
                if rank not in members:
                    self.words[first + rank] = -1

    # --- calls ---

    @contextmanager
    def call(
        self, index: int, text: str, shown: tuple[object, ...] = (), *, passes: bool = False
    ) -> Iterator[None]:
        """Begin a call of a group: wait at the gate, count the call, and issue it inside.

        `shown` is what the call is about, for a sentence about a rank that is behind. With `passes`
        the gate lets the call through: other calls of this rank end only after this one.
        """
        self._raise()
        try:
            if not passes:
                self._wait_at_gate()
            self._count(index, text, shown)
            yield
        finally:
            self._lower()

    @contextmanager
    def departure(self) -> Iterator[None]:
        """Wait at the gate, then let no order come to its point while this rank leaves a group, or
        the gang.
        """
        self._raise()
        try:
            self._wait_at_gate()
            yield
        finally:
            self._lower()

    def leave(self, index: int) -> None:
        """Say in the table that this rank is no longer a member of the group."""
        self.words[counts_at(self.arena, index) + self.rank] = -1

    def is_member(self, index: int, rank: int) -> bool:
        """True unless the rank is no member of the group, or has left it."""
        return self.words[counts_at(self.arena, index) + rank] >= 0

    def _raise(self) -> None:
        with self._lock:
            self.words[self.me + INSIDE] += 1

    def _lower(self) -> None:
        with self._lock:
            self.words[self.me + INSIDE] -= 1

    def _wait_at_gate(self) -> None:
        while not self._may_pass():
            self._lower()
            try:
                self.arena.wait_while(HOLD, self.words[HOLD], GATE_S)
                self.turns.check()
            finally:
                self._raise()

    def _may_pass(self) -> bool:
        """True if the gate is open and the groups are there, or if this rank is behind."""
        if self.error is not None:
            raise RuntimeError(f"its groups could not be built anew: {self.error}")
        is_there = self.words[DROP] == self.built
        return is_there and (not self.words[HOLD] or self._is_behind())

    def _is_behind(self) -> bool:
        words, arena = self.words, self.arena
        if words[ALL_PASS]:
            return True
        for index in range(GROUPS):
            at = arena.group(index)
            begun = words[at + MEMBERS + arena.ranks + self.rank]
            if words[at + NAME] and 0 <= begun < words[at + LIMIT]:
                return True
        return False

    def _count(self, index: int, text: str, shown: tuple[object, ...]) -> None:
        first, words = counts_at(self.arena, index), self.words
        with self._lock:
            # what the call is comes first: who reads the new number must find it
            if (text, shown) != self._shown:
                self._shown = text, shown
                self.arena.write_text(self.me + TEXT, _described(text, shown))
            words[first + self.arena.ranks + self.rank] = _number(text)
            words[first + self.rank] += 1
            words[self.me + CALLS] += 1
        self._must_match(index, text)

    def _must_match(self, index: int, text: str) -> None:
        """Fail the gang if a neighbour makes another call at this place of the group.

        Whichever comes last sees it, and torch's own backends would hang or mix up their data.
        """
        arena, words = self.arena, self.words
        first = counts_at(arena, index)
        size = words[arena.group(index) + SIZE]
        members = [words[arena.group(index) + MEMBERS + place] for place in range(size)]
        me, number = members.index(self.rank), words[first + self.rank]
        for other in {members[me - 1], members[(me + 1) % size]} - {self.rank}:
            is_there = words[first + other] == number
            is_other = words[first + arena.ranks + other] != _number(text)
            if is_there and is_other and words[first + other] == number:  # it has not gone on
                theirs = arena.read_text(arena.rank(other) + TEXT)
                told = f"mismatched collectives: as call {number} of a group, rank {self.rank}"
                fail(arena, f"{told} called {text}, and rank {other} {theirs}")
                self.turns.check()

    # --- receives from any rank ---

    def wait_for_any(self, more: int) -> None:
        """Count receives from any rank that are under way: all ranks may have to send."""
        with self._lock:
            self.words[self.me + OPEN_RECEIVES] += more

    def received(self, index: int) -> None:
        """Count a message that came from any rank, now that its channel is known."""
        with self._lock:
            self.words[counts_at(self.arena, index) + self.rank] += 1

    # --- orders ---

    @property
    def built(self) -> int:
        """The number of the last order after which this rank has built its groups anew."""
        return self.words[self.me + BUILT]

    def settle(self, calls: int) -> None:
        self.words[self.me + SETTLED] = calls

    @property
    def calls(self) -> int:
        return self.words[self.me + CALLS]


@cache
def _number(text: str) -> int:
    """Return a number other than 0 that stands for a kind of call."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") or 1


def _described(text: str, shown: tuple[object, ...]) -> str:
    """Describe a call by its name, and by the type and shape of its first tensor."""
    if not shown:
        return f"{text}()"
    dtype, *shape = shown
    return f"{text}({str(dtype).removeprefix('torch.')}{shape})"
