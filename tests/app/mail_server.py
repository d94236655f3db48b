"""A real SMTP server that takes mails in, and refuses those to some receivers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from email.policy import default
from queue import Queue
from typing import Any

from aiosmtpd.controller import Controller


@dataclass
class MailServer:
    """`got` are the mails that came; a receiver `refused@…` is refused, with the address."""

    url: str = ""
    got: Queue[Message] = field(default_factory=Queue)

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        if address.startswith("refused@"):
            return f"550 no such receiver: {address}"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.got.put(message_from_bytes(envelope.content, policy=default))
        return "250 OK"


class _OnFreePort(Controller):
    def _trigger_server(self) -> None:
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@contextlib.contextmanager
def mail_server() -> Iterator[MailServer]:
    """On a free port of 127.0.0.1."""
    found = MailServer()
    controller = _OnFreePort(found, hostname="127.0.0.1", port=0)
    controller.start()
    try:
        found.url = f"smtp://127.0.0.1:{controller.port}"
        yield found
    finally:
        controller.stop()
