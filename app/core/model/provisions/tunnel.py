"""A tunnel carries bytes between a user and a process inside the sandbox of a running task.

    user -- WebSocket -- API -- TCP -- device worker -- socket -- helper inside the walls

The user and the helper (`workers.commands.shells.tunnel_end`) exchange frames; no process between
them reads more than the head of a frame.  A tunnel has channels, numbered by the user's side:
channel 0 is the terminal of a shell, and each channel of a forwarded port is one connection.  A
side sends at most `WINDOW_BYTES` of a channel beyond what the other side has taken.  So an unread
channel does not hold up other channels, and no buffer grows.

On the way to the device worker stands a ticket (`TunnelTicket`), which opens one tunnel once.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.lifecycle import ENDED
from app.core.model.provisions import running_files

# not imported at run time: it is slow, and the command line needs this module for its tunnels
if TYPE_CHECKING:
    from app.core.model.descriptor import TaskDescriptor

FRAME_BYTES = 2**15  # most bytes of a frame, without its head
WINDOW_BYTES = 2**18
CHANNELS_MAX = 64
TICKET_BYTES = 4096
TICKET_S = 30.0  # how long a ticket is good
PER_TASK = 16  # open tunnels
WORDS_MAX = 64  # per command
WORD_CHARACTERS = 1024
SIDE_MAX = 1000  # most rows or columns of a terminal

#: The head of a frame on TCP and on sockets: kind, channel, length. A WebSocket message is one
#: frame, whose head has no length.
FRAME_HEAD = struct.Struct("!BHI")
MESSAGE_HEAD = struct.Struct("!BH")


#: kinds of tasks (`descriptor.RUNS`) into which tunnels lead
ENTERED = ("command", "job", "function")


class TunnelKind(StrEnum):
    SHELL = "shell"
    FORWARD = "forward"


#: Opened by a call of the API that reads files of a command, whose words say which. It lasts as
#: long as the call, so it has no row.
FILES = "files"


def why_no_tunnel(
    state: str,
    run_kind: str,
    *,
    has_image: bool = False,
    device_kind: str = "cpu",
    is_fraction: bool = False,
) -> str:
    """Return why no tunnel into a task can be opened; "" if one can.

    A tunnel into a task that does not run now waits until it does. A shell in a command counts as
    part of the command. A shell of a job runs beside the job, so device memory that it took would
    count for no task.
    """
    if state in ENDED:
        return f"the task is already {state}; its processes are gone"
    if run_kind not in ENTERED:
        told = f"{', '.join(ENTERED[:-1])} or {ENTERED[-1]}"
        return f"the task runs a {run_kind}; only a {told} can be looked into"
    if has_image:
        return "the task runs in a container image; no shell can be started in one"
    if run_kind == "command" or (device_kind == "cpu" and not is_fraction):
        return ""
    has = "a fraction of its device" if is_fraction else f"a {device_kind} device"
    return f"the task is a {run_kind} with {has}; a shell's memory there would count for no task"


def why_not_into(state: str, spec: TaskDescriptor) -> str:
    """Return why no tunnel into a task with this descriptor can be opened; "" if one can."""
    return why_no_tunnel(
        state,
        spec.run.kind,
        has_image=bool(spec.image),
        device_kind=spec.devices.kind,
        is_fraction=spec.devices.choice.fraction_milli < WHOLE_MILLI,
    )


class FrameKind(IntEnum):
    """Lists the kinds of frames; the comment says which side sends them, and what they carry."""

    DATA = 0  # both: bytes
    WINDOW = 1  # both: how many bytes its sender has taken since its last WINDOW frame
    END = 2  # both: no DATA follows on this channel
    OPEN = 3  # user: connect another channel
    RESIZE = 4  # user: rows, columns
    EXIT = 5  # helper: the exit status of the shell
    FAILED = 6  # helper: why a channel cannot be connected
    QUIET = 7  # user: bytes that are not a person's input, so they wake no task
    OPENED = 8  # device worker: the tunnel is open
    REFUSED = 9  # device worker: why the tunnel is not open


FROM_USER = frozenset(
    {FrameKind.DATA, FrameKind.WINDOW, FrameKind.END, FrameKind.OPEN, FrameKind.RESIZE}
    | {FrameKind.QUIET}
)
FROM_HELPER = frozenset(
    {FrameKind.DATA, FrameKind.WINDOW, FrameKind.END, FrameKind.EXIT, FrameKind.FAILED}
)


class BadFrame(Exception):
    """Raised for a frame that is too long, or of a kind that this side may not send."""


class BadTicket(Exception):
    """Raised for a malformed ticket."""


def checked_head(kind: int, channel: int, size: int, allowed: frozenset[FrameKind]) -> FrameKind:
    """Return the kind of a frame; raises BadFrame."""
    if kind not in allowed:
        raise BadFrame(f"a frame of kind {kind}")
    if channel >= CHANNELS_MAX or size > FRAME_BYTES:
        raise BadFrame(f"a frame of {size} bytes on channel {channel}")
    return FrameKind(kind)


def frame_of_message(message: bytes) -> tuple[FrameKind, bytes]:
    """Return the kind of a user's message, and the frame to forward; raises BadFrame."""
    if len(message) < MESSAGE_HEAD.size:
        raise BadFrame("a message without a head")
    kind, channel = MESSAGE_HEAD.unpack_from(message)
    body = memoryview(message)[MESSAGE_HEAD.size :]
    known = checked_head(kind, channel, len(body), FROM_USER)
    return known, FRAME_HEAD.pack(kind, channel, len(body)) + body


def message_of(kind: FrameKind, channel: int = 0, body: bytes = b"") -> bytes:
    return MESSAGE_HEAD.pack(kind, channel) + body


def frame_of(kind: FrameKind, channel: int = 0, body: bytes = b"") -> bytes:
    return FRAME_HEAD.pack(kind, channel, len(body)) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelTicket:
    """Opens one tunnel to one launch of a task, once and before `expires_s` (seconds since 1970).

    `words` is the command of a shell; empty: the usual shell. `port` is the port to forward. For
    FILES, `words` are an operation and a path (`running_files`).
    """

    tunnel: str
    task: str
    epoch: int
    kind: str
    expires_s: int
    port: int = 0
    words: tuple[str, ...] = ()
    term: str = "xterm"
    rows: int = 24
    columns: int = 80

    def encoded(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decoded(cls, body: bytes) -> TunnelTicket:
        """Return the ticket; raises BadTicket."""
        try:
            said = json.loads(body)
            if (
                set(said) != {field.name for field in fields(cls)}
                or type(said["words"]) is not list
            ):
                raise BadTicket("other fields than those of a ticket")
            ticket = cls(**{**said, "words": tuple(said["words"])})
        except (ValueError, TypeError, RecursionError) as error:
            raise BadTicket(f"not a ticket: {error!r:.100}") from error
        if why := _fault(ticket):
            raise BadTicket(why)
        return ticket


def _fault(ticket: TunnelTicket) -> str:
    texts = (ticket.tunnel, ticket.task, ticket.kind, ticket.term, *ticket.words)
    numbers = (ticket.epoch, ticket.port, ticket.rows, ticket.columns, ticket.expires_s)
    if not all(isinstance(text, str) and len(text) <= WORD_CHARACTERS for text in texts):
        return "a text of the ticket is none, or too long"
    if any(type(number) is not int or number < 0 for number in numbers):
        return "a number of the ticket is none"
    if ticket.kind not in {*TunnelKind, FILES} or len(ticket.words) > WORDS_MAX:
        return "an unknown kind of tunnel, or too many words"
    if ticket.kind == FILES and not running_files.is_words(ticket.words):
        return "the words of the ticket ask for no files"
    is_port = 1 <= ticket.port <= 65535 if ticket.kind == TunnelKind.FORWARD else not ticket.port
    sides = (ticket.rows, ticket.columns)
    return "" if is_port and all(1 <= side <= SIDE_MAX for side in sides) else "out of range"
