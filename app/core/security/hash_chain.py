"""Verifies a hash chain of records: each hash covers the record and the hash before it.

If a record is changed, inserted or removed, the chain breaks there, unless all later records are
written again. But then their hashes differ from hashes that were kept elsewhere (`known`). Only a
kept hash shows that the end of the chain was cut off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64  # the hash before the first record


@dataclass(frozen=True, slots=True)
class TrustedLink:
    """A trusted link: its number, from 1 without gaps, and its hash."""

    id: int = 0
    hash: str = GENESIS


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """A stored record; `says` is its content without `previous` and `hash`."""

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
    """Holds the result: `head` is the last valid link; `checked` counts the valid links after the
    known one.
    """

    checked: int
    head: TrustedLink
    broken: Break | None


def link_hash(previous: str, says: Mapping[str, Any]) -> str:
    """Return the SHA-256, as hex, of the previous hash and the record as JSON with sorted keys."""
    body = json.dumps(says, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def verify(links: Iterable[ChainLink], known: TrustedLink) -> Verdict:
    """Verify the links in order, up to the first break.

    The first link must be the known one, unless that is GENESIS.
    """
    head, checked, rest = known, 0, iter(links)
    broken = _changed(next(rest, None), known) if known.id else None
    while broken is None and (link := next(rest, None)) is not None:
        broken = _break(head, link)
        if broken is None:
            head, checked = TrustedLink(link.id, link.hash), checked + 1
    return Verdict(checked=checked, head=head, broken=broken)


def _changed(link: ChainLink | None, known: TrustedLink) -> Break | None:
    if link is None or link.id != known.id:
        return Break(
            known.id, f"record {known.id} is missing: the chain was truncated at or before it"
        )
    if link.hash != known.hash:
        told = f"record {known.id} does not have the known hash: the chain was rewritten"
        return Break(known.id, told)
    return _wrong(link)


def _break(head: TrustedLink, link: ChainLink) -> Break | None:
    if link.id != head.id + 1:
        return Break(head.id + 1, f"record {head.id + 1} is missing; record {link.id} follows")
    if link.previous != head.hash and head.id:
        told = (
            f"record {link.id} was chained to a different record {head.id}: one of them was "
            "rewritten"
        )
        return Break(head.id, told)
    if link.previous != head.hash:
        return Break(link.id, f"record {link.id} is not a first record, but no record precedes it")
    return _wrong(link)


def _wrong(link: ChainLink) -> Break | None:
    if link_hash(link.previous, link.says) != link.hash:
        return Break(link.id, f"the content of record {link.id} does not match its hash")
    return None
