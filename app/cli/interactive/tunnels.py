"""Verbs that look into a running task: shell, forward."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from app.cli import names, root_command, wording
from app.cli.client import JSON, Client
from app.cli.root_command import NO_ANSWER, REFUSED, WORK, Which, app
from app.cli.tables import err
from app.core.model.provisions.tunnel import CHANNELS_MAX, FrameKind

if TYPE_CHECKING:
    from app.cli.interactive.browser_input import BrowserInput
    from app.cli.interactive.tunnel_client import UserChannel, UserEnd

LEAVE = b"\x1d"  # Ctrl-]
READ_BYTES = 2**16
# if a signal ended the shell, its exit code is this plus the number of the signal
COMMAND_NOT_OK = 128


@app.command(rich_help_panel=WORK)
def shell(
    ctx: typer.Context,
    given: Which,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- WORDS", help="a program to run instead of the usual shell"),
    ] = None,
) -> None:
    """Open a terminal inside a running task, in its sandbox; Ctrl-] leaves it.

    The shell's exit code becomes the command's exit code.  Its processes are part of the task: they
    pause and end with it.
    """
    with root_command.connect(ctx) as client:
        task = names.one_task(client, given)
        shown = asyncio.run(run_shell(client, task["id"], words or []))
    raise typer.Exit(exit_code(shown))


@app.command(rich_help_panel=WORK)
def forward(
    ctx: typer.Context,
    given: Which,
    port: Annotated[int, typer.Argument(min=1, max=65535, help="port inside the task")],
    local: Annotated[
        int, typer.Option("--local", "-l", min=0, max=65535, help="port here; default: the same")
    ] = -1,
) -> None:
    """Make a port of a running task reachable on this machine, at 127.0.0.1; Ctrl-C ends it."""
    with root_command.connect(ctx) as client:
        task = names.one_task(client, given)
        at = port if local < 0 else local
        why = asyncio.run(run_forward(client, task["id"], port, at))
    root_command.fail(NO_ANSWER, Text(f"The tunnel has ended: {why}."))


# --- a shell --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownShell:
    """Says how a shell at this terminal ended."""

    status: int | None  # exit status of the shell; None if the shell has not sent one
    left: bool  # the user left it with Ctrl-]
    failed: str  # why no terminal could be opened
    why: str  # why the tunnel ended

    @property
    def goes_on(self) -> bool:
        """True if, as far as this side knows, the shell still runs: the user left it, or the
        connection was lost.
        """
        return self.left or (self.status is None and not self.failed)


def exit_code(shown: ShownShell) -> int:
    """Return the exit code of the shell; if there was no shell, end the program."""
    if shown.failed:
        root_command.fail(REFUSED, Text(shown.failed))
    if shown.status is not None:
        return shown.status if shown.status >= 0 else COMMAND_NOT_OK - shown.status
    if shown.left:
        return 0
    root_command.fail(NO_ANSWER, Text(f"The shell was closed: {shown.why}."))


async def run_shell(client: Client, task_id: str, words: list[str]) -> ShownShell:
    """Run a shell in the task at this terminal."""
    from app.cli.interactive.tunnel_client import UserEnd

    is_terminal = sys.stdin.isatty()
    # read from the terminal itself: COLUMNS and LINES in the environment may be those of another
    # one
    size = os.get_terminal_size(sys.stdin.fileno()) if is_terminal else os.terminal_size((80, 24))
    body = {
        "kind": "shell",
        "words": words,
        "term": os.environ.get("TERM") or "xterm",
        "rows": max(1, size.lines),
        "columns": max(1, size.columns),
    }
    line = StatusLine()
    async with UserEnd.opened(client, task_id, body, line.tell) as end:
        channel = end.channel(0, _to_stdout)
        with _raw_terminal() if is_terminal else contextlib.nullcontext():
            left = asyncio.Event()
            typing = asyncio.create_task(_type(end, channel, left, is_terminal=is_terminal))
            running = asyncio.create_task(end.run())
            leaving = asyncio.create_task(left.wait())
            with _resized(end) if is_terminal else contextlib.nullcontext():
                await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (typing, running, leaving):
                task.cancel()
            await asyncio.gather(typing, running, leaving, return_exceptions=True)
    return ShownShell(status=end.status, left=left.is_set(), failed=channel.failed, why=end.why)


async def _to_stdout(body: bytes) -> None:
    left = memoryview(body)
    while left:
        left = left[os.write(1, left) :]


async def _type(
    end: UserEnd, channel: UserChannel, left: asyncio.Event, *, is_terminal: bool
) -> None:
    """Send what is typed, or what is on the standard input, until it ends."""
    loop = asyncio.get_running_loop()
    while True:
        data = await _read(loop)
        if is_terminal and LEAVE in data:
            await end.send_data(channel, data.partition(LEAVE)[0])
            left.set()
            return
        if not data:
            await end.send(FrameKind.END)
            return
        await end.send_data(channel, data)


async def _read(loop: asyncio.AbstractEventLoop) -> bytes:
    """Read some of the standard input.

    A file is always readable, but epoll refuses files, so it is read without waiting.
    """
    readable = asyncio.Event()
    try:
        loop.add_reader(0, readable.set)
    except PermissionError:
        return os.read(0, READ_BYTES)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(0)
    return os.read(0, READ_BYTES)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what the user typed meanwhile stays
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resized(end: UserEnd) -> Iterator[None]:
    """Tell the task's side each new size of the window."""
    loop = asyncio.get_running_loop()
    told: set[asyncio.Task[None]] = set()

    def tell() -> None:
        size = os.get_terminal_size()
        body = max(1, size.lines).to_bytes(2, "big") + max(1, size.columns).to_bytes(2, "big")
        sending = loop.create_task(end.send(FrameKind.RESIZE, 0, body))
        told.add(sending)
        sending.add_done_callback(told.discard)

    loop.add_signal_handler(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


class StatusLine:
    """Shows what happens to the task, in a line on standard error that each news overwrites."""

    def __init__(self) -> None:
        self.shown = False

    def tell(self, said: JSON) -> None:
        told = {"waiting": said.get("told", ""), "attached": f"on {said.get('device')}"}
        text = told.get(said["is"], "")
        if said["is"] == "attached" and not self.shown:
            return  # no waiting line was shown, so there is nothing to replace
        if text:
            self.shown = said["is"] == "waiting"
            end = "" if self.shown else "\r\n"
            os.write(2, f"\r\x1b[K[roundhouse: {text}]{end}".encode())


# --- a port ---------------------------------------------------------------------------------------


async def run_forward(client: Client, task_id: str, port: int, at: int) -> str:
    """Forward a local port until the tunnel ends; return why it ended."""
    from app.cli.interactive.tunnel_client import UserEnd

    body = {"kind": "forward", "port": port}
    line = StatusLine()
    async with UserEnd.opened(client, task_id, body, line.tell) as end:
        forwarder = Forwarder(end)
        try:
            server = await asyncio.start_server(forwarder.meet, "127.0.0.1", at)
        except OSError as error:
            root_command.fail(
                REFUSED, Text(f"Port {at} of this machine cannot be used: {error.strerror}.")
            )
        async with server:
            address, number = server.sockets[0].getsockname()
            err().print(wording.forwarding(f"{address}:{number}", port))
            await end.run()
    return end.why


class Forwarder:
    """Gives each local connection a channel of the tunnel.

    `follow` makes, for each connection, an object that distinguishes a person's input from other
    bytes. Without it all bytes count as input.
    """

    def __init__(self, end: UserEnd, follow: Callable[[], BrowserInput] | None = None) -> None:
        self.end, self.follow, self._last = end, follow, 0

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(body: bytes) -> None:
            writer.write(body)
            await writer.drain()

        number = self._free_number()
        if not number:
            writer.close()
            return
        channel = self.end.channel(number, write)
        await self.end.send(FrameKind.OPEN, number)
        coming = asyncio.create_task(self._come(reader, channel))
        try:
            await channel.closed.wait()
        except asyncio.CancelledError:
            return  # Ctrl-C; asyncio would print a traceback for each connection
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            await self.end.send(FrameKind.END, number)
            self.end.channels.pop(number, None)
            writer.close()
        if channel.failed:
            err().print(Text(f"{channel.failed}."))

    def _free_number(self) -> int:
        """Return the number that has been free for the longest time; 0 if all are in use."""
        for step in range(1, CHANNELS_MAX):
            number = 1 + (self._last - 1 + step) % (CHANNELS_MAX - 1)
            if number not in self.end.channels:
                self._last = number
                return number
        return 0

    async def _come(self, reader: asyncio.StreamReader, channel: UserChannel) -> None:
        follower = self.follow() if self.follow is not None else None
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                is_input = follower is None or follower.holds_input(data)
                kind = FrameKind.DATA if is_input else FrameKind.QUIET
                await self.end.send_data(channel, data, kind)
        await self.end.send(FrameKind.END, channel.number)
