"""A call within its rate limits goes on, and its answer says what is left; one beyond is refused.

Whose a key is, is remembered once it was good, so that one call too many costs no look into the
database.

The headers are those of the IETF's draft "RateLimit header fields for HTTP" (version 8 and later);
`app.api.edge` puts them on every answer of the call, on problems too.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from fastapi import Request

from app.errors import TooManyCalls
from app.rates import WINDOW_S, Bucket, Taken, take, take_held

READS = frozenset({"GET", "HEAD"})
REMEMBERED = 10_000  # keys and browser sessions
SESSION_COOKIE = "roundhouse_session"


class _Owners:
    """By the hash of a key or cookie that was good: (its key's id, its tenant's)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: OrderedDict[bytes, tuple[str, str]] = OrderedDict()

    def get(self, credential: str) -> tuple[str, str] | None:
        with self._lock:
            return self._of.get(_hash(credential))

    def put(self, credential: str, owner: tuple[str, str]) -> None:
        with self._lock:
            self._of[_hash(credential)] = owner
            if len(self._of) > REMEMBERED:
                self._of.popitem(last=False)


def _hash(credential: str) -> bytes:
    return hashlib.sha256(credential.encode()).digest()


_owners = _Owners()


def whose(request: Request) -> str:
    """The tenant of the key or cookie, if it was good before; else the caller's address."""
    owner = _owner(request)
    return owner[1] if owner is not None else _address(request)


def whose_key(request: Request) -> str:
    """The key that the call came with, if it was good before; else the caller's address."""
    owner = _owner(request)
    return owner[0] if owner is not None else _address(request)


def _owner(request: Request) -> tuple[str, str] | None:
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
    """Count without a look anywhere else; False if that cannot be."""
    owner = _owners.get(credential)
    if owner is None:
        return False
    key_id, tenant_id = owner
    taken = take_held(key_id=key_id, tenant_id=tenant_id, reads=request.method in READS)
    if taken is None:
        return False
    _tell(request, taken)
    return True


def count_known(request: Request, credential: str) -> bool:
    """False if it has to be looked up first, and then counted as new; raises TooManyCalls."""
    owner = _owners.get(credential)
    if owner is None:
        return False
    _count(request, *owner)
    return True


def count_new(request: Request, credential: str, *, key_id: str, tenant_id: str) -> None:
    """Raises TooManyCalls."""
    remember(credential, key_id=key_id, tenant_id=tenant_id)
    _count(request, key_id, tenant_id)


def remember(credential: str, *, key_id: str, tenant_id: str) -> None:
    """Remember whose a good credential is."""
    _owners.put(credential, (key_id, tenant_id))


def _count(request: Request, key_id: str, tenant_id: str) -> None:
    reads = request.method in READS
    taken = take(key_id=key_id, tenant_id=tenant_id, reads=reads)
    _tell(request, taken)
    if (short := taken.refused) is not None:
        whose = "this key" if short.name.startswith("key") else "all keys of your tenant together"
        calls = "reads" if reads else "changes"
        told = f"{whose} may make {short.quota} {calls} in {WINDOW_S} s; wait {short.next_in_s} s"
        raise TooManyCalls(told[0].upper() + told[1:], retry_after_s=short.next_in_s)


def _tell(request: Request, taken: Taken) -> None:
    if taken.buckets:
        request.state.rate_headers = {
            "RateLimit-Policy": ", ".join(map(_policy, taken.buckets)),
            "RateLimit": ", ".join(map(_left, taken.buckets)),
        }


def _policy(bucket: Bucket) -> str:
    return f'"{bucket.name}";q={bucket.quota};w={WINDOW_S}'


def _left(bucket: Bucket) -> str:
    return f'"{bucket.name}";r={bucket.remaining};t={bucket.full_in_s}'
