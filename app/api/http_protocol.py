"""uvicorn's HTTP protocol with limits on what a connection may send before it is a call.

    uvicorn app.main:app --http app.api.http_protocol:BoundedProtocol

uvicorn's own settings limit neither the size of a header section that httptools reads, nor the time
to send one, nor the time to read an answer.  (h11 limits the header section but not the times, and
each call costs more.)  Connections that send or take nothing for too long are closed without an
answer.  A header section that is too large is answered with 431.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import TimerHandle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\n"
    b"content-length: 33\r\n"
    b"connection: close\r\n\r\n"
    b"the header section is too large.\n"
)


def _send_at_once(transport: asyncio.Transport) -> None:
    """Have the kernel send an answer at once, and not wait for the client to acknowledge its head.

    asyncio does this too, but not for connections of a socket that several API processes share: it
    does not recognise their protocol.  There each small answer took 40 ms longer.
    """
    connection = transport.get_extra_info("socket")
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_HalfOpen = OrderedDict["BoundedProtocol", None]


class BoundedProtocol(HttpToolsProtocol):
    HEAD_BYTES: ClassVar = 2**16  # most bytes of a header section, or of trailers
    HEAD_S: ClassVar = 10.0  # time limit in s for a complete header section
    BODY_BYTES: ClassVar = 2**12  # least bytes of a body that must arrive in each BODY_S
    BODY_S: ClassVar = 20.0
    WRITE_S: ClassVar = 60.0  # seconds that an answer may wait before the client takes any of it
    # most bytes of a message of a WebSocket, which is not compressed
    MESSAGE_BYTES: ClassVar = 2**16
    CONNECTIONS_MAX: ClassVar = 4000
    # most connections that have not sent a complete header section, or have no call under way
    HALF_OPEN_MAX: ClassVar = 2000
    # most calls of a connection that wait for the answer to an earlier call
    PIPELINED_MAX: ClassVar = 16

    _half_open: ClassVar[WeakKeyDictionary[ServerState, _HalfOpen]] = WeakKeyDictionary()

    def __init__(self, config: Any, server_state: ServerState, *args: Any, **more: Any) -> None:
        super().__init__(config, server_state, *args, **more)
        config.ws_max_size, config.ws_per_message_deflate = self.MESSAGE_BYTES, False
        self._others = self._half_open.setdefault(server_state, OrderedDict())
        self._awaits_head = self._awaits_body = False
        self._unread_bytes = 0  # bytes received since the parser last completed something
        self._body_bytes = 0  # bytes received since the last look
        self._reading: TimerHandle | None = None
        self._writing: TimerHandle | None = None

    # --- the life of a connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _send_at_once(transport)
        if len(self.connections) > self.CONNECTIONS_MAX:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        _cancel(self._reading)
        _cancel(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._awaits_head and not self._awaits_body:
            self._await_head()
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > self.HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    # --- what the parser says ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._awaits_head:  # several calls arrived at once
            self._await_head()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= self.PIPELINED_MAX:
            raise ValueError(f"more than {self.PIPELINED_MAX} pipelined calls on one connection")
        self._unread_bytes = 0
        self._head_is_there()
        self._await_body()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        self._awaits_body = False
        _cancel(self._reading)
        super().on_message_complete()

    # --- clients that send nothing ---

    def _await_head(self) -> None:
        self._awaits_head = True
        self._has_no_call()
        self._read_within(self.HEAD_S, self._look_at_head)

    def _has_no_call(self) -> None:
        """Count the connection among those that end first, as the newest of them."""
        self._others.pop(self, None)
        self._others[self] = None
        if len(self._others) > self.HALF_OPEN_MAX:
            oldest, _ = self._others.popitem(last=False)
            oldest.transport.abort()

    def _look_at_head(self) -> None:
        """Abort the connection, unless the header is missing only because reading was paused."""
        if self.flow.read_paused:
            self._read_within(self.HEAD_S, self._look_at_head)
        else:
            self.transport.abort()

    def _head_is_there(self) -> None:
        self._awaits_head = False
        self._others.pop(self, None)

    def _await_body(self) -> None:
        self._awaits_body, self._body_bytes = True, 0
        self._read_within(self.BODY_S, self._look_at_body)

    def _look_at_body(self) -> None:
        if self._body_bytes < self.BODY_BYTES and not self.flow.read_paused:
            self.transport.abort()
        else:
            self._await_body()

    def _read_within(self, seconds: float, otherwise: Callable[[], None]) -> None:
        _cancel(self._reading)
        self._reading = self.loop.call_later(seconds, otherwise)

    # --- clients that take nothing ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to the protocol for WebSockets, which has time limits of its own."""
        self._head_is_there()
        self._awaits_body = False
        _cancel(self._reading)
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif self.cycle is None or self.cycle.response_complete:
            self._has_no_call()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def _abort_later(self) -> None:
        """Abort the transport after WRITE_S, because one that is closing may wait for ever."""
        _cancel(self._writing)
        self._writing = self.loop.call_later(self.WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._writing)
        super().resume_writing()


def _cancel(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
