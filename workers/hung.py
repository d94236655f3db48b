"""Which task a supervisor was busy with when it hung, from one device worker to the next.

The watchdog writes it down before it ends the process.  The next device worker of the device reads
it at its start, and tells the island until that has heard it (`Alive.hung`).  A device worker that
is killed writes nothing: then no task is to blame.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

Place = tuple[str, int]  # task, epoch


def blamed(heard: Place | None, there: Collection[Place]) -> list[Place]:
    """The task whose message the supervisor took in when it hung, or the only task on the device.

    `there` are the tasks of all processes on the device.  Where there are several, any of them may
    have done it, and none is named: no task fails because of a neighbour.
    """
    if heard is not None:
        return [heard]
    return list(there) if len(there) == 1 else []


def write_down(file: Path, tasks: Collection[Place]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(list(tasks)))
    draft.replace(file)


def written_down(file: Path) -> list[list[str | int]]:
    """As `Alive` tells it; nothing if the device worker before did not hang."""
    if not file.exists():
        return []
    try:
        return [[str(task), int(epoch)] for task, epoch in json.loads(file.read_text())]
    except (ValueError, TypeError) as error:
        log.warning("%s cannot be read, and is removed: %s", file, error)
        file.unlink()
        return []
