"""Names how a process ended by one number, as shells do."""

from __future__ import annotations


def shell_status(code: int) -> int:
    """Return a process's exit status; 128 + N if signal N ended it, for which `code` is -N."""
    return code if code >= 0 else 128 - code
