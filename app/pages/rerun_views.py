"""Submits a request once more, as it was or with a changed descriptor."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.access.auth import SUBMITTERS, check_role
from app.api.access.gate import GatedRoute
from app.api.access.visibility import visible_request
from app.api.middleware import strict_json
from app.api.routes import requests as of_requests
from app.db import transactions
from app.db.transactions import Db
from app.errors import BadInput
from app.pages import forms, views
from app.pages.forms import Field
from app.pages.task_actions import may_submit
from app.pages.views import Sender, Visitor

MOST_CHARACTERS = 100_000  # of a descriptor that is changed on the page

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


@router.get("/ui/requests/{id}/again")
def show_rerun(request: Request, session: Db, caller: Visitor, id: str) -> Response:
    """Show the descriptor of a request, to be changed and submitted."""
    found = of_requests.get_submitted_request(id, caller, session)
    text = _as_text(found["descriptor"])
    return views.page(
        request,
        "again.html",
        caller,
        now=transactions.now(session),
        section="requests",
        id=id,
        name=visible_request(session, caller, id).name,
        descriptor=text if len(text) <= MOST_CHARACTERS else "",
        may_submit=may_submit(caller),
    )


@router.post("/ui/requests/{id}/again")
def submit_again(
    request: Request, session: Db, caller: Sender, id: str, descriptor: Field = ""
) -> Response:
    """Submit the changed descriptor, or, without one, that of the request; show the new request."""
    check_role(caller, *SUBMITTERS)
    body = (
        _read(descriptor)
        if descriptor
        else of_requests.get_submitted_request(id, caller, session)["descriptor"]
    )
    views.acts_as(request, session, caller, of_requests.submit_request)
    answer = of_requests.submit_request(caller, session, body)
    made = json.loads(bytes(answer.body))
    told = forms.Told(words=f"{made['name']} is submitted again; this is the new request.")
    return views.answered(request, told, at=f"/ui/requests/{made['id']}")


def _as_text(descriptor: dict[str, Any]) -> str:
    return json.dumps(descriptor, indent=2, ensure_ascii=False)


def _read(text: str) -> dict[str, Any]:
    """Return the descriptor in the text; raises BadInput."""
    try:
        body = strict_json(text.encode())
    except json.JSONDecodeError as error:
        told = error if error.doc else error.msg  # a fault of what was read has no place in it
        raise BadInput.at("/descriptor", f"the descriptor is not JSON: {told}", "json") from error
    if not isinstance(body, dict):
        raise BadInput.at("/descriptor", "the descriptor must be an object in braces", "type")
    return body
