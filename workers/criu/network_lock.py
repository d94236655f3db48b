"""Writes the messages that lock the network of a sandbox while CRIU restores connections in it.

CRIU locks connections when it dumps, and expects to find the lock when it restores: it takes the
lock away once all sockets are there. A sandbox that processes go on in is new and has no lock. So
an end of a connection would send while the other one is not there yet, and be reset. This lock has
the name of CRIU's own, which holds an id of the dump. If CRIU did not take it away, `unlocks` does.

The messages are those of nf_tables, netlink(7). A batch begins, changes something, and ends.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_BATCH_BEGIN, _BATCH_END, _SUBSYSTEM = 16, 17, 10
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6
_REQUEST, _ANSWER, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_INET, _NESTED = 1, 0x8000
_LOCAL_IN, _DROP, _REGISTER, _VERDICT, _MARK, _EQUAL, _NOT_EQUAL = 1, 0, 1, 0, 3, 0, 1
_TRANSPORT_HEADER, _FLAGS_AT, _SYN = 2, 13, b"\x02"  # of TCP
_NAME_LETTERS = 26  # CRIU cuts the name, with "inet ", to 31
_CRIU_MARK = 0xC114  # of packets with which CRIU itself restores the end of a connection

Attributes = Mapping[int, "int | bytes | Attributes"]


def locks(run_id: str) -> bytes:
    """Return a batch that drops what arrives for connections, but for the packets of CRIU.

    New connections can be made: CRIU tries one out before it restores anything.
    """
    table, chain = _table(run_id), b"input\0"
    expressions: list[Attributes] = [
        {1: b"meta\0", 2: {1: _REGISTER, 2: _MARK}},
        {1: b"cmp\0", 2: {1: _REGISTER, 2: _NOT_EQUAL, 3: {1: struct.pack("=I", _CRIU_MARK)}}},
        {1: b"payload\0", 2: {1: _REGISTER, 2: _TRANSPORT_HEADER, 3: _FLAGS_AT, 4: 1}},
        {1: b"bitwise\0", 2: {1: _REGISTER, 2: _REGISTER, 3: 1, 4: {1: _SYN}, 5: {1: b"\0"}}},
        {1: b"cmp\0", 2: {1: _REGISTER, 2: _EQUAL, 3: {1: b"\0"}}},
        {1: b"immediate\0", 2: {1: _VERDICT, 2: {2: {1: _DROP}}}},
    ]
    rule = b"".join(_attributes({1: expression}) for expression in expressions)
    return _batch(
        _message(_NEW_TABLE, {1: table}, _CREATE),
        _message(
            _NEW_CHAIN,
            {1: table, 3: chain, 4: {1: _LOCAL_IN, 2: 0}, 7: b"filter\0"},
            _CREATE,
        ),
        _message(_NEW_RULE, {1: table, 2: chain, 4 | _NESTED: rule}, _CREATE | _APPEND),
    )


def unlocks(run_id: str) -> bytes:
    """Return a batch that removes the lock: for a restore that failed before CRIU did so."""
    return _batch(_message(_DELETE_TABLE, {1: _table(run_id)}))


def _table(run_id: str) -> bytes:
    return f"CRIU-{run_id}"[:_NAME_LETTERS].encode() + b"\0"


def _batch(*messages: bytes) -> bytes:
    ends = (_header(kind, b"", _REQUEST, _SUBSYSTEM) for kind in (_BATCH_BEGIN, _BATCH_END))
    begin, end = ends
    return begin + b"".join(messages) + end


def _message(kind: int, attributes: Attributes, flags: int = 0) -> bytes:
    kind |= _SUBSYSTEM << 8
    return _header(kind, _attributes(attributes), _REQUEST | _ANSWER | flags, 0)


def _header(kind: int, body: bytes, flags: int, resource: int) -> bytes:
    family = _INET if resource == 0 else 0
    head = struct.pack("=IHHII", 20 + len(body), kind, flags, 0, 0)
    return head + struct.pack("=BB", family, 0) + struct.pack(">H", resource) + body


def _attributes(attributes: Attributes) -> bytes:
    out = b""
    for number, value in attributes.items():
        if isinstance(value, Mapping):
            number, body = number | _NESTED, _attributes(value)
        else:
            body = struct.pack(">I", value) if isinstance(value, int) else value
        out += struct.pack("=HH", 4 + len(body), number) + body + bytes(-len(body) % 4)
    return out
