"""Checks that a restored process is as confined as a process of a command must be.

CRIU sets the user, the capabilities and the system call filter of a restored process from the
image.  So these are looked up in /proc before the process executes an instruction.
"""

from __future__ import annotations

_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_FILTERED = "2"  # proc_pid_status(5): SECCOMP_MODE_FILTER


def oddities(status: str, uid: int) -> list[str]:
    """Return in what a process differs from a confined one, given the text of its
    /proc/PID/status.
    """
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    found = [
        f"{name} is {' '.join(fields.get(name, 'unknown').split())}"
        for name in ("Uid", "Gid")
        if fields.get(name, "").split() != [str(uid)] * 4
    ]
    if fields.get("Groups", "").split():
        found.append(f"Groups is {fields['Groups'].strip()}")
    found += [
        f"{name} is {fields.get(name, 'unknown').strip()}"
        for name in _CAPABILITIES
        if int(fields.get(name, "1"), 16)
    ]
    if fields.get("NoNewPrivs", "").strip() != "1":
        found.append("it could gain privileges")
    if fields.get("Seccomp", "").strip() != _FILTERED:
        found.append("it has no system call filter")
    return found
