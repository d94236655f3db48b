"""Random numbers of a node: they depend on its name alone, not on what ran before it.

A node may draw from torch, numpy and Python's random, without declaring it. Seeding all three takes
as long as a small node, and seeding torch alone as long as the smallest. So if a function drew
nothing from numpy and Python in its first call, only torch is seeded from then on. If it never drew
from torch either, nothing is seeded. After each call the generators are checked. If one that was
not seeded has moved, the call is discarded and repeated with this generator seeded too. This costs
only time.

The check reads a generator's memory. If the memory is not as expected, all generators are seeded
each time. One case is not detected: code that reads the state from torch's generator object itself,
and not by `torch.get_rng_state`. Where torch was not seeded it reads another state.
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

from workers.hardware.accelerator import Accelerator

_NUMPY_KEYS = 624  # words before the position, in the state of a Mersenne Twister
_PYTHON_HEAD = object.__basicsize__  # bytes before the position and the first word of its state


def seed_of(name: str) -> int:
    """Return 63 bits of a hash of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


class NodeRandom:
    """The node RNG: all random generators from which nodes draw, in this process."""

    def __init__(self, accelerator: Accelerator) -> None:
        generators = [torch.default_generator]
        if accelerator.kind == "cuda":
            torch.cuda.init()
            generators.append(torch.cuda.default_generators[accelerator.device.index])
        # torch.manual_seed visits all kinds of devices, and takes a hundred times as long.
        self._torch = [generator.manual_seed for generator in generators]
        self._beside = self._torch[1:]  # seeding these takes no time
        self._positions = _positions()
        self._is_watched = _moves_are_seen(self._positions)
        self._engine = _engine() if self._is_watched else None
        self._quiet = set[Callable[..., Any]]()  # functions that drew from torch at most
        # functions of `_quiet` that drew from nothing at all
        self._still = set[Callable[..., Any]]()
        # functions that drew from torch, which keeps them out of `_still`
        self._drew = set[Callable[..., Any]]()
        self._seen = [0, 0]
        # place of torch's engine when last seen, and if it has our mark
        self._place, self._is_marked = 0, False
        self._ahead: int | None = None  # the seed that torch already has for the next call
        self.seed(0)

    def seed(self, number: int) -> None:
        self._seed_torch(number)
        numpy.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        self._seen = [position.value for position in self._positions]

    def moved(self) -> bool:
        """True if anything has drawn from numpy or Python since they were seeded."""
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
        """Call the function, seeded by `number`, and return its result.

        `number` is None if the function declares no draws.
        """
        if number is None:
            returned = function(ctx, **given)
            self.after(function, guessed=False)
            return returned
        if may_repeat and function in self._still:  # as below, in as few calls as possible
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
        """Like `after`; for a discarded call also drop the result that it set."""
        if self.after(function, guessed):
            return True
        ctx.result = None
        return False

    def before(self, function: Callable[..., Any], number: int, may_repeat: bool) -> bool:
        """Seed the generators that the function may draw from; True if that set was a guess."""
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
        """Seed for the call that comes next, while there is time; `forget` takes it back."""
        if function in self._still:
            if self._beside:
                return  # draws from these in the meantime would not be noticed
            self._pretend(number)
        elif function in self._quiet:
            self._seed_torch(number)
        else:
            return
        self._ahead = number

    def _is_ahead(self, number: int) -> bool:
        """True if torch has this seed and was not used since.

        Unpickling a block may run any code.
        """
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
        """Let torch's generator report this seed without seeding it."""
        engine = self._engine
        assert engine is not None, "else nobody is still"
        if not self._is_marked:
            self._seed_torch(0)  # clears a normal number that may be left over, see `after`
            self._place, self._is_marked = engine.marked(), True
        engine.seed.value = number
        for seed in self._beside:
            seed(number)

    def after(self, function: Callable[..., Any], guessed: bool) -> bool:
        """Check the generators after a call; False if the call must be repeated."""
        was_seeded, has_drawn = not self._is_marked, self._has_torch_moved()
        if has_drawn:
            self._drew.add(function)
            self._still.discard(function)
        if self.moved():
            self._quiet.discard(function)
            self._still.discard(function)
            self.seed(0)  # a leftover normal number would be drawn without moving the generator
            return not guessed
        if not guessed and self._is_watched:
            self._quiet.add(function)
        if self._engine is not None and function in self._quiet and function not in self._drew:
            self._still.add(function)
        return was_seeded or not (guessed and has_drawn)

    def _has_torch_moved(self) -> bool:
        """True if torch's generator has moved since its seeding or since the last call."""
        if self._engine is None or self._engine.place.value == self._place:
            return False
        self._place, self._is_marked = self._engine.place.value, False
        return True


def _positions() -> tuple[ctypes.c_uint64, ctypes.c_uint64]:
    """Return numpy's and Python's generator position, each with a word that is new each round."""
    state = numpy.random.mtrand._rand._bit_generator.ctypes.state_address
    of_numpy = ctypes.c_uint64.from_address(state + 4 * (_NUMPY_KEYS - 1))
    of_python = ctypes.c_uint64.from_address(id(random._inst) + _PYTHON_HEAD)
    return of_numpy, of_python


def _moves_are_seen(positions: tuple[ctypes.c_uint64, ctypes.c_uint64]) -> bool:
    """True if the words really change with each kind of draw.

    The generators are restored afterwards.
    """
    before = numpy.random.get_state(), random.getstate()
    seen = []
    seeds: tuple[Callable[[int], Any], ...] = (numpy.random.seed, random.seed)
    draws_of: tuple[Callable[[], float], ...] = (numpy.random.rand, random.random)
    for position, seed, draw in zip(positions, seeds, draws_of, strict=True):
        for draws in (1, 311, 312):  # a draw takes two words, so 312 draws make a round
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
    """The memory of torch's Mersenne Twister: the `seed` that it reports, and its `place`.

    `place` is a word with the position in the state and the flag that it is seeded. For torch any
    flag but 0 means true; torch sets 1 when it seeds the generator or sets its whole state
    (`fork_rng`). So a `marked` place changes after any use of the generator except reading it.
    """

    _MARK = 3
    _PLACE = 12  # offset in bytes from the seed

    def __init__(self, address: int) -> None:
        self.seed = ctypes.c_uint64.from_address(address)
        self.place = ctypes.c_uint64.from_address(address + self._PLACE)
        self._is_seeded = ctypes.c_uint8.from_address(address + self._PLACE)

    def marked(self) -> int:
        self._is_seeded.value = self._MARK
        return self.place.value


_SEED = 0x123456789ABCDEF  # a value that occurs nowhere else
_SEARCHED_BYTES = 256


def _engine() -> _Engine | None:
    """Find the engine in memory and test it with each way to move it.

    Returns None if the engine isn't as expected.
    """
    generator = torch.default_generator.manual_seed(_SEED)
    start = generator._cdata  # type: ignore[attr-defined]
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
    """Make `get_rng_state` visible: reading leaves no trace, but setting the state does."""
    read = torch.random.get_rng_state

    @functools.wraps(read)
    def read_and_set() -> torch.Tensor:
        torch.default_generator.set_state(read())
        return read()  # the state without our mark

    if not hasattr(read, "__wrapped__"):
        torch.get_rng_state = torch.random.get_rng_state = read_and_set
