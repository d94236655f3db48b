"""Takes locks of open files with a time limit, which the kernel does not offer."""

from __future__ import annotations

import fcntl
import time

_AGAIN_S = 0.05


def hold(fd: int, how: int, until_s: float = 0.0) -> bool:
    """Take the lock (LOCK_SH or LOCK_EX), with at least one try; False if it is still taken at
    `until_s`.
    """
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_AGAIN_S)
        else:
            return True
