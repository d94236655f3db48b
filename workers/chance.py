"""Random numbers of a node: they depend on its name alone, whatever ran before it.

A node may draw from torch, numpy and Python itself, and may not say so.  To seed all three takes as
long as a small node, and torch alone as long as the smallest.  So of a function that drew nothing
from numpy and Python in its first call only torch is seeded from then on, and of one that never
drew from torch either, nothing.  It is looked whether any of them moved all the same; if one did,
the call was in vain, and is made again with that seeded too.  Nothing but time depends on that.

Whether a generator moved is read from its memory.  Where that does not look as it should, all are
seeded each time.  What cannot be seen is who reads the state from torch's generator itself, and not
by `torch.get_rng_state`: where torch was not seeded it is another one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch

from workers.accelerator import Accelerator

_NUMPY_KEYS = 624  # words before the position, in the state of a Mersenne Twister
_PYTHON_HEAD = object.__basicsize__  # bytes before the position and the first word of its state


def seed_of(name: str) -> int:
    """63 bits of a hash of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


class Chance:
    """All that nodes draw from, in this process."""

    def __init__(self, accelerator: Accelerator) -> None:
        generators = [torch.default_generator]
        if accelerator.kind == "cuda":
            torch.cuda.init()
            generators.append(torch.cuda.default_generators[accelerator.device.index])
        # torch.manual_seed goes through all kinds of devices, and takes a hundred times as long.
        self._torch = [generator.manual_seed for generator in generators]
        self._beside = self._torch[1:]  # seeded in no time
        self._positions = _positions()
        self._is_watched = _moves_are_seen(self._positions)
        self._engine = _engine() if self._is_watched else None
        self._quiet = set[Callable[..., Any]]()  # drew from torch at most,
        self._still = set[Callable[..., Any]]()  # and of these from nothing at all,
        self._drew = set[Callable[..., Any]]()  # as long as they are not among these
        self._seen = [0, 0]
        self._place, self._is_marked = 0, False  # of torch's engine
        self._ahead: int | None = None  # with what torch was seeded for the call that comes
        self.seed(0)

    def seed(self, number: int) -> None:
        self._seed_torch(number)
        numpy.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        self._seen = [position.value for position in self._positions]

    def moved(self) -> bool:
        """Somebody has drawn from numpy or Python since they were seeded."""
        (one, other), seen = self._positions, self._seen
        return one.value != seen[0] or other.value != seen[1]

    def called(
        self,
        function: Callable[..., Any],
        number: int | None,
        may_repeat: bool,
        ctx: Any,
        given: dict[str, Any],
    ) -> Any:
        """What it returns, seeded by `number`; None: it draws nothing."""
        if number is None:
            returned = function(ctx, **given)
            self.after(function, guessed=False)
            return returned
        if may_repeat and function in self._still:  # as below, in as few calls as can be
            if self._ahead != number:
                self._pretend(number)
            self._ahead, engine = None, self._engine
            assert engine is not None, "else nobody is still"
            try:
                returned = function(ctx, **given)
            except Exception:
                if self._counts(function, True, ctx):
                    raise
            else:
                (one, other), seen = self._positions, self._seen
                is_alike = engine.place.value == self._place and one.value == seen[0]
                if is_alike and other.value == seen[1]:
                    return returned
                self._counts(function, True, ctx)
        return self._called(function, number, may_repeat, ctx, given)

    def _called(
        self,
        function: Callable[..., Any],
        number: int,
        may_repeat: bool,
        ctx: Any,
        given: dict[str, Any],
    ) -> Any:
        while True:
            guessed = self.before(function, number, may_repeat)
            try:
                returned = function(ctx, **given)
            except Exception:
                if self._counts(function, guessed, ctx):
                    raise
            else:
                if self._counts(function, guessed, ctx):
                    return returned

    def _counts(self, function: Callable[..., Any], guessed: bool, ctx: Any) -> bool:
        """As `after`.  A call in vain finishes nothing, nor does it fail."""
        if self.after(function, guessed):
            return True
        ctx.result = None
        return False

    def before(self, function: Callable[..., Any], number: int, may_repeat: bool) -> bool:
        """Seed what the function may draw from by `number`; was it a guess what that is?"""
        if not (may_repeat and function in self._quiet):
            self.seed(number)
            return False
        if function in self._still:
            self._pretend(number)
        elif not self._is_ahead(number):
            self._seed_torch(number)
        self._ahead = None
        return True

    def seed_ahead(self, function: Callable[..., Any], number: int) -> None:
        """While there is time: for a call that comes next, or else `forget` it."""
        if function in self._still:
            if self._beside:
                return  # what is drawn from those meanwhile is not seen
            self._pretend(number)
        elif function in self._quiet:
            self._seed_torch(number)
        else:
            return
        self._ahead = number

    def _is_ahead(self, number: int) -> bool:
        """And nobody has drawn from it since: a block that is unpickled runs what it likes."""
        if self._ahead != number or self._engine is None:
            return False
        return self._engine.place.value == self._place

    def forget(self) -> None:
        self._ahead = None

    def _seed_torch(self, number: int) -> None:
        for seed in self._torch:
            seed(number)
        self._ahead, self._is_marked = None, False
        if self._engine is not None:
            self._place = self._engine.place.value

    def _pretend(self, number: int) -> None:
        """Torch is not seeded, and says that it is, by this number."""
        engine = self._engine
        assert engine is not None, "else nobody is still"
        if not self._is_marked:
            self._seed_torch(0)  # a normal number may be left over, see `after`
            self._place, self._is_marked = engine.marked(), True
        engine.seed.value = number
        for seed in self._beside:
            seed(number)

    def after(self, function: Callable[..., Any], guessed: bool) -> bool:
        """Was all that it drew from seeded?  Else it is to be called again."""
        was_seeded, has_drawn = not self._is_marked, self._has_torch_moved()
        if has_drawn:
            self._drew.add(function)
            self._still.discard(function)
        if self.moved():
            self._quiet.discard(function)
            self._still.discard(function)
            self.seed(0)  # a normal number may be left over, and would be drawn without a move
            return not guessed
        if not guessed and self._is_watched:
            self._quiet.add(function)
        if self._engine is not None and function in self._quiet and function not in self._drew:
            self._still.add(function)
        return was_seeded or not (guessed and has_drawn)

    def _has_torch_moved(self) -> bool:
        """Since it was seeded, or since this was last asked."""
        if self._engine is None or self._engine.place.value == self._place:
            return False
        self._place, self._is_marked = self._engine.place.value, False
        return True


def _positions() -> tuple[ctypes.c_uint64, ctypes.c_uint64]:
    """Of numpy's generator and of Python's: how far it is, and a word that is new each round."""
    state = numpy.random.mtrand._rand._bit_generator.ctypes.state_address
    of_numpy = ctypes.c_uint64.from_address(state + 4 * (_NUMPY_KEYS - 1))
    of_python = ctypes.c_uint64.from_address(id(random._inst) + _PYTHON_HEAD)  # type: ignore[attr-defined]
    return of_numpy, of_python


def _moves_are_seen(positions: tuple[ctypes.c_uint64, ctypes.c_uint64]) -> bool:
    """Is a position where we think that it is?  Tried with each way to draw, and undone."""
    before = numpy.random.get_state(), random.getstate()
    seen = []
    for position, seed, draw in zip(
        positions, (numpy.random.seed, random.seed), (numpy.random.rand, random.random), strict=True
    ):
        for draws in (1, 311, 312):  # two words each: 312 make a round
            seed(draws)
            fresh = position.value
            for _ in range(draws):
                draw()
            drawn = position.value
            seed(draws)
            seen.append(drawn != fresh == position.value)
    numpy.random.set_state(before[0])
    random.setstate(before[1])
    return all(seen)


# --- torch's generator --------------------------------------------------------------------------


class _Engine:
    """Its Mersenne Twister, where it lies: the `seed` that it tells, and its `place`.

    `place` is how far it is, beside whether it is seeded: that torch calls true whatever it is but
    0, and makes 1 when it seeds it or sets all of it (`fork_rng`).  So what is `marked` differs
    after anything that is done with it, but to read it.
    """

    _MARK = 3
    _PLACE = 12  # bytes behind the seed

    def __init__(self, address: int) -> None:
        self.seed = ctypes.c_uint64.from_address(address)
        self.place = ctypes.c_uint64.from_address(address + self._PLACE)
        self._is_seeded = ctypes.c_uint8.from_address(address + self._PLACE)

    def marked(self) -> int:
        self._is_seeded.value = self._MARK
        return self.place.value


_SEED = 0x123456789ABCDEF  # that stands nowhere else
_SEARCHED_BYTES = 256


def _engine() -> _Engine | None:
    """None if it is not where we think that it is.  Tried with each way to move it."""
    generator = torch.default_generator.manual_seed(_SEED)
    start = generator._cdata
    behind = ctypes.string_at(start, _SEARCHED_BYTES).find(_SEED.to_bytes(8, sys.byteorder))
    if behind < 0:
        return None
    engine = _Engine(start + behind)
    _let_reading_show()
    is_right = not _is_seen(engine, int) and all(_is_seen(engine, move) for move in _MOVES)
    return engine if is_right else None


def _is_seen(engine: _Engine, move: Callable[[], object]) -> bool:
    torch.default_generator.manual_seed(0)
    place = engine.marked()
    move()
    return engine.place.value != place


def _fork() -> None:
    with torch.random.fork_rng(devices=()):
        torch.rand(1)


_MOVES: tuple[Callable[[], object], ...] = (
    *(functools.partial(torch.rand, draws) for draws in (1, 623, 624, 625, 1248)),
    *(functools.partial(torch.randn, draws) for draws in (1, 2, 16)),
    *(functools.partial(torch.manual_seed, seed) for seed in (0, 1)),
    *(_fork, torch.seed, lambda: torch.get_rng_state()),
)


def _let_reading_show() -> None:
    """Who reads torch's state leaves no trace in it, but who sets what was read does."""
    read = torch.random.get_rng_state

    @functools.wraps(read)
    def read_and_set() -> torch.Tensor:
        torch.default_generator.set_state(read())
        return read()  # as it is without our mark

    if not hasattr(read, "__wrapped__"):
        torch.get_rng_state = torch.random.get_rng_state = read_and_set
