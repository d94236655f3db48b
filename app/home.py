"""Where a service on this machine keeps its data, for programs that must start quickly.

`app.settings` reads all settings and needs pydantic for it; the command only needs these.
"""

from __future__ import annotations

import os
from pathlib import Path

HOST, PORT = "127.0.0.1", 8000  # of the API, unless ROUNDHOUSE_HOST and ROUNDHOUSE_PORT say more


def default_home() -> Path:
    """The data folder: the user's state directory, or one of its own for root.

    Embedded Postgres refuses to run as root and so runs as another user, who cannot look into
    root's home.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/roundhouse")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "roundhouse"


def home() -> Path:
    """The folder that ROUNDHOUSE_HOME names, or the default one."""
    named = os.environ.get("ROUNDHOUSE_HOME")
    return Path(named) if named else default_home()
