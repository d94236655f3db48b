"""A chain of records: each one's hash covers what it says and the hash before it.

Who changes, puts in or takes out a record breaks the chain there, unless they write all that
follows anew; then the hashes differ from any that somebody has kept elsewhere (`known`).  What is
cut off at the end is found by a kept hash only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64  # what stands before the first record


@dataclass(frozen=True, slots=True)
class Known:
    """A link that is taken for good: its number, from 1 without gaps, and its hash."""

    id: int = 0
    hash: str = GENESIS


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A record as it is kept; `says` is all of it but `previous` and `hash`."""

    id: int
    says: Mapping[str, Any]
    previous: str
    hash: str


@dataclass(frozen=True, slots=True)
class Break:
    id: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`head` is the last link that is good; `checked` links were, after the known one."""

    checked: int
    head: Known
    broken: Break | None


def link_hash(previous: str, says: Mapping[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the hash before it and the record as JSON with sorted keys."""
    body = json.dumps(says, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def verify(links: Iterable[Link], known: Known) -> Verdict:
    """The links, in order, from the known one on if that is not GENESIS: up to the first break."""
    head, checked, rest = known, 0, iter(links)
    broken = _changed(next(rest, None), known) if known.id else None
    while broken is None and (link := next(rest, None)) is not None:
        broken = _break(head, link)
        if broken is None:
            head, checked = Known(link.id, link.hash), checked + 1
    return Verdict(checked=checked, head=head, broken=broken)


def _changed(link: Link | None, known: Known) -> Break | None:
    if link is None or link.id != known.id:
        return Break(known.id, f"record {known.id} is gone: the chain was cut there or before")
    if link.hash != known.hash:
        told = f"record {known.id} has another hash than was kept: the chain was written anew"
        return Break(known.id, told)
    return _wrong(link)


def _break(head: Known, link: Link) -> Break | None:
    if link.id != head.id + 1:
        return Break(head.id + 1, f"record {head.id + 1} is missing; record {link.id} follows")
    if link.previous != head.hash and head.id:
        told = f"record {link.id} was chained to another record {head.id}: one was written anew"
        return Break(head.id, told)
    if link.previous != head.hash:
        return Break(link.id, f"record {link.id} does not begin the chain, and none is before it")
    return _wrong(link)


def _wrong(link: Link) -> Break | None:
    if link_hash(link.previous, link.says) != link.hash:
        return Break(link.id, f"record {link.id} does not say what it said when it was written")
    return None
