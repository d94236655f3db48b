"""Datablocks: named tensors of a tenant, uploaded, downloaded, listed, deleted.

An upload says what it is to become (`sha256`), so it can break at any byte and go on:

    PUT /v1/datablocks/corpus?sha256=…    Content-Range: bytes */TOTAL        how far is it? (202)
    PUT /v1/datablocks/corpus?sha256=…    Content-Range: bytes FROM-TO/TOTAL  the next bytes (202)

and the last bytes are answered with the version (201).  Without `Content-Range` the body is all of
it.  Bytes that are there are skipped, if they are sent again; a gap is refused (409).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Header, Path, Query, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from app import audit, datablocks, uploads
from app.api import downloads
from app.api.auth import Authed, Caller, Submitter
from app.api.cursors import Paged
from app.api.downloads import Download
from app.api.edge import v1_router
from app.api.problems import declared
from app.api.reach import of_caller
from app.api.schemas import DatablockOut, Page, UploadOut
from app.core import descriptor as descriptors
from app.db import Db, transaction
from app.errors import BadInput, Conflict, Forbidden, NotFound, Unavailable
from app.models import Datablock
from app.uploads import PART_BYTES, Begun, Done, Wanted

router = v1_router("datablocks")

_NAME = "[a-z0-9][a-z0-9._-]{0,62}"
Name = Annotated[str, Path(pattern=f"^{_NAME}$", description="of all its versions")]
AnyVersion = Annotated[
    str,
    Path(pattern=rf"^{_NAME}(@[1-9][0-9]{{0,8}})?$", description="`NAME`, or `NAME@VERSION`"),
]
OneVersion = Annotated[
    str, Path(pattern=rf"^{_NAME}@[1-9][0-9]{{0,8}}$", description="`NAME@VERSION`")
]
Sha256 = Annotated[
    str, Query(pattern="^[0-9a-f]{64}$", description="of the whole, in hexadecimal digits")
]
ContentRange = Annotated[
    str | None,
    Header(description="`bytes FROM-TO/TOTAL`, or `bytes */TOTAL` to ask how far it is"),
]
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")
_BODY = {"required": False, "description": "safetensors or npy", "content": downloads.BINARY}


# --- up -----------------------------------------------------------------------------------------


@router.put(
    "/datablocks/{name}",
    response_model=DatablockOut,
    status_code=201,
    summary="Upload a datablock, or the next part of one",
    responses={
        200: {"model": DatablockOut, "description": "The newest version has these bytes already"},
        202: {"model": UploadOut, "description": "More of it is wanted"},
        **declared(403, 409, 413),
    },
    openapi_extra={"requestBody": _BODY},
)
async def put_datablock(
    http: HttpRequest,
    name: Name,
    sha256: Sha256,
    caller: Submitter,
    session: Db,
    content_range: ContentRange = None,
) -> Response:
    """The bytes become the next version of `name`, when all of them are there, have the hash that
    was said, and are tensors: safetensors, or npy without objects.  Nothing in them is run.

    What your tenant has already, under any name, need not be sent: ask with `bytes */TOTAL` first.
    """
    await run_in_threadpool(session.commit)  # no connection is held while the client sends
    sent = _Sent.of(content_range, http.headers.get("content-length"))
    wanted = Wanted(
        tenant_id=caller.tenant_id,
        user_id=caller.user_id,
        name=name,
        sha256=sha256,
        size_bytes=sent.total,
    )
    at = await _in_thread(lambda: uploads.begin(wanted))
    if isinstance(at, Begun) and not sent.asks:
        at = await _receive(http, at, sent)
    if isinstance(at, Begun) and at.received_bytes == sent.total:
        begun = at
        at = await _in_thread(lambda: uploads.finish(begun))
    return _progress(at) if isinstance(at, Begun) else await run_in_threadpool(_stored, at)


@dataclass(frozen=True, slots=True)
class _Sent:
    """The bytes from `start` to `end` of `total` are in the body; none, if it only `asks`."""

    start: int
    end: int
    total: int
    asks: bool = False

    @classmethod
    def of(cls, content_range: str | None, length: str | None) -> _Sent:
        """Raises BadInput."""
        if content_range is None:
            if length is None or not length.isdecimal() or int(length) == 0:
                told = "say how long the body is, or send a Content-Range"
                raise BadInput.at("Content-Length:", told, "missing")
            return cls(0, int(length), int(length))
        found = _CONTENT_RANGE.fullmatch(content_range)
        if found is None:
            told = "it is of the form `bytes FROM-TO/TOTAL` or `bytes */TOTAL`"
            raise BadInput.at("Content-Range:", told)
        first, last, total = (None if part is None else int(part) for part in found.groups())
        assert total is not None, "every form has one"
        if total == 0 or (first is not None and last is not None and not first <= last < total):
            raise BadInput.at("Content-Range:", "there are no such bytes", "range")
        if first is None or last is None:
            return cls(0, 0, total, asks=True)
        return cls(first, last + 1, total)


async def _receive(http: HttpRequest, begun: Begun, sent: _Sent) -> Begun:
    """Keep what comes, part by part; where the client breaks off, what came so far stays."""
    at = begun.received_bytes
    if sent.start > at:
        told = f"{at} bytes of it are here: go on from there, not from {sent.start}"
        raise Conflict(told)
    skip, body = at - sent.start, bytearray()
    try:
        async for piece in http.stream():
            body += piece[skip:]
            skip = max(0, skip - len(piece))
            if at + len(body) > sent.end:
                raise BadInput.at("Content-Range:", "the body is longer than that", "range")
            if len(body) >= PART_BYTES:
                at = await _keep(begun, at, body)
    except ClientDisconnect:
        pass  # nobody hears the answer
    if body:
        at = await _keep(begun, at, body)
    return Begun(id=begun.id, wanted=begun.wanted, received_bytes=at)


async def _keep(begun: Begun, at: int, body: bytearray) -> int:
    """Where the next bytes begin; `body` is empty then."""
    part = bytes(body)
    body.clear()
    await _in_thread(lambda: uploads.keep(begun, at, part))
    return at + len(part)


async def _in_thread(act: Callable[[], Any]) -> Any:
    try:
        return await run_in_threadpool(act)
    except OSError as error:
        raise Unavailable(str(error)) from error


def _progress(begun: Begun) -> JSONResponse:
    wanted = begun.wanted
    shown = UploadOut(
        name=wanted.name,
        sha256=wanted.sha256,
        size_bytes=wanted.size_bytes,
        received_bytes=begun.received_bytes,
    )
    return JSONResponse(shown.model_dump(mode="json"), 202)


def _stored(done: Done) -> JSONResponse:
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
    """The newest version, if none is named; `Content-Location` says which one it is.

    The `ETag` is the SHA-256 of the whole.  All of it is checked on the way: if it turns out to be
    damaged the answer ends before its `Content-Length`.  Check a file put together from ranges.
    """
    row = _named(session, caller, name)
    return downloads.answer(row.sha256, row.size_bytes, _headers(row), asked)


@router.head(
    "/datablocks/{name}",
    response_class=Response,
    summary="Is it there, how large is it, and what is its hash?",
    responses=declared(404),
)
def head_datablock(name: AnyVersion, caller: Authed, session: Db) -> Response:
    """What a download would say, without the bytes."""
    row = _named(session, caller, name)
    length = {"Content-Length": str(row.size_bytes)}
    return Response(headers=_headers(row) | length, media_type="application/octet-stream")


def _headers(row: Datablock) -> dict[str, str]:
    filename = f"{row.name}@{row.version}.{row.format}"
    return {**downloads.headers_of(row.sha256, filename), "Content-Location": _address(row)}


def _named(session: Session, caller: Caller, name: str) -> Datablock:
    source = descriptors.datablock(name)
    assert source is not None, "the path has that form"
    row = datablocks.found(session, caller.tenant_id, [source]).get(source)
    if row is None:
        raise NotFound("datablock", name)
    return row


# --- all of them --------------------------------------------------------------------------------


@router.get(
    "/datablocks", response_model=Page[DatablockOut], summary="List datablocks, newest first"
)
def list_datablocks(
    paging: Paged,
    caller: Authed,
    session: Db,
    name: Annotated[str | None, Query(description="versions of this one only")] = None,
    format: Literal["safetensors", "npy"] | None = None,
    latest: Annotated[bool, Query(description="only the newest version of each name")] = False,
) -> dict[str, Any]:
    """Every version that has not been deleted, of the tenants that you see."""
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
    """The newest version of the same name."""
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
    """It has its name no longer, and no new task can take it.  Its bytes stay as long as tasks that
    have not ended need them (`holders`), and go some minutes after.
    """
    row = _named(session, caller, name)
    if caller.role == "member" and row.user_id != caller.user_id:
        raise Forbidden("only who made it or an administrator may do that, not a member")
    session.refresh(row, with_for_update=True)  # so who submits now either had it, or finds none
    audit.asked(session, row)
    if row.deleted_at is None:
        row.deleted_at = session.scalar(select(func.now()))
    return _shown(row, holders=datablocks.holders(session, [row.id])[row.id])
