"""Moves bytes between the store and a resident: what a launch names, and what a resident stores.

It runs outside the supervisor's thread, as disks and hashes take time.  A resident never sees the
store: it gets open files; its images lie in its slab, and its outputs come over a socket.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.core.model.checkpoints import manifest as manifests
from app.core.model.checkpoints import tensor_file
from app.core.model.checkpoints.manifest import About, Manifest
from app.core.model.checkpoints.tensor_file import HEAD_BYTES, BadTensorFile
from app.core.model.protocol.messages import (
    CheckpointRef,
    ExpectedTask,
    Launch,
    about_image_key,
    about_secrets,
)
from app.core.model.provisions.folder import FOLDER, BadFolderManifest
from app.core.model.provisions.registry_image import (
    RegistryImage,
    allowing,
    image_of,
    refusal,
)
from app.core.security.redaction import (
    MAX_LINES_TOGETHER,
    NO_SECRETS,
    Redactor,
    are_too_long,
)
from app.storage.chunk_cipher import NO_CIPHERS, ChunkCipher, Ciphers, NoImageKey, ciphers
from app.storage.sealing import CannotOpen
from app.storage.store import Damaged, Store
from workers.device.processes.process_ends import close_all
from workers.device.processes.resident import Saving
from workers.process import slab, untrusted
from workers.process.image_layout import BadLayout, from_json
from workers.process.isolation import host_mounts
from workers.process.isolation.device_access import DeviceAccess, NoSuchDevice
from workers.process.slab import BadIndex
from workers.process.untrusted import Nonsense
from workers.process.uv import NoUv
from workers.transfer import checkpoint, folder_cache, peer_blocks
from workers.transfer.checkpoint import BadSlab, FoundImage, HeldChunks, Known, Written
from workers.transfer.code_unpack import BadBundle, unpacked
from workers.transfer.folder_cache import BuiltFolder, FolderBeyondCache
from workers.transfer.host_context import House
from workers.transfer.installs.container_images import (
    HeldContainerImage,
    NotFromRegistry,
    NotUnpacked,
)
from workers.transfer.installs.environments import HeldEnvironment, NotBuilt

JSON = dict[str, Any]

log = logging.getLogger(__name__)

AGAIN_AFTER_S = (0.2, 0.5, 1.0)
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Holds all that a launch names, verified: its code, open files of its inputs, its image."""

    code: Path
    # Open files: first the graph, if the launch runs one, then the inputs by port. The file of a
    # folder is its manifest.
    fds: list[int]
    slab: int  # descriptor of the memory with the image; the memory is empty if there is no image
    input_bytes: int = 0  # size of all inputs
    # part of `input_bytes` read from the store, as neither this host nor another had it
    fetched_bytes: int = 0
    # by port: how the input arrived, one of core.model.protocol.messages.WAYS
    ways: dict[str, str] = field(default_factory=dict)
    index_bytes: int = 0
    image: Saving | None = None
    # how the process reaches its devices
    access: DeviceAccess = field(default_factory=DeviceAccess)
    environment: HeldEnvironment | None = None
    root: HeldContainerImage | None = None
    # by port: inputs that are folders
    folders: dict[str, BuiltFolder] = field(default_factory=dict)
    # by name: values that the launch has sealed
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    redactor: Redactor = NO_SECRETS  # removes the values of `secrets` from texts
    manifest: Manifest | None = None  # manifest of the image
    beside: HeldChunks = field(default_factory=dict, repr=False)  # chunks of the second image

    @property
    def locks(self) -> list[int]:
        """Return the locks that keep its input folders and its container image on the disk."""
        of_image = [] if self.root is None else [self.root.fd]
        return [*(one.lock for one in self.folders.values()), *of_image]

    def close(self) -> None:
        close_all([*self.fds, self.slab, *self.locks])
        if self.environment is not None:
            self.environment.close()


class NotFetched(Exception):
    """Raised when a part of a launch is unavailable; `cause` is one of
    core.model.failure_causes.CAUSES."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause, self.message = cause, message
        super().__init__(message)


class OutOfStep(Exception):
    """Raised when a resident did not send the bytes that it announced."""


def fetch(
    launch: Launch,
    house: House,
    came: dict[str, str],
    *,
    held: int | None = None,
    before: FoundImage | None = None,
) -> Fetched:
    """Verify and open what the launch names; raises NotFetched.

    `came` has, by SHA-256, how prefetched inputs came; the first launch that takes one reports it.
    `held` is a slab that already has the image `before`; it is closed if anything fails.
    """
    if held is None:
        held = slab.made(house.host_memory_bytes)
    fds: list[int] = []
    folders: dict[str, BuiltFolder] = {}
    environment: HeldEnvironment | None = None
    root: HeldContainerImage | None = None
    try:
        root = held_image(launch, house)
        if launch.spec.environment is not None:
            environment = held_environment(launch.spec.environment.lock, house)
        secrets, redactor = opened_secrets(launch, house)
        code = unpack(launch.bundle, house)
        with _as_cause("bundle"):
            if launch.spec.run.kind == "graph":
                fds.append(house.cache.opened(launch.spec.run.graph_sha256, house.store).fd)
        counted = {
            **_inputs(launch, house, came, fds, folders),
            "access": _access(launch, house),
            "environment": environment,
            "root": root,
            "folders": folders,
            "secrets": secrets,
            "redactor": redactor,
        }
        if not launch.images:
            return Fetched(code=code, fds=fds, slab=held, **counted)
        newest = launch.images[0]
        found = fill(
            *(held, newest),
            tenant=launch.tenant,
            store=house.store,
            before=before,
            ciphers=opened_image_key(launch, house),
        )
        with _as_cause("image"):
            image, index_bytes = _indexed(held, newest, found)
    except BaseException:
        close_all([*fds, held, *(one.lock for one in folders.values())])
        if root is not None:
            os.close(root.fd)
        if environment is not None:
            environment.close()
        raise
    counted |= {"index_bytes": index_bytes, "image": image, "manifest": found.manifest}
    counted["beside"] = found.beside
    return Fetched(code=code, fds=fds, slab=held, **counted)


def held_environment(lock: str, house: House) -> HeldEnvironment:
    """Return the environment of a lock, built if this is its first use here; raises NotFetched."""
    with _as_cause("environment"):
        try:
            return house.environments.opened(lock, house.store)
        except (NotBuilt, NoUv) as error:
            raise NotFetched("environment", str(error)) from error


def held_image(launch: Launch, house: House) -> HeldContainerImage | None:
    """Return the task's container image, unpacked if this is its first use here; raises
    NotFetched.
    """
    if (name := launch.spec.image) is None:
        return None
    if (image := image_of(name)) is not None:
        return _held_as_asked(launch, lambda: _from_registry(image, house))
    if not launch.root:
        told = f"Its tenant may not use the container image {name} any more, or it was removed."
        raise NotFetched("mount", told)
    place = host_mounts.place_of(launch.root, house.mount_roots, may_be_file=True)
    if place is None:
        raise NotFetched("mount", f"This host may not show the container image {name}.")
    return _held_as_asked(launch, lambda: house.images.opened(name, place))


def _from_registry(image: RegistryImage, house: House) -> HeldContainerImage:
    """Return an image of a registry that this host allows; raises NotUnpacked."""
    allowed = allowing(image, house.image_registries)
    if allowed is None:
        raise NotFromRegistry(refusal(image, house.image_registries))
    if not house.skopeo:
        raise NotFromRegistry("this host has no skopeo; it is in the Debian package skopeo")
    return house.images.fetched(image, house.skopeo, is_plain_http=allowed.is_plain_http)


def _held_as_asked(launch: Launch, hold: Callable[[], HeldContainerImage]) -> HeldContainerImage:
    """Return the image that `hold` returns; raises NotFetched with the reason."""
    name, step = launch.spec.image, "unpacked"
    try:
        return hold()
    except NotUnpacked as error:
        why, step = str(error), error.step
    except Exception as error:  # another try would fail for the same reason
        log.exception("task %s: its container image %s is not unpacked", launch.task, name)
        reason = error.strerror if isinstance(error, OSError) else None
        why = f"this host failed ({reason or type(error).__name__})"
    raise NotFetched("mount", f"Its container image {name} could not be {step}: {why}.")


def opened_secrets(launch: Launch, house: House) -> tuple[dict[str, str], Redactor]:
    """Open the secrets that the launch has for this host; raises NotFetched.

    A task never runs without a secret that it names.
    """
    names, given = launch.spec.secrets, launch.secrets
    if not names:
        return {}, NO_SECRETS
    if told := given.get("refused"):
        raise NotFetched("secret", f"It cannot have its secrets: {told}.")
    about = about_secrets(launch.task, launch.epoch, house.device)
    try:
        values = json.loads(house.host_key.opened(given.get("sealed", ""), about))
    except CannotOpen as error:
        raise NotFetched("secret", f"Its secrets do not open here: {error}.") from error
    if values.keys() != {*names}:
        raise NotFetched("secret", "Its secrets are not those that it names.")
    if are_too_long(values.values()):
        told = f"they have more than {MAX_LINES_TOGETHER} lines together"
        raise NotFetched("secret", f"It cannot have its secrets: {told}.")
    return values, Redactor(values.values())


def opened_image_key(order: Launch | ExpectedTask, house: House) -> Ciphers:
    """Return the cipher of the task's images; an empty mapping if the order has no key for this
    host.
    """
    if "sealed" not in order.image_key:
        return NO_CIPHERS
    about = about_image_key(order.task, order.epoch, house.device)
    try:
        return ciphers([house.host_key.opened(order.image_key["sealed"], about)])
    except (CannotOpen, ValueError) as error:
        log.error("task %s: the key of its images does not open here: %s", order.task, error)
        return NO_CIPHERS


def _access(launch: Launch, house: House) -> DeviceAccess:
    """Return the access to this device and to the further devices that the task has."""
    if not launch.guests or house.kind == "cpu":
        return house.access
    try:
        return house.allocations.access(house.device, launch.guests)
    except NoSuchDevice as error:
        raise NotFetched("device", f"It cannot use its devices: {error}.") from error


def _inputs(
    launch: Launch,
    house: House,
    came: dict[str, str],
    fds: list[int],
    folders: dict[str, BuiltFolder],
) -> JSON:
    """Open the inputs, in the order of their ports; return their sizes and how each came."""
    all_bytes = fetched_bytes = 0
    ways = dict[str, str]()
    with _as_cause("exception"):
        for port in sorted(launch.inputs):
            fd, ways[port] = opened(launch.inputs[port], house, came)
            fds.append(fd)
            size = os.fstat(fd).st_size
            all_bytes += size
            fetched_bytes += size if ways[port] == "store" else 0
            if launch.inputs[port].get("format") == FOLDER:
                found = folders[port] = built_folder(launch.inputs[port], fd, house)
                all_bytes += found.size_bytes
                fetched_bytes += found.fetched_bytes
                if found.fetched_bytes:
                    ways[port] = "store"
    return {"input_bytes": all_bytes, "fetched_bytes": fetched_bytes, "ways": ways}


def built_folder(source: JSON, fd: int, house: House) -> BuiltFolder:
    """Return the folder whose manifest is open at `fd`; raises NotFetched, or the store's
    errors.
    """
    manifest = os.pread(fd, os.fstat(fd).st_size, 0)
    try:
        return folder_cache.built(source["sha256"], manifest, house.cache, house.store)
    except (BadFolderManifest, FolderBeyondCache) as error:
        raise NotFetched("exit", f"It cannot be given a folder: {error}.") from error


def opened(source: JSON, house: House, came: dict[str, str]) -> tuple[int, str]:
    """Open an input that a Launch names; return its descriptor and its way.

    It comes from this host, another host, or else the store.  For an input that was prefetched, the
    way is taken from `came`, by SHA-256; the first task that takes the input reports it.  Raises
    the store's errors.
    """
    sha256, copies = source["sha256"], source.get("copies", [])
    if (fd := house.cache.held(sha256)) is not None:
        return fd, came.pop(sha256, "here")
    fd = peer_blocks.taken(copies, sha256, source["size_bytes"], house.cache) if copies else None
    if fd is not None:
        return fd, "host"
    return house.cache.opened(sha256, house.store).fd, "store"


def opened_in_time(source: JSON, house: House, came: dict[str, str]) -> tuple[int, str]:
    """Open an input for a task that waits for it in the slot; if that fails, try a few more
    times.
    """
    for wait_s in AGAIN_AFTER_S:
        try:
            return opened(source, house, came)
        except (Damaged, OSError) as error:
            log.warning("block %s is not available now: %s", source["sha256"], error)
        time.sleep(wait_s)
    return opened(source, house, came)


def unpack(bundle: str, house: House) -> Path:
    """Return the folder with a bundle's code, empty if `bundle` is ""; raises NotFetched."""
    if not bundle:
        none = house.folder / "code" / "none"
        none.mkdir(exist_ok=True)
        none.chmod(0o755)  # the mode of a bundle's folder: see `workers.transfer.code_unpack`
        return none
    code = house.folder / "code" / bundle
    with _as_cause("bundle"):
        if not code.is_dir():
            with house.store.open(bundle) as archive:
                unpacked(Path(f"/dev/fd/{archive.fileno()}"), code)
    return code


def fill(
    held: int,
    image: CheckpointRef,
    *,
    tenant: str,
    store: Store,
    before: FoundImage | None,
    ciphers: Ciphers,
    ahead_bytes: int = 0,
) -> FoundImage:
    """Read a checkpoint that a Launch names into the slab `held`; raises NotFetched.

    Its second image is fetched ahead if it has up to `ahead_bytes`.
    """
    with _as_cause("image"):
        try:
            found = checkpoint.read(
                image.sha256,
                into=held,
                tenant=tenant,
                key=image.key,
                store=store,
                before=before,
                ciphers=ciphers,
                ahead_bytes=ahead_bytes,
            )
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            raise _too_large(held) from error  # the slab's length is sealed
    if found.layout.end > slab.limit_bytes(held):
        raise _too_large(held)
    return found


def _indexed(held: int, image: CheckpointRef, found: FoundImage) -> tuple[Saving, int]:
    """Write the index behind the image; return the description of the image and the size of the
    index.
    """
    about = found.manifest.about
    index = {"layout": found.layout.as_json(), "fingerprint": dict(about.fingerprint)}
    size_bytes = found.manifest.size_bytes
    saved = Saving(step=image.step, sha256=image.sha256, key=image.key, size_bytes=size_bytes)
    return saved, slab.write_index(held, index)


def _too_large(held: int) -> NotFetched:
    limit = slab.limit_bytes(held)
    told = f"its saved state exceeds the {limit} bytes that this device can keep"
    return NotFetched("exit", f"{told} (ROUNDHOUSE_HOST_MEMORY_BYTES)")


@contextlib.contextmanager
def _as_cause(cause: str) -> Iterator[None]:
    try:
        yield
    except (Damaged, BadBundle, BadIndex) as error:
        raise NotFetched(cause, str(error)) from error
    except NoImageKey as error:  # the image is intact, and an older image would need the key too
        raise NotFetched("store", f"Its image cannot be read: {error}.") from error
    except OSError as error:  # the store is away; its content may be intact
        raise NotFetched("store", f"{type(error).__name__}: {error}") from error


def keep(
    held: int,
    index_bytes: int,
    launch: Launch,
    step: int,
    *,
    known: Known,
    house: House,
    awaited: bool = False,
    beside: Sequence[memoryview] = (),
    dump_damaged: bool = False,
    cipher: ChunkCipher | None = None,
) -> Written:
    """Store the image that a resident announced in its slab; raises OutOfStep, OSError.

    If the image is `awaited` on another device, that device can fetch it while it is being written.
    `beside` are the parts of a second image of the same moment; `dump_damaged` goes into the
    manifest. With a `cipher` both are encrypted.
    """
    try:
        index = slab.read_index(held, index_bytes)
        layout = from_json(index.get("layout"), limit_bytes=slab.limit_bytes(held))
        about = About(
            tenant=launch.tenant,
            task=launch.task,
            epoch=launch.epoch,
            step=step,
            fingerprint=untrusted.table(index, "fingerprint"),
            dump_damaged=dump_damaged,
        )
        if not isinstance(tensors := index.get("tensors"), dict):
            raise Nonsense("tensors must be a table")
        return checkpoint.write(
            *(held, layout, about),
            tensors=tensors,
            store=house.store,
            signer=house.signer,
            known=known,
            draft=checkpoint.draft(launch.task, launch.epoch) if awaited else "",
            beside=beside,
            cipher=cipher,
        )
    except (BadIndex, BadLayout, BadSlab, Nonsense) as error:
        raise OutOfStep(str(error)) from error


def keep_marked(image: Saving, launch: Launch, house: House) -> Written:
    """Store an image of a command again, as one whose processes a dump has damaged since; raises
    Damaged, OSError.

    Its chunks are in the store, so only a manifest is written.
    """
    manifest = house.store.manifest(launch.tenant, image.sha256, key=image.key)
    about = replace(manifest.about, task=launch.task, epoch=launch.epoch, dump_damaged=True)
    marked = replace(manifest, about=about)
    body = house.signer.sealed(manifests.encode(marked))
    return Written(
        sha256=house.store.put_manifest(launch.tenant, body),
        size_bytes=marked.size_bytes,
        new_bytes=0,
        chunks=len(marked.addresses),
    )


def store(pieces: Iterator[memoryview], size: int, house: House) -> JSON:
    """Store an output from `received`; return its description.

    Raises OutOfStep, or any error of the store.
    """
    try:
        sha256, size_bytes = house.cache.stored(pieces, size, house.store)
    except OutOfStep:
        raise
    except Exception:
        for _ in pieces:  # so that the next output begins at its start
            pass
        raise
    return {"sha256": sha256, "size_bytes": size_bytes}


def publish(pieces: Iterator[memoryview], size: int, house: House) -> JSON:
    """Store an output that becomes a datablock; also return its summary. Raises if it holds no
    tensors.
    """
    head = bytearray()

    def looked_at() -> Iterator[memoryview]:
        for piece in pieces:
            head.extend(piece[: HEAD_BYTES - len(head)])
            yield piece

    kept = store(looked_at(), size, house)
    try:
        return {**kept, **tensor_file.read(bytes(head), size).summary()}
    except BadTensorFile as error:
        raise OutOfStep(
            f"what it publishes cannot be read as a file of tensors: {error}"
        ) from error


def received(bulk: socket.socket, size: int, read: Callable[[], None]) -> Iterator[memoryview]:
    """Yield the bytes that a resident sends, piece by piece; all pieces use the same buffer.

    `read` is called when all bytes have arrived. Raises OutOfStep.
    """
    left, room = size, memoryview(bytearray(min(size, _PIECE)))
    while left:
        try:
            came = bulk.recv_into(room, min(left, _PIECE), socket.MSG_WAITALL)
        except OSError as error:
            raise OutOfStep(f"{left} of {size} bytes did not come: {error}") from error
        if not came:
            raise OutOfStep(f"{left} of {size} bytes did not come")
        left -= came
        yield room[:came].toreadonly()
    read()
