"""Seats and turns: N ranks on M seats, one rank running on each seat at a time.

A rank's turn ends where it would block: in a collective, on a store key, asleep; at the end of a
step when its slice is used up; and when it is done.  It then gives its seat to the next rank that
can go on, and sleeps until what it waits for has come *and* its seat is free.  No process stands
between them: whoever makes a wait come true marks the rank as ready, and whoever leaves a seat
picks who is next.

What always holds:
* a rank between two turns has its device memory out of the way (`leave`, `enter`);
* every wait has a deadline, and ends with an error if a rank dies, if another rank fails, or if
  nobody is left that could end it: then the error says where every rank stands;
* the map from ranks to seats changes only while nobody else runs (`_regroup`), at the boundary
  between two steps that all ranks reach, or where all of them are parked anyway.

What a rank computes does not depend on any of this: results are put together in rank order
(`workers/exchange`).
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

from workers.ground import LOOK_EVERY_S, Ground

if TYPE_CHECKING:
    import torch

# Words of the board's head; further ones belong to `exchange`, `collectives` and `passing`.
FAILED, GENERATION, SEATS, WISH, BOUNDARY, CUT, CUT_AT, _CUTS = range(8)
_FAILED_TEXT, _FAILED_WORDS = 64, 448

# Words of a rank.
STATE, SEAT, STEP, KIND, ABOUT, NUMBER, PART, TURNS, ON_SEAT_NS, PROCESS, SPACE = range(11)
_TEXT = 32

_HOLDER = 0  # of a seat: the rank that runs there, plus one

IDLE_S = 1.0  # who has a seat and sleeps so long, waits for something that we do not know of
LOG_LENGTH = 10_000


class State(IntEnum):
    NEW = 0  # its process has not come yet
    READY = 1  # could run, and waits for its seat
    RUNNING = 2
    WAITING = 3  # for something that another rank does
    AWAY = 4  # waits for something outside the gang, without a seat
    DONE = 5


# To look one up in its class takes longer than to read a word.
_READY, _RUNNING, _WAITING = State.READY, State.RUNNING, State.WAITING


class Wait(IntEnum):
    """What a rank waits for; `about`, `number` and `part` say which."""

    NOTHING = 0
    CALL = 1  # group, sequence, whose part (or EVERYBODY)
    VOTE = 2  # group, sequence: given up when nothing else can move
    ROOM = 3  # group, sequence: its slot is still being read
    STORE = 4
    MESSAGE = 5  # from any rank to this one
    BOUNDARY = 6
    BLOCK = 7  # number: of a graph's block, or of a part of it
    CUT = 8  # before step `part`, until all hosts have agreed on where the cut is


#: A tensor whose content need not go to the host: its copy there, or None where it is about to be
#: overwritten anyway.
Spared = tuple["torch.Tensor", "torch.Tensor | None"]


class GangFailed(RuntimeError):
    """Why the ranks of this gang cannot go on.  Every one of them gets the same text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn as it was: for the log."""

    seat: int
    begun_ns: int
    ended_ns: int
    ended_by: str


def seat_of(rank: int, ranks: int, seats: int) -> int:
    """Neighbours share a seat, and the first seats take one more if it does not divide."""
    size, more = divmod(ranks, seats)
    wide = (size + 1) * more
    return rank // (size + 1) if rank < wide else more + (rank - wide) // size


def hosts_of(ranks: int, seats: tuple[int, ...]) -> tuple[int, ...]:
    """Of each rank its host, where `seats` says how many of the seats lie on each."""
    all_seats = [host for host, number in enumerate(seats) for _ in range(number)]
    return tuple(all_seats[seat_of(rank, ranks, len(all_seats))] for rank in range(ranks))


def seat_all(ground: Ground, seats: int) -> None:
    """Before the first rank comes, or while nobody sits (`reseat`, `_regroup`)."""
    words = ground.words
    words[SEATS] = seats
    for rank in range(ground.ranks):
        words[ground.rank(rank) + SEAT] = seat_of(rank, ground.ranks, seats)


def reseat(ground: Ground, seats: int) -> None:
    """While all ranks are away: no wish is open any more, and they come back to so many seats."""
    words = ground.words
    with ground.locked():
        words[WISH] = words[BOUNDARY] = 0
        if words[SEATS] != seats:
            words[GENERATION] += 1
            seat_all(ground, seats)


def seats(ground: Ground) -> int:
    """How many there are; as many as were wished once all ranks have come to a boundary."""
    return ground.words[SEATS]


def wish(ground: Ground, seats: int) -> None:
    """Ask for another number of seats; it comes true at the next boundary that all ranks reach."""
    if ground.is_bridged:
        raise ValueError("ranks of several hosts change their seats only when they begin again")
    if not 1 <= seats <= ground.ranks:
        raise ValueError(f"{ground.ranks} ranks take 1 to {ground.ranks} seats, not {seats}")
    with ground.locked():
        ground.words[WISH] = seats
    ground.ring_all()


def call_to_cut(ground: Ground) -> None:
    """Ask that all ranks come to stand before the same step (`Turns.is_cut`)."""
    with ground.locked():
        ground.words[_CUTS] += 1
        ground.words[CUT] = ground.words[_CUTS]
    ground.ring_all()


def set_cut(ground: Ground, number: int) -> None:
    """As it is at home: the cut of this number, or none (0)."""
    with ground.locked():
        ground.words[CUT] = number
    if number:
        ground.ring_all()


def end_cut(ground: Ground) -> None:
    with ground.locked():
        ground.words[CUT] = ground.words[CUT_AT] = 0
    if ground.is_bridged:
        ground.ring(ground.bridge)


def unbegun(ground: Ground) -> int:
    """A step that no rank of this host has begun, nor will begin before the cut is named.

    0 while it is not known: nobody has come to a boundary yet.
    """
    words, steps = ground.words, [0]
    with ground.locked():
        here = [ground.rank(rank) for rank in ground.here()]
        for at in here:
            held = words[at + STATE] == State.WAITING and words[at + KIND] == Wait.CUT
            steps.append(words[at + PART] if held else words[at + STEP] + bool(words[at + STEP]))
        if all(words[at + STATE] == State.DONE for at in here):
            steps.append(1)
    return max(steps)


def name_cut(turns: Turns, step: int) -> None:
    """All hosts have agreed on it."""
    with turns.board():
        turns.words[CUT_AT] = step
        turns.ready(Wait.CUT)


def wake_at_cut(turns: Turns) -> None:
    """There is none any more; who waits to hear of it goes on."""
    with turns.board():
        turns.ready(Wait.CUT)


def state(ground: Ground, rank: int) -> State:
    return State(ground.words[ground.rank(rank) + STATE])


def waits_for(ground: Ground, rank: int) -> Wait:
    """NOTHING where it does not wait for other ranks."""
    at = ground.rank(rank)
    waits = ground.words[at + STATE] == State.WAITING
    return Wait(ground.words[at + KIND]) if waits else Wait.NOTHING


def are_still(ground: Ground) -> bool:
    """Whether no rank of this host could move by itself."""
    return all(state(ground, rank) in (State.WAITING, State.DONE) for rank in ground.here())


def fail(ground: Ground, text: str) -> None:
    """End the gang: every rank gets this text at its next call, or at once if it waits."""
    with ground.locked():
        _fail(ground, text)
    ground.ring_all()


def failure(ground: Ground) -> str:
    """Why the gang cannot go on; empty while it can."""
    return ground.read_text(_FAILED_TEXT, _FAILED_WORDS) if ground.words[FAILED] else ""


def _fail(ground: Ground, text: str) -> None:
    if not ground.words[FAILED]:
        ground.write_text(_FAILED_TEXT, text, _FAILED_WORDS)
        ground.words[FAILED] = 1


class _Board:
    """See `Turns.board`."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._lock = turns, turns.ground.locked()

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        turns, bells = self._turns, []
        try:
            if kind is None:
                bells, turns._bells = turns._bells, bells
                for rank in bells[:1]:  # it wakes up while the lock is let go of
                    turns.ground.ring(rank)
        finally:
            self._lock.__exit__()
        for rank in bells[1:]:
            turns.ground.ring(rank)


class Turns:
    """One rank's hold on its seat."""

    def __init__(
        self,
        ground: Ground,
        rank: int,
        *,
        slice_s: float = 1.0,
        leave: Callable[[list[Spared]], None] | None = None,
        enter: Callable[[], None] | None = None,
        apart: bool = False,
    ) -> None:
        """`apart`: the steps of one rank have nothing to do with those of another, so each may
        stop before any of its own, and where it waits for a block.
        """
        self.ground, self.rank, self.slice_s = ground, rank, slice_s
        self.apart = apart
        self.words, self.me = ground.words, ground.rank(rank)
        self.leave, self.enter = leave, enter
        self.log: deque[Turn] = deque(maxlen=LOG_LENGTH)
        # `exchange` fills these in: who has not come to a call, and giving up a vote.
        self.lacking: Callable[[int, int], list[int]] = lambda about, number: []
        self.give_up_vote: Callable[[int, int], None] = lambda about, number: None
        self.spared: list[Callable[[], list[Spared]]] = []  # who knows what need not be moved
        self._idle: tuple[tuple[int, ...], float] = (), 0.0  # what was seen of a holder, since when
        self._left_cut = 0  # the number of the last that we stood at
        self._out = False  # our device memory is out of the way
        self._begun_ns = 0
        self._bells: list[int] = []
        self._board = _Board(self)
        self._ranks = [ground.rank(rank) for rank in range(ground.ranks)]
        self._fence = threading.Lock()  # its use is one for memory, too

    # --- a rank's life ---

    def join(self) -> None:
        """Come alive and wait for the first turn."""
        self.ground.hold_lifeline(self.rank)
        with self.board():
            self.words[self.me + PROCESS], self.words[self.me + SPACE] = os.getpid(), _space()
            self.words[self.me + STATE] = State.READY
            self._seat_next(self.seat)
        self._sleep_until_running()

    def finish(self) -> None:
        """This rank has nothing more to do."""
        with self.board():
            self._get_up("end")
            self.words[self.me + STATE] = State.DONE
            self._seat_next(self.seat)
            self._regroup_at_boundary()
            self._must_not_be_stuck()

    @property
    def seat(self) -> int:
        return self.words[self.me + SEAT]

    @property
    def generation(self) -> int:
        """How often the map of seats has changed."""
        return self.words[GENERATION]

    def seatmates(self) -> list[int]:
        """The ranks of this seat that are not done, this one among them."""
        return [rank for rank in self.on_my_seat() if self._of(rank, STATE) != State.DONE]

    def on_my_seat(self) -> list[int]:
        """All ranks of this seat, whatever they do."""
        return [rank for rank in range(self.ground.ranks) if self._of(rank, SEAT) == self.seat]

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
        """Give the seat away until `until()`, which whoever makes it true announces by `ready`.

        Raises GangFailed, or TimeoutError past `timeout_s` of this rank's share of the seat: where
        three ranks take turns a wait may last three times as long.
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
            came = until()  # looked at after it was said what we wait for, see `awaiting`
            if not came:
                self._wait_for(kind, text)
        if came:
            self._move_in()
        else:
            crowd = math.ceil(self.ground.ranks / max(1, self.words[SEATS]))
            self._sleep_until_running(timeout_s * crowd, until if kind == Wait.BLOCK else None)

    def _wait_for(self, kind: Wait, text: str) -> None:
        self.ground.write_text(self.me + _TEXT, text)
        self._get_up("wait")
        self.words[self.me + STATE] = State.WAITING
        self._seat_next(self.seat)
        self._regroup_at_boundary()
        self._must_not_be_stuck()
        if kind == Wait.CUT:
            self.call_bridge()

    @contextmanager
    def away(self, text: str) -> Iterator[None]:
        """While this rank waits for something outside the gang, others run."""
        self._move_out()
        with self.board():
            self.ground.write_text(self.me + _TEXT, text)
            self._get_up("away")
            self.words[self.me + STATE] = State.AWAY
            self._seat_next(self.seat)
        try:
            yield
        finally:
            with self.board():
                self.words[self.me + STATE] = State.READY
                self._seat_next(self.seat)
            self._sleep_until_running()

    def boundary(self, step: int, timeout_s: float) -> None:
        """Before step `step` begins: the place where the map of seats may change.

        All ranks agree on the boundary without a message: the first one that sees the wish names
        one that nobody has passed.
        """
        self.check()
        self._come_back()
        words = self.words
        if self.ground.is_bridged and not self.apart:
            self._hear_of_cut(step, timeout_s)
        with self.board():
            if words[WISH] and not words[BOUNDARY]:
                words[BOUNDARY] = self._first_unbegun(step)
            if words[CUT] and not words[CUT_AT] and not self.ground.is_bridged:
                words[CUT_AT] = self._first_unbegun(step)
            is_here = words[BOUNDARY] == step or self._parks()
            if not is_here:
                words[self.me + STEP] = step  # begun: what others name from now on lies behind it
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
        """The first step that no rank has begun; this one is about to begin `step`."""
        return max(step - 1, *(self._of(rank, STEP) for rank in range(self.ground.ranks))) + 1

    def _hear_of_cut(self, step: int, timeout_s: float) -> None:
        """Begin no step while the hosts agree on where the cut is: one that no rank has begun."""
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
        """All ranks stop before this step, until `end_cut`: each comes here after `boundary`."""
        return self._is_cut_now() if self.apart else self.words[CUT_AT] == step

    def is_called(self) -> bool:
        """Whether ranks that are `apart` are to stop wherever they are."""
        return self.apart and (self._is_cut_now() or self._parks())

    @property
    def cut(self) -> int:
        """The number of the one that ranks are called to; 0 if there is none."""
        return self.words[CUT]

    def leave_cut(self, number: int) -> None:
        """Ranks that are `apart` stand at each once.  On another host than home it may be heard
        later that it is over than what comes after it.
        """
        self._left_cut = number

    def _is_cut_now(self) -> bool:
        cut = self.words[CUT]
        return cut > 0 and cut != self._left_cut

    def _parks(self) -> bool:
        """Stop for a change of seats; who stands at a cut cannot come, so that goes before."""
        return self.apart and self.words[WISH] > 0 and not self._is_cut_now()

    def _yield_seat(self) -> None:
        """The slice is used up: to the end of the row, if anybody stands there."""
        others = [rank for rank in self.seatmates() if self._of(rank, STATE) == State.READY]
        if not others:
            return
        self._move_out()
        with self.board():
            self._get_up("slice")
            self.words[self.me + STATE] = State.READY
            self._seat_next(self.seat)
        self._sleep_until_running()

    # --- what others do for those who wait; under the lock, within `board` ---

    def board(self) -> _Board:
        """Alone on the board; whom it concerns is rung up at the end."""
        return self._board

    def awaiting(self, kind: Wait, number: int) -> list[int]:
        """Who waits for this, or is about to; asked once it can be seen, without the lock.

        Who waits looks once more after saying for what: one of both sees what the other did.
        """
        with self._fence:  # nothing behind it is read before all before it can be seen
            pass
        words, ranks = self.words, enumerate(self._ranks)
        return [r for r, at in ranks if words[at + NUMBER] == number and words[at + KIND] == kind]

    def ready(
        self, kind: Wait, about: int = 0, number: int | None = 0, part: int | None = None
    ) -> None:
        """What these waited for has come."""
        words = self.words
        for at in self._ranks:
            if (
                words[at + STATE] == _WAITING
                and words[at + KIND] == kind
                and words[at + ABOUT] == about
                and (number is None or words[at + NUMBER] == number)
                and (part is None or words[at + PART] == part)
            ):
                words[at + STATE] = _READY
                self._seat_next(words[at + SEAT])

    def call_bridge(self) -> None:
        """There is something to do for the bridge to the other hosts."""
        self._bells.append(self.ground.bridge)

    def regroup_here(self) -> None:
        """For a script without steps: all others wait in the call that this rank completes."""
        words = self.words
        if words[WISH] and not words[self.me + STEP] and not self._runs_beside_me():
            self._regroup()

    def check(self) -> None:
        """Raises GangFailed once any rank has failed."""
        if self.words[FAILED]:
            raise GangFailed(failure(self.ground))

    def standing(self) -> str:
        """Where every rank stands, in a sentence."""
        return "; ".join(self.standing_of(rank) for rank in range(self.ground.ranks))

    # --- inside ---

    def _of(self, rank: int, word: int) -> int:
        return self.words[self.ground.rank(rank) + word]

    def _move_out(self) -> None:
        if self.leave is not None and not self._out and len(self.seatmates()) > 1:
            self.leave([pair for known in self.spared for pair in known()])
            self._out = True

    def _move_in(self) -> None:
        if self._out and self.enter is not None:
            self._out = False
            self.enter()

    def _get_up(self, why: str) -> None:
        seat = self.ground.seat(self.seat)
        if self.words[seat + _HOLDER] == self.rank + 1:
            self.words[seat + _HOLDER] = 0
        now_ns = time.monotonic_ns()
        self.words[self.me + ON_SEAT_NS] += now_ns - self._begun_ns
        turn = Turn(seat=self.seat, begun_ns=self._begun_ns, ended_ns=now_ns, ended_by=why)
        self.log.append(turn)

    def _seat_next(self, seat: int) -> None:
        """Whoever is ready and comes next in rank order, if the seat is free."""
        words, place = self.words, self.ground.seat(seat) + _HOLDER
        if words[place]:
            return
        ranks = range(self.ground.ranks)
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
        """Looks by itself now and then whether what it waits for has come, if it is given that."""
        end_s = time.monotonic() + timeout_s
        while self.words[self.me + STATE] != _RUNNING:
            self.ground.sleep(self.rank, LOOK_EVERY_S)
            self.check()
            if self.words[self.me + STATE] == _RUNNING:
                break
            self._must_be_alive()
            self._stop_waiting_if_called()
            if until is not None and until():
                self._stop_waiting()
            if self.words[self.me + STATE] == State.READY:
                self._take_idle_seat()
            if time.monotonic() > end_s and self.words[self.me + STATE] == State.WAITING:
                self._too_late(timeout_s)
        self._begun_ns = time.monotonic_ns()
        self._move_in()

    def _stop_waiting_if_called(self) -> None:
        words, me = self.words, self.me
        if not self.apart or words[me + STATE] != State.WAITING:
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
        """Who holds our seat sleeps, in a lock or a socket perhaps, and may be waiting for us."""
        place = self.ground.seat(self.seat) + _HOLDER
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
                    at = self.ground.rank(holder)
                    self.ground.write_text(at + _TEXT, "it sleeps in something of its own")
                    self.words[at + STATE], self.words[place] = State.AWAY, 0
                    self._seat_next(self.seat)

    def _come_back(self) -> None:
        """If our seat was taken while we slept: for another turn to the end of the row."""
        if self.words[self.me + STATE] != State.AWAY:
            return
        with self.board():
            self.words[self.me + STATE] = State.READY
            self._seat_next(self.seat)
        self._sleep_until_running()

    def _too_late(self, timeout_s: float) -> None:
        """Take the wait back and say so; who asked decides what it means."""
        with self.board():
            if self.words[self.me + STATE] != State.WAITING:
                return
            told = f"no end of it within {timeout_s:.1f} s: {self.standing()}"
            self.words[self.me + STATE] = State.READY
            self._seat_next(self.seat)
        self._sleep_until_running()
        raise TimeoutError(told)

    def _must_be_alive(self) -> None:
        for rank in range(self.ground.ranks):
            state = self._of(rank, STATE)
            if rank == self.rank or state in (State.NEW, State.DONE):
                continue
            if self.ground.is_dead(rank) and self._of(rank, STATE) != State.DONE:
                fail(self.ground, f"rank {rank} has died: {self.standing()}")
                self.check()
        if self.ground.is_bridged and self.ground.has_no_bridge():
            fail(self.ground, f"the bridge of host {self.ground.host} has died: {self.standing()}")
            self.check()

    # --- stuck, and regrouped ---

    def _runs_beside_me(self) -> bool:
        """Whether any other rank could move by itself."""
        still = (State.WAITING, State.DONE)
        states = (self._of(rank, STATE) for rank in range(self.ground.ranks) if rank != self.rank)
        return any(state not in still for state in states)

    def _must_not_be_stuck(self) -> None:
        """Everybody waits: change the seats if that is wished, give up votes, or fail."""
        if self.ground.is_bridged:
            if are_still(self.ground):  # the bridges find out whether that is so everywhere
                self.call_bridge()
            return
        mine = self.words[self.me + STATE]
        if mine not in (State.WAITING, State.DONE) or self._runs_beside_me():
            return
        waiting = [
            rank for rank in range(self.ground.ranks) if self._of(rank, STATE) == State.WAITING
        ]
        if any(self._of(rank, KIND) == Wait.BOUNDARY for rank in waiting):
            self._regroup()  # all are parked, which is all that a change of seats needs
        elif votes := [rank for rank in waiting if self._of(rank, KIND) == Wait.VOTE]:
            for rank in votes:
                self.give_up_vote(self._of(rank, ABOUT), self._of(rank, NUMBER))
        elif waiting:
            _fail(self.ground, f"the ranks wait for each other: {self.standing()}")
            self._bells += range(self.ground.ranks)

    def _regroup_at_boundary(self) -> None:
        """The last one has come to the boundary, or will never come because it is done."""
        live = [r for r in range(self.ground.ranks) if self._of(r, STATE) != State.DONE]
        waiting = [r for r in live if self._of(r, STATE) == State.WAITING]
        there = [r for r in waiting if self._of(r, KIND) == Wait.BOUNDARY]
        if there and there == live:
            self._regroup()

    def _regroup(self) -> None:
        """A new map of seats.  Nobody runs but perhaps this rank."""
        words, ground = self.words, self.ground
        seats, step = words[WISH], words[BOUNDARY]
        words[WISH] = words[BOUNDARY] = 0
        words[GENERATION] += 1
        seat_all(ground, seats)
        for rank in range(ground.ranks):
            words[ground.seat(rank) + _HOLDER] = 0
            at = ground.rank(rank)
            if words[at + STATE] == State.WAITING and words[at + KIND] == Wait.BOUNDARY:
                words[at + STEP] = step  # begun, as in `boundary`
        if words[self.me + STATE] == State.RUNNING:
            words[ground.seat(self.seat) + _HOLDER] = self.rank + 1
        self.ready(Wait.BOUNDARY)
        for seat in range(seats):
            self._seat_next(seat)

    def standing_of(self, rank: int) -> str:
        if not self.ground.is_here(rank):
            return f"rank {rank} is on another host"
        state = State(self._of(rank, STATE))
        text = self.ground.read_text(self.ground.rank(rank) + _TEXT)
        if state == State.WAITING:
            for_whom = self._lacked_by(rank)
            return f"rank {rank} waits in {text}{for_whom}"
        if state == State.AWAY:
            return f"rank {rank} is away ({text})"
        names = {State.NEW: "has not come", State.READY: "is ready to run", State.DONE: "has ended"}
        return f"rank {rank} {names.get(state, 'runs')}"

    def _lacked_by(self, rank: int) -> str:
        if self._of(rank, KIND) not in (Wait.CALL, Wait.VOTE):
            return ""
        lacking = self.lacking(self._of(rank, ABOUT), self._of(rank, NUMBER))
        return f", which rank {', '.join(map(str, lacking))} has not called" if lacking else ""


def _space() -> int:
    """The world of process ids that this process lives in."""
    return os.stat("/proc/self/ns/pid").st_ino


def _processor_ticks_asleep(process: int) -> int:
    """What a process that sleeps has used so far; -1 if it runs, or cannot be seen."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "R" else int(fields[11]) + int(fields[12])
