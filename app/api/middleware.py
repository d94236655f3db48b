"""Checks every call before a route sees it: a request id, a limit on the body, strict parsing.

JSON is parsed more strictly than by Python's `json`: a repeated key, NaN, an infinite number, a NUL
and half a surrogate pair are rejected, because Postgres or the next reader would understand
something else. A query parameter that a route does not know is an error, because a typo in a filter
must not list everything. So is a parameter that is given twice, of which only the last would count.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import uuid_utils
from fastapi import APIRouter, Request
from fastapi._compat import ModelField, field_annotation_is_sequence
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import problems
from app.api.access import auth, rate_limiting, wrong_keys
from app.api.access.calls_in_progress import calls_in_progress
from app.api.access.scoped import ScopedRoute
from app.core.model.fields import Fault
from app.errors import BadInput, TooLarge, TooManyCalls, WrongMediaType

DRAINED_BYTES = 64 * 2**20  # bytes that are still read, and discarded, of a body that is too large
LARGE_BYTES = 2**16  # a larger body is parsed off the event loop
DIGITS = 1000  # most digits of a whole number, because parsing very many takes long
DEPTH = 32  # most levels of nesting in a JSON body

PROBES = ("/livez", "/readyz")  # a load balancer asks for them by address

_ONCE = ("Authorization", "Idempotency-Key", "Content-Range", "If-Match", "Last-Event-ID")
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}
_STRICT_TRANSPORT = f"max-age={365 * 86400}"


class RequestId:
    """Gives every call an id: the caller's `X-Request-ID` if it is well formed, otherwise a new
    one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if _GOOD_ID.fullmatch(given) else uuid_utils.uuid7().hex
        scope.setdefault("state", {})["request_id"] = id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = id
                headers.update(scope["state"].get("rate_headers", {}))
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if scope["scheme"] == "https":
                    headers.setdefault("Strict-Transport-Security", _STRICT_TRANSPORT)
                if scope["path"].startswith("/v1/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, send_with_id)


class KnownHosts:
    """Rejects a call whose `Host` is not one of `hosts()`, if that lists any; probes are answered.

    So a page of another site whose name was pointed at this service reaches nothing (DNS
    rebinding).
    """

    def __init__(self, app: ASGIApp, hosts: Callable[[], str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listed = self.hosts()
        is_free = not listed or scope["type"] not in ("http", "websocket")
        if is_free or scope["path"] in PROBES or _is_listed(Headers(scope=scope), listed):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        told = "the Host header must be one of ROUNDHOUSE_HOSTS; the administrator adds names there"
        request = Request(scope)
        answer = problems.problem(
            problems.request_id_of(request),
            request.url.path,
            type_="bad-request",
            status=400,
            title="Unknown host",
            detail=told,
        )
        await answer(scope, receive, send)


def _is_listed(headers: Headers, listed: str) -> bool:
    try:
        name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return any(fnmatchcase(name, known) for known in listed.lower().split(",") if known)


class AtOnce:
    """Rejects, at little cost, a call beyond the bounds of `app.api.access.calls_in_progress`.

    The connection is closed then, so that rejected calls hold none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/livez":
            return await self.app(scope, receive, send)
        request = Request(scope)
        owner = rate_limiting.owner(request)
        try:
            calls_in_progress.begin(request, owner, wrong_keys.address_of(request))
        except TooManyCalls as error:
            answer = problems.of_error(request, error)
            answer.headers["Connection"] = "close"
            return await answer(scope, receive, send)
        try:
            await self.app(scope, receive, send)
        finally:
            calls_in_progress.end(request)


class BodyTooLarge(HTTPException):
    """Raised if the body is too large. It is an HTTPException, because FastAPI answers others with
    400.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, f"the body is larger than {limit_bytes} bytes")


class BodyLimit:
    """Rejects bodies above `limit_of(path)` bytes, by their announced or their real length.

    The rest of the body is still read and discarded, up to DRAINED_BYTES, because many clients read
    the answer only after they have sent everything.
    """

    def __init__(self, app: ASGIApp, limit_of: Callable[[str], int]) -> None:
        self.app, self.limit_of = app, limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit, headers = self.limit_of(scope["path"]), Headers(scope=scope)
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            if "expect" not in headers:
                await _drain(receive)
            error = TooLarge(f"the body must have at most {limit} bytes; got {announced}")
            return await problems.of_error(Request(scope), error)(scope, receive, send)
        await self.app(scope, _limited(receive, limit), send)


def _limited(receive: Receive, limit: int) -> Receive:
    size = 0

    async def receive_limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            if message.get("more_body", False):
                await _drain(receive)
            raise BodyTooLarge(limit)
        return message

    return receive_limited


async def _drain(receive: Receive) -> None:
    left, more = DRAINED_BYTES, True
    while more and left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)


# --- routers -----------------------------------------------------------------------------


def v1_router(tag: str, *statuses: int) -> APIRouter:
    """Return a router under /v1 that parses strictly; `statuses` are its possible problems."""
    return APIRouter(
        prefix="/v1",
        tags=[tag],
        route_class=StrictRoute,
        responses=problems.declared(401, 422, 429, 503, *statuses),
    )


# --- strict reading -----------------------------------------------------------------------------


class StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            large = len(body) > LARGE_BYTES
            self._json = await run_in_threadpool(strict_json, body) if large else strict_json(body)
        return self._json


class StrictRoute(ScopedRoute):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.needs_caller = not auth.AUTHENTICATING.isdisjoint(_calls_of(self.dependant))
        if self.body_field is not None:
            self.responses = {**self.responses, **problems.declared(415)}

    @cached_property
    def query_parameters(self) -> dict[str, ModelField]:
        """The query parameters by the name that a caller gives them."""
        fields = get_flat_params(self.dependant)
        return {field.alias: field for field in fields if isinstance(field.field_info, Query)}

    def get_route_handler(self) -> Callable[..., Any]:
        handle, takes_json = super().get_route_handler(), self.body_field is not None

        async def handle_strictly(request: Request) -> Any:
            _check_given_once(request.headers)
            if takes_json:
                _check_media_type(request.headers)
            if self.needs_caller:  # before the body is read
                await auth.identified(request)
            _check_parameters(request, self.query_parameters)
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def _calls_of(dependant: Dependant) -> Iterator[Callable[..., Any] | None]:
    for each in dependant.dependencies:
        yield each.call
        yield from _calls_of(each)


def _check_given_once(headers: Headers) -> None:
    """Reject repeated headers: a proxy may have read the last one where we would read the first."""
    for name in _ONCE:
        if len(headers.getlist(name)) > 1:
            raise BadInput.at(f"{name}:", "this header must be given once", "given-twice")


def _check_media_type(headers: Headers) -> None:
    """Reject types other than JSON: a form of another origin could send these without preflight."""
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    packed = headers.get("content-encoding", "identity").strip().lower()
    if has_body and packed != "identity":
        raise WrongMediaType(
            f"compressed bodies are not supported ({packed:.40}); send the body uncompressed"
        )
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and given != "application/json":
        raise WrongMediaType(f"Content-Type must be application/json; got {given or 'none'}")


def strict_json(body: bytes) -> Any:
    """Parse JSON strictly; raises json.JSONDecodeError, which FastAPI makes a validation error."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_no_doubles,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole_number,
        )
        _plain(value, DEPTH)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:  # includes UnicodeDecodeError
        raise json.JSONDecodeError(str(error), "", 0) from error
    return value


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        times = Counter(name for name, _ in pairs)
        twice = next(name for name, count in times.items() if count > 1)
        raise ValueError(f"duplicate key {twice[:80]!r}")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not valid JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _whole_number(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"the number {text[:20]}… must have at most {DIGITS} digits")
    return int(text)


def _plain(value: Any, depth: int) -> None:
    if isinstance(value, str):
        if "\x00" in value:
            raise ValueError("a string contains a NUL character")
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("a string contains half a surrogate pair")
    elif isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(f"must be nested at most {DEPTH} levels deep")
        for item in value:
            _plain(item, depth - 1)
        for item in value.values() if isinstance(value, dict) else ():
            _plain(item, depth - 1)


def _check_parameters(request: Request, known: Mapping[str, ModelField]) -> None:
    """Reject query parameters that are unknown, repeated without being lists, or contain a NUL."""
    given = request.query_params.multi_items()
    times = Counter(name for name, _ in given)
    faults = [
        Fault(f"?{name}", _unknown(name, set(known)), "unknown-parameter")
        for name in sorted(times.keys() - known.keys())
    ]
    faults += [
        Fault(f"?{name}", f"must be given once; got it {times[name]} times", "given-twice")
        for name, field in known.items()
        if times[name] > 1 and not field_annotation_is_sequence(field.field_info.annotation)
    ]
    pointed = [(f"?{name}", value) for name, value in given]
    pointed += [(f"{{{name}}}", value) for name, value in request.path_params.items()]
    faults += [
        Fault(where, "must not contain a NUL character", "text")
        for where, value in pointed
        if "\x00" in str(value)
    ]
    faults += _not_text(request.scope["query_string"])
    if faults:
        raise BadInput(faults[0].detail, errors=tuple(faults))


def _not_text(query: bytes) -> Iterator[Fault]:
    """Yield faults for parameters that are not UTF-8, which would be read as something else."""
    for part in query.split(b"&"):
        try:
            unquote_to_bytes(part).decode()
        except UnicodeDecodeError:
            name = unquote_to_bytes(part.partition(b"=")[0]).decode(errors="replace")
            yield Fault(f"?{name}", "must be UTF-8", "text")


def _unknown(name: str, known: set[str]) -> str:
    there = (
        f"known parameters: {', '.join(sorted(known))}"
        if known
        else "this address has no query parameters"
    )
    return f"unknown query parameter {name!r}; {there}"
