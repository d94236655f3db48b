"""How many examples and seeds a test takes: all of them, or some with `pytest --fast`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

_PART = 10  # `--fast` takes one in so many
_LEAST = 5

_is_fast = False


def be_fast() -> None:
    global _is_fast
    _is_fast = True


def examples(count: int) -> int:
    """Return how many examples Hypothesis takes of a test that has `count`."""
    return min(count, max(_LEAST, count // _PART)) if _is_fast else count


def seeds(all_of_them: Sequence[Any]) -> Sequence[Any]:
    """Return the seeds with which a test runs: the first ones of `--fast`."""
    return all_of_them[: max(1, len(all_of_them) // _PART)] if _is_fast else all_of_them


def over_seeds(
    all_of_them: Sequence[int], *, at_once: int = 50
) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    """Run a test of one seed with `at_once` seeds as one test, named by the place of the first.

    A test of a millisecond costs less than what pytest does for each test.
    """
    taken = seeds(all_of_them)

    def decorated(test: Callable[[int], None]) -> Callable[[int], None]:
        def test_of_some(first: int) -> None:
            for seed in taken[first : first + at_once]:
                test(seed)

        test_of_some.__name__, test_of_some.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("first", range(0, len(taken), at_once))(test_of_some)

    return decorated


def rest_long(seeds: Sequence[Any], *, keep: int = 1) -> list[Any]:
    """Return seeds of which `make test` takes the first `keep`, and `make bench` all others."""
    return [
        *seeds[:keep],
        *(pytest.param(*_values(seed), marks=pytest.mark.long) for seed in seeds[keep:]),
    ]


def in_rotation(values: Sequence[Any], ways: Sequence[Any]) -> list[Any]:
    """Return all pairs of a value and a way, of which `make test` takes one for each value.

    The ways take turns, so each of them has a value too; `make bench` runs the other pairs.
    """
    chosen = {(n, n % len(ways)) for n in range(max(len(values), len(ways)))}
    taken = {(n % len(values), way) for n, way in chosen}
    return [
        pytest.param(
            *(*_values(value), *_values(way)), marks=() if (v, w) in taken else pytest.mark.long
        )
        for v, value in enumerate(values)
        for w, way in enumerate(ways)
    ]


def every_second(values: Sequence[Any], *, begin: int) -> list[Any]:
    """Return values of which `make test` takes every second one, from the one at `begin` on.

    Two tests that begin at 0 and at 1 take all of them together.
    """
    return [
        pytest.param(value, marks=() if n % 2 == begin else pytest.mark.long)
        for n, value in enumerate(values)
    ]


def _values(seed: Any) -> tuple[Any, ...]:
    return seed if isinstance(seed, tuple) else (seed,)
