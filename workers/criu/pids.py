"""Keeps the process ids of commands apart from those of helpers in the same PID namespace.

A restored process gets its old id, so this id must be free.  The threads of the stub and CRIU take
the lowest ids of a new namespace; processes of a command get ids above `RESERVED`.
"""

from __future__ import annotations

from pathlib import Path

RESERVED = 1000
_LAST = Path("/proc/sys/kernel/ns_last_pid")


def begin_above(last: int) -> None:
    """Have the next process of our PID namespace get the id `last` + 1; needs CAP_SYS_ADMIN."""
    _LAST.write_text(str(last))
