"""Random numbers of a node: they depend on its name alone, whatever ran before it.

A node may draw from torch, numpy and Python itself, and may not say so.  To seed all three takes as
long as a small node, and most draw from none but torch.  So of a function that drew nothing from
numpy and Python in its first call only torch is seeded from then on, and it is looked whether the
others moved all the same; if they did, the call was in vain, and is made again with all of them
seeded.  Nothing but time depends on that.

Whether a generator moved is read from its memory.  Where that does not look as it should, all are
seeded each time.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
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
        self._positions = _positions()
        self._is_watched = _moves_are_seen(self._positions)
        self._quiet = set[Callable[..., Any]]()
        self._seen = [0, 0]
        self._ahead: int | None = None  # with what torch was seeded for the call that comes
        self.seed(0)

    def seed(self, number: int) -> None:
        self._ahead = None
        self._seed_torch(number)
        numpy.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        self._seen = [position.value for position in self._positions]

    def moved(self) -> bool:
        """Somebody has drawn from numpy or Python since they were seeded."""
        (one, other), seen = self._positions, self._seen
        return one.value != seen[0] or other.value != seen[1]

    def before(self, function: Callable[..., Any], number: int, may_repeat: bool) -> bool:
        """Seed what the function may draw from by `number`; was it a guess what that is?"""
        if may_repeat and function in self._quiet:
            if self._ahead != number:
                self._seed_torch(number)
            self._ahead = None
            return True
        self.seed(number)
        return False

    def seed_ahead(self, function: Callable[..., Any], number: int) -> None:
        """While there is time: for a call that comes next, or else `forget` it."""
        if function in self._quiet:
            self._seed_torch(number)
            self._ahead = number

    def forget(self) -> None:
        self._ahead = None

    def _seed_torch(self, number: int) -> None:
        for seed in self._torch:
            seed(number)

    def after(self, function: Callable[..., Any], guessed: bool) -> bool:
        """Was all that it drew from seeded?  Else it is to be called again."""
        if not self.moved():
            if not guessed and self._is_watched:
                self._quiet.add(function)
            return True
        self._quiet.discard(function)
        self.seed(0)  # a normal number may be left over, and would be drawn without a move
        return not guessed


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
