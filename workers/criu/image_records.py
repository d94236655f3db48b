"""Reads and writes the files of CRIU's images, as far as this is needed for checks; CRIU is not
called.

A file is two magic numbers and records; a record is its length and a message in the format of
protocol buffers. Some kinds of records are followed by raw bytes, which stay as they are.

The reader is stricter than CRIU's: whatever two readers could understand in different ways is an
error. So CRIU reads exactly what was checked here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMMON, SERVICE = 0x54564319, 0x55105940
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TAG_MAX, _VARINT_BYTES = 2**32 - 1, 10
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<II")

Value = int | bytes


class BadRecord(ValueError):
    """Raised when bytes are not what CRIU writes."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, position after it)."""
    value = shift = 0
    for byte in data[at : at + _VARINT_BYTES]:
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, at
    raise BadRecord("a number has no end")


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """The fields of a message in their order: (number, wire type, value)."""

    fields: tuple[tuple[int, int, Value], ...]

    @classmethod
    def read(cls, data: bytes) -> ImageRecord:
        return cls(tuple(_fields(data)))

    def encoded(self) -> bytes:
        out = bytearray()
        for number, wire, value in self.fields:
            out += varint(number << 3 | wire)
            if isinstance(value, int):
                out += varint(value)
            else:
                out += varint(len(value)) + value if wire == _BYTES else value
        return bytes(out)

    def has(self, number: int) -> bool:
        return any(found == number for found, _, _ in self.fields)

    def numbers(self, number: int) -> list[int]:
        """Return the values of a repeated field of up to 32 bits, packed or not."""
        values: list[int] = []
        for found, _, value in self.fields:
            if found == number:
                values += [value] if isinstance(value, int) else _packed(value)
        return [_of_32_bits(value) for value in values]

    def number(self, number: int, default: int | None = None) -> int:
        """Return the value of a field of up to 32 bits.

        If there is no default, a missing field is an error.
        """
        return _of_32_bits(self.long_number(number, default))

    def long_number(self, number: int, default: int | None = None) -> int:
        values = [value for found, _, value in self.fields if found == number]
        if not values and default is not None:
            return default
        if len(values) != 1 or not isinstance(values[0], int):
            raise BadRecord(f"field {number} is not one number")
        return values[0]

    def text(self, number: int) -> bytes:
        values = [value for found, _, value in self.fields if found == number]
        if len(values) != 1 or isinstance(values[0], int):
            raise BadRecord(f"field {number} is not one string")
        return values[0]

    def messages(self, number: int) -> list[ImageRecord]:
        values = [value for found, _, value in self.fields if found == number]
        if any(isinstance(value, int) for value in values):
            raise BadRecord(f"field {number} is not a message")
        return [ImageRecord.read(value) for value in values if not isinstance(value, int)]

    def message(self, number: int) -> ImageRecord:
        """Return the only message in a field; CRIU would merge several."""
        return ImageRecord.read(self.text(number))

    def with_int(self, number: int, value: int) -> ImageRecord:
        """Return a copy with another value in a field, if the field is there."""
        return self._mapped(number, _VARINT, lambda _: value)

    def with_text(self, number: int, value: bytes) -> ImageRecord:
        """Return a copy with another string in a field, if the field is there."""
        return self._mapped(number, _BYTES, lambda _: value)

    def with_message(
        self, number: int, change: Callable[[ImageRecord], ImageRecord]
    ) -> ImageRecord:
        """Return a copy with a message changed, if the message is there."""

        def changed(value: Value) -> Value:
            if isinstance(value, int):
                raise BadRecord(f"field {number} is not a message")
            return change(ImageRecord.read(value)).encoded()

        return self._mapped(number, _BYTES, changed)

    def _mapped(self, number: int, wire: int, change: Callable[[Value], Value]) -> ImageRecord:
        return ImageRecord(
            tuple(
                (found, wire, change(value)) if found == number else (found, its, value)
                for found, its, value in self.fields
            )
        )


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file of an image: its magic number, its records, and raw bytes that follow the last."""

    magic: int
    records: tuple[ImageRecord, ...]
    rest: bytes = b""

    @classmethod
    def read(cls, data: bytes, magic: int, *, records_most: int | None = None) -> ImageFile:
        """Read a file of this kind.

        What follows the first `records_most` records is raw bytes.
        """
        at = _after_head(data, magic)
        records: list[ImageRecord] = []
        while at < len(data) and (records_most is None or len(records) < records_most):
            (length,) = _LENGTH.unpack(_exactly(data, at, _LENGTH.size))
            at += _LENGTH.size
            records.append(ImageRecord.read(_exactly(data, at, length)))
            at += length
        return cls(magic, tuple(records), data[at:])

    def encoded(self) -> bytes:
        out = bytearray(_head(self.magic))
        for record in self.records:
            body = record.encoded()
            out += _LENGTH.pack(len(body)) + body
        return bytes(out + self.rest)


#: The inventory is the only kind of file without the common magic number before its own.
INVENTORY = 0x58313116


def _head(magic: int) -> bytes:
    return _LENGTH.pack(magic) if magic == INVENTORY else _HEAD.pack(COMMON, magic)


def _after_head(data: bytes, magic: int) -> int:
    head = _head(magic)
    if data[: len(head)] != head:
        raise BadRecord("it does not begin as such a file")
    return len(head)


def _exactly(data: bytes, at: int, size: int) -> bytes:
    part = data[at : at + size]
    if len(part) != size:
        raise BadRecord("it is truncated")
    return part


def _fields(data: bytes) -> Iterator[tuple[int, int, Value]]:
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if tag > _TAG_MAX or not number:
            raise BadRecord("expected a field number from 1 to 2^29 - 1; got another tag")
        if wire == _VARINT:
            value, at = read_varint(data, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            size, at = read_varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise BadRecord(f"field {number} has an unknown form")
        yield number, wire, _exactly(data, at, size)
        at += size


def _packed(data: bytes) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = read_varint(data, at)
        values.append(value)
    return values


def _of_32_bits(value: int) -> int:
    """Return the value if it fits into 32 bits, since CRIU would cut off the rest; raises if not.

    A negative number of 32 bits is written with 64 bits.
    """
    if value < 1 << 32:
        return value
    if value >= (1 << 64) - (1 << 31):
        return value & 0xFFFFFFFF
    raise BadRecord("a number has more than 32 bits")
