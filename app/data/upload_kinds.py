"""Defines the sorts of uploads: datablocks of tensors, files of folders, and bundles of code."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model.checkpoints import tensor_file
from app.core.model.checkpoints.tensor_file import HEAD_BYTES, BadTensorFile, TensorFile
from app.core.model.protocol.messages import JSON
from app.core.model.provisions.folder import FOLDER
from app.data import bundles, datablocks
from app.data.uploads import Done, WantedUpload
from app.db.models import Bundle, Datablock, PackageFile, StoredFile
from app.errors import BadInput
from app.settings import settings
from app.storage.backend import Bytes
from app.storage.store import OtherBytes, Store


class Tensors:
    """Uploads that become the next version of a datablock, or match the newest one."""

    @property
    def limit_bytes(self) -> int:
        return settings().datablock_limit_bytes

    def known(self, session: Session, wanted: WantedUpload) -> Done | None:
        """Return the newest version of the name if it has these bytes.

        Otherwise create a new version at once, if the tenant has the bytes under any name.
        """
        datablocks.shelve(session, [wanted.tenant_id])
        mine = (Datablock.tenant_id == wanted.tenant_id, Datablock.deleted_at.is_(None))
        newest = select(Datablock).where(*mine, Datablock.name == wanted.name)
        row = session.scalars(newest.order_by(Datablock.version.desc()).limit(1)).first()
        if row is not None and row.sha256 == wanted.sha256 and row.format != FOLDER:
            return Done(row=row, is_new=False)
        # The lock prevents the other version from being deleted before our row exists, so the bytes
        # always have a name.
        same = select(Datablock).where(
            *mine, Datablock.sha256 == wanted.sha256, Datablock.format != FOLDER
        )
        row = session.scalars(same.limit(1).with_for_update(read=True)).first()
        if row is None:
            return None
        return self._made(session, wanted, row.size_bytes, datablocks.summary_of(row))

    def check_room(self, session: Session, wanted: WantedUpload) -> None:
        datablocks.check_room(session, wanted.tenant_id, wanted.size_bytes)

    def look_at_head(self, wanted: WantedUpload, head: bytes) -> None:
        if len(head) >= min(HEAD_BYTES, wanted.size_bytes):
            _described(head, wanted.size_bytes)

    def store(self, wanted: WantedUpload, pieces: Iterable[Bytes]) -> JSON:
        head = bytearray()

        def seen() -> Iterator[Bytes]:
            for piece in pieces:
                head.extend(piece[: HEAD_BYTES - len(head)])
                yield piece
            # checks the bytes before the blob gets its name
            _described(bytes(head), wanted.size_bytes)

        try:
            Store.at(settings().store_address).put(seen(), promised=wanted.sha256)
        except OtherBytes as error:
            raise _other_bytes(wanted, error.found, "?sha256") from error
        return _described(bytes(head), wanted.size_bytes).summary()

    def made(self, session: Session, wanted: WantedUpload, summary: JSON) -> Done:
        return self._made(session, wanted, wanted.size_bytes, summary)

    @staticmethod
    def _made(session: Session, wanted: WantedUpload, size_bytes: int, summary: JSON) -> Done:
        new = datablocks.New(
            tenant_id=wanted.tenant_id,
            user_id=wanted.user_id,
            name=wanted.name,
            sha256=wanted.sha256,
            size_bytes=size_bytes,
            summary=summary,
        )
        return Done(row=datablocks.added(session, new), is_new=True)


def _described(head: bytes, size_bytes: int) -> TensorFile:
    try:
        return tensor_file.read(head, size_bytes)
    except BadTensorFile as error:
        told = f"unsupported file; a datablock must be .safetensors or .npy: {error}"
        raise BadInput.at("", told, "format") from error


class Files:
    """Uploads that become files of folders, of any content; a tenant has each under its SHA-256."""

    #: Stands in an `Upload` in place of a name, so that the bytes count for the tenant's quota.
    NAME = "@file"

    @property
    def limit_bytes(self) -> int:
        return settings().datablock_limit_bytes

    def known(self, session: Session, wanted: WantedUpload) -> Done | None:
        datablocks.shelve(session, [wanted.tenant_id])
        row = session.get(StoredFile, (wanted.tenant_id, wanted.sha256), with_for_update=True)
        if row is None:
            return None
        row.touched_at = func.now()
        return Done(row=row, is_new=False)

    def check_room(self, session: Session, wanted: WantedUpload) -> None:
        datablocks.check_room(session, wanted.tenant_id, wanted.size_bytes)

    def look_at_head(self, wanted: WantedUpload, head: bytes) -> None:
        """Do nothing: any bytes are a file."""

    def store(self, wanted: WantedUpload, pieces: Iterable[Bytes]) -> JSON:
        try:
            Store.at(settings().store_address).put(pieces, promised=wanted.sha256)
        except OtherBytes as error:
            raise _other_bytes(wanted, error.found, "{sha256}") from error
        return {}

    def made(self, session: Session, wanted: WantedUpload, summary: JSON) -> Done:
        row = StoredFile(
            tenant_id=wanted.tenant_id, sha256=wanted.sha256, size_bytes=wanted.size_bytes
        )
        session.add(row)
        session.flush()
        return Done(row=row, is_new=True)


class Code:
    """Uploads that become a bundle; a tenant has each bundle once, under its SHA-256."""

    @property
    def limit_bytes(self) -> int:
        return settings().bundle_limit_bytes

    def known(self, session: Session, wanted: WantedUpload) -> Done | None:
        row = session.get(Bundle, (wanted.tenant_id, wanted.sha256))
        return None if row is None else Done(row=row, is_new=False)

    def check_room(self, session: Session, wanted: WantedUpload) -> None:
        """Do nothing: there is no quota for code."""

    def look_at_head(self, wanted: WantedUpload, head: bytes) -> None:
        """Do nothing: an archive can only be inspected as a whole."""

    def store(self, wanted: WantedUpload, pieces: Iterable[Bytes]) -> JSON:
        store, digest = Store.at(settings().store_address), hashlib.sha256()
        with tempfile.NamedTemporaryFile(prefix="roundhouse-bundle-") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.flush()
            if digest.hexdigest() != wanted.sha256:
                raise _other_bytes(wanted, digest.hexdigest(), "{sha256}")
            contents = bundles.inspect(Path(file.name))
            if not store.has(wanted.sha256):
                store.put_file(Path(file.name))
        return asdict(contents)

    def made(self, session: Session, wanted: WantedUpload, summary: JSON) -> Done:
        values = {
            "tenant_id": wanted.tenant_id,
            "sha256": wanted.sha256,
            "size_bytes": wanted.size_bytes,
            "entry_points": summary["entry_points"],
            "signatures": summary["signatures"],
            "package_files": keep_package_files(
                session, wanted.tenant_id, summary["package_files"]
            ),
        }
        row = insert(Bundle).values(values).on_conflict_do_nothing().returning(Bundle.sha256)
        is_new = session.execute(row).one_or_none() is not None
        made = session.get_one(Bundle, (wanted.tenant_id, wanted.sha256))
        return Done(row=made, is_new=is_new, summary=summary)


def keep_package_files(
    session: Session, tenant_id: str, files: Mapping[str, bytes]
) -> dict[str, str]:
    """Store files of a bundle that name packages; return their hashes, by path."""
    hashes = {path: hashlib.sha256(body).hexdigest() for path, body in files.items()}
    rows = {hashes[path]: body for path, body in files.items()}
    if rows:
        values = [
            {"tenant_id": tenant_id, "sha256": sha256, "body": body}
            for sha256, body in sorted(rows.items())
        ]
        session.execute(insert(PackageFile).values(values).on_conflict_do_nothing())
    return hashes


def _other_bytes(wanted: WantedUpload, found: str, pointer: str) -> BadInput:
    told = f"the bytes must hash to {wanted.sha256}; got {found}"
    return BadInput.at(pointer, told, "digest")


TENSORS, FILES, CODE = Tensors(), Files(), Code()
