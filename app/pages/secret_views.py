"""Shows the page of secrets: their names and times, and a form to set one. No value is shown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.access.caller import Caller
from app.api.access.gate import GatedRoute
from app.api.cursors import Paging
from app.api.routes import secrets as of_secrets
from app.db import transactions
from app.db.transactions import Db
from app.pages import forms, views
from app.pages.forms import Field
from app.pages.views import Sender, Visitor

ON_A_PAGE = 200
WIDE = "tenant"  # the choice in the form for a secret of all users

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


@router.get("/ui/secrets")
def list_secrets(request: Request, session: Db, caller: Visitor) -> Response:
    paging = Paging(http=request, response=Response(), limit=ON_A_PAGE, given=None)
    found = of_secrets.list_secrets(paging, caller, session, tenant_id=caller.tenant_id)
    return views.page(
        request,
        "secrets.html",
        caller,
        now=transactions.now(session),
        section="secrets",
        secrets=sorted(found["items"], key=lambda one: (one["name"], one["user_id"] or "")),
        may_set=caller.role != "viewer",
        may_set_wide=_is_admin(caller),
        wide=WIDE,
    )


@router.post("/ui/secrets")
def change_secret(
    request: Request,
    session: Db,
    caller: Sender,
    do: Field = "",
    name: Field = "",
    value: Field = "",
    whose: Field = "",
) -> Response:
    known: dict[str, Callable[..., Any]] = {
        "set": of_secrets.set_secret,
        "remove": of_secrets.remove_secret,
    }
    operation = forms.chosen(do, known)
    of_secrets.check_submitter(caller)
    views.acts_as(request, session, caller, operation)
    name, is_wide = name.strip(), whose == WIDE
    if do == "set":
        body = forms.filled(of_secrets.SecretIn, value=value)
        of_secrets.set_secret(name, body, Response(), caller, session, tenant_wide=is_wide)
        told = forms.Told(words=f"{name} is set. Tasks that name it get it at their next launch.")
    else:
        of_secrets.remove_secret(name, caller, session, tenant_wide=is_wide)
        told = forms.Told(words=f"{name} is removed.")
    return views.answered(request, told, partial(list_secrets, request, session, caller))


def _is_admin(caller: Caller) -> bool:
    return caller.role in ("tenant_admin", "platform_admin")
