"""Keeps the log lines of a task on this device until the island has them.

Of a flood the middle is dropped. While the log is full, the newest bytes of each stream are kept
unread; they become lines when there is room again, or when the task ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from app.core.security.redaction import NO_SECRETS

JSON = dict[str, Any]

LINE_LIMIT_BYTES = 8 * 1024
# kept per stay until acknowledged; of the rest only the newest bytes of each stream
LOG_LIMIT_BYTES = 1 * 2**20
# of each stream; half of them may have come from the pipe after the task's own last words, if
# several processes write to it
TAIL_BYTES = 128 * 1024
RECENT_LINES, RECENT_CHARACTERS = 100, 500
LAST_LINES = 20  # lines of stderr that become the detail of a failed command


class Log:
    """Keeps the unacknowledged log lines of one stay, numbered from 0."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, str]] = deque()
        self.first = 0  # number of the first line in `waiting`
        self.held_bytes = 0
        self.dropped = 0
        self.last = deque[str](maxlen=LAST_LINES)  # last lines of stderr, acknowledged or not
        # last lines of both streams, in which patterns of `retry` are sought
        self.recent = deque[str](maxlen=RECENT_LINES)
        self._open = {"stdout": b"", "stderr": b""}  # incomplete last lines, not redacted yet
        self._tails: dict[str, bytes] = {}  # newest bytes of each stream in a flood, not redacted
        self.redactor = NO_SECRETS

    @property
    def is_full(self) -> bool:
        return self.held_bytes >= LOG_LIMIT_BYTES

    @property
    def next_line(self) -> int:
        """The number of the next line."""
        return self.first + len(self.waiting)

    def write(self, stream: str, data: bytes) -> None:
        if self.is_full or stream in self._tails:
            self._put_aside(stream, data)
        else:
            self._take(stream, data)

    def _put_aside(self, stream: str, data: bytes) -> None:
        """Keep the newest bytes of a flood, without any work for its lines."""
        data = self._tails.get(stream, b"") + data
        if len(data) > TAIL_BYTES:
            cut = data.find(b"\n", len(data) - TAIL_BYTES) + 1  # no line begins in its middle
            cut = cut or len(data) - TAIL_BYTES + self.redactor.longest
            self.dropped += max(1, data.count(b"\n", 0, cut))
            data, self._open[stream] = data[cut:], b""
        self._tails[stream] = data

    def take_tails(self) -> None:
        """Make lines of what was put aside."""
        for stream in self._open:
            if stream in self._tails:
                tail = self._tails.pop(stream)
                self._say_what_was_dropped()
                self._take(stream, tail)

    def _take(self, stream: str, data: bytes) -> None:
        data = self._open[stream] + data
        end = data.rfind(b"\n") + 1
        *whole, _ = self.redactor.clean(data[:end]).split(b"\n")
        for line in whole:
            self._add(stream, _last_frame(line))
        rest = _last_frame(data[end:])
        # Part of a secret may have arrived: hold it back until all of it is there.
        while len(rest) > LINE_LIMIT_BYTES + self.redactor.longest:
            part, rest = self.redactor.split(rest, LINE_LIMIT_BYTES)
            self._add(stream, part)
        self._open[stream] = rest

    def say(self, text: str) -> None:
        """Add a line of our own between those that the task prints."""
        self._add("stderr", self.redactor.clean(text.encode()))

    def goes_on_from(self, before: Log) -> None:
        """Take over the incomplete last lines, which this stay will complete."""
        before.take_tails()
        self._open, before._open = before._open, self._open

    @property
    def begun(self) -> dict[str, str]:
        """The incomplete last line of each stream, for an image whose processes will complete
        it.
        """
        return {stream: rest.decode("latin-1") for stream, rest in self._open.items() if rest}

    def begin_with(self, begun: Mapping[str, str]) -> None:
        """Take over the incomplete last lines of an image."""
        for stream in self._open:
            self._open[stream] = begun.get(stream, "").encode("latin-1")

    def leave_begun(self) -> None:
        """Forget the incomplete last lines: an image has them."""
        self.take_tails()
        self.begin_with({})

    def end(self) -> None:
        """Add the incomplete last lines as lines."""
        self.take_tails()
        for stream, rest in self._open.items():
            if rest:
                self._add(stream, self.redactor.clean_cut(rest))
            self._open[stream] = b""

    def acknowledged(self, next_line: int) -> None:
        while self.waiting and self.first < next_line:
            stream, text = self.waiting.popleft()
            self.held_bytes -= _line_bytes(stream, text)
            self.first += 1
        if not self.is_full:
            self.take_tails()

    def part(self, limit_bytes: int) -> tuple[list[list[str]], int]:
        """Return the next lines that fit, and their size in bytes."""
        lines: list[list[str]] = []
        taken = 0
        for stream, text in self.waiting:
            taken += _line_bytes(stream, text)
            if lines and taken > limit_bytes:
                return lines, taken - _line_bytes(stream, text)
            lines.append([stream, text])
        return lines, taken

    def _add(self, stream: str, line: bytes) -> None:
        while len(line) > LINE_LIMIT_BYTES:
            self._add(stream, line[:LINE_LIMIT_BYTES])
            line = line[LINE_LIMIT_BYTES:]
        self._keep(stream, line.decode("utf-8", "replace").rstrip("\r").replace("\0", "\ufffd"))

    def _say_what_was_dropped(self) -> None:
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            told = f"… {dropped} lines dropped: printed faster than they are kept"
            self._keep("stderr", told, is_last=False)

    def _keep(self, stream: str, text: str, *, is_last: bool = True) -> None:
        self.waiting.append((stream, text))
        if is_last:
            self.recent.append(text[:RECENT_CHARACTERS])
        if stream == "stderr" and is_last:
            self.last.append(text)
        self.held_bytes += _line_bytes(stream, text)


def _last_frame(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns, as progress bars print them.

    A carriage return at the end has no effect yet: only text after it replaces the line.
    """
    start = line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1
    return line[start:]


def _line_bytes(stream: str, text: str) -> int:
    return len(stream) + len(text.encode()) + 16  # estimated size as JSON
