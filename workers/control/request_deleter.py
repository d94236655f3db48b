"""Deletes ended requests beside the other work of control, some rows at a time.

Several may run: each takes other requests.  After each piece it rests as long as the piece took, so
that a long deletion leaves half of a processor and of the disk to what runs.
"""

from __future__ import annotations

import time

from app.db import transactions
from app.scheduling import retention
from workers.control.loop import Loop

LOOK_S = 30.0


class RequestDeleter(Loop):
    def __init__(self) -> None:
        super().__init__("request deleter")

    def look(self) -> float:
        began_s = time.monotonic()
        with transactions.transaction() as session:
            is_more = retention.delete_some(session)
        return time.monotonic() - began_s if is_more else LOOK_S
