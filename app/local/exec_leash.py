"""Execute another program that dies with its parent, optionally as another user.

    python -I -S leash.py PARENT_PID SIGNAL USER_ID GROUP_ID PROGRAM ARGUMENT...

This is a separate program, because a process with threads must not run Python between `fork` and
`exec`.  The signal is sent when the *thread* that started us ends (Linux only; on other systems
none is sent).  USER_ID -1 keeps the user.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def become(user_id: int, group_id: int) -> None:
    os.setgroups([])
    os.setgid(group_id)
    os.setuid(user_id)


def die_with(parent_pid: int, signal: int) -> None:
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent died before prctl
        sys.exit(1)


if __name__ == "__main__":
    parent_pid, signal, user_id, group_id = (int(word) for word in sys.argv[1:5])
    if user_id >= 0:
        become(user_id, group_id)
    die_with(parent_pid, signal)  # set after the change of user, which clears the signal
    os.execv(sys.argv[5], sys.argv[5:])
