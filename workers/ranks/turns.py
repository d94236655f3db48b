"""Turns: N ranks on M slots (`seats` in code), with one rank running on each slot at a time.

A rank's turn ends where it would block (in a collective, on a store key, asleep), at the end of a
step when its slice is used up, and when the rank is done. The rank then gives its slot to the next
rank that can go on. It sleeps until what it waits for has come *and* its slot is free. No separate
process schedules them: the rank that fulfils a wait marks the waiting rank as ready, and the rank
that leaves a slot picks the next rank.

Invariants:
* a rank between two turns has moved its device memory out of the way (`leave`, `enter`);
* every wait has a deadline. It ends with an error if a rank dies, if another rank fails, or if no
  rank is left that could end the wait. The error then says where every rank stands;
* the map from ranks to slots changes only while no other rank runs (`_regroup`): at a boundary
  between two steps that all ranks reach, or where all of them are parked anyway.

What a rank computes does not depend on turns: results are combined in rank order
(`workers/ranks/rendezvous`).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from workers.ranks.shared_memory import LOOK_EVERY_S, Arena

if TYPE_CHECKING:
    import torch

# Words of the shared table's head; `rendezvous`, `process_group` and `shared_blocks` use further
# ones.
FAILED, GENERATION, SEATS, WISH, BOUNDARY, CUT, CUT_AT, _CUTS = range(8)
_FAILED_TEXT, _FAILED_WORDS = 64, 448

# The 64-bit words of a rank in the shared table, by offset.
STATE, SEAT, STEP, KIND, ABOUT, NUMBER, PART, TURNS, ON_SEAT_NS, PROCESS, SPACE, TOLD = range(12)
TEXT = 32

_HOLDER = 0  # word of a slot: the number of the rank that runs there plus 1, 0 if none

# seconds; if a slot's holder sleeps this long, it waits for something that we do not know
IDLE_S = 1.0
LOG_LENGTH = 10_000


class RankState(IntEnum):
    NEW = 0  # the rank's process has not joined yet
    READY = 1  # could run, and waits for its slot
    RUNNING = 2
    WAITING = 3  # waits for something that another rank does
    AWAY = 4  # waits for something outside the gang, and holds no slot
    DONE = 5


# Kept as module variables: reading a member from its class takes longer than reading a word.
_READY, _RUNNING, _WAITING = RankState.READY, RankState.RUNNING, RankState.WAITING
_AWAY = RankState.AWAY


class Wait(IntEnum):
    """Lists what a rank can wait for; the words `about`, `number` and `part` say for which one
    exactly.
    """

    NOTHING = 0
    CALL = 1  # about: group; number: call; part: the awaited member, or -1 for all
    VOTE = 2  # about: group; number: call; the wait is given up when no rank can move otherwise
    ROOM = 3  # about: group; number: call slot; its last call is still being read
    STORE = 4
    MESSAGE = 5  # a message from any rank to this rank
    BOUNDARY = 6
    BLOCK = 7  # number: of a graph's block, or of a part of it
    CUT = 8  # waits before step `part` until all hosts have agreed where the cut is


#: (tensor, copy): a tensor that need not be moved to the host, and a copy of its content there.
#: The copy is None if the tensor is about to be overwritten anyway.
Spared = tuple["torch.Tensor", "torch.Tensor | None"]


class GangFailed(RuntimeError):
    """Raised when the ranks of this gang cannot continue. Every rank gets the same text, which says
    why.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A finished turn, kept for the log."""

    seat: int
    begun_ns: int
    ended_ns: int
    ended_by: str


def seat_of(rank: int, ranks: int, seats: int) -> int:
    """Return the slot of a rank.

    Neighbours share a slot. If the ranks do not divide evenly, the first slots take one rank more.
    """
    size, more = divmod(ranks, seats)
    wide = (size + 1) * more
    return rank // (size + 1) if rank < wide else more + (rank - wide) // size


def hosts_of(ranks: int, seats: tuple[int, ...]) -> tuple[int, ...]:
    """Return each rank's host; `seats` says how many of the slots lie on each host."""
    all_seats = [host for host, number in enumerate(seats) for _ in range(number)]
    return tuple(all_seats[seat_of(rank, ranks, len(all_seats))] for rank in range(ranks))


def seat_all(arena: Arena, seats: int) -> None:
    """Assign every rank its slot.

    Call it before the first rank joins, or while no rank holds a slot.
    """
    words = arena.words
    words[SEATS] = seats
    for rank in range(arena.ranks):
        words[arena.rank(rank) + SEAT] = seat_of(rank, arena.ranks, seats)


def reseat(arena: Arena, seats: int) -> None:
    """Drop any requested change and let the ranks return to `seats` slots.

    All ranks must be away (`RankState.AWAY`).
    """
    words = arena.words
    with arena.locked():
        words[WISH] = words[BOUNDARY] = 0
        if words[SEATS] != seats:
            words[GENERATION] += 1
            seat_all(arena, seats)


def seats(arena: Arena) -> int:
    """Return the current number of slots.

    A requested number takes effect when all ranks reach a boundary.
    """
    return arena.words[SEATS]


def slot_of(arena: Arena, rank: int) -> int:
    """Return the number of the rank's present slot, among those of all hosts."""
    return arena.words[arena.rank(rank) + SEAT]


def wish(arena: Arena, seats: int) -> None:
    """Request another number of slots.

    It takes effect at the next boundary that all ranks reach.
    """
    if arena.is_bridged:
        raise ValueError("ranks of several hosts change their seats only when they begin again")
    if not 1 <= seats <= arena.ranks:
        raise ValueError(f"{arena.ranks} ranks take 1 to {arena.ranks} seats, not {seats}")
    with arena.locked():
        arena.words[WISH] = seats
    arena.ring_all()


def call_to_cut(arena: Arena) -> None:
    """Ask all ranks to stop before the same step (`Turns.is_cut`)."""
    with arena.locked():
        arena.words[_CUTS] += 1
        arena.words[CUT] = arena.words[_CUTS]
    arena.ring_all()


def set_cut(arena: Arena, number: int) -> None:
    """Set this host's cut number to the coordinator host's; 0 means no cut."""
    with arena.locked():
        arena.words[CUT] = number
    if number:
        arena.ring_all()


def end_cut(arena: Arena) -> None:
    with arena.locked():
        arena.words[CUT] = arena.words[CUT_AT] = 0
    if arena.is_bridged:
        arena.ring(arena.bridge)


def unbegun(arena: Arena) -> int:
    """Return a step that no rank of this host has begun, or will begin before the cut's step is
    set.

    Returns 0 if the step is not known yet, because no rank has come to a boundary.
    """
    words, steps = arena.words, [0]
    with arena.locked():
        here = [arena.rank(rank) for rank in arena.here()]
        for at in here:
            held = words[at + STATE] == RankState.WAITING and words[at + KIND] == Wait.CUT
            steps.append(words[at + PART] if held else words[at + STEP] + bool(words[at + STEP]))
        if all(words[at + STATE] == RankState.DONE for at in here):
            steps.append(1)
    return max(steps)


def name_cut(turns: Turns, step: int) -> None:
    """Set the step of the cut, agreed on by all hosts, and wake the ranks that wait for it."""
    with turns.board():
        turns.words[CUT_AT] = step
        turns.ready(Wait.CUT)


def wake_at_cut(turns: Turns) -> None:
    """Wake the ranks that wait for a cut's step, because the cut was called off."""
    with turns.board():
        turns.ready(Wait.CUT)


def state(arena: Arena, rank: int) -> RankState:
    return RankState(arena.words[arena.rank(rank) + STATE])


def waits_for(arena: Arena, rank: int) -> Wait:
    """Return what the rank waits for; NOTHING if it doesn't wait for other ranks."""
    at = arena.rank(rank)
    waits = arena.words[at + STATE] == RankState.WAITING
    return Wait(arena.words[at + KIND]) if waits else Wait.NOTHING


def are_still(arena: Arena) -> bool:
    """True if every rank of this host is done, or waits for other ranks."""
    return all(state(arena, rank) in (RankState.WAITING, RankState.DONE) for rank in arena.here())


def fail(arena: Arena, text: str) -> None:
    """End the gang. Every rank gets this text: at its next call, or at once if it waits."""
    with arena.locked():
        _fail(arena, text)
    arena.ring_all()


def failure(arena: Arena) -> str:
    """Return why the gang cannot go on; empty while it can."""
    return arena.read_text(_FAILED_TEXT, _FAILED_WORDS) if arena.words[FAILED] else ""


def _fail(arena: Arena, text: str) -> None:
    if not arena.words[FAILED]:
        arena.write_text(_FAILED_TEXT, text, _FAILED_WORDS)
        arena.words[FAILED] = 1


class _LockedTable:
    """Holds the lock of the shared table; when it is released, wakes the ranks that became
    ready.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns, self._lock = turns, turns.arena.locked()

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        turns, bells = self._turns, []
        try:
            if kind is None:
                bells, turns._bells = turns._bells, bells
                for rank in bells[:1]:  # rank `bells[0]` wakes up while the lock is being released
                    turns.arena.ring(rank)
        finally:
            self._lock.__exit__()
        for rank in bells[1:]:
            turns.arena.ring(rank)


class Turns:
    """A rank's hold on its slot."""

    def __init__(
        self,
        arena: Arena,
        rank: int,
        *,
        slice_s: float = 1.0,
        leave: Callable[[list[Spared]], None] | None = None,
        enter: Callable[[], None] | None = None,
        apart: bool = False,
    ) -> None:
        """Set up the rank's view of the shared table.

        `apart` means that the steps of different ranks are independent. Each rank may then stop
        before any of its own steps, and where it waits for a block.
        """
        self.arena, self.rank, self.slice_s = arena, rank, slice_s
        self.apart = apart
        self.words, self.me = arena.words, arena.rank(rank)
        self.leave, self.enter = leave, enter
        self.log: deque[Turn] = deque(maxlen=LOG_LENGTH)
        # `rendezvous` sets both functions. They find the ranks missing from a call, and give up a
        # vote.
        self.lacking: Callable[[int, int], list[int]] = lambda about, number: []
        self.give_up_vote: Callable[[int, int], None] = lambda about, number: None
        # functions; each returns tensors that need not be moved
        self.spared: list[Callable[[], list[Spared]]] = []
        # what was last seen of the slot's holder, and since when
        self._idle: tuple[tuple[int, ...], float] = (), 0.0
        self._left_cut = 0  # number of the last cut at which we stopped
        self._out = False  # True while our device memory is out of the way
        self._begun_ns = 0
        self._bells: list[int] = []
        self._board = _LockedTable(self)
        self._ranks = [arena.rank(rank) for rank in range(arena.ranks)]
        self._fence = threading.Lock()  # locking it serves as a memory barrier

    # --- a rank's life ---

    def join(self) -> None:
        """Register this process and wait for the first turn."""
        self.arena.hold_lifeline(self.rank)
        with self.board():
            self.words[self.me + PROCESS], self.words[self.me + SPACE] = os.getpid(), _space()
            self.words[self.me + STATE] = RankState.READY
            self._seat_next(self.seat)
        self._sleep_until_running()

    def finish(self) -> None:
        """Mark this rank as done and pass its slot on."""
        with self.board():
            self._get_up("end")
            self.words[self.me + STATE] = RankState.DONE
            self._seat_next(self.seat)
            self._regroup_at_boundary()
            self._must_not_be_stuck()

    @property
    def seat(self) -> int:
        return self.words[self.me + SEAT]

    @property
    def generation(self) -> int:
        """The number of times that the map of slots has changed."""
        return self.words[GENERATION]

    def seatmates(self) -> list[int]:
        """Return the ranks of this slot that are not done, this rank included."""
        return [rank for rank in self.on_my_seat() if self._of(rank, STATE) != RankState.DONE]

    def on_my_seat(self) -> list[int]:
        """Return all ranks of this slot, whatever their state."""
        return [rank for rank in range(self.arena.ranks) if self._of(rank, SEAT) == self.seat]

    # --- ends of a turn ---

    def wait(
        self,
        kind: Wait,
        about: int = 0,
        number: int = 0,
        part: int = 0,
        *,
        until: Callable[[], bool],
        text: str,
        timeout_s: float,
    ) -> None:
        """Give the slot away until `until()` is true; the rank that makes it true calls `ready`.

        Raises GangFailed, or TimeoutError. The limit is `timeout_s` times the number of ranks that
        share a slot: where three ranks take turns, a wait may last three times as long.
        """
        self.check()
        self._come_back()
        if until():
            return
        self._move_out()
        at, words = self.me, self.words
        words[at + KIND], words[at + ABOUT], words[at + NUMBER] = kind, about, number
        words[at + PART] = part
        with self.board():
            came = until()  # checked after the wait was published, see `awaiting`
            if not came:
                self._wait_for(kind, text)
        if came:
            self._move_in()
        else:
            crowd = math.ceil(self.arena.ranks / max(1, self.words[SEATS]))
            self._sleep_until_running(timeout_s * crowd, until if kind == Wait.BLOCK else None)

    def _wait_for(self, kind: Wait, text: str) -> None:
        self.arena.write_text(self.me + TEXT, text)
        self._get_up("wait")
        self.words[self.me + STATE] = RankState.WAITING
        self._seat_next(self.seat)
        self._regroup_at_boundary()
        self._must_not_be_stuck()
        if kind == Wait.CUT:
            self.call_bridge()

    @contextmanager
    def away(self, text: str) -> Iterator[None]:
        """Let others run while this rank waits for something outside the gang."""
        self._move_out()
        self._go_away(text)
        try:
            yield
        finally:
            self._come_back()

    def wait_outside(self, number: int, fd: int, *, until: Callable[[], bool], text: str) -> None:
        """Wait for a block as in `wait`, or for news from outside the gang, which makes `fd`
        readable.

        Because the news may come at any time, the gang is not taken to be stuck.
        """
        self.check()
        self._come_back()
        if until():
            return
        self._move_out()
        at, words = self.me, self.words
        words[at + KIND], words[at + ABOUT], words[at + NUMBER] = Wait.BLOCK, 0, number
        words[at + PART] = 0
        self._go_away(text)
        while not until():
            self.arena.sleep(self.rank, LOOK_EVERY_S, beside=fd)
            self.check()
            self._must_be_alive()
        self._come_back()

    def boundary(self, step: int, timeout_s: float) -> None:
        """Stop before step `step` if the map of slots changes there; yield the slot if the slice is
        used up.

        Ranks agree on the boundary without a message: the first rank that sees the requested change
        names a step that no rank has begun.
        """
        self.check()
        self._come_back()
        words = self.words
        if self.arena.is_bridged and not self.apart:
            self._hear_of_cut(step, timeout_s)
        with self.board():
            if words[WISH] and not words[BOUNDARY]:
                words[BOUNDARY] = self._first_unbegun(step)
            if words[CUT] and not words[CUT_AT] and not self.arena.is_bridged:
                words[CUT_AT] = self._first_unbegun(step)
            is_here = words[BOUNDARY] == step or self._parks()
            if not is_here:
                # begun: steps that others name from now on are later ones
                words[self.me + STEP] = step
        if is_here:
            generation = self.generation
            text = f"the boundary before step {step}, where the seats change"
            self.wait(
                Wait.BOUNDARY,
                until=lambda: self.generation != generation or (self.apart and self._is_cut_now()),
                text=text,
                timeout_s=timeout_s,
            )
        elif time.monotonic_ns() - self._begun_ns > self.slice_s * 1e9:
            self._yield_seat()

    def _first_unbegun(self, step: int) -> int:
        """Return the first step that no rank has begun; this rank is about to begin `step`."""
        return max(step - 1, *(self._of(rank, STEP) for rank in range(self.arena.ranks))) + 1

    def _hear_of_cut(self, step: int, timeout_s: float) -> None:
        """While the hosts agree on a cut, wait here: no step may begin until the cut's step is
        known.
        """
        words = self.words

        def is_known() -> bool:
            return not words[CUT] or bool(words[CUT_AT])

        while True:
            with self.board():
                if is_known():
                    words[self.me + STEP] = step
                    return
            text = f"the boundary before step {step}, until the hosts agree on a cut"
            self.wait(Wait.CUT, part=step, until=is_known, text=text, timeout_s=timeout_s)

    def is_cut(self, step: int) -> bool:
        """True if all ranks stop before this step, until `end_cut`. Call it after `boundary`."""
        return self._is_cut_now() if self.apart else self.words[CUT_AT] == step

    def is_called(self) -> bool:
        """True if ranks that are `apart` must stop wherever they are."""
        return self.apart and (self._is_cut_now() or self._parks())

    @property
    def cut(self) -> int:
        """The number of the cut to which the ranks are called; 0 if there is none."""
        return self.words[CUT]

    def leave_cut(self, number: int) -> None:
        """Remember that this rank has stopped at cut `number`, so that it stops at each cut only
        once.

        This is only for ranks that are `apart`: their host may receive blocks sent after a cut
        before it learns that the cut has ended.
        """
        self._left_cut = number

    def _is_cut_now(self) -> bool:
        cut = self.words[CUT]
        return cut > 0 and cut != self._left_cut

    def _parks(self) -> bool:
        """True if this rank must stop for a change of slots.

        A cut goes first: a rank that stands at a cut cannot come to the change.
        """
        return self.apart and self.words[WISH] > 0 and not self._is_cut_now()

    def _yield_seat(self) -> None:
        """Let the other ready ranks of this slot run first, if there are any, as the slice is used
        up.
        """
        others = [rank for rank in self.seatmates() if self._of(rank, STATE) == RankState.READY]
        if not others:
            return
        self._move_out()
        with self.board():
            self._get_up("slice")
            self.words[self.me + STATE] = RankState.READY
            self._seat_next(self.seat)
        self._sleep_until_running()

    # --- what a rank does for waiting ranks; the rank calls it under the lock, within `board` ---

    def board(self) -> _LockedTable:
        """Return a context manager: lock the shared table, and wake affected ranks at the end."""
        return self._board

    def awaiting(self, kind: Wait, number: int) -> list[int]:
        """Return the ranks that wait for this, or are about to.

        Call it without the lock, and after the awaited thing is published. A waiting rank checks
        once more after it has published its wait, so at least one of the two sides sees what the
        other side did.
        """
        with self._fence:  # barrier: no read below happens before writes above are visible
            pass
        words, ranks = self.words, enumerate(self._ranks)
        return [r for r, at in ranks if words[at + NUMBER] == number and words[at + KIND] == kind]

    def ready(
        self, kind: Wait, about: int = 0, number: int | None = 0, part: int | None = None
    ) -> None:
        """Mark the ranks with a matching wait as ready.

        Ranks that also wait for news from outside are woken, too.
        """
        words = self.words
        for rank, at in enumerate(self._ranks):
            if (
                words[at + STATE] in (_WAITING, _AWAY)
                and words[at + KIND] == kind
                and words[at + ABOUT] == about
                and (number is None or words[at + NUMBER] == number)
                and (part is None or words[at + PART] == part)
            ):
                if words[at + STATE] == _AWAY:
                    self._bells.append(rank)
                    continue
                words[at + STATE] = _READY
                self._seat_next(words[at + SEAT])

    def call_bridge(self) -> None:
        """Wake the bridge to the other hosts: it has something to do."""
        self._bells.append(self.arena.bridge)

    def regroup_here(self) -> None:
        """Change the slots in a script without steps, if that is requested.

        Does so only if all other ranks wait for the call that this rank completes.
        """
        words = self.words
        if words[WISH] and not words[self.me + STEP] and not self._runs_beside_me():
            self._regroup()

    def check(self) -> None:
        """Raise GangFailed if any rank has failed."""
        if self.words[FAILED]:
            raise GangFailed(failure(self.arena))

    def standing(self) -> str:
        """Describe in a sentence where every rank stands."""
        return "; ".join(self.standing_of(rank) for rank in range(self.arena.ranks))

    # --- inside ---

    def _of(self, rank: int, word: int) -> int:
        return self.words[self.arena.rank(rank) + word]

    def _move_out(self) -> None:
        if self.leave is not None and not self._out and len(self.seatmates()) > 1:
            self.leave([pair for known in self.spared for pair in known()])
            self._out = True

    def _move_in(self) -> None:
        if self._out and self.enter is not None:
            self._out = False
            self.enter()

    def _get_up(self, why: str) -> None:
        seat = self.arena.seat(self.seat)
        if self.words[seat + _HOLDER] == self.rank + 1:
            self.words[seat + _HOLDER] = 0
        now_ns = time.monotonic_ns()
        self.words[self.me + ON_SEAT_NS] += now_ns - self._begun_ns
        turn = Turn(seat=self.seat, begun_ns=self._begun_ns, ended_ns=now_ns, ended_by=why)
        self.log.append(turn)

    def _seat_next(self, seat: int) -> None:
        """Give a free slot to the next ready rank in rank order."""
        words, place = self.words, self.arena.seat(seat) + _HOLDER
        if words[place]:
            return
        ranks = range(self.arena.ranks)
        for rank in (*ranks[self.rank + 1 :], *ranks[: self.rank + 1]):
            at = self._ranks[rank]
            if words[at + SEAT] == seat and words[at + STATE] == _READY:
                words[place] = rank + 1
                words[at + STATE] = _RUNNING
                words[at + TURNS] += 1
                self._bells.append(rank)
                return

    def _sleep_until_running(
        self, timeout_s: float = math.inf, until: Callable[[], bool] | None = None
    ) -> None:
        """Sleep until this rank has its slot.

        If `until` is given, call it now and then, since another wait may end first.
        """
        end_s = time.monotonic() + timeout_s
        while self.words[self.me + STATE] != _RUNNING:
            self.arena.sleep(self.rank, LOOK_EVERY_S)
            self.check()
            if self.words[self.me + STATE] == _RUNNING:
                break
            self._must_be_alive()
            self._stop_waiting_if_called()
            if until is not None and until():
                self._stop_waiting()
            if self.words[self.me + STATE] == RankState.READY:
                self._take_idle_seat()
            if time.monotonic() > end_s and self.words[self.me + STATE] == RankState.WAITING:
                self._too_late(timeout_s)
        self._begun_ns = time.monotonic_ns()
        self._move_in()

    def _stop_waiting_if_called(self) -> None:
        words, me = self.words, self.me
        if not self.apart or words[me + STATE] != RankState.WAITING:
            return
        is_called = self.is_called() if words[me + KIND] == Wait.BLOCK else self._is_cut_now()
        if is_called:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        words, me = self.words, self.me
        with self.board():
            if words[me + STATE] == _WAITING:
                words[me + STATE] = _READY
                self._seat_next(self.seat)

    def _take_idle_seat(self) -> None:
        """Take the slot from a holder that sleeps outside our calls, for example in a lock.

        The holder may wait for this rank, so the gang would be stuck.
        """
        place = self.arena.seat(self.seat) + _HOLDER
        holder = self.words[place] - 1
        if holder < 0 or self._of(holder, SPACE) != self._of(self.rank, SPACE):
            return
        used = _processor_ticks_asleep(self._of(holder, PROCESS))
        seen = (holder, self._of(holder, TURNS), used)
        if used < 0 or seen != self._idle[0]:
            self._idle = seen, time.monotonic()
        elif time.monotonic() - self._idle[1] >= IDLE_S:
            with self.board():
                if (self.words[place] - 1, self._of(holder, TURNS)) == seen[:2]:
                    at = self.arena.rank(holder)
                    self.arena.write_text(at + TEXT, "it sleeps in a call that is not ours")
                    self.words[at + STATE], self.words[place] = RankState.AWAY, 0
                    self._seat_next(self.seat)

    def _go_away(self, text: str) -> None:
        """Give the slot to the next rank while this rank waits for something outside the gang."""
        with self.board():
            self.arena.write_text(self.me + TEXT, text)
            self._get_up("away")
            self.words[self.me + STATE] = RankState.AWAY
            self._seat_next(self.seat)

    def _come_back(self) -> None:
        """If this rank gave its slot away, or lost it while asleep, wait for it behind the ready
        ranks.
        """
        if self.words[self.me + STATE] != RankState.AWAY:
            return
        with self.board():
            self.words[self.me + STATE] = RankState.READY
            self._seat_next(self.seat)
        self._sleep_until_running()

    def _too_late(self, timeout_s: float) -> None:
        """Withdraw the wait and raise TimeoutError; the caller decides what that means."""
        with self.board():
            if self.words[self.me + STATE] != RankState.WAITING:
                return
            told = f"no end of it within {timeout_s:.1f} s: {self.standing()}"
            self.words[self.me + STATE] = RankState.READY
            self._seat_next(self.seat)
        self._sleep_until_running()
        raise TimeoutError(told)

    def _must_be_alive(self) -> None:
        for rank in range(self.arena.ranks):
            state = self._of(rank, STATE)
            if rank == self.rank or state in (RankState.NEW, RankState.DONE):
                continue
            if self.arena.is_dead(rank) and self._of(rank, STATE) != RankState.DONE:
                fail(self.arena, f"rank {rank} has died: {self.standing()}")
                self.check()
        if self.arena.is_bridged and self.arena.has_no_bridge():
            fail(self.arena, f"the bridge of host {self.arena.host} has died: {self.standing()}")
            self.check()

    # --- stuck, and regrouped ---

    @property
    def is_last_to_move(self) -> bool:
        """True if no other rank of this host could move by itself."""
        return not self._runs_beside_me()

    def _runs_beside_me(self) -> bool:
        """True if any other rank of this host could move by itself."""
        still = (RankState.WAITING, RankState.DONE)
        states = (self._of(rank, STATE) for rank in self.arena.here() if rank != self.rank)
        return any(state not in still for state in states)

    def _must_not_be_stuck(self) -> None:
        """If all ranks wait, apply a requested change of slots, give up votes, or fail the gang."""
        if self.arena.is_bridged:
            if are_still(self.arena):  # the bridges find out whether the ranks of all hosts wait
                self.call_bridge()
            return
        mine = self.words[self.me + STATE]
        if mine not in (RankState.WAITING, RankState.DONE) or self._runs_beside_me():
            return
        waiting = [
            rank for rank in range(self.arena.ranks) if self._of(rank, STATE) == RankState.WAITING
        ]
        if any(self._of(rank, KIND) == Wait.BOUNDARY for rank in waiting):
            self._regroup()  # all ranks are parked, as a change of slots requires
        elif votes := [rank for rank in waiting if self._of(rank, KIND) == Wait.VOTE]:
            for rank in votes:
                self.give_up_vote(self._of(rank, ABOUT), self._of(rank, NUMBER))
        elif waiting:
            _fail(self.arena, f"the ranks wait for each other: {self.standing()}")
            self._bells += range(self.arena.ranks)

    def _regroup_at_boundary(self) -> None:
        """Apply the requested map of slots if every live rank waits at the boundary.

        A rank calls this when it comes to the boundary, or is done.
        """
        live = [r for r in range(self.arena.ranks) if self._of(r, STATE) != RankState.DONE]
        waiting = [r for r in live if self._of(r, STATE) == RankState.WAITING]
        there = [r for r in waiting if self._of(r, KIND) == Wait.BOUNDARY]
        if there and there == live:
            self._regroup()

    def _regroup(self) -> None:
        """Apply the requested map of slots. No rank runs, except perhaps this one."""
        words, arena = self.words, self.arena
        seats, step = words[WISH], words[BOUNDARY]
        words[WISH] = words[BOUNDARY] = 0
        words[GENERATION] += 1
        seat_all(arena, seats)
        for rank in range(arena.ranks):
            words[arena.seat(rank) + _HOLDER] = 0
            at = arena.rank(rank)
            if words[at + STATE] == RankState.WAITING and words[at + KIND] == Wait.BOUNDARY:
                words[at + STEP] = step  # counts as begun, as in `boundary`
        if words[self.me + STATE] == RankState.RUNNING:
            words[arena.seat(self.seat) + _HOLDER] = self.rank + 1
        self.ready(Wait.BOUNDARY)
        for seat in range(seats):
            self._seat_next(seat)

    def standing_of(self, rank: int) -> str:
        if not self.arena.is_here(rank):
            return f"rank {rank} is on another host"
        state = RankState(self._of(rank, STATE))
        text = self.arena.read_text(self.arena.rank(rank) + TEXT)
        if state == RankState.WAITING:
            for_whom = self._lacked_by(rank)
            return f"rank {rank} waits in {text}{for_whom}"
        if state == RankState.AWAY:
            return f"rank {rank} is away ({text})"
        names = {
            RankState.NEW: "has not come",
            RankState.READY: "is ready to run",
            RankState.DONE: "has ended",
        }
        return f"rank {rank} {names.get(state, 'runs')}"

    def _lacked_by(self, rank: int) -> str:
        if self._of(rank, KIND) not in (Wait.CALL, Wait.VOTE):
            return ""
        lacking = self.lacking(self._of(rank, ABOUT), self._of(rank, NUMBER))
        return f", which rank {', '.join(map(str, lacking))} has not called" if lacking else ""


def _space() -> int:
    """Return the id of this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _processor_ticks_asleep(process: int) -> int:
    """Return the processor ticks that a sleeping process has used.

    Returns -1 if it runs or is not visible.
    """
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "R" else int(fields[11]) + int(fields[12])
