"""Datablocks: named tensors of a tenant, uploaded, downloaded, listed, deleted.

`app.api.uploading` describes how an upload resumes after a break.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from app.api import downloads
from app.api.access.auth import Authed, Submitter
from app.api.access.caller import Caller
from app.api.access.gate import in_thread
from app.api.access.visibility import of_caller
from app.api.cursors import Paged
from app.api.downloads import Download
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.data import DatablockOut, UploadOut
from app.api.uploading import ContentRange, SentRange, progress, received
from app.core.model import descriptor as descriptors
from app.data import datablocks
from app.data.upload_kinds import TENSORS
from app.data.uploads import Begun, Done, WantedUpload
from app.db.models import Datablock
from app.db.transactions import Db, lock_again, transaction
from app.errors import Forbidden, NotFound
from app.identity import audit

router = v1_router("datablocks")

_NAME = "[a-z0-9][a-z0-9._-]{0,62}"
Name = Annotated[str, Path(pattern=f"^{_NAME}$", description="The name of the datablock.")]
AnyVersion = Annotated[
    str,
    Path(pattern=rf"^{_NAME}(@[1-9][0-9]{{0,8}})?$", description="`NAME` or `NAME@VERSION`."),
]
OneVersion = Annotated[
    str, Path(pattern=rf"^{_NAME}@[1-9][0-9]{{0,8}}$", description="`NAME@VERSION`")
]
Sha256 = Annotated[
    str, Query(pattern="^[0-9a-f]{64}$", description="SHA-256 of the whole file, in hexadecimal.")
]
_BODY = {
    "required": False,
    "description": "A safetensors or npy file.",
    "content": downloads.BINARY,
}


# --- up -----------------------------------------------------------------------------------------


@router.put(
    "/datablocks/{name}",
    response_model=DatablockOut,
    status_code=201,
    summary="Upload a datablock, or the next part of an upload",
    responses={
        200: {"model": DatablockOut, "description": "The newest version already has these bytes."},
        202: {"model": UploadOut, "description": "More parts are expected."},
        **declared(403, 409, 413),
    },
    openapi_extra={"requestBody": _BODY},
)
async def put_datablock(
    http: HttpRequest,
    name: Name,
    sha256: Sha256,
    caller: Submitter,
    content_range: ContentRange = None,
) -> Response:
    """Makes the bytes the next version of `name`, once all have arrived, have the given hash, and
    are tensors: safetensors, or npy without objects.  Nothing in them is run.

    Bytes that your tenant already has, under any name, need not be sent: ask with `bytes */TOTAL`
    first.
    """
    sent = SentRange.of(content_range, http.headers.get("content-length"))
    wanted = WantedUpload(
        sort=TENSORS,
        tenant_id=caller.tenant_id,
        user_id=caller.user_id,
        name=name,
        sha256=sha256,
        size_bytes=sent.total,
    )
    at = await received(http, wanted, sent)
    if isinstance(at, Begun):
        return progress(at)
    return await in_thread(caller.tenant_id, stored_answer, at)


def stored_answer(done: Done) -> JSONResponse:
    row = done.row
    with transaction() as session:
        holders = datablocks.holders(session, [row.id])[row.id]
    shown = _shown(row, holders=holders).model_dump(mode="json")
    headers = {"Location": _address(done.row)}
    return JSONResponse(shown, 201 if done.is_new else 200, headers=headers)


def _address(row: Datablock) -> str:
    return f"/v1/datablocks/{row.name}@{row.version}"


def _shown(row: Datablock, *, holders: int) -> DatablockOut:
    fields = DatablockOut.model_fields.keys() - {"holders"}
    shown = {name: getattr(row, name) for name in fields}
    return DatablockOut.model_validate({**shown, "holders": holders})


# --- down ---------------------------------------------------------------------------------------


@router.get(
    "/datablocks/{name}",
    response_class=StreamingResponse,
    summary="Download a datablock",
    responses=downloads.ANSWERS,
)
def get_datablock(name: AnyVersion, caller: Authed, session: Db, asked: Download) -> Response:
    """Sends the newest version, if none is named; `Content-Location` tells which version it is.

    The `ETag` is the SHA-256 of the whole file.  The whole file is verified during the download: if
    it is damaged, the answer ends before its `Content-Length`.  Verify a file put together from
    ranges yourself.
    """
    row = find_datablock(session, caller, name)
    return downloads.answer(row.sha256, row.size_bytes, _headers(row), asked)


@router.head(
    "/datablocks/{name}",
    response_class=Response,
    summary="Check whether a datablock exists, its size and its hash",
    responses=declared(404),
)
def head_datablock(name: AnyVersion, caller: Authed, session: Db) -> Response:
    """Sends the headers of a download, without the bytes."""
    row = find_datablock(session, caller, name)
    length = {"Content-Length": str(row.size_bytes)}
    return Response(headers=_headers(row) | length, media_type="application/octet-stream")


def _headers(row: Datablock) -> dict[str, str]:
    filename = f"{row.name}@{row.version}.{row.format}"
    return {**downloads.headers_of(row.sha256, filename), "Content-Location": _address(row)}


def find_datablock(session: Session, caller: Caller, name: str) -> Datablock:
    source = descriptors.datablock(name)
    assert source is not None, "the path has that form"
    row = datablocks.found(session, caller.tenant_id, [source]).get(source)
    if row is None:
        raise NotFound("datablock", name)
    return row


# --- listing ------------------------------------------------------------------------------------


@router.get(
    "/datablocks", response_model=Page[DatablockOut], summary="List datablocks, newest first"
)
def list_datablocks(
    paging: Paged,
    caller: Authed,
    session: Db,
    name: Annotated[str | None, Query(description="Only versions of this datablock.")] = None,
    format: Literal["safetensors", "npy", "folder"] | None = None,
    latest: Annotated[
        bool, Query(description="Only the newest version of each datablock.")
    ] = False,
) -> dict[str, Any]:
    """Lists every version that has not been deleted, of the tenants that you see."""
    query = select(Datablock).where(
        of_caller(caller, Datablock.tenant_id), Datablock.deleted_at.is_(None)
    )
    if name is not None:
        query = query.where(Datablock.name == name)
    if format is not None:
        query = query.where(Datablock.format == format)
    if latest:
        query = query.where(Datablock.version == _newest())
    found = paging.read(session, query, by=Datablock.id, newest_first=True)
    holders = datablocks.holders(session, [row.id for row in found.rows])
    return found.page([_shown(row, holders=holders[row.id]) for row in found.rows])


def _newest() -> Any:
    """Return a subquery: the newest version of the same name."""
    other = aliased(Datablock)
    same = (other.tenant_id == Datablock.tenant_id, other.name == Datablock.name)
    query = select(func.max(other.version)).where(*same, other.deleted_at.is_(None))
    return query.scalar_subquery()


# --- away ---------------------------------------------------------------------------------------


@router.delete(
    "/datablocks/{name}",
    response_model=DatablockOut,
    summary="Delete a version of a datablock",
    responses=declared(403, 404),
)
def delete_datablock(name: OneVersion, caller: Submitter, session: Db) -> DatablockOut:
    """Frees the name of this version, so that no new task can take it.

    The bytes stay as long as tasks that have not ended need them (`holders`), and go some minutes
    later.
    """
    row = find_datablock(session, caller, name)
    if caller.role == "member" and row.user_id != caller.user_id:
        raise Forbidden("only the owner or an administrator may do this; got role member")
    # lock: a concurrent submission either already holds this version, or does not find it
    lock_again(session, row)
    audit.asked(session, row)
    if row.deleted_at is None:
        row.deleted_at = session.scalar(select(func.now()))
    return _shown(row, holders=datablocks.holders(session, [row.id])[row.id])
