"""Datablocks on their way in: bytes come in order, in as many calls as it takes, and none twice.

An upload is known by what it is to become: tenant, name, SHA-256 and size.  Whoever begins the same
again goes on where it broke.  What was told to be there is durable.  Bytes that the tenant has
already, under any name, are not sent at all; what another tenant has is never told.

The bytes lie in the store as parts until the last one is there; then they are read once, checked
(their hash, and that they are tensors), and kept as one blob.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uuid_utils
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app import datablocks
from app.core import tensorfile
from app.core.messages import JSON
from app.core.tensorfile import HEAD_BYTES, BadTensorFile, TensorFile
from app.db import transaction
from app.errors import BadInput, Conflict, TooLarge
from app.models import Datablock, Upload, UploadPart
from app.places import Bytes, Missing
from app.settings import settings
from app.store import UPLOADS, OtherBytes, Store

PART_BYTES = 8 * 2**20  # become durable at a time; the first one holds any header
assert PART_BYTES >= HEAD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What somebody wants to upload, and for whom."""

    tenant_id: str
    user_id: str
    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An upload of which the first `received_bytes` are there."""

    id: str
    wanted: Wanted
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The version that these bytes are; it `is_new` if it was made by this."""

    row: Datablock
    is_new: bool


def begin(wanted: Wanted) -> Begun | Done:
    """What is there of it; raises TooLarge or QuotaExceeded."""
    limit = settings().datablock_limit_bytes
    if wanted.size_bytes > limit:
        raise TooLarge(f"{wanted.size_bytes} bytes; a datablock has {limit} at most")
    with transaction() as session:
        datablocks.shelve(session, [wanted.tenant_id])
        if (done := _known(session, wanted)) is not None:
            return done
        return _begun(session, wanted)


def _known(session: Session, wanted: Wanted) -> Done | None:
    """The newest version of the name if it has these bytes; else a new one, if the tenant has them
    under any name."""
    mine = (Datablock.tenant_id == wanted.tenant_id, Datablock.deleted_at.is_(None))
    newest = select(Datablock).where(*mine, Datablock.name == wanted.name)
    row = session.scalars(newest.order_by(Datablock.version.desc()).limit(1)).first()
    if row is not None and row.sha256 == wanted.sha256:
        return Done(row=row, is_new=False)
    # Not deleted before our row is there, so the bytes always have a name.
    same = select(Datablock).where(*mine, Datablock.sha256 == wanted.sha256)
    row = session.scalars(same.limit(1).with_for_update(read=True)).first()
    if row is None:
        return None
    return _made(session, wanted, row.size_bytes, datablocks.summary_of(row))


def _begun(session: Session, wanted: Wanted) -> Begun:
    this = {"name": wanted.name, "sha256": wanted.sha256, "size_bytes": wanted.size_bytes}
    query = select(Upload).filter_by(tenant_id=wanted.tenant_id, **this)
    upload = session.scalar(query)
    if upload is None:
        datablocks.check_room(session, wanted.tenant_id, wanted.size_bytes)
        id = f"upl_{uuid_utils.uuid7().hex}"
        upload = Upload(id=id, tenant_id=wanted.tenant_id, **this)
        session.add(upload)
        session.flush()
    received = _received_bytes(session, upload.id)
    return Begun(id=upload.id, wanted=wanted, received_bytes=received)


def _received_bytes(session: Session, id: str) -> int:
    parts = select(func.sum(UploadPart.size_bytes)).where(UploadPart.upload_id == id)
    return int(session.scalar(parts) or 0)


def keep(begun: Begun, at: int, body: bytes) -> None:
    """Durably keep the bytes from `at` on; raises Conflict if somebody else sends them as well."""
    if at == 0:
        _look_at_head(begun, body)
    place = f"{UPLOADS}/{begun.id}/{uuid.uuid4().hex}"
    _store().place.keep([body], lambda: place)
    with transaction() as session:
        touched = update(Upload).where(Upload.id == begun.id).values(touched_at=func.now())
        is_open = session.execute(touched.returning(Upload.id)).one_or_none() is not None
        if not is_open or _received_bytes(session, begun.id) != at:
            # What was put lies there without a name, and is swept away.
            raise Conflict("somebody else sends the same bytes; ask how far that is, and go on")
        part = {"upload_id": begun.id, "at": at, "size_bytes": len(body), "place": place}
        session.execute(insert(UploadPart).values(part))


def _look_at_head(begun: Begun, body: bytes) -> None:
    """Refuse what is no tensors before all of it was sent, if so much came at once."""
    if len(body) >= min(HEAD_BYTES, begun.wanted.size_bytes):
        _described(body, begun.wanted.size_bytes)


def _described(head: bytes, size_bytes: int) -> TensorFile:
    try:
        return tensorfile.read(head, size_bytes)
    except BadTensorFile as error:
        told = f"this is no safetensors or npy file that can be kept: {error}"
        raise BadInput.at("", told, "format") from error


def finish(begun: Begun) -> Done:
    """All of it is there: it becomes a version, or nothing is left of it.  Raises BadInput."""
    wanted = begun.wanted
    with transaction() as session:
        parts = _parts(session, begun.id)
    if not parts:
        return _finished_by_another(wanted)
    try:
        summary = _stored(wanted, parts).summary()
    except Missing:
        return _finished_by_another(wanted)
    except BadInput:
        _drop(begun.id, parts)
        raise
    with transaction() as session:
        datablocks.shelve(session, [wanted.tenant_id])
        done = _known(session, wanted) or _made(session, wanted, wanted.size_bytes, summary)
        session.execute(delete(Upload).where(Upload.id == begun.id))
    _delete(parts)
    return done


def _finished_by_another(wanted: Wanted) -> Done:
    with transaction() as session:
        datablocks.shelve(session, [wanted.tenant_id])
        done = _known(session, wanted)
    if done is None:
        raise Conflict("what was sent of it was dropped meanwhile; send it anew")
    return done


def _parts(session: Session, id: str) -> Sequence[str]:
    query = select(UploadPart.place).where(UploadPart.upload_id == id)
    return session.scalars(query.order_by(UploadPart.at)).all()


def _stored(wanted: Wanted, parts: Sequence[str]) -> TensorFile:
    """Keep the parts as one blob; what is wrong with them is a BadInput."""
    head, store = bytearray(), _store()

    def pieces() -> Iterator[Bytes]:
        for place in parts:
            body = store.place.get(place)
            head.extend(body[: HEAD_BYTES - len(head)])
            yield body
        _described(bytes(head), wanted.size_bytes)  # before it gets its name

    try:
        store.put(pieces(), promised=wanted.sha256)
    except OtherBytes as error:
        told = f"the bytes sent hash to {error.found}, not to the {wanted.sha256} that was said"
        raise BadInput.at("?sha256", told, "digest") from error
    return _described(bytes(head), wanted.size_bytes)


def _drop(id: str, parts: Sequence[str]) -> None:
    with transaction() as session:
        session.execute(delete(Upload).where(Upload.id == id))
    _delete(parts)


def _delete(parts: Sequence[str]) -> None:
    place = _store().place
    for name in parts:
        place.delete(name)


def _made(session: Session, wanted: Wanted, size_bytes: int, summary: JSON) -> Done:
    new = datablocks.New(
        tenant_id=wanted.tenant_id,
        user_id=wanted.user_id,
        name=wanted.name,
        sha256=wanted.sha256,
        size_bytes=size_bytes,
        summary=summary,
    )
    return Done(row=datablocks.added(session, new), is_new=True)


def _store() -> Store:
    return Store.at(settings().store_address)
