"""Folders: datablocks of any files, of which only those that the tenant lacks are uploaded.

POST /v1/datablocks/corpus/folder  {"files": [...]}     which files are missing? (202)
PUT  /v1/files                     {"files": [...]}     the bytes of many small ones
PUT  /v1/files/SHA256              the bytes of one     each of the rest, resumed as any upload
POST /v1/datablocks/corpus/folder  {"files": [...]}     the next version (201)
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated

from fastapi import Path, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse

from app.api import downloads, uploading
from app.api.access.auth import Authed, Submitter
from app.api.access.gate import in_thread
from app.api.downloads import Download
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.routes.datablocks import AnyVersion, Name, find_datablock, stored_answer
from app.api.schemas.base import EXAMPLE_SHA256
from app.api.schemas.data import (
    DatablockOut,
    FileOut,
    FolderIn,
    FolderMissing,
    SmallFilesIn,
    SmallFilesOut,
    UploadOut,
)
from app.api.uploading import ContentRange, SentRange, progress, received
from app.core.model.fields import Fault
from app.core.model.provisions.folder import FolderFile, FolderManifest, faults, folder_of
from app.data import folders
from app.data.upload_kinds import FILES
from app.data.uploads import Begun, WantedUpload
from app.db.transactions import Db
from app.errors import BadInput, NotFound

router = v1_router("datablocks")

Sha256 = Annotated[
    str,
    Path(
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the file, in hexadecimal.",
        examples=[EXAMPLE_SHA256],
    ),
]
_BODY = {"required": False, "description": "The bytes of the file.", "content": downloads.BINARY}


@router.put(
    "/files/{sha256}",
    response_model=FileOut,
    status_code=201,
    summary="Upload a file of a folder, or the next part of it",
    responses={
        200: {"model": FileOut, "description": "Your tenant has the file already."},
        202: {"model": UploadOut, "description": "More parts are expected."},
        **declared(403, 409, 413),
    },
    openapi_extra={"requestBody": _BODY},
)
async def put_file(
    http: HttpRequest, sha256: Sha256, caller: Submitter, content_range: ContentRange = None
) -> Response:
    """Stores the bytes under their hash, for folders of your tenant.  It is resumed as the upload
    of a datablock is.  A file that no folder has goes after a day.
    """
    sent = SentRange.of(content_range, http.headers.get("content-length"))
    wanted = WantedUpload(
        sort=FILES,
        tenant_id=caller.tenant_id,
        user_id=caller.user_id,
        name=FILES.NAME,
        sha256=sha256,
        size_bytes=sent.total,
    )
    at = await received(http, wanted, sent)
    if isinstance(at, Begun):
        return progress(at)
    shown = {"sha256": at.row.sha256, "size_bytes": at.row.size_bytes}
    return JSONResponse(shown, 201 if at.is_new else 200)


@router.put(
    "/files",
    response_model=SmallFilesOut,
    summary="Upload small files of a folder together",
    responses=declared(403),
)
async def put_files(body: SmallFilesIn, caller: Submitter) -> SmallFilesOut:
    """Stores the bytes of many files under their hashes, as single uploads would: all or none."""
    made = await uploading.in_thread(lambda: folders.put(caller.tenant_id, _small_files(body)))
    return SmallFilesOut(new=made)


def _small_files(body: SmallFilesIn) -> dict[str, bytes]:
    """Decode the files, by hash; raises BadInput if bytes do not have the hash that was sent."""
    files = dict[str, bytes]()
    for n, file in enumerate(body.files):
        try:
            content = base64.b64decode(file.content, validate=True)
        except ValueError as error:
            raise BadInput.at(f"/files/{n}/content", f"must be Base64: {error}") from error
        if not content:
            raise BadInput.at(f"/files/{n}/content", "an empty file is not uploaded")
        if (found := hashlib.sha256(content).hexdigest()) != file.sha256:
            raise BadInput.at(f"/files/{n}/sha256", f"the bytes have the SHA-256 {found}")
        files[file.sha256] = content
    return files


@router.post(
    "/datablocks/{name}/folder",
    response_model=DatablockOut,
    status_code=201,
    summary="Make a folder of files the next version of a datablock",
    responses={
        200: {"model": DatablockOut, "description": "The newest version is this folder already."},
        202: {"model": FolderMissing, "description": "Upload these files first."},
        **declared(403, 409, 413),
    },
)
async def create_folder(name: Name, body: FolderIn, caller: Submitter) -> Response:
    """Names all files of the folder.  If your tenant lacks some of them, the answer lists their
    hashes, and nothing is made.

    A folder has plain files only; of a file's mode it keeps whether the file may be run.
    """
    files = _folder(body)
    missing = await in_thread(caller.tenant_id, folders.missing, caller.tenant_id, files)
    if not missing:
        whose = (caller.tenant_id, caller.user_id)
        done = await in_thread(caller.tenant_id, folders.made, *whose, name, files)
        if done is not None:
            return await in_thread(caller.tenant_id, stored_answer, done)
        missing = await in_thread(caller.tenant_id, folders.missing, caller.tenant_id, files)
    return JSONResponse({"missing": missing}, 202)


def _folder(body: FolderIn) -> FolderManifest:
    """Read the manifest; raises BadInput with all faults."""
    files = [FolderFile(**file.model_dump()) for file in body.files]
    found = tuple(Fault(f"/files/{n}", told) for n, told in faults(files))
    if found:
        raise BadInput(f"{found[0].pointer}: {found[0].detail}", errors=found[:100])
    return folder_of(files)


@router.get(
    "/datablocks/{name}/files/{sha256}",
    response_class=StreamingResponse,
    summary="Download a file of a folder",
    responses=downloads.ANSWERS,
)
def get_file(
    name: AnyVersion, sha256: Sha256, caller: Authed, session: Db, asked: Download
) -> Response:
    """Sends the file of this hash, if the folder has it at any path.  A download of the datablock
    itself is the list of its files: `{"folder": 1, "files": [[PATH, BYTES, SHA256, 1 or 0], ...]}`;
    the last number tells whether the file may be run.
    """
    size_bytes = folders.has(session, find_datablock(session, caller, name), sha256)
    if size_bytes is None:
        raise NotFound("file", sha256)
    return downloads.answer(sha256, size_bytes, downloads.headers_of(sha256, sha256), asked)
