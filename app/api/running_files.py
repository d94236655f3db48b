"""Answers a call with what a running command's sandbox sends of its files.

The endpoint has looked at the task before, in its own turn.  From then on the call holds no thread
and no database connection: it waits for the command, within bounds, and keeps one frame at a time.
It counts among the caller's open streams.  A command that stops in the middle (it was paused, or
its device was lost) ends the answer before its end, so that the client sees that it is not whole.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from urllib.parse import quote

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api import problems
from app.api.access.caller import Caller
from app.api.event_stream import open_streams
from app.api.schemas.tasks import RunningFileOut, RunningFilesOut
from app.api.tunnel_relay import CONNECT_S, DeviceLink
from app.core.model.provisions import running_files
from app.core.model.provisions.running_files import HEAD_BYTES, LIST_BYTES, BadAnswer, ContentHead
from app.core.model.provisions.tunnel import (
    FILES,
    TICKET_BYTES,
    TICKET_S,
    BadFrame,
    FrameKind,
    TunnelTicket,
)
from app.errors import AppError, BadInput, Conflict, NotFound, Unavailable
from app.intake.tunnels import TunnelPlace

log = logging.getLogger(__name__)

FIRST_S = 10.0  # longest wait for the first frame
LIST_S = 15.0  # for a whole list
SILENCE_S = 30.0  # longest silence within a content

SILENT = (
    "the task did not answer in time: it may wait for its turn on its device, or be paused; ask "
    "again in some seconds"
)
STOPPED = "the task stopped while its files were read; ask again when it runs"


class CutOff(Exception):
    """Raised within an answer whose rest does not come, so that the server closes the connection
    before the end of the answer.
    """


def ticket_of(place: TunnelPlace, task_id: str, operation: str, path: str) -> TunnelTicket:
    """Return a ticket that reads this; raises BadInput at ?path."""
    ticket = TunnelTicket(
        tunnel=f"{FILES}/{secrets.token_hex(8)}",
        task=task_id,
        epoch=place.epoch,
        kind=FILES,
        expires_s=int(place.clock_s + TICKET_S),
        words=(operation, path),
    )
    if len(ticket.encoded()) > TICKET_BYTES - 2:
        raise BadInput.at("?path", "is too long to be sent to the task", "path")
    return ticket


class _FromTask(Response):
    """Connects to the task's sandbox once the call is answered; counted among the streams."""

    def __init__(self, place: TunnelPlace, ticket: TunnelTicket, caller: Caller) -> None:
        super().__init__()
        self.place, self.ticket, self.caller = place, ticket, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self.caller.key_id, self.caller.tenant_id
        if (refusal := open_streams.refusal(*owner)) is not None:
            return await problems.of_error(Request(scope), refusal)(scope, receive, send)
        link = None
        with open_streams.one(*owner):
            try:
                link = await self._connect()
                answer = await self.answer(link)
            except AppError as error:
                answer = problems.of_error(Request(scope), error)
            try:
                await answer(scope, receive, send)
            except CutOff as error:  # the server closes a connection whose answer has no end
                log.info("the files of %s were cut off: %s", self.ticket.task, error)
            finally:
                if link is not None:
                    link.close()

    async def _connect(self) -> DeviceLink:
        """Open the tunnel; raises Conflict if the device worker refuses, Unavailable if it is not
        reached.
        """
        try:
            return await DeviceLink.opened(self.place, self.ticket)
        except ConnectionRefusedError as error:
            if error.errno is None:  # said by the device worker
                raise Conflict(f"{self.place.device}: {error}; ask again") from error
            raise Unavailable(f"{self.place.device} is not reached: {error.strerror}") from error
        except (OSError, TimeoutError, BadFrame) as error:
            told = str(error) or f"no answer within {CONNECT_S:g} s"
            raise Unavailable(f"{self.place.device} is not reached: {told}") from error

    async def answer(self, link: DeviceLink) -> Response:
        raise NotImplementedError

    async def frame(self, link: DeviceLink, within_s: float) -> bytes | None:
        """Return the next bytes, None at the end; raises AppError."""
        try:
            async with asyncio.timeout(within_s):
                kind, _, body = await link.read()
        except TimeoutError as error:
            raise Conflict(SILENT) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Conflict(STOPPED) from error
        except BadFrame as error:
            raise Conflict(f"the task sent {error}") from error
        if kind == FrameKind.FAILED:
            _, path = self.ticket.words
            if not body:
                raise NotFound("file", path)
            raise Conflict(body[:500].decode("utf-8", "replace"))
        return body if kind == FrameKind.DATA else None


class ListAnswer(_FromTask):
    """Answers with the list of files, as JSON."""

    async def answer(self, link: DeviceLink) -> Response:
        body, within_s = b"", FIRST_S
        try:
            async with asyncio.timeout(LIST_S):
                while (piece := await self.frame(link, within_s)) is not None:
                    body, within_s = body + piece, LIST_S
                    if len(body) > LIST_BYTES:
                        raise Conflict(f"the list of files is longer than {LIST_BYTES} bytes")
        except TimeoutError as error:
            raise Conflict(SILENT) from error
        return Response(await run_in_threadpool(self._shown, body), media_type="application/json")

    def _shown(self, body: bytes) -> bytes:
        try:
            found = running_files.read_list(body)
        except BadAnswer as error:
            raise Conflict(str(error)) from error
        files = [
            RunningFileOut(
                path=file.path,
                size_bytes=file.size_bytes,
                modified_at=datetime.fromtimestamp(file.modified_s, UTC),
            )
            for file in found.files
        ]
        shown = RunningFilesOut(task_id=self.ticket.task, files=files, is_cut=found.is_cut)
        return shown.model_dump_json().encode()


class ContentAnswer(_FromTask):
    """Answers with the bytes of one file, or with the zip of a folder."""

    async def answer(self, link: DeviceLink) -> Response:
        begun, within_s = b"", FIRST_S
        while b"\n" not in begun:
            piece = await self.frame(link, within_s)
            if piece is None or len(begun) > HEAD_BYTES:
                raise Conflict("the task did not describe the file")
            begun, within_s = begun + piece, LIST_S
        line, _, rest = begun.partition(b"\n")
        try:
            head = running_files.read_head(line)
        except BadAnswer as error:
            raise Conflict(str(error)) from error
        media_type = "application/zip" if head.is_folder else "application/octet-stream"
        headers = {"Content-Disposition": _disposition(self.ticket.words[1], head)}
        if not head.is_folder:
            headers["Content-Length"] = str(head.size_bytes)
        return StreamingResponse(
            self._pieces(link, rest, head), 200, headers, media_type=media_type
        )

    async def _pieces(
        self, link: DeviceLink, piece: bytes, head: ContentHead
    ) -> AsyncIterator[bytes]:
        left, more = head.size_bytes, bytes(piece)
        while True:
            if not head.is_folder:
                more = more[:left]
                left -= len(more)
            if more:
                yield more
            try:
                found = await self.frame(link, SILENCE_S)
            except AppError as error:
                raise CutOff(error.detail) from error
            if found is None:
                break
            more = found
        if left and not head.is_folder:
            raise CutOff("the file became shorter while it was read")


def _disposition(path: str, head: ContentHead) -> str:
    name = (path.rpartition("/")[2] or "files") + (".zip" if head.is_folder else "")
    return f"attachment; filename*=UTF-8''{quote(name, safe='')}"
