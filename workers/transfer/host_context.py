"""Describes a device worker: its settings, its folders, and the lock that makes it the only one.

A host context (`House`) covers the processes of one device worker and all that they hold.  The
device worker, the zygote and the keepers hold its lock.  Residents hold no lock; they are recorded
(`workers.device.births`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.core.security.sandbox_layers import Mode
from app.settings import Settings
from app.storage.signing import Signer
from app.storage.store import Store
from workers.process import sandbox
from workers.process.cgroups import Bounds
from workers.transfer.host_cache import Cache

log = logging.getLogger(__name__)

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """The settings and folders of a device worker; `run` is its own folder under the home."""

    device: str
    island: str
    store: Store
    run: Path
    kind: str = "cpu"
    threads: int = 1
    memory_bytes: int = 4 * 2**30
    host_memory_bytes: int = 4 * 2**30  # for images; one image may take all of it
    host_cache_bytes: int = 2**30
    block_bytes_per_s: int = 0  # to other hosts; 0: no limit
    overhead_bytes: int = 2 * 2**30  # host memory of each resident besides both
    scratch_bytes: int = 0  # disk of each resident's scratch folder; 0: a part of the free space
    residents_max: int = 4
    stop_grace_s: float = 5.0
    lease_margin_s: float = 3.0
    beat_s: float = 2.0
    patience_s: float = 0.5  # how long a task may wait for a late input in the slot
    at_rest_s: float = 5.0  # how long a task may wait so if no other task wants the slot
    sandbox: Mode = "required"
    address: str = "127.0.0.1"  # address at which other hosts reach this host
    incarnation: str = field(default_factory=lambda: _incarnation(0))

    @classmethod
    def of(cls, settings: Settings) -> House:
        return cls(
            device=settings.device,
            island=settings.island,
            store=Store.at(settings.store_address),
            run=settings.home / "run",
            kind=settings.device_kind,
            threads=settings.device_threads,
            memory_bytes=settings.device_memory_bytes,
            host_memory_bytes=settings.host_memory_bytes or settings.device_memory_bytes,
            host_cache_bytes=settings.host_cache_bytes,
            block_bytes_per_s=settings.block_bytes_per_s,
            scratch_bytes=settings.scratch_bytes,
            overhead_bytes=settings.resident_overhead_bytes,
            residents_max=settings.residents_max,
            stop_grace_s=settings.stop_grace_s,
            lease_margin_s=settings.lease_margin_s,
            beat_s=settings.beat_s,
            sandbox=settings.sandbox,
            incarnation=next_incarnation(settings.home / "run" / f"{settings.device}.incarnation"),
            address=settings.address or _address_towards(settings.redis_url.get_secret_value()),
        )

    @property
    def folder(self) -> Path:
        return self.run / self.device

    @property
    def bounds(self) -> Bounds:
        """The limits of the residents on this host, together and each."""
        return Bounds.of(
            memory_bytes=self.memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            overhead_bytes=self.overhead_bytes,
            residents_max=self.residents_max,
            threads=self.threads,
            nodes=sandbox.device_nodes(self.kind),
        )

    @property
    def tmp_bytes(self) -> int:
        """Size of a resident's /tmp, and of its /dev/shm; both are charged to it as memory."""
        return max(2**28, self.host_memory_bytes // 2)

    @property
    def cache(self) -> Cache:
        """The cache of the host: all its devices take inputs from it and keep outputs in it."""
        return Cache(self.run / "cache", self.host_cache_bytes)

    @property
    def signer(self) -> Signer:
        """The signing key of the host: it signs what its devices write.  Made at first use."""
        return Signer.at(self.run / "signing.key")

    @property
    def facts(self) -> JSON:
        return {
            "host": self.device.rpartition(".")[0] or self.device,
            "island": self.island,
            "kind": self.kind,
            "threads": self.threads,
            "memory_bytes": self.memory_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "key": self.signer.public,
            # a splice is possible: ranks can take turns on this and other devices
            "splice": self.kind == "cpu",
        }


def next_incarnation(file: Path) -> str:
    """Return a name for this process that sorts after those of all earlier processes on this
    device.

    This holds even if the host's clock was put back.  Messages of older processes are never
    believed again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    last_ns = 0
    with contextlib.suppress(FileNotFoundError, ValueError):
        last_ns = int(file.read_text().partition("-")[0])
    found = _incarnation(last_ns)
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    draft.write_text(found)
    draft.replace(file)
    return found


def _incarnation(last_ns: int) -> str:
    return f"{max(time.time_ns(), last_ns + 1):020d}-{uuid.uuid4().hex[:8]}"


def _address_towards(url: str) -> str:
    """Return the address under which one of our servers sees this host."""
    place = urlsplit(url)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(place.hostname, place.port or 1, type=socket.SOCK_DGRAM)
        for family, kind, _, _, there in found if place.hostname else ():
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends no packet
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def set_aside(folder: Path) -> Path:
    """Move a folder out of the way at once; return where it and earlier ones lie now."""
    old = folder.with_name(f"{folder.name}.old")
    old.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(old / uuid.uuid4().hex)
    return old


def remove_tree(folder: Path) -> None:
    """Remove a folder that a tenant may have filled, however deep, in a separate process."""
    done = subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.PIPE, check=False)
    if done.returncode:
        # A job that runs as our own user can remove the user's access to its folders.
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], stderr=subprocess.PIPE, check=False)
        done = subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, check=False)
    if done.returncode:
        log.warning("cannot remove %s: %s", folder, done.stderr[-300:].decode("utf-8", "replace"))


class CannotServe(Exception):
    """Raised when this device worker must not take work; the message says why and what to do."""


def locked(path: Path, wait_s: float) -> int:
    """Take the device's lock; the kernel frees it when its last holder is dead.

    Raises CannotServe if another process holds the lock after `wait_s`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
            if time.monotonic() >= until_s:
                os.close(fd)
                raise CannotServe(
                    f"{path} is locked by {holder or 'another process'}: a device can have only "
                    "one worker; stop that worker first"
                ) from None
            time.sleep(0.2)  # the kernel has no timed flock
        else:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} and its children".encode(), 0)
            return fd
