"""Bounds the calls that a key, a tenant or an unknown caller has in progress in this process.

Each call holds a connection, so that otherwise one tenant could take all connections.  Streams and
waits count while they last.  A call counts for its address until its key is known: from its
beginning if the key was valid before, else from its authentication.
"""

from __future__ import annotations

from collections import Counter

from starlette.requests import HTTPConnection

from app.errors import TooManyCalls
from app.settings import settings


class CallsInProgress:
    """Counts calls by key, tenant or address (`_names`); used by one event loop."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    def begin(self, call: HTTPConnection, owner: tuple[str, str] | None, address: str) -> None:
        """Count a call of `owner`, a key and its tenant, or else of an address; raises
        TooManyCalls.
        """
        names = (f"address {address}",) if owner is None else _names(owner)
        self._check(names)
        self._move(call, (), names)

    def known(self, call: HTTPConnection, owner: tuple[str, str]) -> None:
        """Count for its key and tenant a call whose key turned out to be valid; raises
        TooManyCalls.
        """
        before, names = getattr(call.state, "counts_for", None), _names(owner)
        if before not in (None, names):
            self._check(names)
            self._move(call, before, names)

    def end(self, call: HTTPConnection) -> None:
        self._move(call, call.state.counts_for, ())

    def _check(self, names: tuple[str, ...]) -> None:
        for name in names:
            kind, _, _ = name.partition(" ")
            limit, called = _LIMITS[kind]
            if self._of[name] >= getattr(settings(), limit):
                raise TooManyCalls(
                    f"{called} has {self._of[name]} calls in progress, which is its limit; wait for"
                    " some to end"
                )

    def _move(self, call: HTTPConnection, before: tuple[str, ...], names: tuple[str, ...]) -> None:
        self._of.update(names)
        self._of.subtract(before)
        for name in before:
            if not self._of[name]:
                del self._of[name]
        call.state.counts_for = names


_LIMITS = {
    "key": ("key_calls_max", "this key"),
    "tenant": ("tenant_calls_max", "your tenant"),
    "address": ("key_calls_max", "this address, with keys that are not known yet,"),
}


def _names(owner: tuple[str, str]) -> tuple[str, ...]:
    key_id, tenant_id = owner
    return f"key {key_id}", f"tenant {tenant_id}"


calls_in_progress = CallsInProgress()
