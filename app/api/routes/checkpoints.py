"""Checkpoints: lists the tensors in a checkpoint, exports them as a safetensors file, pins it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from app.api.access.auth import Authed
from app.api.access.caller import Caller
from app.api.access.visibility import task_to_act_on, visible, visible_request
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.tasks import CheckpointOut, TensorOut
from app.core.model.checkpoints.manifest import Manifest
from app.core.model.checkpoints.tensor_file import SAID
from app.db.models import Checkpoint
from app.db.transactions import Db
from app.errors import BadInput, Conflict, Gone, NotFound, Unavailable
from app.identity import audit
from app.intake import pins, starting_checkpoints
from app.settings import settings
from app.storage.store import Damaged, Store
from app.storage.tensor_export import Export, Unsayable

router = v1_router("checkpoints", 404)

Names = Annotated[
    list[str] | None, Query(description="Names of the tensors to download; default: all.")
]
OfTask = Annotated[
    str | None, Query(description="The name of the task, of the lot, or of one of its members.")
]
_FILE = {
    "description": "One safetensors file.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


@router.get("/checkpoints/{id}", response_model=CheckpointOut, summary="Show a checkpoint")
def get_checkpoint(id: str, caller: Authed, session: Db) -> Checkpoint:
    """Shows when it was made, at which step, how large it is, and which host signed it."""
    return _visible(session, caller, id)


@router.get(
    "/checkpoints/{id}/tensors",
    response_model=Page[TensorOut],
    summary="List the tensors of a checkpoint",
    responses=declared(410, 503),
)
def list_tensors(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists all tensors of the job, by attribute, without unpickling the checkpoint."""
    manifest = _manifest(_visible(session, caller, id))
    tensors = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "size_bytes": tensor.size,
            "exported": tensor.dtype in SAID,
        }
        for tensor in manifest.ranks[0].tensors
    ]
    return {"items": tensors, "next_cursor": None}


@router.get(
    "/checkpoints/{id}/safetensors",
    response_class=StreamingResponse,
    summary="Download tensors of a checkpoint as safetensors",
    responses={200: _FILE, **declared(409, 410, 503)},
)
def export_checkpoint(
    id: str, caller: Authed, session: Db, names: Names = None
) -> StreamingResponse:
    """Writes every tensor separately and contiguous, even if tensors shared memory.

    Tensors of types that safetensors does not have are left out, and named in the file's metadata.
    If a chunk turns out to be damaged during the download, the answer ends before its
    `Content-Length`.
    """
    checkpoint = _visible(session, caller, id)
    chunks = _store().chunks(checkpoint.tenant_id)
    try:
        export = Export(_manifest(checkpoint), chunks, names=names)
    except Unsayable as error:
        raise BadInput.at("?names", str(error), "unknown-tensor") from error
    if not export.tensors:
        told = "the checkpoint holds no tensors; that of a command holds the files of its working"
        raise Conflict(f"{told} folder, in which `from_checkpoint` begins another command")
    headers = {
        "Content-Length": str(export.size),
        "Content-Disposition": f'attachment; filename="{checkpoint.id}.safetensors"',
        "ETag": f'"{checkpoint.sha256}"',
    }
    return StreamingResponse(
        export.pieces(), media_type="application/octet-stream", headers=headers
    )


@router.get(
    "/requests/{id}/best-checkpoint",
    response_model=CheckpointOut,
    summary="Show the best checkpoint of a request",
)
def get_best_checkpoint(id: str, caller: Authed, session: Db, task: OfTask = None) -> Checkpoint:
    """Shows the best by `checkpoint.best`, of a lot over all its members; `from_checkpoint:
    NAME@best` means this one.

    404 if there is none yet, or if several tasks have one and `task` names none of them.
    """
    request = visible_request(session, caller, id)
    try:
        best = starting_checkpoints.find_best(session, request.name, request.id, task or "")
    except starting_checkpoints.NoBest as error:
        raise NotFound("best checkpoint", id, because=str(error)) from error
    return session.get_one(Checkpoint, best)


@router.post(
    "/checkpoints/{id}/pin",
    response_model=CheckpointOut,
    summary="Pin a checkpoint",
    responses=declared(403, 409),
)
def pin_checkpoint(id: str, caller: Authed, session: Db) -> Checkpoint:
    """Keeps the checkpoint, and its request, whatever their age, until it is unpinned.

    It does not count among the task's `checkpoint.keep`. A tenant pins a bounded number.
    """
    checkpoint = _to_act_on(session, caller, id)
    pins.pin_checkpoint(session, checkpoint, by=caller.user_name)
    return checkpoint


@router.post(
    "/checkpoints/{id}/unpin",
    response_model=CheckpointOut,
    summary="Unpin a checkpoint",
    responses=declared(403, 409),
)
def unpin_checkpoint(id: str, caller: Authed, session: Db) -> Checkpoint:
    """Lets the checkpoint go: its age counts again."""
    checkpoint = _to_act_on(session, caller, id)
    pins.unpin_checkpoint(session, checkpoint, by=caller.user_name)
    return checkpoint


def _to_act_on(session: Session, caller: Caller, id: str) -> Checkpoint:
    checkpoint = visible(session, caller, Checkpoint, id)
    task_to_act_on(session, caller, checkpoint.task_id)
    return checkpoint


def _visible(session: Session, caller: Caller, id: str) -> Checkpoint:
    found = visible(session, caller, Checkpoint, id)
    audit.looked(session, found)
    return found


def _manifest(checkpoint: Checkpoint) -> Manifest:
    if checkpoint.deleted_at is not None:
        raise Gone("the checkpoint is beyond its task's `checkpoint.keep` and is being deleted")
    try:
        return _store().manifest(checkpoint.tenant_id, checkpoint.sha256, key=checkpoint.key)
    except Damaged as error:
        raise Gone(str(error)) from error
    except OSError as error:
        raise Unavailable(str(error)) from error


def _store() -> Store:
    return Store.at(settings().store_address)
