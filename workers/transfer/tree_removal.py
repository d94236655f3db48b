"""Removes folders that a tenant may have filled."""

from __future__ import annotations

import logging
import subprocess
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


def remove_tree(folder: Path) -> None:
    """Remove a folder that a tenant may have filled, however deep; a separate process does it.

    An empty folder needs no process: that of a resident whose files had a file system of their own.
    """
    with suppress(OSError):  # it is not empty, or no folder
        folder.rmdir()
        return
    done = subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.PIPE, check=False)
    if done.returncode:
        # A job that runs as our own user may have removed our permission to enter its folders.
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], stderr=subprocess.PIPE, check=False)
        done = subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, check=False)
    if done.returncode:
        log.warning("cannot remove %s: %s", folder, done.stderr[-300:].decode("utf-8", "replace"))
