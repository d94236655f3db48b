"""Numbers in sentences, for every text that people read."""

from __future__ import annotations


def count(n: int, what: str, several: str = "") -> str:
    """A number and its noun: "1 step", "3 steps", "0 steps"; `several` where an s does not do."""
    return f"{n:,} {what if n == 1 else several or what + 's'}"
