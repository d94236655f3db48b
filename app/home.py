"""Finds the data folder of a service on this machine, for programs that must start quickly.

`app.settings` reads all settings, and needs pydantic for that; some commands need only this folder.
"""

from __future__ import annotations

import os
from pathlib import Path

HOST, PORT = "127.0.0.1", 8000  # the defaults of ROUNDHOUSE_HOST and ROUNDHOUSE_PORT, for the API


def default_home() -> Path:
    """Return the default data folder: in the user's state directory; for root, a system folder.

    Embedded Postgres refuses to run as root, so it then runs as another user, which cannot enter
    root's home.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/roundhouse")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "roundhouse"


def home() -> Path:
    """Return the folder that ROUNDHOUSE_HOME names, or the default one."""
    named = os.environ.get("ROUNDHOUSE_HOME")
    return Path(named) if named else default_home()
