"""The inner end of a tunnel: a shell in a terminal, or connections to a port of the task.

    python -I -S tunnel_end.py FD TICKET

It runs inside the sandbox of a command as one more process of the task, so it is frozen, charged,
limited and ended like the others.  It imports only the standard library, because the sandbox shows
no package of Roundhouse; the frames are those of `provisions.tunnel`.

A shell gets SIGHUP when the user is gone.  A connection is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import termios
import time
from typing import Any, NoReturn

HEAD = struct.Struct("!BHI")
DATA, WINDOW, END, OPEN, RESIZE, EXIT, FAILED, QUIET = range(8)
FRAME_BYTES, WINDOW_BYTES, CHANNELS_MAX = 2**15, 2**18, 64
# most bytes that wait for the outer side to take them; above this limit no channel is read
KEPT_BYTES = 2**16
LAST_WORDS_S = 0.1  # how long a terminal must be silent after its shell has ended
LAST_WORDS_MAX_S = 5.0
CONNECT_S = 2.0
NO_SHELL = 127
_GIVEN_BACK = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class TunnelOver(Exception):
    """Raised when the user is gone, or broke the rules of frames."""


class InnerChannel:
    """Describes a channel: a descriptor, and how many bytes may be sent in each direction."""

    def __init__(self, number: int, fd: int) -> None:
        os.set_blocking(fd, False)
        self.number, self.fd = number, fd
        self.inwards = bytearray()  # bytes from the user that are not written yet
        self.window = WINDOW_BYTES  # how many more bytes the user takes
        self.is_read = self.is_written = True
        self.ends = False  # the user sends no more

    @property
    def events(self) -> int:
        reads = selectors.EVENT_READ if self.is_read and self.window > 0 else 0
        return reads | (selectors.EVENT_WRITE if self.inwards or self.ends else 0)

    def close(self) -> None:
        os.close(self.fd)


class InnerEnd:
    """Moves bytes between the user's frames and the channels."""

    def __init__(self, outer: socket.socket, ticket: dict[str, Any]) -> None:
        outer.setblocking(False)
        self.outer, self.ticket = outer, ticket
        self.came, self.leaves = bytearray(), bytearray()
        self.channels: dict[int, InnerChannel] = {}
        self.selector = selectors.DefaultSelector()
        self.is_over = False

    def serve(self) -> None:
        while not self.is_over or self.leaves:
            self.await_events()
            for key, events in self.selector.select(self.timeout_s()):
                channel: InnerChannel | None = key.data
                if key.fileobj is self.outer:
                    self.meet_user(events)
                elif channel is not None and self.channels.get(channel.number) is channel:
                    self.meet_channel(channel, events)
            self.look()

    def timeout_s(self) -> float | None:
        return None

    def look(self) -> None:
        """Do what is due because time has passed or another process has changed."""

    def await_events(self) -> None:
        writes = selectors.EVENT_WRITE if self.leaves else 0
        self.watch(self.outer, selectors.EVENT_READ | writes, None)
        for channel in self.channels.values():
            full = len(self.leaves) >= KEPT_BYTES
            self.watch(channel.fd, channel.events & ~(full * selectors.EVENT_READ), channel)

    def watch(self, fileobj: Any, events: int, data: InnerChannel | None) -> None:
        known = self.selector.get_map().get(fileobj)
        if known is not None and (not events or known.data is not data):
            self.selector.unregister(fileobj)
            known = None
        if known is not None:
            self.selector.modify(fileobj, events, data)
        elif events:
            self.selector.register(fileobj, events, data)

    # --- the user's side ---

    def meet_user(self, events: int) -> None:
        if events & selectors.EVENT_WRITE and self.leaves:
            with contextlib.suppress(BlockingIOError):
                del self.leaves[: self.outer.send(self.leaves)]
        if events & selectors.EVENT_READ:
            piece = b""
            with contextlib.suppress(ConnectionError):
                piece = self.outer.recv(FRAME_BYTES)
            if not piece:
                raise TunnelOver
            self.came += piece
            while self.take():
                pass

    def take(self) -> bool:
        """Take one frame, if all of it has arrived."""
        if len(self.came) < HEAD.size:
            return False
        kind, number, size = HEAD.unpack_from(self.came)
        if size > FRAME_BYTES or number >= CHANNELS_MAX:
            raise TunnelOver
        if len(self.came) < HEAD.size + size:
            return False
        body = bytes(self.came[HEAD.size : HEAD.size + size])
        del self.came[: HEAD.size + size]
        self.obey(kind, number, body)
        return True

    def obey(self, kind: int, number: int, body: bytes) -> None:
        if kind == OPEN:
            self.open(number)
        elif kind == RESIZE and len(body) == 4:
            self.resize(*struct.unpack("!HH", body))
        elif (channel := self.channels.get(number)) is None:
            return  # this side closed the channel, and the user does not know yet
        elif kind in (DATA, QUIET):
            channel.inwards += body
            if len(channel.inwards) > WINDOW_BYTES:
                raise TunnelOver
        elif kind == WINDOW and len(body) == 4:
            channel.window += int.from_bytes(body, "big")
        elif kind == END:
            channel.ends = True

    def say(self, kind: int, number: int = 0, body: bytes = b"") -> None:
        self.leaves += HEAD.pack(kind, number, len(body)) + body

    def open(self, number: int) -> None:
        """Connect a new channel. A shell refuses this: it has only the channel with which it
        began.
        """

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal, if there is one."""

    # --- the inner side ---

    def meet_channel(self, channel: InnerChannel, events: int) -> None:
        if events & selectors.EVENT_WRITE and (channel.inwards or channel.ends):
            self.write(channel)
        if events & selectors.EVENT_READ and channel.is_read:
            self.read(channel)
        if not channel.is_read and not channel.is_written:
            self.close(channel)

    def write(self, channel: InnerChannel) -> None:
        try:
            size = os.write(channel.fd, channel.inwards[:FRAME_BYTES]) if channel.inwards else 0
        except BlockingIOError:
            return
        except OSError:  # no process inside reads any more
            size, channel.is_written = len(channel.inwards), False
        del channel.inwards[:size]
        if size:
            self.say(WINDOW, channel.number, size.to_bytes(4, "big"))
        if channel.ends and not channel.inwards:
            channel.ends = channel.is_written = False
            self.finish(channel)

    def read(self, channel: InnerChannel) -> None:
        try:
            piece = os.read(channel.fd, min(FRAME_BYTES, channel.window))
        except BlockingIOError:
            return
        except OSError:  # no process has the terminal open, or the connection was reset
            piece = b""
        if piece:
            channel.window -= len(piece)
            self.say(DATA, channel.number, piece)
        else:
            channel.is_read = False
            self.say(END, channel.number)

    def finish(self, channel: InnerChannel) -> None:
        """Tell the inner side that the user sends no more."""

    def close(self, channel: InnerChannel) -> None:
        self.watch(channel.fd, 0, None)
        self.channels.pop(channel.number)
        channel.close()

    def end(self) -> None:
        for channel in list(self.channels.values()):
            self.close(channel)
        self.outer.close()


# --- a shell --------------------------------------------------------------------------------------


class Shell(InnerEnd):
    """Runs a shell in a terminal of its own, on channel 0."""

    def __init__(self, outer: socket.socket, ticket: dict[str, Any]) -> None:
        super().__init__(outer, ticket)
        self.child = 0
        self.status: int | None = None
        self.ended_s = 0.0
        try:
            master, slave = os.openpty()
        except OSError as error:
            why = f"no terminal can be opened on this host: {error.strerror}"
            self.say(FAILED, 0, why.encode())
            self.is_over = True
            return
        _set_size(slave, ticket["rows"], ticket["columns"])
        self.child = os.fork()
        if not self.child:
            _become_shell(slave, ticket["words"])
        os.close(slave)
        self.channels[0] = InnerChannel(0, master)
        self.pidfd = os.pidfd_open(self.child)
        self.selector.register(self.pidfd, selectors.EVENT_READ)

    def timeout_s(self) -> float | None:
        return None if self.status is None else LAST_WORDS_S

    def look(self) -> None:
        """End with the shell, once its last output is read."""
        if not self.child or self.is_over:
            return
        if self.status is None:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                self.selector.unregister(self.pidfd)
                self.status, self.ended_s = os.waitstatus_to_exitcode(status), time.monotonic()
        elif self.has_read_all():
            self.say(EXIT, 0, self.status.to_bytes(4, "big", signed=True))
            self.is_over = True

    def has_read_all(self) -> bool:
        """True if no more output comes from the terminal.

        A process that the shell left behind may keep the terminal open, and write to it.
        """
        channel, since_s = self.channels.get(0), time.monotonic() - self.ended_s
        if channel is None or not channel.is_read or since_s >= LAST_WORDS_MAX_S:
            return True
        return since_s >= LAST_WORDS_S and channel.window > 0 and not _is_readable(channel.fd)

    def resize(self, rows: int, columns: int) -> None:
        if 0 in self.channels:
            _set_size(self.channels[0].fd, rows, columns)

    def finish(self, channel: InnerChannel) -> None:
        with contextlib.suppress(OSError):
            os.write(channel.fd, b"\x04")  # the character that ends an input, as typed


def _is_readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))


def _set_size(fd: int, rows: int, columns: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _become_shell(slave: int, words: list[str]) -> NoReturn:
    try:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in range(3):
            os.dup2(slave, fd)
        os.closerange(3, 4096)
        # Python, this program, or a shell that began the device worker in the background ignores
        # these signals.  Programs would inherit that: they would outlive a lost user, and could not
        # be interrupted.
        for number in _GIVEN_BACK:
            signal.signal(number, signal.SIG_DFL)
        argv = words or [_usual_shell()]
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{words[0] if words else 'shell'}: {error.strerror}\r\n".encode())
    os._exit(NO_SHELL)


def _usual_shell() -> str:
    return os.environ.get("SHELL") or shutil.which("bash") or "/bin/sh"


# --- a port ---------------------------------------------------------------------------------------


class Forward(InnerEnd):
    """Connects each channel to a port of the task's own loopback address."""

    def open(self, number: int) -> None:
        if (before := self.channels.get(number)) is not None:
            if before.is_read or not before.ends:
                raise TunnelOver
            self.close(before)  # both sides have closed the channel
        port = self.ticket["port"]
        try:
            sock = socket.create_connection(("127.0.0.1", port), CONNECT_S)
        except OSError as error:
            told = error.strerror or "no answer"
            self.say(FAILED, number, f"nothing listens on port {port} in the task: {told}".encode())
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.channels[number] = InnerChannel(number, sock.detach())

    def finish(self, channel: InnerChannel) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(channel.fd)) as sock:
            sock.shutdown(socket.SHUT_WR)


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ticket = json.loads(sys.argv[2])
    outer = socket.socket(fileno=int(sys.argv[1]))
    end = (Forward if ticket["kind"] == "forward" else Shell)(outer, ticket)
    with contextlib.suppress(TunnelOver):
        end.serve()
    end.end()


if __name__ == "__main__":
    main()
