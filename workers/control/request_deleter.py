"""Deletes ended requests beside the other work of control, some rows at a time.

Several of these may run, but only one works at a time. After each piece it rests as long as the
piece took, so that a long deletion leaves half of a processor and of the disk to other work.
"""

from __future__ import annotations

import logging
import time

from app.db import transactions
from app.scheduling import retention
from app.scheduling.archive import CannotArchive, archive
from workers.control.loop import Loop

LOOK_S = 30.0

log = logging.getLogger(__name__)


class RequestDeleter(Loop):
    def __init__(self) -> None:
        super().__init__("request deleter")

    def look(self) -> float:
        began_s = time.monotonic()
        try:
            with transactions.transaction() as session:
                is_more = retention.delete_some(session, archive())
        except CannotArchive as error:
            log.warning("old requests stay, as the archive does not take them in: %s", error)
            return LOOK_S
        return time.monotonic() - began_s if is_more else LOOK_S
