"""Signs people in and out of the pages: by a key, or by an identity provider."""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Cookie, Form, Request, Response
from fastapi.responses import RedirectResponse

from app.api.access import wrong_keys
from app.api.access.auth import (
    COOKIE,
    call_of,
    count_wrong_key,
    from_our_origin,
    sign_in,
    sign_in_person,
    sign_out,
)
from app.api.access.gate import GatedRoute
from app.db.transactions import Db
from app.errors import AppError, Forbidden, NotFound, Unauthenticated, Unavailable
from app.identity import audit, directory
from app.pages import views
from app.settings import settings

OIDC = "/ui/login/oidc"
# name of the cookie while a person is with the identity provider
SIGNING_IN = "roundhouse_signing_in"
SIGNING_IN_S = 600.0

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


@router.get("/ui/login")
def show_sign_in(request: Request, next: str = views.HOME) -> Response:
    return _form(request, next)


@router.post("/ui/login")
def sign_in_with_key(
    request: Request,
    session: Db,
    key: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = views.HOME,
) -> Response:
    if not from_our_origin(request):
        raise Forbidden("sign in from the page of this service")
    wrong_keys.check_address(request)
    try:
        caller, cookie = sign_in(session, key.strip())
    except Unauthenticated as error:
        count_wrong_key(session, request, key.strip(), "signIn")
        return _form(request, next, wrong=f"{error.detail[0].upper()}{error.detail[1:]}")
    audit.signed_in(session, call_of(request, caller, "signIn"))
    return _signed_in(request, cookie, next)


def _signed_in(request: Request, cookie: str, next: str) -> Response:
    answer = RedirectResponse(_own_page(next), status_code=303)
    _set_cookie(request, answer, COOKIE, cookie, settings().web_session_s)
    return answer


def _set_cookie(
    request: Request, answer: Response, name: str, value: str, for_s: float, path: str = "/"
) -> None:
    answer.set_cookie(
        name,
        value,
        max_age=int(for_s),
        path=path,
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )


# --- by the identity provider: authorization code with PKCE ----


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningIn:
    """Holds the state of a sign-in that this browser has begun; it is kept in a cookie.

    `state` proves that the same browser comes back, `nonce` that the token belongs to this sign-in,
    and `verifier` that the code does.
    """

    state: str
    nonce: str
    verifier: str
    next: str

    def sealed(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def opened(cls, cookie: str) -> SigningIn | None:
        try:
            found = cls(**json.loads(base64.urlsafe_b64decode(cookie)))
        except (ValueError, TypeError):
            return None
        return found if all(isinstance(each, str) for each in asdict(found).values()) else None


@router.get(OIDC)
def go_to_provider(request: Request, next: str = views.HOME) -> Response:
    provider = directory.provider()
    if provider is None:
        raise NotFound("identity provider", "oidc")
    begun = SigningIn(
        state=secrets.token_urlsafe(32),
        nonce=secrets.token_urlsafe(32),
        verifier=secrets.token_urlsafe(48),
        next=_own_page(next),
    )
    try:
        address = directory.sign_in_address(
            provider,
            redirect_uri=_return_address(request),
            state=begun.state,
            nonce=begun.nonce,
            verifier=begun.verifier,
        )
    except Unavailable as error:
        return _form(request, next, wrong=_sentence(error))
    answer = RedirectResponse(address, status_code=303)
    _set_cookie(request, answer, SIGNING_IN, begun.sealed(), SIGNING_IN_S, OIDC)
    return answer


@router.get(f"{OIDC}/callback")
def return_from_provider(
    request: Request,
    session: Db,
    state: str = "",
    code: str = "",
    error: str = "",
    cookie: Annotated[str, Cookie(alias=SIGNING_IN)] = "",
) -> Response:
    provider, begun = directory.provider(), SigningIn.opened(cookie)
    if provider is None:
        raise NotFound("identity provider", "oidc")
    if begun is None or not hmac.compare_digest(begun.state.encode(), state.encode()):
        return _form(request, views.HOME, wrong="This sign-in was not begun here, or too long ago.")
    if error or not code:
        said = f"The identity provider says {error or 'nothing'}."
        return _form(request, begun.next, wrong=said)
    try:
        person = directory.of_sign_in(
            session,
            provider,
            code,
            redirect_uri=_return_address(request),
            verifier=begun.verifier,
            nonce=begun.nonce,
        )
    except (Unauthenticated, Forbidden, Unavailable) as refused:
        return _form(request, begun.next, wrong=_sentence(refused))
    caller, own = sign_in_person(session, person)
    audit.signed_in(session, call_of(request, caller, "signIn"))
    answer = _signed_in(request, own, begun.next)
    answer.delete_cookie(SIGNING_IN, path=OIDC)
    return answer


def _return_address(request: Request) -> str:
    """Return the address that is registered with the provider."""
    return str(request.url_for("return_from_provider"))


def _sentence(error: AppError) -> str:
    return f"{error.detail[0].upper()}{error.detail[1:]}."


@router.post("/ui/logout")
def sign_out_of_pages(
    request: Request, session: Db, cookie: Annotated[str | None, Cookie(alias=COOKIE)] = None
) -> Response:
    if not from_our_origin(request):
        raise Forbidden("sign out from the page of this service")
    if cookie is not None:
        sign_out(session, cookie)
    answer = RedirectResponse("/ui/login", status_code=303)
    answer.delete_cookie(COOKIE)
    return answer


def _form(request: Request, next: str, wrong: str = "") -> Response:
    return views.templates.TemplateResponse(
        request,
        "login.html",
        {"next": _own_page(next), "wrong": wrong, "provider": directory.provider() is not None},
        status_code=401 if wrong else 200,
    )


def _own_page(path: str) -> str:
    """Return `path` if it is one of the pages, otherwise the overview: no link leads to another
    site.
    """
    return path if path.startswith(views.HOME) and "\\" not in path else views.HOME
