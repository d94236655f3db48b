"""Handles uploads in progress: bytes arrive in order, in any number of calls, and each only once.

An upload is identified by its result: tenant, name, SHA-256 and size. A client that begins the same
upload again continues where it broke. Bytes reported as received are durable. Bytes that the tenant
has already are not sent again; what another tenant has is never revealed.

The bytes lie in the store as parts until the last one has arrived. Then they are read once,
checked, and stored as one blob. The sort of upload defines the checks and the result
(`app.data.upload_kinds`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model.checkpoints.tensor_file import HEAD_BYTES
from app.core.model.protocol.messages import JSON
from app.db.ids import new_id
from app.db.models import Upload, UploadPart
from app.db.transactions import transaction
from app.errors import BadInput, Conflict, TooLarge
from app.settings import settings
from app.storage.backend import Bytes, Missing
from app.storage.store import UPLOADS, Store

# number of bytes that are stored at a time; the first part is large enough for any header
PART_BYTES = 8 * 2**20
assert PART_BYTES >= HEAD_BYTES


class Sort(Protocol):
    """The kind of result of an upload."""

    @property
    def limit_bytes(self) -> int:
        """The largest size of one upload."""

    def known(self, session: Session, wanted: WantedUpload) -> Done | None:
        """Return the result if it exists already; until the commit no other transaction creates the
        same.
        """

    def check_room(self, session: Session, wanted: WantedUpload) -> None:
        """Raise QuotaExceeded if the tenant has no room."""

    def look_at_head(self, wanted: WantedUpload, head: bytes) -> None:
        """Refuse what the first bytes already show to be wrong; raises BadInput."""

    def store(self, wanted: WantedUpload, pieces: Iterable[Bytes]) -> JSON:
        """Store the bytes as one blob; returns its summary.  Raises BadInput."""

    def made(self, session: Session, wanted: WantedUpload, summary: JSON) -> Done:
        """Insert the row, after `known` found none in this transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedUpload:
    """The upload that a user wants, and for which tenant; `name` is empty if the result has no
    name.
    """

    sort: Sort
    tenant_id: str
    user_id: str
    name: str = ""
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An upload with its first `received_bytes` in the store."""

    id: str
    wanted: WantedUpload
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Holds the row of the uploaded bytes; `is_new` if this call created it.

    `summary` is what was found in the bytes, if this call inspected them.
    """

    row: Any
    is_new: bool
    summary: JSON | None = None


def begin(wanted: WantedUpload) -> Begun | Done:
    """Return how much of the upload is there; raises TooLarge or QuotaExceeded."""
    limit = wanted.sort.limit_bytes
    if wanted.size_bytes > limit:
        raise TooLarge(f"must be at most {limit} bytes; got {wanted.size_bytes}")
    with transaction() as session:
        if (done := wanted.sort.known(session, wanted)) is not None:
            return done
        return _begun(session, wanted)


def _begun(session: Session, wanted: WantedUpload) -> Begun:
    this = {"name": wanted.name, "sha256": wanted.sha256, "size_bytes": wanted.size_bytes}
    query = select(Upload).filter_by(tenant_id=wanted.tenant_id, **this)
    upload = session.scalar(query)
    if upload is None:
        wanted.sort.check_room(session, wanted)
        id = new_id("upl")
        upload = Upload(id=id, tenant_id=wanted.tenant_id, **this)
        session.add(upload)
        session.flush()
    received = _received_bytes(session, upload.id)
    return Begun(id=upload.id, wanted=wanted, received_bytes=received)


def _received_bytes(session: Session, id: str) -> int:
    parts = select(func.sum(UploadPart.size_bytes)).where(UploadPart.upload_id == id)
    return int(session.scalar(parts) or 0)


def keep(begun: Begun, at: int, body: bytes) -> None:
    """Durably store the bytes from `at` on; raises Conflict if another client sends them as
    well.
    """
    if at == 0:
        begun.wanted.sort.look_at_head(begun.wanted, body)
    place = f"{UPLOADS}/{begun.id}/{uuid.uuid4().hex}"
    _store().place.keep([body], lambda: place)
    with transaction() as session:
        touched = update(Upload).where(Upload.id == begun.id).values(touched_at=func.now())
        is_open = session.execute(touched.returning(Upload.id)).one_or_none() is not None
        if not is_open or _received_bytes(session, begun.id) != at:
            # No row refers to the stored bytes, so garbage collection removes them.
            raise Conflict(
                "another call is uploading the same bytes; ask for its progress, then continue"
            )
        part = {"upload_id": begun.id, "at": at, "size_bytes": len(body), "place": place}
        session.execute(insert(UploadPart).values(part))


def finish(begun: Begun, body: Iterable[Bytes] | None = None) -> Done:
    """Turn the complete bytes, in parts or as `body`, into the result, or delete them.  Raises
    BadInput.
    """
    wanted = begun.wanted
    with transaction() as session:
        parts = _parts(session, begun.id)
    if body is None and not parts:
        return _finished_by_another(wanted)
    try:
        summary = wanted.sort.store(wanted, _pieces(parts) if body is None else body)
    except Missing:
        return _finished_by_another(wanted)
    except BadInput:
        _drop(begun.id, parts)
        raise
    with transaction() as session:
        done = wanted.sort.known(session, wanted) or wanted.sort.made(session, wanted, summary)
        session.execute(delete(Upload).where(Upload.id == begun.id))
    _delete(parts)
    return done


def _pieces(parts: Sequence[str]) -> Iterator[Bytes]:
    place = _store().place
    return (place.get(part) for part in parts)


def _finished_by_another(wanted: WantedUpload) -> Done:
    with transaction() as session:
        done = wanted.sort.known(session, wanted)
    if done is None:
        raise Conflict("the partial upload was deleted meanwhile; upload it again")
    return done


def _parts(session: Session, id: str) -> Sequence[str]:
    query = select(UploadPart.place).where(UploadPart.upload_id == id)
    return session.scalars(query.order_by(UploadPart.at)).all()


def _drop(id: str, parts: Sequence[str]) -> None:
    with transaction() as session:
        session.execute(delete(Upload).where(Upload.id == id))
    _delete(parts)


def _delete(parts: Sequence[str]) -> None:
    place = _store().place
    for name in parts:
        place.delete(name)


def _store() -> Store:
    return Store.at(settings().store_address)
