"""Stands between processes and a Redis, and for a time answers commands with an error reply.

    with RefusingRedis(url) as proxy:
        ...  # processes use `proxy.url`
        with proxy.refusing(READONLY):
            ...

A command that is refused does not reach Redis. A client that blocks in BRPOP when a refusal begins
gets the reply at once, as in a failover. Commands of one connection are handled one after another,
so replies stay in order.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO
from urllib.parse import urlsplit

# Commands that change nothing, and those that Redis takes even when its memory is full.
HANDSHAKE = frozenset({"HELLO", "AUTH", "CLIENT", "PING", "SELECT", "QUIT", "COMMAND"})
READS = frozenset({"GET", "LLEN", "TYPE", "EXISTS", "SMEMBERS", "TIME", "INFO", "ZREVRANGEBYSCORE"})
TAKES = frozenset({"BRPOP", "RPOP", "DEL", "ZREM", "HDEL", "MULTI", "EXEC", "DISCARD", "WATCH"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply, and the commands that Redis still takes."""

    reply: str
    spared: frozenset[str] = field(default=frozenset())

    @property
    def name(self) -> str:
        return self.reply.split()[0]


READONLY = Refusal("READONLY You can't write against a read only replica.", HANDSHAKE | READS)
LOADING = Refusal("LOADING Redis is loading the dataset in memory")
NOAUTH = Refusal("NOAUTH Authentication required.")
OOM = Refusal("OOM command not allowed when used memory > 'maxmemory'.", HANDSHAKE | READS | TAKES)
MISCONF = Refusal(
    "MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist"
    " on disk.",
    HANDSHAKE | READS,
)
BUSY = Refusal("BUSY Redis is busy running a script. You can only call SCRIPT KILL.")
NOPERM = Refusal("NOPERM User default has no permissions to run this command", HANDSHAKE)
UNBLOCKED = Refusal(
    "UNBLOCKED force unblock from blocking operation, instance state changed", HANDSHAKE
)
MASTERDOWN = Refusal("MASTERDOWN Link with MASTER is down", HANDSHAKE)
CLUSTERDOWN = Refusal("CLUSTERDOWN Hash slot not served", HANDSHAKE)
TRYAGAIN = Refusal("TRYAGAIN Multiple keys request during rehashing of slot", HANDSHAKE)
NOREPLICAS = Refusal("NOREPLICAS Not enough good replicas to write.", HANDSHAKE | READS)
MAXCLIENTS = Refusal("ERR max number of clients reached")
UNKNOWN = Refusal("ERR unknown command", HANDSHAKE)

EACH = (
    READONLY, LOADING, NOAUTH, OOM, MISCONF, BUSY, NOPERM, UNBLOCKED, MASTERDOWN, CLUSTERDOWN,
    TRYAGAIN, NOREPLICAS, MAXCLIENTS, UNKNOWN,
)  # fmt: skip


class RefusingRedis:
    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.refusal: Refusal | None = None
        self._blocked: set[_Connection] = set()
        self._refused = 0  # number of commands since the refusal began
        self._lock = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> RefusingRedis:
        threading.Thread(target=self._serve, name="refusing redis", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @contextlib.contextmanager
    def refusing(self, refusal: Refusal) -> Iterator[None]:
        with self._lock:
            self.refusal, self._refused = refusal, 0
            blocked = {one for one in self._blocked if "BRPOP" not in refusal.spared}
        for one in blocked:
            one.give_up()
        try:
            yield
        finally:
            self.refusal = None

    def refuses(self, command: str) -> Refusal | None:
        refusal = self.refusal
        return refusal if refusal is not None and command not in refusal.spared else None

    def count(self) -> None:
        with self._lock:
            self._refused += 1
            self._lock.notify_all()

    def wait_refused(self, commands: int) -> None:
        """Wait until so many commands were refused since the refusal began."""
        with self._lock:
            assert self._lock.wait_for(lambda: self._refused >= commands, 60.0)

    def blocks(self, connection: _Connection, *, now: bool) -> None:
        with self._lock:
            (self._blocked.add if now else self._blocked.discard)(connection)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_Connection(self, client).run, daemon=True).start()


class _Connection:
    def __init__(self, proxy: RefusingRedis, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.server = _connect(proxy.upstream)
        self.is_in_multi = self.is_spoiled = False

    def run(self) -> None:
        try:
            with self.client, self.server, self.client.makefile("rb") as asked:
                answers = self.server.makefile("rb")
                while (command := _value(asked)) is not None:
                    self.client.sendall(self._reply(command, answers))
        except (OSError, EOFError):
            return  # one side has gone

    def give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)

    def _reply(self, command: bytes, answers: IO[bytes]) -> bytes:
        name = command.split(b"\r\n")[2].decode().upper()
        if (refusal := self.proxy.refuses(name)) is not None:
            self.proxy.count()
            self.is_spoiled = self.is_in_multi
            return f"-{refusal.reply}\r\n".encode()
        if name == "EXEC" and self.is_spoiled:
            self.is_in_multi = self.is_spoiled = False
            self._asked(b"*1\r\n$7\r\nDISCARD\r\n", answers)
            return b"-EXECABORT Transaction discarded because of previous errors.\r\n"
        self.is_in_multi = name == "MULTI" or (self.is_in_multi and name not in ("EXEC", "DISCARD"))
        if name != "BRPOP":
            return self._asked(command, answers)
        self.proxy.blocks(self, now=True)
        try:
            self.server.sendall(command)
            # A client that has gone must not take a message.
            if self.client in select.select([self.client, self.server], [], [])[0]:
                self.give_up()
            return self._asked(b"", answers)
        except EOFError:
            self.client.sendall(f"-{UNBLOCKED.reply}\r\n".encode())
            raise
        finally:
            self.proxy.blocks(self, now=False)

    def _asked(self, command: bytes, answers: IO[bytes]) -> bytes:
        self.server.sendall(command)
        reply = _value(answers)
        if reply is None:
            raise EOFError
        return reply


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        server = socket.socket(socket.AF_UNIX)
        server.connect(parts.path)
        return server
    return socket.create_connection((parts.hostname, parts.port or 6379))


def _value(source: IO[bytes]) -> bytes | None:
    """Return the bytes of one command or reply; None at the end."""
    line = source.readline()
    if not line.endswith(b"\r\n"):
        return None
    kind, count = line[:1], line[1:-2]
    if kind in b"$=!" and count != b"-1":
        return line + source.read(int(count) + 2)
    items = int(count) * (2 if kind in b"%|" else 1) if kind in b"*%~>|" else 0
    parts = [line]
    for _ in range(items):
        if (part := _value(source)) is None:
            return None
        parts.append(part)
    return b"".join(parts)
