"""Changes the user of the processes and files in an image: each slot of a host has a user of its
own.

The image must have passed `image_check` for the user that it has. Files of the working folder get
their owner when they are written; this module changes what is only in the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.criu.image_check import CORE, FILES, GHOST, KINDS, MEMFD, UNIX_SOCKET
from workers.criu.image_records import ImageFile, ImageRecord

_Change = Callable[[ImageRecord], ImageRecord]


def with_owner(files: Mapping[str, bytes], before: int, after: int) -> dict[str, bytes]:
    """Return the files with user and group `after` instead of `before`; all else stays the same."""
    if before == after:
        return dict(files)
    return {name: _changed(name, data, before, after) for name, data in files.items()}


def _changed(name: str, data: bytes, before: int, after: int) -> bytes:
    def owned(*fields: int) -> _Change:
        return lambda record: _replaced(record, fields, before, after)

    def core(record: ImageRecord) -> ImageRecord:
        return record.with_message(5, lambda thread: thread.with_message(10, owned(*range(1, 9))))

    def file(record: ImageRecord) -> ImageRecord:
        at, owner = KINDS[record.number(1)]
        if owner:
            record = record.with_message(at, lambda entry: entry.with_message(owner, owned(1, 2)))
        if at == KINDS[UNIX_SOCKET][0]:
            record = record.with_message(at, lambda entry: entry.with_message(13, owned(2, 3)))
        return record

    if name.startswith("core-"):
        return _mapped(data, CORE, core)
    if name == "files.img":
        return _mapped(data, FILES, file)
    if name.startswith("ghost-file-"):
        return _mapped(data, GHOST, owned(1, 2), records_most=1)
    if name == "memfd.img":
        return _mapped(data, MEMFD, owned(2, 3))
    return data


def _mapped(data: bytes, magic: int, change: _Change, records_most: int | None = None) -> bytes:
    file = ImageFile.read(data, magic, records_most=records_most)
    return ImageFile(magic, tuple(map(change, file.records)), file.rest).encoded()


def _replaced(record: ImageRecord, fields: tuple[int, ...], before: int, after: int) -> ImageRecord:
    for field in fields:
        if record.number(field) == before:
            record = record.with_int(field, after)
    return record
