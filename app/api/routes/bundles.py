"""Bundles: a tenant's code, uploaded under the SHA-256 of its bytes."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Path as PathParameter
from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import JSONResponse
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app.api.access.auth import Authed, Submitter
from app.api.access.caller import Caller
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.data import BundleOut, BundleStored, UploadOut
from app.api.uploading import ContentRange, SentRange, progress, received, received_whole
from app.data import bundles
from app.data.upload_kinds import CODE
from app.data.uploads import PART_BYTES, Begun, Done, WantedUpload
from app.db.models import Bundle
from app.db.transactions import Db
from app.errors import Gone, NotFound
from app.settings import settings
from app.storage.store import Damaged, Store

router = v1_router("bundles")

Sha256 = Annotated[
    str,
    PathParameter(pattern="^[0-9a-f]{64}$", description="SHA-256 of the bytes, in hexadecimal."),
]
_BODY = {
    "required": False,
    "description": "A zip, tar or tar.gz archive.",
    "content": {
        kind: {"schema": {"type": "string", "format": "binary"}}
        # Client generators use the first media type; the service recognises the kind of archive by
        # its bytes.
        for kind in (
            "application/octet-stream",
            "application/zip",
            "application/x-tar",
            "application/gzip",
        )
    },
}


@router.put(
    "/bundles/{sha256}",
    response_model=BundleStored,
    status_code=201,
    summary="Upload a bundle",
    responses={
        200: {"model": BundleStored, "description": "The bundle already existed."},
        202: {"model": UploadOut, "description": "More parts are expected."},
        **declared(403, 409, 410, 413),
    },
    openapi_extra={"requestBody": _BODY},
)
async def put_bundle(
    http: HttpRequest,
    sha256: Sha256,
    caller: Submitter,
    content_range: ContentRange = None,
) -> Response:
    """The body is the archive itself.  The service inspects the archive without running or
    unpacking it: plain files only, no path that leaves the bundle, limits on number and size.

    A large archive can be sent in parts, and resumed after a break: ask with `bytes */TOTAL` how
    much has arrived.  A bundle that your tenant already has need not be sent again; sending it is
    no error (200 instead of 201).
    """
    length = http.headers.get("content-length")
    if content_range is None and length is None:
        at = await _of_unknown_length(http, caller, sha256)
    else:
        sent = SentRange.of(content_range, length)
        at = await received(http, _wanted(caller, sha256, sent.total), sent)
    return progress(at) if isinstance(at, Begun) else await run_in_threadpool(_stored, at)


def _wanted(caller: Caller, sha256: str, size_bytes: int) -> WantedUpload:
    tenant_id, user_id = caller.tenant_id, caller.user_id
    return WantedUpload(
        sort=CODE, tenant_id=tenant_id, user_id=user_id, sha256=sha256, size_bytes=size_bytes
    )


async def _of_unknown_length(http: HttpRequest, caller: Caller, sha256: str) -> Begun | Done:
    """Receive an upload of unknown length; after a break it starts again from the beginning.

    The middleware in `app.api.middleware` limits its size.
    """
    with tempfile.TemporaryFile(prefix="roundhouse-bundle-") as file:
        async for piece in http.stream():
            await run_in_threadpool(file.write, piece)
        wanted = _wanted(caller, sha256, file.tell())
        file.seek(0)
        return await received_whole(wanted, iter(lambda: file.read(PART_BYTES), b""))


def _stored(done: Done) -> JSONResponse:
    bundle: Bundle = done.row
    found = done.summary or _looked_through(bundle.sha256)
    shown = BundleStored(
        **BundleOut.model_validate(bundle).model_dump(),
        files=found["files"],
        unparsed=found["unparsed"],
    )
    return JSONResponse(shown.model_dump(mode="json"), 201 if done.is_new else 200)


def _looked_through(sha256: str) -> dict[str, Any]:
    """Inspect a stored bundle; raises Gone if the store does not have it any more."""
    try:
        with Store.at(settings().store_address).open(sha256) as stored:
            return asdict(bundles.inspect_stored(stored))
    except Damaged as error:
        raise Gone(f"{error}; tell an administrator") from error


@router.get(
    "/bundles/{sha256}",
    response_model=BundleOut,
    summary="Show a bundle",
    responses=declared(404),
)
def get_bundle(sha256: Sha256, caller: Authed, session: Db) -> Bundle:
    """Shows what is known of the bundle.  Only devices can read its bytes."""
    return _visible(session, caller, sha256)


@router.head(
    "/bundles/{sha256}",
    response_class=Response,
    summary="Check whether a bundle exists",
    responses=declared(404),
)
def head_bundle(sha256: Sha256, caller: Authed, session: Db) -> Response:
    """Tells whether the bundle must be uploaded; the answer has no body."""
    _visible(session, caller, sha256)
    return Response()


@router.get("/bundles", response_model=Page[BundleOut], summary="List your tenant's bundles")
def list_bundles(paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists the bundles in the order of their SHA-256."""
    query = select(Bundle).where(Bundle.tenant_id == caller.tenant_id)
    return paging.read(session, query, by=Bundle.sha256).page()


def _visible(session: Session, caller: Caller, sha256: str) -> Bundle:
    bundle = session.get(Bundle, (caller.tenant_id, sha256))
    if bundle is None:
        raise NotFound("bundle", sha256)
    return bundle
