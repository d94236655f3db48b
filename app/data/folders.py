"""Rows of folders: datablocks of files that lie in the store once for all folders of a tenant.

A client uploads the files that the tenant lacks (`app.data.upload_kinds`), and then names all files
of the folder.  So uploading a changed folder sends only the changed files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import delete, exists, func, insert, select, text, update
from sqlalchemy.orm import Session

from app.core.model.provisions import folder
from app.core.model.provisions.folder import FOLDER, FolderManifest
from app.data import datablocks
from app.data.uploads import Done
from app.db.models import Datablock, DatablockFile, StoredFile
from app.db.transactions import transaction
from app.errors import BadInput, TooLarge
from app.settings import settings
from app.storage.store import Store, blob

UNUSED_KEPT = text("interval '1 day'")  # how long a file stays that no folder has


def missing(tenant_id: str, files: FolderManifest) -> list[str]:
    """Return the hashes of files that the tenant lacks; those that it has are now kept for a day.

    Raises TooLarge, or BadInput if a file has another size than the tenant's file of this hash.
    """
    limit = settings().datablock_limit_bytes
    if files.size_bytes > limit:
        raise TooLarge(f"a folder must have at most {limit} bytes; got {files.size_bytes}")
    wanted = files.contents()
    with transaction() as session:
        found = _touched(session, tenant_id, wanted)
    for sha256, size_bytes in found.items():
        if wanted[sha256] != size_bytes:
            told = f"the file {sha256} has {size_bytes} bytes; got {wanted[sha256]}"
            raise BadInput.at("/files", told)
    return sorted(wanted.keys() - found.keys())


def put(tenant_id: str, files: Mapping[str, bytes]) -> int:
    """Durably store files under their hashes; return how many of them the tenant lacked.

    Raises QuotaExceeded.
    """
    with transaction() as session:
        new = _without_known(session, tenant_id, files)
        datablocks.check_room(session, tenant_id, sum(map(len, new.values())))
    with Store.at(settings().store_address).place.batch() as batch:
        for sha256, body in new.items():
            batch.put(blob(sha256), [body])
        batch.settle()
    with transaction() as session:
        datablocks.shelve(session, [tenant_id])
        new = _without_known(session, tenant_id, new)
        datablocks.check_room(session, tenant_id, sum(map(len, new.values())))
        session.add_all(
            StoredFile(tenant_id=tenant_id, sha256=sha256, size_bytes=len(body))
            for sha256, body in new.items()
        )
    return len(new)


def _without_known(
    session: Session, tenant_id: str, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    known = _touched(session, tenant_id, files)
    return {sha256: body for sha256, body in files.items() if sha256 not in known}


def made(tenant_id: str, user_id: str, name: str, files: FolderManifest) -> Done | None:
    """Make the folder the next version of `name`; None if one of its files was deleted meanwhile.

    If the newest version is equal, it is returned instead. Raises QuotaExceeded.
    """
    store = Store.at(settings().store_address)
    sha256, size_bytes = store.put([folder.encoded(files)])
    with transaction() as session:
        datablocks.shelve(session, [tenant_id])
        of_name = (Datablock.tenant_id == tenant_id, Datablock.name == name)
        there = select(Datablock).where(*of_name, Datablock.deleted_at.is_(None))
        newest = session.scalars(there.order_by(Datablock.version.desc()).limit(1)).first()
        if newest is not None and (newest.format, newest.sha256) == (FOLDER, sha256):
            return Done(row=newest, is_new=False)
        if len(_touched(session, tenant_id, files.contents())) < len(files.contents()):
            return None
        datablocks.check_room(session, tenant_id, size_bytes)
        new = datablocks.New(
            tenant_id=tenant_id,
            user_id=user_id,
            name=name,
            sha256=sha256,
            size_bytes=size_bytes,
            summary={"format": FOLDER, "tensors": [], "tensor_count": 0},
        )
        row = datablocks.added(session, new)
        row.file_count, row.file_bytes = len(files.files), files.size_bytes
        each = [{"datablock_id": row.id, "sha256": sha256} for sha256 in files.contents()]
        if each:
            session.execute(insert(DatablockFile), each)
        session.flush()
    return Done(row=row, is_new=True)


def _touched(session: Session, tenant_id: str, wanted: Collection[str]) -> dict[str, int]:
    """From these hashes, keep for a day the files that the tenant has; return their sizes."""
    mine = (StoredFile.tenant_id == tenant_id, StoredFile.sha256.in_(wanted))
    # all in the same order, so that two clients that name the same files cannot deadlock
    locked = select(StoredFile.sha256).where(*mine).order_by(StoredFile.sha256).with_for_update()
    session.execute(locked)
    touched = update(StoredFile).where(*mine).values(touched_at=func.now())
    rows = session.execute(touched.returning(StoredFile.sha256, StoredFile.size_bytes))
    return {sha256: size_bytes for sha256, size_bytes in rows}


def has(session: Session, row: Datablock, sha256: str) -> int | None:
    """Return the size of the folder's file of this hash; None if it has no such file."""
    query = (
        select(StoredFile.size_bytes)
        .join(DatablockFile, DatablockFile.sha256 == StoredFile.sha256)
        .where(
            DatablockFile.datablock_id == row.id,
            StoredFile.tenant_id == row.tenant_id,
            StoredFile.sha256 == sha256,
        )
    )
    return session.scalar(query)


def forget(session: Session, freed: Collection[str]) -> list[str]:
    """Delete files that only these freed folders had, and files that were never in a folder.

    Returns the names of their blobs.
    """
    session.execute(delete(DatablockFile).where(DatablockFile.datablock_id.in_(freed)))
    is_in_a_folder = exists().where(
        DatablockFile.sha256 == StoredFile.sha256,
        DatablockFile.datablock_id == Datablock.id,
        Datablock.tenant_id == StoredFile.tenant_id,
    )
    old = delete(StoredFile).where(
        StoredFile.touched_at < func.now() - UNUSED_KEPT, ~is_in_a_folder
    )
    gone = old.returning(StoredFile.sha256).execution_options(synchronize_session=False)
    return [blob(sha256) for sha256 in session.scalars(gone)]
