"""The API's side of a tunnel, for tests of a device worker."""

from __future__ import annotations

import hashlib
import select
import struct
import time
import uuid
from typing import Any

from app.core.model.provisions.tunnel import FRAME_HEAD, FrameKind, TunnelTicket, frame_of
from app.core.security import peer_proof
from app.storage.signing import tunnel_key
from tests.workers.conftest import PATIENCE_S, DeviceRig
from workers.transfer import peer_auth


def ticket_for(task: str, epoch: int = 1, **more: Any) -> TunnelTicket:
    said = {"kind": "shell", "expires_s": int(time.time()) + 120, **more}
    return TunnelTicket(tunnel=uuid.uuid4().hex, task=task, epoch=epoch, **said)


class FarEnd:
    """A tunnel as the API has it; `refused` is why it was not opened."""

    def __init__(
        self, rig: DeviceRig, ticket: TunnelTicket, *, sent: bytes | None = None, secret: str = ""
    ) -> None:
        body = ticket.encoded()
        named = hashlib.sha256(body).hexdigest()
        alive = rig.reports[-1]
        key = tunnel_key(secret or alive.secret, named)
        self.sock = peer_auth.at_desk(peer_proof.TUNNEL, alive.links, key, named)
        self.sock.settimeout(PATIENCE_S)
        body = body if sent is None else sent
        self.sock.sendall(struct.pack("!H", len(body)) + body)
        self.text, self.status, self.failed, self.refused = b"", None, "", ""
        kind, _, said = self.read()
        if kind == FrameKind.REFUSED:
            self.refused = said.decode()
        else:
            assert kind == FrameKind.OPENED

    def __enter__(self) -> FarEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, kind: FrameKind, body: bytes = b"", channel: int = 0) -> None:
        self.sock.sendall(frame_of(kind, channel, body))

    def type(self, text: str) -> None:
        self.send(FrameKind.DATA, text.encode())

    def read(self) -> tuple[int, int, bytes]:
        kind, channel, size = FRAME_HEAD.unpack(peer_auth.read(self.sock, FRAME_HEAD.size))
        return kind, channel, peer_auth.read(self.sock, size)

    def take(self) -> tuple[int, int, bytes]:
        """Take the next frame, and let the other side send so much again."""
        kind, channel, body = self.read()
        if kind == FrameKind.DATA:
            self.text += body
            self.send(FrameKind.WINDOW, len(body).to_bytes(4, "big"), channel)
        elif kind == FrameKind.EXIT:
            self.status = int.from_bytes(body, "big", signed=True)
        elif kind == FrameKind.FAILED:
            self.failed = body.decode()
        return kind, channel, body

    def until(self, word: str) -> str:
        """Read until the text has the word; returns the text up to it, and forgets both."""
        while word.encode() not in self.text:
            self.take()
        found, _, self.text = self.text.partition(word.encode())
        return found.decode()

    def to_the_end(self) -> int | None:
        """Read until the tunnel ends; returns the exit status of the shell."""
        try:
            while True:
                self.take()
        except ConnectionError:
            return self.status

    def is_readable(self, within_s: float) -> bool:
        return bool(select.select([self.sock], [], [], within_s)[0])
