"""Makes small images by hand, so that each part of them can be made wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.criu import image_check
from workers.criu.image_records import INVENTORY, ImageFile, ImageRecord, varint
from workers.criu.page_chunks import PAGEMAP

UID = 200_007
FILTER = bytes(range(16))
ROOT, CHILD, THREAD = 1001, 1002, 1003
ALLOWED = image_check.Allowed(
    uid=UID, machine="x86_64", filter_programs=(FILTER,), shown=("/usr", "/lib64", "/opt/python")
)
RUN = "04fdae0f-82df-4d1f-a24b-98bd8a5cf16f"
NO_OWNER = {1: 0, 2: 0, 3: 0, 4: 0, 5: 0}
Fields = Mapping[int, Any]


def message(fields: Fields) -> bytes:
    """Encode fields: numbers, bytes, text, messages, or lists of them."""
    out = b""
    for number, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int):
                out += varint(number << 3) + varint(each)
                continue
            body = each if isinstance(each, bytes) else _body(each)
            out += varint(number << 3 | 2) + varint(len(body)) + body
    return out


def _body(value: str | Fields) -> bytes:
    return value.encode() if isinstance(value, str) else message(value)


def file(magic: int, *records: Fields, rest: bytes = b"") -> bytes:
    read = tuple(ImageRecord.read(message(record)) for record in records)
    return ImageFile(magic, read, rest).encoded()


def creds(**other: Any) -> dict[int, Any]:
    users: dict[int, Any] = {number: UID for number in range(1, 9)}
    return users | {9: 0, 10: 0, 11: 0, 12: 0, 13: 0, 18: 1} | _by_number(other)


def thread(own: Fields, **other: Any) -> dict[int, Any]:
    base = {1: 0, 2: 0, 3: 0, 4: 0, 10: own, 11: 2, 12: 0, 13: "python"}
    return base | _by_number(other)


def task(**other: Any) -> dict[int, Any]:
    limits = {1: [{1: 2**64 - 1, 2: 2**64 - 1}] * 4 + [{1: 0, 2: 0}, {1: 9, 2: 9}, {1: 9, 2: 1024}]}
    return {1: 3, 2: 0, 3: 0, 4: 0, 5: 0, 6: "python", 8: limits, 14: 0} | _by_number(other)


def core(own: Fields, shared: Fields | None = None, machine: int = 1) -> bytes:
    body: dict[int, Any] = {1: machine, 5: own}
    if shared is not None:
        body[3] = shared
    return file(image_check.CORE, body)


def regular(number: int, path: str | bytes, **other: Any) -> dict[int, Any]:
    entry = {1: number, 2: 0, 3: 0, 5: NO_OWNER, 6: path} | _by_number(other)
    return {1: 1, 2: number, 3: entry}


def files(*more: Fields) -> bytes:
    """Return `files.img` with the open files of the two processes, and more."""
    usual = [regular(1, "/"), regular(2, "/scratch"), regular(3, "/usr/bin/python3")]
    return file(image_check.FILES, *usual, *more)


def image() -> dict[str, bytes]:
    """Return an image of two processes, the first with two threads, that passes."""
    ids = {1: 1, 2: 1, 3: 1, 4: 1, **{number: number for number in range(5, 12)}, 12: 40}
    filters = {1: [{1: FILTER, 3: 1}]}
    made = {
        "inventory.img": file(INVENTORY, {1: 2, 3: ids, 13: RUN}),
        "pstree.img": file(
            image_check.PSTREE,
            {1: ROOT, 2: 0, 3: ROOT, 4: ROOT, 5: [ROOT, THREAD]},
            {1: CHILD, 2: ROOT, 3: ROOT, 4: ROOT, 5: CHILD},
        ),
        "seccomp.img": file(image_check.SECCOMP, filters),
        "files.img": files(),
        f"core-{THREAD}.img": core({1: 0, 2: 0, 3: 0, 4: 0, 10: creds()}),
        "pages-1.img": b"",
    }  # fmt: skip
    for pid in (ROOT, CHILD):
        made[f"core-{pid}.img"] = core(thread(creds()), task())
        made[f"ids-{pid}.img"] = file(image_check.IDS, ids)
        made[f"fs-{pid}.img"] = file(image_check.FS, {1: 2, 2: 1, 3: 0})
    return made


def pagemap(*runs: tuple[int, int], pages: int = 1, flags: int = 4) -> bytes:
    """Return a map of runs of pages: (address, number of pages)."""
    entries = [{1: address, 2: count, 4: flags, 5: count} for address, count in runs]
    return file(PAGEMAP, {1: pages}, *entries)


def _by_number(other: Mapping[str, Any]) -> dict[int, Any]:
    """Turn names such as `f18` into field numbers."""
    return {int(name[1:]): value for name, value in other.items()}
