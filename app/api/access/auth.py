"""Authenticates calls: an API key, a token of the identity provider, or a browser session.

A key is `rh_<id>_<secret><check>`.  The id finds the row.  Only a SHA-256 of the secret is stored;
as the secret has 256 random bits, a slow hash would add nothing.  The check tells a mistyped key
from an unknown one without a query.  The tenant always comes from the key, never from the body.

A cookie may read.  It may change something only in a call from a page of our own origin.

`app.api.access.visibility` decides what a caller may see and act on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security.utils import get_authorization_scheme_param
from sqlalchemy import ColumnElement, bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from app.api.access import rate_limiting, wrong_keys
from app.api.access.caller import Caller
from app.api.access.calls_in_progress import calls_in_progress
from app.api.access.credential_cache import callers
from app.api.access.gate import in_thread
from app.api.access.scoped import ScopedRoute, operation_id
from app.core.security.grants import ROLES
from app.core.security.scopes import allows
from app.db.models import ApiKey, Tenant, User, WebSession
from app.db.transactions import Db, now, transaction
from app.errors import Forbidden, Unauthenticated
from app.identity import audit, directory
from app.identity.directory import Person
from app.settings import settings

COOKIE = rate_limiting.SESSION_COOKIE
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
NO_SECRET = ""  # `secret_sha256` of a key without a secret
#: Conditions on the row of a key: it is neither revoked nor expired.
IS_VALID = (ApiKey.revoked_at.is_(None), func.coalesce(ApiKey.expires_at > func.now(), True))
USES_EVERY_S = 60.0  # shortest time in s between two writes of `last_used_at`

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH, _SECRET_LENGTH, _CHECK_LENGTH = 8, 43, 6


# --- keys ---------------------------------------------------------------------------------------


def new_key(
    session: Session,
    user_id: str,
    role: str,
    name: str,
    *,
    scopes: Sequence[str] | None = None,
    expires_at: datetime | None = None,
) -> str:
    """Make a key; returns the token, which cannot be read again."""
    if role not in ROLES:
        raise ValueError(f"must be one of the roles {', '.join(ROLES)}; got {role!r}")
    id = _random(_ID_LENGTH)
    bare = f"rh_{id}_{_random(_SECRET_LENGTH)}"
    token = bare + _check(bare)
    session.add(
        ApiKey(
            id=id,
            user_id=user_id,
            role=role,
            name=name,
            scopes=None if scopes is None else list(scopes),
            secret_sha256=_sha256(token),
            expires_at=expires_at,
        )
    )
    session.flush()
    return token


def id_of(token: str) -> str | None:
    """Return the public part of a token, or None if the token is mistyped or not one of ours."""
    parts = token.split("_")
    if len(parts) != 3 or parts[0] != "rh" or len(parts[1]) != _ID_LENGTH or not token.isascii():
        return None
    bare, check = token[:-_CHECK_LENGTH], token[-_CHECK_LENGTH:]
    return parts[1] if hmac.compare_digest(check, _check(bare)) else None


def caller_of_key(session: Session, token: str) -> Caller:
    """Return the caller to whom a valid key belongs.

    Raises Unauthenticated, with the same words for a wrong, an expired and a revoked key.
    """
    id = id_of(token)
    if id is None:
        raise Unauthenticated("malformed API key: check that it is complete")
    row = session.execute(_OF_KEY, {"id": id}).one_or_none()
    if row is None or not hmac.compare_digest(row.secret_sha256, _sha256(token)):
        raise Unauthenticated("this API key is unknown, expired or revoked")
    return _used(row)


def owner_of_key(session: Session, token: str) -> Caller | None:
    """Return the owner of the key that the token names, even if the token does not authenticate."""
    id = id_of(token)
    if id is None:
        return None
    query = _owners(ApiKey.id == id)
    row = session.execute(query).one_or_none()
    return _caller(row) if row else None


def _callers(*which: ColumnElement[bool]) -> Any:
    return _owners(*which, *IS_VALID, User.deleted_at.is_(None))


def _owners(*which: ColumnElement[bool]) -> Any:
    return (
        select(
            ApiKey.id,
            ApiKey.role,
            ApiKey.scopes,
            ApiKey.secret_sha256,
            User.service,
            User.id.label("user_id"),
            User.name.label("user_name"),
            Tenant.id.label("tenant_id"),
            Tenant.name.label("tenant_name"),
            Tenant.parent_id,
        )
        .join(User, User.id == ApiKey.user_id)
        .join(Tenant, Tenant.id == User.tenant_id)
        .where(*which)
    )


# Prepared once: every call runs one of these queries, and to build it costs more than to run it.
_OF_KEY = _callers(ApiKey.id == bindparam("id"))
_OF_COOKIE = _callers(
    ApiKey.id
    == select(WebSession.key_id)
    .where(WebSession.token_sha256 == bindparam("sha256"), WebSession.expires_at > func.now())
    .scalar_subquery()
)


def _used(row: Any) -> Caller:
    uses.note(row.id)
    return _caller(row)


def _caller(row: Any) -> Caller:
    return Caller(
        user_id=row.user_id,
        user_name=row.user_name,
        tenant_id=row.tenant_id,
        tenant_name=row.tenant_name,
        role=row.role,
        key_id=row.id,
        scopes=None if row.scopes is None else tuple(row.scopes),
        service=row.service,
        in_root=row.parent_id is None,
    )


def _random(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def _check(bare: str) -> str:
    number, digits = zlib.crc32(bare.encode()), []
    for _ in range(_CHECK_LENGTH):
        number, digit = divmod(number, len(_BASE62))
        digits.append(_BASE62[digit])
    return "".join(digits)


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


# --- people whom the identity provider names ----------------------------------------------------


def caller_of_token(session: Session, token: str) -> Caller:
    """Return the caller of an identity provider's token.

    Raises Unauthenticated, Forbidden or Unavailable.
    """
    provider = directory.provider()
    if provider is None:
        raise Unauthenticated(
            "not an API key, and tokens of an identity provider are not enabled here"
        )
    person = directory.of_token(session, provider, token)
    # All tokens of a person count as one key.
    return _caller_of(person, key_id=f"oidc-{person.user_id}")


def _caller_of(person: Person, *, key_id: str) -> Caller:
    return Caller(key_id=key_id, **asdict(person))


def sign_in_person(session: Session, person: Person) -> tuple[Caller, str]:
    """Open a browser session for a person who has just signed in; returns (caller, cookie value).

    The session belongs to a key without a secret, so it is listed and can be revoked like a key.
    """
    ends = _session_ends(session)
    key = session.scalar(
        select(ApiKey)
        .where(ApiKey.user_id == person.user_id, ApiKey.secret_sha256 == NO_SECRET)
        .where(ApiKey.role == person.role, ApiKey.revoked_at.is_(None))
        .order_by(ApiKey.id)
        .limit(1)
        .with_for_update()
    )
    if key is None:
        key = ApiKey(
            id=_random(_ID_LENGTH),
            user_id=person.user_id,
            role=person.role,
            name="browsers, signed in with OIDC",
            secret_sha256=NO_SECRET,
        )
        session.add(key)
    key.expires_at = ends
    session.flush()
    return _caller_of(person, key_id=key.id), _new_cookie(session, key.id, ends)


# --- signed-in browsers -------------------------------------------------------------------------


def sign_in(session: Session, token: str) -> tuple[Caller, str]:
    """Open a browser session for a key: returns (caller, cookie value); raises Unauthenticated."""
    caller = caller_of_key(session, token)
    if caller.service or caller.scopes is not None:
        # A browser shows all that a role may see, so a key narrowed to scopes may not open a
        # session.
        raise Unauthenticated(
            "this key is for programs (it has scopes or belongs to a service account) and cannot "
            "sign in"
        )
    return caller, _new_cookie(session, caller.key_id, _session_ends(session))


def _session_ends(session: Session) -> datetime:
    return now(session) + timedelta(seconds=settings().web_session_s)


def _new_cookie(session: Session, key_id: str, ends: datetime) -> str:
    cookie = secrets.token_urlsafe(32)
    session.add(WebSession(token_sha256=_sha256(cookie), key_id=key_id, expires_at=ends))
    return cookie


def sign_out(session: Session, cookie: str) -> None:
    session.execute(delete(WebSession).where(WebSession.token_sha256 == _sha256(cookie)))


def caller_of_cookie(session: Session, cookie: str) -> Caller:
    """Return the caller of a browser session.

    Raises Unauthenticated; a revoked key ends its browser sessions.
    """
    row = session.execute(_OF_COOKIE, {"sha256": _sha256(cookie)}).one_or_none()
    if row is None:
        raise Unauthenticated("your session has ended; sign in again")
    return _used(row)


def from_our_origin(request: Request) -> bool:
    """True if the browser reports that one of our own pages made this call."""
    if site := request.headers.get("sec-fetch-site"):
        return site == "same-origin"
    host = request.headers.get("host")
    return request.headers.get("origin") in {f"http://{host}", f"https://{host}"}


# --- dependencies -------------------------------------------------------------------------------


async def identified(request: Request) -> Caller:
    """Return the caller; looked up at most once per call."""
    known: Caller | None = getattr(request.state, "caller", None)
    if known is None:
        known = await _identified(request)
        calls_in_progress.known(request, (known.key_id, known.tenant_id))
        request.state.caller = known
    return known


async def _identified(request: Request) -> Caller:
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    if scheme.lower() == "bearer" and token:
        caller = _known(token)
        if caller is None or not rate_limiting.count_held(request, token):
            caller = await _in_turn(request, token, _of_bearer)
        return caller
    cookie = request.cookies.get(COOKIE)
    if not cookie or "authorization" in request.headers:
        raise Unauthenticated("send an API key: Authorization: Bearer rh_…")
    caller = await _in_turn(request, cookie, caller_of_cookie)
    if request.method not in SAFE_METHODS and not from_our_origin(request):
        raise Forbidden(
            "calls with a session cookie may change data only from the pages of this service"
        )
    return caller


async def authenticated(request: Request, session: Db) -> Caller:
    """Return the caller, after a check of the scope."""
    caller = await identified(request)
    _check_scope(caller, request.scope["route"])
    audit.begin(session, call_of(request, caller, operation_id(request.scope["route"])))
    return caller


def _known(token: str) -> Caller | None:
    """Return a recently seen caller without a query, or None."""
    if (caller := callers.get(token)) is not None:
        uses.note(caller.key_id)
    return caller


def _of_bearer(session: Session, token: str) -> Caller:
    if _looks_like_jwt(token):
        return caller_of_token(session, token)
    if (caller := _known(token)) is not None:
        return caller
    round = callers.round
    caller = caller_of_key(session, token)
    callers.keep(token, caller, round)
    return caller


def _looks_like_jwt(token: str) -> bool:
    return token.count(".") == 2 and not token.startswith("rh_")


LookUp = Callable[[Session, str], Caller]


async def _in_turn(request: Request, credential: str, look_up: LookUp) -> Caller:
    return await in_thread(rate_limiting.whose(request), _counted, request, credential, look_up)


def _counted(request: Request, credential: str, look_up: LookUp) -> Caller:
    counted = rate_limiting.count_known(request, credential)  # no database connection is held yet
    if not counted:
        wrong_keys.check_address(request)
    try:
        with transaction() as session:
            caller = look_up(session, credential)
    except Unauthenticated:
        with transaction() as session:
            count_wrong_key(session, request, credential, "authenticate")
        raise
    if not counted:
        rate_limiting.count_new(
            request, credential, key_id=caller.key_id, tenant_id=caller.tenant_id
        )
    return caller


def count_wrong_key(session: Session, request: Request, token: str, operation: str) -> None:
    """Count and record a credential that did not authenticate."""
    owner = owner_of_key(session, token)
    if owner is not None:
        call = call_of(request, owner, operation)
    else:
        address = wrong_keys.address_of(request)
        call = audit.Call(operation=operation, user="", address=address)
    wrong_keys.count_wrong_key(session, request, call)


def _check_scope(caller: Caller, route: ScopedRoute) -> None:
    needed = route.needs_scope
    if needed is not None and not allows(caller.scopes, needed):
        has = ", ".join(caller.scopes or ())
        raise Forbidden(f"this operation needs a key with the scope {needed}; got {has}")


def call_of(request: Request, caller: Caller, operation: str) -> audit.Call:
    """Describe the call for the audit log.

    Behind a proxy that uvicorn trusts, the address is the client's.
    """
    return audit.Call(
        operation=operation,
        user=caller.user_name,
        user_id=caller.user_id,
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        address=request.client.host if request.client else "",
        request_id=str(getattr(request.state, "request_id", "")),
    )


Authed = Annotated[Caller, Depends(authenticated)]

#: Dependencies that find out who calls. None depends on anything but the session, because each
#: dependency costs FastAPI some 20 µs in every call.
AUTHENTICATING: set[Callable[..., Any]] = {authenticated}


def check_role(caller: Caller, *roles: str) -> None:
    if caller.role not in roles:
        raise Forbidden(
            f"this operation needs a key with the role {' or '.join(roles)}; got {caller.role}"
        )


def require(*roles: str) -> Any:
    """Return a dependency that gives the caller; it raises Forbidden if the caller has none of
    these roles.
    """

    async def allowed(request: Request, session: Db) -> Caller:
        caller = await authenticated(request, session)
        check_role(caller, *roles)
        return caller

    AUTHENTICATING.add(allowed)
    return Depends(allowed)


PlatformAdmin = Annotated[Caller, require("platform_admin")]
AnyAdmin = Annotated[Caller, require("platform_admin", "tenant_admin")]
#: The roles that may submit requests.
SUBMITTERS = ("platform_admin", "tenant_admin", "member")
Submitter = Annotated[Caller, require(*SUBMITTERS)]


# --- when a key was last used -------------------------------------------------------------------


class Uses:
    """Collects which keys were used, so that a call need not write a row."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: dict[str, datetime] = {}

    def note(self, key_id: str) -> None:
        with self._lock:
            self._at[key_id] = datetime.now(UTC)

    def write(self, session: Session) -> None:
        rows = self._take_noted()
        if rows:
            used = update(ApiKey).where(ApiKey.id == bindparam("key"))
            session.connection().execute(used.values(last_used_at=bindparam("at")), rows)

    def _take_noted(self) -> list[dict[str, Any]]:
        with self._lock:
            at, self._at = self._at, {}
        return [{"key": key, "at": at[key]} for key in sorted(at)]


uses = Uses()


def write_uses() -> None:
    with transaction() as session:
        uses.write(session)
