"""Answers every error as `application/problem+json` (RFC 9457), with a `type` that can be opened.

Errors of this service, FastAPI, Starlette and the database all get the same body here.  A pointer
is a JSON Pointer into the body sent; "?name" names a query parameter, "name:" a header, "{name}" a
part of the path.  The page behind a `type` says what it means and what to do.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Match

from app import errors
from app.core.model.fields import MAX_FAULTS, Fault
from app.db.guarded_connection import refusal
from app.errors import AppError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2

#: The meaning of each type, and what to do about it.
MEANINGS = {
    "validation-error": (
        "Part of the input is invalid: an unknown field, a value out of range, or a reference to "
        "something that does not exist.",
        "Read `errors`: each entry names the place (`pointer`) and the fault (`detail`). Nothing "
        "was changed; correct the input and send it again.",
    ),
    "unsatisfiable": (
        "The request is well formed, but no device of this deployment could ever run it.",
        "Read `errors`, and GET /v1/devices for the existing devices. Ask for less, or ask an "
        "administrator for such a device.",
    ),
    "idempotency-key-reused": (
        "This Idempotency-Key was used before, with another body or another route.",
        "Use a new key for a new call. Reuse a key only to repeat exactly the same call.",
    ),
    "unauthenticated": (
        "The call has no API key or token, or its key is unknown, expired or revoked.",
        "Send `Authorization: Bearer rh_…`. An administrator of your tenant can create a key.",
    ),
    "insufficient-scope": (
        "The key is valid, but its role or its scopes do not permit this operation.",
        "Use a key with the role or scope that `detail` names. The scope of each operation is its "
        "`x-scope` in /openapi.json.",
    ),
    "not-found": (
        "Nothing that you may see exists at this address. Resources of other tenants are also "
        "reported as not found.",
        "Check the id, and that your key belongs to the tenant of the resource.",
    ),
    "method-not-allowed": (
        "The address does not support this method.",
        "The `Allow` header of the response lists the supported methods; so does /docs.",
    ),
    "conflict-state": (
        "The current state of the resource does not permit the operation, or its name is taken.",
        "Read the resource again; `detail` names the obstacle.",
    ),
    "queue-full": (
        "You, your tenant, or a tenant above it has a limit of queued tasks (`max_queued`), and "
        "this request would exceed it. Nothing was submitted.",
        "Wait until some queued tasks have started, or cancel some. Then send the request again "
        "with the same Idempotency-Key. An administrator can raise the limit.",
    ),
    "quota-exceeded": (
        "A tenant may store a limited number of bytes of datablocks and of pinned and best "
        "checkpoints, and keep a limited number of requests; a user may have a limited number of "
        "sessions. This call would exceed one of the limits; `detail` says which. Unfinished "
        "uploads count; equal bytes count once. Outputs that tasks publish are always stored; only "
        "uploads, pins, and requests that would publish, are rejected.",
        "Delete unneeded versions (DELETE /v1/datablocks/NAME@VERSION), unpin checkpoints (POST "
        "/v1/checkpoints/{id}/unpin), or release requests (PATCH "
        "/v1/requests/{id} with `keep` false), then try again. GET /v1/datablocks lists the "
        "versions with their sizes, GET /v1/requests with `keep=true` the kept requests. An "
        "administrator can raise the limit.",
    ),
    "gone": (
        "The checkpoint or datablock is listed, but its bytes in the store are damaged, lost or "
        "already deleted; `detail` says which.",
        "Use another version: GET /v1/tasks/{id}/checkpoints lists the checkpoints of a task, GET "
        "/v1/datablocks the versions of a datablock.",
    ),
    "precondition-failed": (
        "The resource was changed after you read it (`If-Match` is not its current `ETag`).",
        "Read the resource again, check what changed, and send your change with the new `ETag`.",
    ),
    "precondition-required": (
        "This change needs an `If-Match` header, to protect changes by others.",
        "Read the resource first, and send its `ETag` as `If-Match`.",
    ),
    "payload-too-large": (
        "The body is larger than this service accepts.",
        "Send less: upload large data as a bundle or a datablock. `detail` names the limit.",
    ),
    "unsupported-media-type": (
        "The body has a Content-Type that this address does not accept. By default, curl -d sends "
        "the Content-Type of a form.",
        "Send `Content-Type: application/json` and a JSON body.",
    ),
    "range-not-satisfiable": (
        "The `Range` begins after the last byte.",
        "`Content-Range` gives the size of the file; your copy may already be complete.",
    ),
    "rate-limited": (
        "A limit was exceeded: the calls per minute of this key or of all keys of its tenant "
        "(reads and changes are counted separately); the open streams or concurrent calls of this "
        "key; or the invalid keys from this address. `detail` says which. Nothing was changed.",
        "Try again after the seconds in `Retry-After`, with the same Idempotency-Key. The header "
        "`RateLimit` of each response gives the remaining calls (`r`) and the seconds until the "
        "full quota is available (`t`). Use `?wait=` or a stream instead of polling.",
    ),
    "bad-request": (
        "The call is not valid HTTP, or not valid for this address.",
        "Compare the call with the example in /docs.",
    ),
    "unavailable": (
        "The database, or for a sign-in the identity provider, does not respond at the moment; or "
        "the service is overloaded and did not process this call within 2 s. Accepted work is not "
        "lost.",
        "Try again after the seconds in `Retry-After`, with the same Idempotency-Key.",
    ),
    "internal": (
        "An error in Roundhouse. Nothing was changed.",
        "Give the administrator the `request_id`, which identifies the entry in the log.",
    ),
}

_OF_STATUS = {404: "not-found", 405: "method-not-allowed", 413: "payload-too-large"}


def install(app: FastAPI) -> None:
    """Answer every exception raised in `app` with a problem."""
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    for kind in (DBAPIError, PoolTimeout):
        app.add_exception_handler(kind, _database_error)
    app.add_exception_handler(Exception, _unexpected)


def problem(
    request_id: str,
    instance: str,
    *,
    type_: str,
    status: int,
    title: str,
    detail: str,
    faults: Iterable[Fault] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    body: dict[str, Any] = {
        "type": f"/problems/{type_}",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": instance,
        "request_id": request_id,
    }
    if listed := [{"pointer": f.pointer, "detail": f.detail, "code": f.code} for f in faults]:
        body["errors"] = listed
    return JSONResponse(
        body, status, headers={**(headers or {})}, media_type="application/problem+json"
    )


def of_error(request: Request, error: AppError) -> JSONResponse:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, errors.BadRange):
        headers["Content-Range"] = f"bytes */{error.size_bytes}"
    if isinstance(error, errors.TooManyCalls):
        headers["Retry-After"] = str(error.retry_after_s)
    return problem(
        request_id_of(request),
        request.url.path,
        type_=error.type,
        status=error.status,
        title=error.title,
        detail=error.detail,
        faults=error.errors,
        headers=headers,
    )


def request_id_of(request: Request) -> str:
    return str(getattr(request.state, "request_id", ""))


def _app_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AppError)
    return of_error(request, error)


def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return of_error(request, bad_input(error))


def bad_input(error: RequestValidationError) -> errors.BadInput:
    """Convert FastAPI's validation errors to BadInput."""
    found = error.errors()
    faults = tuple(_fault(item) for item in found[:MAX_FAULTS])
    if len(found) > MAX_FAULTS:
        told = f"{len(found) - MAX_FAULTS} more faults are not listed"
        faults = (*faults, Fault("", told, "more"))
    first = f"{faults[0].pointer or 'the body'}: {faults[0].detail}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return errors.BadInput(first + more, errors=faults)


def _fault(item: Mapping[str, Any]) -> Fault:
    where, *path = item["loc"]
    if path[-1:] == ["[key]"]:  # the fault is that of a key, which is the part before it
        del path[-1]
    detail = item["msg"].removeprefix("Value error, ")
    if item["type"] == "json_invalid":
        return Fault("", f"not JSON: {item['ctx']['error']}, at character {path[0]}", "json")
    if item["type"] == "extra_forbidden":
        detail = f"unknown field {path[-1]!r}"
    name = str(path[0]) if path else ""
    pointers = {"query": f"?{name}", "header": f"{name}:", "path": f"{{{name}}}"}
    return Fault(pointers.get(where, pointer(path)), detail, item["type"])


def pointer(path: Iterable[str | int]) -> str:
    """Return a path as a JSON Pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    title = HTTPStatus(error.status_code).phrase
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
    return problem(
        request_id_of(request),
        request.url.path,
        type_=_OF_STATUS.get(error.status_code, "bad-request"),
        status=error.status_code,
        title=title,
        detail=_DETAILS.get(error.detail, error.detail),
        headers=headers,
    )


def _methods(request: Request) -> list[str]:
    """Return all methods of the address; a single route knows only its own."""
    known: set[str] = set()
    for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"):
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            known.add(method)
    return sorted(known)


_DETAILS = {
    "Not Found": "unknown address; /docs lists all addresses",
    "Method Not Allowed": "this address does not support the method; see the Allow header",
}


def _database_error(request: Request, error: Exception) -> JSONResponse:
    told = refusal(error) if isinstance(error, DBAPIError) else "no database connection is free"
    if not told:
        raise error  # our own fault: an internal error, with its traceback in the log
    log.warning("%s %s: %s: %s", request.method, request.url.path, told, error)
    return of_error(request, errors.Unavailable(f"{told[0].upper()}{told[1:]}."))


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """Answer an unexpected error; Starlette then raises it again, for the server's log."""
    answer = of_error(request, AppError())
    # this answer bypasses the middleware, which would set the header
    answer.headers["X-Request-ID"] = request_id_of(request)
    return answer


# --- the pages behind `type` --------------------------------------------------------------------

router = APIRouter(include_in_schema=False)


@router.get("/problems", response_class=HTMLResponse)
def list_problem_types() -> str:
    items = "".join(f'<li><a href="/problems/{name}">{name}</a></li>' for name in MEANINGS)
    return _page("What can go wrong", f"<ul>{items}</ul>")


@router.get("/problems/{name}", response_class=HTMLResponse)
def show_problem_type(request: Request, name: str) -> str:
    if name not in MEANINGS:
        raise errors.NotFound("problem type", name)
    means, do = (_linked(request.app, html.escape(text)) for text in MEANINGS[name])
    return _page(name, f"<h2>What it means</h2><p>{means}</p><h2>What to do</h2><p>{do}</p>")


_CALL = re.compile(r"(GET|PUT|POST|PATCH|DELETE) (/v1/[^\s,.;)]+)")


def _linked(app: FastAPI, text: str) -> str:
    """Turn the name of every call in the text into a link to its place on the API page."""
    paths = app.openapi()["paths"]

    def link(call: re.Match[str]) -> str:
        for path, operations in paths.items():
            operation = operations.get(call[1].lower())
            if operation and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), call[2]):
                tag = quote(operation["tags"][0])
                return f'<a href="/docs#/{tag}/{operation["operationId"]}">{call[0]}</a>'
        raise LookupError(f"no operation is {call[0]}")

    return _CALL.sub(link, text)


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title} · Roundhouse</title>'
        '<meta name="viewport" content="width=device-width">'
        '<link rel="stylesheet" href="/static/roundhouse.css"><script src="/static/theme.js">'
        '</script><main><p><a href="/problems">Problems</a> · <a href="/docs">API</a></p>'
        f"<h1>{title}</h1>{body}</main></html>"
    )


# --- for the OpenAPI page -----------------------------------------------------------------------


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return problem responses for FastAPI's `responses=`; `app.api.openapi` adds their schema."""
    return {status: _content(status) for status in statuses}


def _content(status: int) -> dict[str, Any]:
    kinds = [kind for kind in _all_errors() if kind.status == status]
    names = " or ".join(f"`{kind.type}`" for kind in kinds)
    example = {
        "type": f"/problems/{kinds[0].type}",
        "title": kinds[0].title,
        "status": status,
        "detail": kinds[0].title,
        "instance": "/v1/requests",
        "request_id": "0192f0c1b7e97d3e9a4c5b6d7e8f9a0b",
    }
    if status == 422:
        said = "there is no field 'jobb' here"
        example["errors"] = [{"pointer": "/tasks/0/run", "detail": said, "code": "unknown"}]
    return {
        "description": names,
        "content": {
            "application/problem+json": {
                "schema": {"$ref": "#/components/schemas/Problem"},
                "example": example,
            }
        },
    }


def _all_errors() -> list[type[AppError]]:
    found, open_ = [], [AppError]
    while open_:
        kind = open_.pop(0)
        found.append(kind)
        open_ += kind.__subclasses__()
    return found
