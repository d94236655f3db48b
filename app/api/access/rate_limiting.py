"""Applies the rate limits: a call within them proceeds; a call that exceeds them is rejected.

The owner of a valid key is cached, so that a rejected call costs no query.

The headers follow the IETF draft "RateLimit header fields for HTTP" (version 8 and later).
`app.api.middleware` adds them to every answer of the call, including problems.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from fastapi import Request

from app.api.access.credential_cache import digest_of
from app.errors import TooManyCalls
from app.identity.rate_limits import WINDOW_S, RateBucket, RateResult, take, take_held

READS = frozenset({"GET", "HEAD"})
REMEMBERED = 10_000  # keys and browser sessions
SESSION_COOKIE = "roundhouse_session"


class _Owners:
    """Caches the owner of each valid key or cookie by its hash: (key id, tenant id)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: OrderedDict[bytes, tuple[str, str]] = OrderedDict()

    def get(self, credential: str) -> tuple[str, str] | None:
        with self._lock:
            return self._of.get(digest_of(credential))

    def put(self, credential: str, owner: tuple[str, str]) -> None:
        with self._lock:
            self._of[digest_of(credential)] = owner
            if len(self._of) > REMEMBERED:
                self._of.popitem(last=False)


_owners = _Owners()


def whose(request: Request) -> str:
    """Return the tenant of the key or cookie, if it was valid before; else the caller's address."""
    found = owner(request)
    return found[1] if found is not None else _address(request)


def owner(request: Request) -> tuple[str, str] | None:
    """Return the key and the tenant of the credential that was sent, if it was valid before."""
    credential = _credential(request)
    return _owners.get(credential) if credential else None


def _address(request: Request) -> str:
    return f"address {request.client.host if request.client else ''}"


def _credential(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme:
        return token.strip() if scheme.lower() == "bearer" else None
    return request.cookies.get(SESSION_COOKIE)


def count_held(request: Request, credential: str) -> bool:
    """Count the call from this process's memory alone; False if that is not possible."""
    found = _owners.get(credential)
    if found is None:
        return False
    key_id, tenant_id = found
    taken = take_held(key_id=key_id, tenant_id=tenant_id, reads=request.method in READS)
    if taken is None:
        return False
    _tell(request, taken)
    return True


def count_known(request: Request, credential: str) -> bool:
    """Count the call of a known credential and return True; raises TooManyCalls.

    Returns False if the credential is not known here: then it must be looked up and counted.
    """
    found = _owners.get(credential)
    if found is None:
        return False
    _count(request, *found)
    return True


def count_new(request: Request, credential: str, *, key_id: str, tenant_id: str) -> None:
    """Count the call of a credential that was just looked up; raises TooManyCalls."""
    remember(credential, key_id=key_id, tenant_id=tenant_id)
    _count(request, key_id, tenant_id)


def remember(credential: str, *, key_id: str, tenant_id: str) -> None:
    """Cache the owner of a valid credential."""
    _owners.put(credential, (key_id, tenant_id))


def _count(request: Request, key_id: str, tenant_id: str) -> None:
    reads = request.method in READS
    taken = take(key_id=key_id, tenant_id=tenant_id, reads=reads)
    _tell(request, taken)
    if (short := taken.refused) is not None:
        whose = "this key" if short.name.startswith("key") else "all keys of your tenant together"
        calls = "reads" if reads else "changes"
        told = (
            f"{whose} may make {short.quota} {calls} in {WINDOW_S} s; try again in "
            f"{short.next_in_s} s"
        )
        raise TooManyCalls(told[0].upper() + told[1:], retry_after_s=short.next_in_s)


def _tell(request: Request, taken: RateResult) -> None:
    if taken.buckets:
        request.state.rate_headers = {
            "RateLimit-Policy": ", ".join(map(_policy, taken.buckets)),
            "RateLimit": ", ".join(map(_left, taken.buckets)),
        }


def _policy(bucket: RateBucket) -> str:
    return f'"{bucket.name}";q={bucket.quota};w={WINDOW_S}'


def _left(bucket: RateBucket) -> str:
    return f'"{bucket.name}";r={bucket.remaining};t={bucket.full_in_s}'
