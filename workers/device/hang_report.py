"""Tells the next device worker which task the supervisor was busy with when it hung.

The watchdog writes a file before it ends the process.  The next device worker of the device reads
the file at its start, and reports it until the island acknowledges it (`Alive.hung`).  A device
worker that is killed writes no file, and no task is blamed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

Place = tuple[str, int]  # task, epoch


def blamed(heard: Place | None, there: Collection[Place]) -> list[Place]:
    """Return the task that sent the message being processed, or else the only task on the device.

    `there` are the tasks of all processes on the device. If there are several, any of them may be
    the cause, so none is returned: no task fails because of another one.
    """
    if heard is not None:
        return [heard]
    return list(there) if len(there) == 1 else []


def write_down(file: Path, tasks: Collection[Place]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(list(tasks)))
    draft.replace(file)


def written_down(file: Path) -> list[list[str | int]]:
    """Return the recorded tasks in the form of `Alive`; [] if the last worker did not hang."""
    if not file.exists():
        return []
    try:
        return [[str(task), int(epoch)] for task, epoch in json.loads(file.read_text())]
    except (ValueError, TypeError) as error:
        log.warning("cannot read %s, which is deleted: %s", file, error)
        file.unlink()
        return []
