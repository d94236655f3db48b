"""Describes a device worker: its settings, its folders, and the lock of its device.

A host context (`House`) covers the processes of one device worker and all that they hold. The
device worker, the zygote and the keepers hold its lock, so no second worker serves the device.
Residents hold no lock; they are recorded (`workers.device.processes.resident_records`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.core.model.descriptor import SHARING_NEED, labels_in
from app.core.model.protocol.protocol_version import PROTOCOL
from app.core.model.provisions import collectives, notice, session
from app.core.model.provisions.registry_image import AllowedRegistry, allowed_registries
from app.core.security.addresses import addresses_by_name
from app.core.security.sandbox_layers import Mode
from app.messaging.message_keys import MessageKeys
from app.settings import Settings
from app.storage.backend import Folder
from app.storage.sealing import HostKey
from app.storage.signing import Signer
from app.storage.store import Store
from workers.process import uv
from workers.process.file_locks import hold
from workers.process.host_allocations import HostAllocations
from workers.process.isolation import sandbox
from workers.process.isolation.cgroups import Bounds
from workers.process.isolation.device_access import HOST_FOLDER, DeviceAccess, FoundDevice
from workers.process.isolation.helper_groups import HelperGroups
from workers.transfer.host_cache import Cache
from workers.transfer.installs import image_fetcher
from workers.transfer.installs.container_images import ContainerImages
from workers.transfer.installs.environments import Environments

JSON = dict[str, Any]

#: What every host of this version gives to tasks.
_OFFERS = ("env", "secrets", notice.NEED, session.NEED, "isolation", SHARING_NEED)
CPU_BYTES = 4 * 2**30  # memory of a CPU device, unless set


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Lists the settings and folders of a device worker; `run` is its own folder under the home."""

    device: str
    island: str
    store: Store
    run: Path
    kind: str = "cpu"
    labels: tuple[str, ...] = ()
    rack: str = ""
    location: tuple[str, ...] = ()  # where the device is inside its host, from wide to narrow
    threads: int = 1
    access: DeviceAccess = field(default_factory=DeviceAccess)
    model: str = ""  # name of an accelerator's model, as its driver gives it
    compute_capability: str = ""
    can_splice: bool = True  # True if ranks can take turns on the device
    can_checkpoint: bool = False  # the driver can move a process's memory off the device and back
    memory_bytes: int = CPU_BYTES
    device_fraction: float = 1.0  # part of an accelerator's memory that residents may have
    host_memory_bytes: int = CPU_BYTES  # host memory for images; one image may take all of it
    host_cache_bytes: int = 2**30
    block_bytes_per_s: int = 0  # rate at which blocks are sent to other hosts; 0: no limit
    images_bytes: int = 64 * 2**30  # disk for unpacked container images
    # registries from which container images are fetched, and skopeo, which does it; "": not there
    image_registries: tuple[AllowedRegistry, ...] = ()
    skopeo: str = ""
    environments_bytes: int = 32 * 2**30  # disk for environments
    environment_build_s: float = 900.0
    package_options: tuple[str, ...] = ()  # name the index (`workers.process.uv.index_options`)
    wheels: Path | None = None  # the folder of wheels in these options, if any
    # hosts that a build reaches (`workers.process.uv.reach`)
    package_hosts: tuple[str, ...] | None = ()
    mount_roots: tuple[str, ...] = ()  # folders below which tasks may see mounts
    # host memory of each resident beside the device's and the image's
    overhead_bytes: int = 2 * 2**30
    scratch_bytes: int = 0  # disk of each resident's scratch folder; 0: a part of the free space
    residents_max: int = 4
    stop_grace_s: float = 5.0
    drain_s: float = 8.0  # a stopping worker pauses and saves its tasks within this
    lease_margin_s: float = 3.0
    beat_s: float = 2.0
    # in seconds: how long a task with the slot may wait there for a late input
    patience_s: float = 0.5
    at_rest_s: float = 5.0  # the same if no other task wants the slot
    sandbox: Mode = "required"
    criu: str = ""  # a prefix or a program; "": the prefix that `make criu` makes
    monitor: str = "none"  # what watches the device's health (`workers.device.monitors`)
    health_every_s: float = 5.0
    health_patience_s: float = 30.0
    egress: bool = True  # tasks may reach the network, where the sandbox keeps them apart
    egress_private: str = ""  # networks that tasks may reach although these are not public
    egress_hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name -> addresses
    host_news: bool = False  # the worker reads the queue of its host
    address: str = "127.0.0.1"  # address at which other hosts reach this host
    incarnation: str = field(default_factory=lambda: _incarnation(0))
    # control groups of programs that build packages and unpack images
    helpers: HelperGroups = field(default_factory=HelperGroups, compare=False)
    # what the supervisors of this process know of each other's devices
    allocations: HostAllocations = field(default_factory=HostAllocations, compare=False)

    @classmethod
    def of(cls, settings: Settings, found: FoundDevice) -> House:
        """Return the context of a worker that serves the device `found`."""
        memory_bytes = _device_bytes(settings.device_memory_bytes, found.memory_bytes)
        location = found.access.location
        return cls(
            device=settings.device,
            island=settings.island,
            store=Store.at(settings.store_address),
            run=settings.home / "run",
            kind=settings.device_kind,
            labels=labels_in(settings.device_labels),
            rack=settings.rack,
            location=tuple(settings.device_location.split("/"))
            if settings.device_location
            else location,
            threads=settings.device_threads,
            access=found.access,
            model=found.model,
            compute_capability=found.compute_capability,
            can_splice=found.can_splice,
            can_checkpoint=found.can_checkpoint,
            memory_bytes=memory_bytes,
            device_fraction=memory_bytes / (found.memory_bytes or memory_bytes),
            host_memory_bytes=settings.host_memory_bytes or memory_bytes,
            host_cache_bytes=settings.host_cache_bytes,
            block_bytes_per_s=settings.block_bytes_per_s,
            images_bytes=settings.images_bytes,
            image_registries=allowed_registries(settings.image_registries),
            skopeo=shutil.which(image_fetcher.PROGRAM) or "",
            environments_bytes=settings.environments_bytes,
            environment_build_s=settings.environment_build_s,
            package_options=tuple(uv.index_options(settings)),
            wheels=settings.wheels,
            package_hosts=uv.reach(settings),
            mount_roots=tuple(filter(None, settings.mount_roots.split(":"))),
            scratch_bytes=settings.scratch_bytes,
            overhead_bytes=settings.resident_overhead_bytes,
            residents_max=settings.residents_max,
            stop_grace_s=settings.stop_grace_s,
            drain_s=settings.drain_s,
            lease_margin_s=settings.lease_margin_s,
            beat_s=settings.beat_s,
            sandbox=settings.sandbox,
            criu=settings.criu,
            monitor=settings.device_monitor,
            health_every_s=settings.health_every_s,
            health_patience_s=settings.health_patience_s,
            egress=settings.egress == "on",
            egress_private=settings.egress_private,
            egress_hosts=addresses_by_name(settings.egress_hosts),
            incarnation=next_incarnation(settings.home / "run" / f"{settings.device}.incarnation"),
            address=settings.address or _address_towards(settings.redis_url.get_secret_value()),
        )

    @property
    def host(self) -> str:
        """The name of the host in that of the device."""
        return self.device.rpartition(".")[0] or self.device

    @property
    def folder(self) -> Path:
        return self.run / self.device

    @property
    def own_folders(self) -> tuple[Path, ...]:
        """Folders of Roundhouse on this host, which no mount may show."""
        place = self.store.place
        return (self.run.parent, *([place.root] if isinstance(place, Folder) else []))

    @property
    def bounds(self) -> Bounds:
        """The limits of the residents on this host, together and each."""
        return Bounds.of(
            # a CPU device uses memory of the host; an accelerator has its own
            memory_bytes=self.memory_bytes if self.kind == "cpu" else 0,
            host_memory_bytes=self.host_memory_bytes,
            overhead_bytes=self.overhead_bytes,
            residents_max=self.residents_max,
            threads=self.threads,
            nodes=sandbox.device_nodes(()),
        )

    @property
    def tmp_bytes(self) -> int:
        """The size of a resident's /tmp, and of its /dev/shm; both count as the resident's
        memory.
        """
        return max(2**28, self.host_memory_bytes // 2)

    @property
    def cache(self) -> Cache:
        """The cache of this host: all its devices take inputs from it and store outputs in it."""
        return Cache(self.run / "cache", self.host_cache_bytes)

    @property
    def environments(self) -> Environments:
        """The environments of the host, which all its devices share."""
        return Environments(
            folder=self.run / "environments",
            limit_bytes=self.environments_bytes,
            build_s=self.environment_build_s,
            options=self.package_options,
            wheels=self.wheels,
            reach=self.package_hosts,
            is_walled=self.sandbox != "off",
            build_bytes=self.environments_bytes,
            helpers=self.helpers,
        )

    @property
    def images(self) -> ContainerImages:
        """The container images of the host, which all its devices share."""
        return ContainerImages(
            folder=self.run / "images", limit_bytes=self.images_bytes, helpers=self.helpers
        )

    @property
    def signer(self) -> Signer:
        """The signing key of the host, with which it signs what its devices write. It is made at
        first use.
        """
        return Signer.at(self.run / "signing.key")

    @property
    def message_keys(self) -> MessageKeys:
        """The keys with which the host's devices exchange messages with their island."""
        return MessageKeys(self.signer)

    @property
    def host_key(self) -> HostKey:
        """The key of the host to which secrets are sealed. It is made at first use."""
        return HostKey.at(self.run / "sealing.key")

    @property
    def facts(self) -> JSON:
        return {
            "host": self.host,
            "island": self.island,
            "kind": self.kind,
            **({"model": self.model, "uuid": self.access.id} if self.model else {}),
            "compute_capability": self.compute_capability,
            "labels": list(self.labels),
            "rack": self.rack,
            "location": list(self.location),
            "threads": self.threads,
            "memory_bytes": self.memory_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "key": self.signer.public,
            "exchange_key": self.message_keys.announced,
            "sealing_key": self.host_key.announced(self.signer),
            "splice": self.can_splice,
            "protocol": PROTOCOL,
            "spec": True,  # for an island of the version before: a Launch may have a descriptor
            "image_key": True,  # the worker takes a Launch with the key of images
            "user": True,  # the worker takes a Launch with its user,
            "request": True,  # and with its request
            "paced": True,  # the worker takes an answer that says when to report again
            "pulses": True,  # the worker takes an answer that lets it send a Pulse
            **({"host_news": True} if self.host_news else {}),
            "offers": [
                *_OFFERS,
                *(collectives.NEEDS.values() if self.kind in collectives.KINDS else ()),
            ],
        }


def _device_bytes(set_bytes: int, found_bytes: int) -> int:
    """Return the device memory for residents: all of an accelerator, or as much as the settings
    say.
    """
    if not found_bytes:
        return set_bytes or CPU_BYTES
    return min(set_bytes, found_bytes) if set_bytes else found_bytes


def next_incarnation(file: Path) -> str:
    """Return a name for this process that sorts after those of all earlier processes on this
    device.

    The order holds even if the host's clock was set back. Messages of older processes are then
    rejected.
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
    """Return the address under which a server of Roundhouse sees this host."""
    place = urlsplit(url)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(place.hostname, place.port or 1, type=socket.SOCK_DGRAM)
        for family, kind, _, _, there in found if place.hostname else ():
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends no packet
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def set_aside(folder: Path) -> Path:
    """Move a folder out of the way at once; return the folder that holds all folders moved so."""
    old = folder.with_name(f"{folder.name}.old")
    old.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(old / uuid.uuid4().hex)
    return old


def lock_device(house: House, wait_s: float) -> int | None:
    """Take the lock of the accelerator, so that only one worker serves it; None for a CPU device.

    If the accelerator has a UUID, and this process may do so, the lock holds for the whole host;
    else for this home. Raises CannotServe.
    """
    access = house.access
    if not access.id:
        return None
    name = re.sub(r"[^A-Za-z0-9.-]", "_", f"{house.kind}-{access.id}")
    folder = house.run
    if access.is_unique and os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container with a read-only /run
            HOST_FOLDER.mkdir(mode=0o700, exist_ok=True)
            folder = HOST_FOLDER
    return locked(folder / f"{name}.lock", wait_s)


class CannotServe(Exception):
    """Raised when this device worker must not take work; the message says why and what to do."""


def locked(path: Path, wait_s: float) -> int:
    """Take the device's lock; the kernel frees it when its last holder is dead.

    Raises CannotServe if another process holds the lock after `wait_s`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if not hold(fd, fcntl.LOCK_EX, time.monotonic() + wait_s):
        holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
        os.close(fd)
        raise CannotServe(
            f"{path} is locked by {holder or 'another process'}: a device can have only one "
            "worker; stop that worker first"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} and its children".encode(), 0)
    return fd
