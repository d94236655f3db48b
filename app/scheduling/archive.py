"""Keeps what `app.scheduling.retention` deletes, as files of JSON lines in a folder or a bucket.

Each piece that is deleted is a file of its own, `archive/YYYY/MM/DD/ID.jsonl.zst`; ids sort by
time. A line is a row: {"table": "logs", "row": {...}}, with all columns by their names. The file is
durable before its rows are deleted. If control is killed between the two, the rows are deleted
later and are in a later file too: of several rows with one key, the last one counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache

import zstandard

from app.db.ids import new_id
from app.settings import settings
from app.storage.backend import Place
from app.storage.store import place_at

log = logging.getLogger(__name__)

ARCHIVE = "archive"
# compression level: each file is written once, and waiting for the disk or bucket takes longer
# anyway
LEVEL = 9
DRAFTS_KEPT_S = 86400.0


class CannotArchive(Exception):
    """Raised when rows cannot be kept, so that they must stay in the database."""


class Archive:
    def __init__(self, place: Place) -> None:
        self.place = place

    def keep(self, rows: Mapping[str, Iterable[str]], at: datetime) -> str:
        """Durably store the rows, given as JSON by table; return the file's name.  Raises
        CannotArchive.
        """
        name = f"{ARCHIVE}/{at:%Y/%m/%d}/{new_id('del')}.jsonl.zst"
        lines = [
            f'{{"table": "{table}", "row": {row}}}\n'
            for table, told in rows.items()
            for row in told
        ]
        packed = zstandard.ZstdCompressor(level=LEVEL).compress("".join(lines).encode())
        try:
            self.place.keep([packed], lambda: name)
        except OSError as error:
            raise CannotArchive(f"{self.place}: {error}") from error
        return name


def archive() -> Archive | None:
    """Return the archive of this deployment; None if it has none."""
    address = settings().archive
    return _at(address) if address else None


@lru_cache
def _at(address: str) -> Archive:
    place = place_at(address)
    try:
        place.tidy(older_than_s=DRAFTS_KEPT_S)  # drafts of writers that were killed
    except OSError as error:
        log.warning("unfinished files of the archive in %s stay: %s", place, error)
    return Archive(place)
