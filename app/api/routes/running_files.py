"""Gives the files of a running command: a list, one file, or a folder as a zip."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from app.api.access.auth import Authed
from app.api.access.caller import Caller
from app.api.access.tunnel_access import why_secret
from app.api.access.visibility import task_to_act_on
from app.api.downloads import BINARY
from app.api.middleware import v1_router
from app.api.running_files import ContentAnswer, ListAnswer, ticket_of
from app.api.schemas.tasks import RunningFilesOut
from app.core.model.descriptor import RUNS
from app.core.model.provisions import running_files
from app.core.model.provisions.running_files import LIST, READ
from app.core.model.provisions.tunnel import TunnelTicket
from app.db.models import Task
from app.db.transactions import Db
from app.errors import BadInput, Conflict, Forbidden
from app.insight import phases
from app.intake.tunnels import TunnelPlace, place_of

router = v1_router("tasks", 403, 404, 409)

AskedPath = Annotated[
    str,
    Query(
        max_length=255,
        description="A path in the working folder, such as `out` or `out/model.pt`; empty: all of "
        "the folder.",
        examples=["out"],
    ),
]
_CONTENT = {"content": {**BINARY, "application/zip": BINARY["application/octet-stream"]}}


@router.get(
    "/tasks/{id}/files",
    response_model=RunningFilesOut,
    summary="List the files of a running command",
)
def list_running_files(id: str, caller: Authed, session: Db, path: AskedPath = "") -> Response:
    """Lists the plain files in the working folder of a command that runs now, or below `path`.

    A command that does not run now (it waits, is paused or has ended) has no list: the answer is
    409 and says what to do. For its owner and for administrators, as a shell.
    """
    return ListAnswer(*_opened(session, caller, id, LIST, path), caller)


@router.get(
    "/tasks/{id}/files/content",
    response_class=StreamingResponse,
    summary="Download a file or a folder of a running command",
    responses={200: {"description": "The file, or a zip of the folder.", **_CONTENT}},
)
def read_running_file(id: str, caller: Authed, session: Db, path: AskedPath = "") -> Response:
    """Sends one file as it is now, up to its present length, or a folder as a zip.

    An answer that ends before its `Content-Length`, or a zip without its list, is not whole: the
    command was stopped meanwhile, or changed the file.
    """
    return ContentAnswer(*_opened(session, caller, id, READ, path), caller)


def _opened(
    session: Session, caller: Caller, id: str, operation: str, path: str
) -> tuple[TunnelPlace, TunnelTicket]:
    """Check who may read, and whether the task can be read now; raises AppError."""
    if fault := running_files.path_fault(path):
        raise BadInput.at("?path", fault, "path")
    task = task_to_act_on(session, caller, id)
    if why := why_secret(caller, task.user_id, task.descriptor.get("secrets") or ()):
        raise Forbidden(why)
    if why := _why_not(task):
        raise Conflict(why)
    task, place = place_of(session, task.id)
    if not place.runs:
        raise Conflict("the task's device does not answer now; ask again in some seconds")
    return place, ticket_of(place, task.id, operation, path)


def _why_not(task: Task) -> str:
    if task.lot_id == task.id:
        return "it is a lot; each of its members has files of its own, so name one of them"
    run = task.descriptor.get("run") or {}
    return running_files.why_no_files(
        task.state,
        phases.of_task(task),
        next((kind for kind in RUNS if kind in run), "gang of several islands"),
        has_image=bool(task.descriptor.get("image")),
    )
