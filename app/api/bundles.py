"""Bundles: a tenant's code, uploaded under the SHA-256 of its bytes."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path as FilePath
from typing import IO, Annotated, Any

from fastapi import Path, Response
from fastapi import Request as HttpRequest
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app import bundles
from app.api.auth import Authed, Caller, Submitter
from app.api.cursors import Paged
from app.api.edge import v1_router
from app.api.problems import declared
from app.api.schemas import BundleOut, BundleStored, Page
from app.db import Db, transaction
from app.errors import BadInput, NotFound
from app.models import Bundle
from app.settings import settings
from app.store import Store

router = v1_router("bundles")

Sha256 = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="of the bytes, in hexadecimal digits")
]
_BODY = {
    "required": True,
    "description": "a zip, tar or tar.gz",
    "content": {
        kind: {"schema": {"type": "string", "format": "binary"}}
        for kind in ("application/zip", "application/x-tar", "application/gzip")
    },
}


@router.put(
    "/bundles/{sha256}",
    response_model=BundleStored,
    status_code=201,
    summary="Upload a bundle",
    responses={200: {"model": BundleStored, "description": "It was there"}, **declared(403, 413)},
    openapi_extra={"requestBody": _BODY},
)
async def put_bundle(
    http: HttpRequest, response: Response, sha256: Sha256, caller: Submitter, session: Db
) -> dict[str, Any]:
    """The body is the archive itself.  It is looked through without running or unpacking it:
    plain files only, no path that leaves the bundle, limits on number and size.

    Uploading the same bytes again is no error (200 instead of 201).
    """
    await run_in_threadpool(session.commit)  # no connection is held while the client sends
    with tempfile.NamedTemporaryFile(prefix="roundhouse-bundle-") as file:
        found = await _receive(http, file)
        if found != sha256:
            told = f"the bytes sent hash to {found}, not to the {sha256} of the address"
            raise BadInput.at("{sha256}", told, "digest")
        stored, made = await run_in_threadpool(_take_in, caller, sha256, FilePath(file.name))
    response.status_code = 201 if made else 200
    return stored


async def _receive(http: HttpRequest, file: IO[bytes]) -> str:
    """Write the body into the file; returns its SHA-256.  Its size is limited at the edge."""
    digest = hashlib.sha256()
    async for piece in http.stream():
        digest.update(piece)
        await run_in_threadpool(file.write, piece)
    await run_in_threadpool(file.flush)
    return digest.hexdigest()


def _take_in(caller: Caller, sha256: str, path: FilePath) -> tuple[dict[str, Any], bool]:
    contents = bundles.inspect(path)
    store = Store.at(settings().store_address)
    if not store.has(sha256):
        store.put_file(path)
    values = {
        "tenant_id": caller.tenant_id,
        "sha256": sha256,
        "size_bytes": path.stat().st_size,
        "entry_points": contents.entry_points,
    }
    with transaction() as session:
        row = insert(Bundle).values(values).on_conflict_do_nothing().returning(Bundle.sha256)
        made = session.execute(row).one_or_none() is not None
        bundle = session.get_one(Bundle, (caller.tenant_id, sha256))
        shown = BundleOut.model_validate(bundle).model_dump()
    return {**shown, "files": contents.files, "unparsed": contents.unparsed}, made


@router.get(
    "/bundles/{sha256}",
    response_model=BundleOut,
    summary="Show a bundle",
    responses=declared(404),
)
def get_bundle(sha256: Sha256, caller: Authed, session: Db) -> Bundle:
    """What is known of it; its bytes are for the devices only."""
    return _visible(session, caller, sha256)


@router.head(
    "/bundles/{sha256}",
    response_class=Response,
    summary="Is it there?",
    responses=declared(404),
)
def head_bundle(sha256: Sha256, caller: Authed, session: Db) -> Response:
    """Tells whether it must be uploaded, without a body."""
    _visible(session, caller, sha256)
    return Response()


@router.get("/bundles", response_model=Page[BundleOut], summary="List your tenant's bundles")
def list_bundles(paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """By the SHA-256 of their bytes."""
    query = select(Bundle).where(Bundle.tenant_id == caller.tenant_id)
    return paging.read(session, query, by=Bundle.sha256).page()


def _visible(session: Session, caller: Caller, sha256: str) -> Bundle:
    bundle = session.get(Bundle, (caller.tenant_id, sha256))
    if bundle is None:
        raise NotFound("bundle", sha256)
    return bundle
