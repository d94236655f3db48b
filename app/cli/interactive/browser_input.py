"""Distinguishes what a person does in a browser from what the page does by itself.

A notebook's page asks its server again and again which kernels there are. These calls must not wake
an idle session. So this module reads what one connection of the browser sends: calls that change
something, opened pages and messages on WebSockets are input; other calls, pings and the bytes of
TLS are not. It runs on the user's own machine and changes nothing.
"""

from __future__ import annotations

HEAD_BYTES = 2**16  # a longer head of a call counts as input
_CHANGING = (b"POST", b"PUT", b"PATCH", b"DELETE")
_MESSAGES = (1, 2)  # opcodes of text and bytes


class BrowserInput:
    """Follows one connection of the browser."""

    def __init__(self) -> None:
        self._kept = b""  # beginning of an HTTP head that is not complete yet
        self._skipped = 0  # number of bytes of a body or frame that are still to come
        self._is_socket = False

    def holds_input(self, data: bytes) -> bool:
        """True if a person did something in what the browser has just sent."""
        found = False
        left = self._kept + data
        self._kept = b""
        while left:
            if self._skipped:
                skipped = min(self._skipped, len(left))
                self._skipped -= skipped
                left = left[skipped:]
                continue
            taken, is_input = self._frame(left) if self._is_socket else self._call(left)
            found |= is_input
            if not taken:
                self._kept = left
                break
            left = left[taken:]
        return found

    def _call(self, data: bytes) -> tuple[int, bool]:
        """Read the head of a call; return (its length, whether it is input).

        A length of 0 means that the head is not complete yet.
        """
        head, end, _ = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > HEAD_BYTES:
                return len(data), True
            return 0, False
        lines = head.split(b"\r\n")
        method = lines[0].split(b" ")[0].upper()
        fields = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        length = fields.get(b"content-length", b"0")
        self._skipped = int(length) if length.isdigit() else 0
        self._is_socket = fields.get(b"upgrade") == b"websocket"
        opens_page = fields.get(b"sec-fetch-dest") == b"document"
        return len(head) + len(end), method in _CHANGING or opens_page

    def _frame(self, data: bytes) -> tuple[int, bool]:
        """Read the head of a WebSocket frame; return the same."""
        if len(data) < 2:
            return 0, False
        opcode, size, at = data[0] & 15, data[1] & 127, 2
        if size > 125:
            at += 2 if size == 126 else 8
            if len(data) < at:
                return 0, False
            size = int.from_bytes(data[2:at], "big")
        self._skipped = size + (4 if data[1] & 128 else 0)
        return at, opcode in _MESSAGES
