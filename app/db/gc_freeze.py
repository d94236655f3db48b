"""Keeps large, long-lived objects out of Python's garbage collections.

Each collection that scans a board, or a tree of ten thousand tenants, stops everything else for a
quarter of a second. Objects that exist when `spare` is called are not scanned any more. They are
still freed by reference counts, but not if they are part of a reference cycle. `spare_anew` frees
those too.
"""

from __future__ import annotations

import gc


def spare() -> None:
    """Exclude all present objects from garbage collection; called after something large was
    read.
    """
    gc.collect()
    gc.freeze()


def spare_anew() -> None:
    """Do the same after a spared object with reference cycles, such as a board, was replaced."""
    gc.unfreeze()
    spare()
