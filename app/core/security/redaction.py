"""Replaces the values of secrets by MARK in the output of a task's processes.

A value is found unchanged, line by line, and in the usual encodings: Base64 at any place of a
longer text, URL-quoted, and escaped as JSON or Python write texts. This keeps a secret from getting
into logs by accident. It is no protection against the author of a task's code, who can print
secrets in a form that is not recognised.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

MARK = "***"
MIN_BYTES = 6  # a shorter text would be found by chance everywhere
ENCODED_MIN_BYTES = 8  # shorter values are not searched in encodings
MAX_BYTES = 32 * 1024  # per value
MAX_LINES = 64  # per value
# most lines of all secrets of a task, since each costs time for every line of a log
MAX_LINES_TOGETHER = 128

CUT_LEAST = 40  # in characters; shorter texts were never cut on their way

_MARK = MARK.encode()


def fault_of(value: str) -> str:
    """Say why this text cannot be a secret; "" if it can."""
    size = len(value.encode())
    if "\0" in value:
        return "a value cannot contain a NUL character: no environment variable can hold it"
    if size > MAX_BYTES:
        return f"a value has at most {MAX_BYTES} bytes; got {size}"
    if len(value.strip().encode()) < MIN_BYTES:
        told = f"a value has at least {MIN_BYTES} bytes, not counting spaces around it"
        return f"{told}: a shorter one could not be kept out of logs"
    if (lines := len(_lines(value))) > MAX_LINES:
        return f"a value has at most {MAX_LINES} lines; got {lines}"
    return ""


def are_too_long(values: Iterable[str]) -> bool:
    """True if these values together have too many lines for one task."""
    return sum(len(_lines(value)) for value in values) > MAX_LINES_TOGETHER


class Redactor:
    """Knows the forms of a task's secrets; without secrets it changes nothing."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        found = {form.encode("utf-8", "surrogatepass") for each in values for form in _forms(each)}
        self._forms = sorted((form for form in found if len(form) >= MIN_BYTES), key=len)
        #: No form is longer than this, so only this many bytes before a cut can belong to a form
        #: across it.
        self.longest = max(map(len, self._forms), default=0)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def clean(self, data: bytes) -> bytes:
        """Replace all forms in whole lines.

        A text that is not UTF-8 is searched byte by byte.
        """
        return _without(data, _merged(self._spans(data))) if self._forms else data

    def split(self, data: bytes, at: int) -> tuple[bytes, bytes]:
        """Cut a line that is too long: return about the first `at` bytes, cleaned, and the rest.

        The cut never divides a form: such a form goes into the first part.
        """
        spans = _merged(self._spans(data))
        cut = max([at, *(end for begin, end in spans if begin < at)])
        return _without(data[:cut], [span for span in spans if span[1] <= cut]), data[cut:]

    def text(self, said: str) -> str:
        """Replace all forms in a text that may have been cut at its beginning or its end."""
        if not self._forms:
            return said
        data = said.encode("utf-8", "surrogatepass")
        clean = self.clean_cut(data) if len(said) >= CUT_LEAST else self.clean(data)
        return said if clean is data else clean.decode("utf-8", "surrogatepass")

    def clean_cut(self, data: bytes) -> bytes:
        """Replace all forms, and parts of a form with which the bytes begin or end."""
        return _without(data, _merged([*self._spans(data), *self._cut_off(data)]))

    def json(self, value: Any) -> Any:
        """Replace all forms in the texts, names and numbers of a value."""
        if not self._forms or value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.json(name): self.json(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.json(part) for part in value]
        said = repr(value).encode()
        return value if (cleaned := self.clean(said)) == said else cleaned.decode()

    def _spans(self, data: bytes) -> Iterator[tuple[int, int]]:
        for form in self._forms:
            begin = data.find(form)
            while begin >= 0:
                yield begin, begin + len(form)
                begin = data.find(form, begin + len(form))

    def _cut_off(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield the part of a form at the end of a text, and at its beginning."""
        for form in self._forms:
            first = max(0, len(data) - len(form) + 1)
            for begin in _finds(data, form[:MIN_BYTES], first, len(data)):
                if form.startswith(data[begin:]):
                    yield begin, len(data)
            tail = form[-MIN_BYTES:]
            for begin in _finds(data, tail, 0, len(form) - 1):
                if form.endswith(data[: begin + len(tail)]):
                    yield 0, begin + len(tail)


NO_SECRETS = Redactor()


def _finds(data: bytes, part: bytes, begin: int, end: int) -> Iterator[int]:
    while (begin := data.find(part, begin, end)) >= 0:
        yield begin
        begin += 1


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that overlap, so that a value inside or across another one leaves nothing."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _without(data: bytes, spans: list[tuple[int, int]]) -> bytes:
    if not spans:
        return data
    parts, done = [], 0
    for begin, end in spans:
        parts += [data[done:begin], _MARK]
        done = end
    return b"".join([*parts, data[done:]])


# --- forms --------------------------------------------------------------------------------------


def _lines(value: str) -> list[str]:
    return [line for line in value.splitlines() if line.strip()]


def _forms(value: str) -> Iterator[str]:
    stripped = value.strip()
    lines = {*map(str.strip, _lines(value))}
    yield from lines  # a form has no line end, so that cleaning a log never joins its lines
    for text in {stripped, *lines}:
        if len(text.encode()) >= ENCODED_MIN_BYTES:
            yield from _escaped(text)
    if len(stripped.encode()) >= ENCODED_MIN_BYTES:
        for text in {stripped, value}:
            yield from _in_base64(text.encode())


def _escaped(text: str) -> Iterator[str]:
    for ascii_only in (True, False):
        yield json.dumps(text, ensure_ascii=ascii_only)[1:-1]
    yield repr(text)[1:-1]
    yield repr(text.encode())[2:-1]
    yield from (quote(text, safe=""), quote(text), quote_plus(text))


def _in_base64(value: bytes) -> Iterator[str]:
    """Yield how the value looks inside a longer text in Base64, which depends on its place in the
    text.

    The digits at the edges depend on the bytes around the value too, so they are left out.
    """
    for before in range(3):
        digits = base64.b64encode(bytes(before) + value).decode().rstrip("=")
        first = -(-before * 8 // 6)
        whole = (before + len(value)) * 8 // 6
        for form in {digits[first:whole], digits[first:whole].translate(_URL_SAFE)}:
            if len(form) >= ENCODED_MIN_BYTES:
                yield form


_URL_SAFE = str.maketrans("+/", "-_")
