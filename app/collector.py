"""Python's garbage collector, kept away from what is large and stays.

A board or a tree of ten thousand tenants, looked through for garbage again and again, stops all
else for a quarter of a second each time.  What is there after `spare` is looked at no more: it goes
when nobody holds it, but not if it is garbage in rings.  `spare_anew` looks for those, too.
"""

from __future__ import annotations

import gc


def spare() -> None:
    """Whoever has just read something large calls it."""
    gc.collect()
    gc.freeze()


def spare_anew() -> None:
    """The same, when it took the place of something that was spared and is held together by rings,
    as a board is.
    """
    gc.unfreeze()
    spare()
