"""Handles the forms on a request's page: each calls the API's operation of the same name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.access.gate import GatedRoute
from app.api.access.visibility import visible_task
from app.api.routes import requests as of_requests
from app.api.routes import tasks as of_tasks
from app.api.schemas.tasks import ResizeIn
from app.core.model.lifecycle import ENDED
from app.db.transactions import Db
from app.errors import NotFound
from app.pages import forms, views
from app.pages.forms import Field
from app.pages.views import Sender

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


# --- requested actions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wish:
    """Describes an operation, and the message that is shown after it.

    `told` is a format string for the operation's answer. `of_ended`: the operation is for ended
    requests.
    """

    operation: Callable[..., Any]
    told: str
    of_ended: bool = False


_OF_REQUEST = {
    "cancel": _Wish(
        of_requests.cancel_request,
        "Cancelling {name}: queued tasks end at once, running tasks at their next safe point.",
    ),
    "hold": _Wish(
        of_requests.hold_request,
        "Pausing {name}: running tasks pause at their next safe point, and nothing starts "
        "until it is resumed.",
    ),
    "release": _Wish(of_requests.release_request, "{name} resumed: it is queued again."),
    "retry": _Wish(of_requests.retry_request, "What failed of {name} starts again.", of_ended=True),
    "delete": _Wish(
        of_requests.delete_request, "Deleting {name}: it is gone in some minutes.", of_ended=True
    ),
}
_OF_TASK = {
    "cancel": _Wish(
        of_tasks.cancel_task, "Cancelling {name}, and every task that needs its output."
    ),
    "pause": _Wish(
        of_tasks.pause_task,
        "Pausing {name} at its next safe point: no step is lost, and it waits until it is resumed.",
    ),
    "resume": _Wish(of_tasks.resume_task, "{name} resumed: it is queued again."),
    "save": _Wish(of_tasks.checkpoint_task, "{name} saves a checkpoint at its next safe point."),
    "move": _Wish(
        of_tasks.migrate_task,
        "{name} moves to another device as soon as one is free; no step is lost.",
    ),
    "resize": _Wish(of_tasks.resize_task, "{name} may use at most {devices_max} devices."),
}


@router.post("/ui/requests/{id}")
def wish(
    request: Request,
    session: Db,
    caller: Sender,
    id: str,
    do: Field = "",
    task: Field = "",
    devices_max: Field = "",
) -> Response:
    """Act on the request, or, with `task`, on that task of the request."""
    wished = forms.chosen(do, _OF_TASK if task else _OF_REQUEST)
    views.acts_as(request, session, caller, wished.operation)
    if task:
        if visible_task(session, caller, task).request_id != id:
            raise NotFound("task", task)
        given = [_width(devices_max)] if do == "resize" else []
        found = wished.operation(task, *given, caller, session).model_dump()
    else:
        found = wished.operation(id, caller, session)
    told = forms.Told(words=_words(wished, found))
    show = partial(views.show_request, request, session, caller, id)
    return views.answered(request, told, show)


def _words(wished: _Wish, found: dict[str, Any]) -> str:
    if found["state"] in ENDED and not wished.of_ended:
        return f"{found['name']} is already {found['state']}. Nothing changed."
    return wished.told.format(**found)


def _width(text: str) -> ResizeIn:
    number = int(text) if text.isdecimal() and len(text) < 6 else text
    return forms.filled(ResizeIn, devices_max=number)
