"""Slows an address that sends wrong keys, and records the attempts within limits.

Every wrong key, token or browser session takes one from a bucket of the caller's address
(`app.identity.rate_limits`, in Redis, so that all API processes count together).  Once the bucket
is empty, this process rejects unknown credentials from that address, without a query, until the
bucket fills again.  Keys that were valid before still work from there.

A flood writes few records: one per key or address in a minute, and at most RECORDS_PER_MIN in
total.  Each record says how many wrong keys this process has seen since the previous record.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque

from fastapi import Request
from prometheus_client import Counter
from sqlalchemy.orm import Session

from app.errors import TooManyCalls
from app.identity import audit
from app.identity.rate_limits import WINDOW_S, take_wrong_key

ADDRESSES_KEPT = 10_000
RECORDS_PER_MIN = 10

counted = Counter(
    "roundhouse_api_wrong_keys",
    "Rejected keys, tokens and browser sessions in this process.",
    registry=None,  # `app.api.metrics` shows it
)


class _Guard:
    """Remembers the wrong keys that came to one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # until when an address is rejected, in seconds of the monotonic clock
        self._refused_until_s: OrderedDict[str, float] = OrderedDict()
        self._recorded_s: deque[float] = deque(maxlen=RECORDS_PER_MIN)
        self._unrecorded = 0

    def seconds_left(self, address: str) -> float:
        with self._lock:
            return self._refused_until_s.get(address, 0.0) - time.monotonic()

    def refuse(self, address: str, for_s: float) -> None:
        with self._lock:
            self._refused_until_s[address] = time.monotonic() + for_s
            self._refused_until_s.move_to_end(address)
            if len(self._refused_until_s) > ADDRESSES_KEPT:
                self._refused_until_s.popitem(last=False)

    def count(self) -> bool:
        """Count one wrong key; returns True if a record may be written now."""
        with self._lock:
            self._unrecorded += 1
            full = len(self._recorded_s) == RECORDS_PER_MIN
            return not full or time.monotonic() - self._recorded_s[0] >= WINDOW_S

    def take_unrecorded(self) -> int:
        """Return the number of wrong keys for a record that is written now."""
        with self._lock:
            self._recorded_s.append(time.monotonic())
            number, self._unrecorded = self._unrecorded, 0
            return number


guard = _Guard()


def address_of(request: Request) -> str:
    return request.client.host if request.client else ""


def check_address(request: Request) -> None:
    """Raise TooManyCalls while the caller's address has sent too many wrong keys."""
    if (left_s := guard.seconds_left(address_of(request))) > 0:
        raise _too_many(max(1, round(left_s)))


def count_wrong_key(session: Session, request: Request, call: audit.Call) -> None:
    """Count and record one wrong key; after too many, the address is rejected."""
    counted.inc()
    if guard.count():
        audit.refused(session, call, guard.take_unrecorded)
    short = take_wrong_key(address_of(request)).refused
    if short is not None:
        guard.refuse(address_of(request), short.next_in_s)


def _too_many(wait_s: int) -> TooManyCalls:
    told = f"Too many invalid keys from this address; try again in {wait_s} s."
    return TooManyCalls(told, retry_after_s=wait_s)
