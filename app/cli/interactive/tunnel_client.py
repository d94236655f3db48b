"""Implements the user's end of a tunnel: frames, channels and their windows
(`provisions.tunnel`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from app.cli import proxies
from app.cli.client import JSON, Client, Unreachable
from app.core.model.provisions.tunnel import (
    FRAME_BYTES,
    MESSAGE_HEAD,
    WINDOW_BYTES,
    FrameKind,
    message_of,
)

NO_WEBSOCKETS = (
    "A proxy before the service must pass WebSockets on: docs/howto/behind_a_proxy.md has a"
    " configuration that does."
)

#: A function that gives received bytes to the local side, and waits until they are taken.
Write = Callable[[bytes], Awaitable[None]]


@dataclass(eq=False)
class UserChannel:
    """Describes a channel of the tunnel; `write` is None when the local side takes no more
    bytes.
    """

    number: int
    write: Write | None
    window: int = WINDOW_BYTES  # how many bytes the task's side takes
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # set while the window has room
    received: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    # set when everything that arrived was passed on
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    failed: str = ""  # why the task's side did not connect it

    def grew(self, size: int) -> None:
        self.window += size
        self.opened.set()


class UserEnd:
    """A connected tunnel.  `news` is called with each message about the task."""

    def __init__(self, socket: ClientConnection, news: Callable[[JSON], None]) -> None:
        self.socket, self.news = socket, news
        self.channels: dict[int, UserChannel] = {}
        self.status: int | None = None  # exit status of the shell
        self.why = ""  # why the tunnel ended, in the words of the service

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, client: Client, task_id: str, body: JSON, news: Callable[[JSON], None]
    ) -> AsyncIterator[UserEnd]:
        """Open a tunnel; raises ApiProblem, or Unreachable."""
        made = client.post(f"/v1/tasks/{task_id}/tunnels", body)
        url = "ws" + client.url.removeprefix("http") + made["path"]
        try:
            async with connect(
                url,
                compression=None,  # the service needs none
                max_size=2**17,
                max_queue=4,
                proxy=proxies.proxy_of(client.url),
            ) as socket:
                await socket.send(made["ticket"])
                yield cls(socket, news)
        except InvalidHandshake as error:
            raise Unreachable(client.url, error, NO_WEBSOCKETS) from error
        except (InvalidURI, ConnectionClosed, OSError) as error:
            raise Unreachable(client.url, error) from error

    def channel(self, number: int, write: Write) -> UserChannel:
        channel = self.channels[number] = UserChannel(number, write)
        return channel

    async def run(self) -> None:
        """Take messages until the tunnel ends."""
        drains: dict[int, asyncio.Task[None]] = {}
        try:
            async for message in self.socket:
                if isinstance(message, str):
                    self._hear(json.loads(message))
                    continue
                kind, number = MESSAGE_HEAD.unpack_from(message)
                channel = self.channels.get(number)
                if channel is not None:
                    if number not in drains or drains[number].done():
                        drains[number] = asyncio.create_task(self._drain(channel))
                    self._take(channel, kind, message[MESSAGE_HEAD.size :])
        except ConnectionClosed as closed:
            self.why = self.why or (
                closed.rcvd.reason if closed.rcvd else "the connection was lost"
            )
        self.why = self.why or "the connection was closed"
        for channel in self.channels.values():
            channel.received.put_nowait(None)
            channel.grew(0)
        await asyncio.gather(*drains.values(), return_exceptions=True)
        for channel in self.channels.values():
            channel.closed.set()

    def _hear(self, said: JSON) -> None:
        if said["is"] == "ended":
            self.why = said["told"]
        self.news(said)

    def _take(self, channel: UserChannel, kind: int, body: bytes) -> None:
        match kind:
            case FrameKind.DATA:
                channel.received.put_nowait(body)
            case FrameKind.WINDOW:
                channel.grew(int.from_bytes(body, "big"))
            case FrameKind.EXIT:
                self.status = int.from_bytes(body, "big", signed=True)
            case FrameKind.FAILED:
                channel.failed = body.decode("utf-8", "replace")
                channel.received.put_nowait(None)
            case FrameKind.END:
                channel.received.put_nowait(None)

    async def _drain(self, channel: UserChannel) -> None:
        """Pass received bytes to the local side, then allow the task's side to send as many
        again.
        """
        while (body := await channel.received.get()) is not None:
            if channel.write is not None:
                try:
                    await channel.write(body)
                except OSError:
                    channel.write = None
            await self.send(FrameKind.WINDOW, channel.number, len(body).to_bytes(4, "big"))
        channel.closed.set()

    async def send(self, kind: FrameKind, number: int = 0, body: bytes = b"") -> None:
        """Send a frame.

        Does nothing after the end of the tunnel, which `run` reports.
        """
        with contextlib.suppress(ConnectionClosed):
            await self.socket.send(message_of(kind, number, body))

    async def send_data(
        self, channel: UserChannel, data: bytes, kind: FrameKind = FrameKind.DATA
    ) -> None:
        """Send bytes of the local side, as far as the task's side takes them."""
        for at in range(0, len(data), FRAME_BYTES):
            piece = data[at : at + FRAME_BYTES]
            while channel.window < len(piece) and not self.why:
                channel.opened.clear()
                await channel.opened.wait()
            channel.window -= len(piece)
            await self.send(kind, channel.number, piece)
