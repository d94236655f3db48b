"""Keeps the unpacked container images of a host, each under its digest.

A process of its own unpacks an image, once for all devices of the host
(`workers.transfer.installs.image_unpacker`). From then on the image never changes; commands see it
read-only. If a registered folder changes, it has another digest, so it is unpacked again at the
next launch; running tasks keep the image that they have.

An image of a registry is fetched before, by another process
(`workers.transfer.installs.image_fetcher`), and kept under the digest that its tasks name: it is
fetched once for all of them. Registered images are kept apart from those. So a task that names the
digest of a registered image, which its tenant may not use, gets it from the registry or not at all.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.core.model.provisions.registry_image import RegistryImage
from app.core.model.storable_text import is_storable
from app.storage.backend import make_private
from workers.process.isolation import host_mounts
from workers.process.isolation.helper_groups import HelperGroups
from workers.process.isolation.host_mounts import HostMount
from workers.transfer.installs import image_fetcher, image_source
from workers.transfer.installs.image_source import BadContainerImage
from workers.transfer.installs.image_unpacker import REFUSED
from workers.transfer.installs.kept_trees import ABOUT, KeptTrees, make_read_only

JSON = dict[str, Any]

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
UNPACK_S = 1800.0  # time limit for unpacking one image
FETCH_S = 1800.0  # time limit for fetching one image
LONGEST_S = FETCH_S + UNPACK_S
DIGEST_S = 120.0  # limit for reading the digest of a file
MAX_VARIABLES = 200
MAX_VARIABLES_BYTES = 64 * 1024  # length of all names and values together
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,126}")
_TOLD = 2000
_SLACK_S = 5.0  # a program that knows its limit says more when it ends by itself
_FROM_REGISTRY = "registry-"  # prefix of the names under which images of registries are kept
_CALLED = {"image_unpacker": "unpacker", "image_fetcher": "fetcher"}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_NETWORK = (*_PROXIES, *map(str.lower, _PROXIES), *image_fetcher.CERTIFICATES)
_DIGESTS_KEPT = 1000
#: (device, inode, size, times) of a file -> the digest of its container image.
_digests: dict[tuple[int, ...], str] = {}


class NotUnpacked(Exception):
    """Raised when a container image cannot be unpacked here; the message is for the task's
    owner.
    """

    step = "unpacked"  # what did not succeed


class NotFromRegistry(NotUnpacked):
    """Raised when a container image cannot be fetched from its registry."""

    step = "fetched"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldContainerImage:
    """An unpacked container image that is in use, until `fd` is closed."""

    root: Path
    digest: str
    variables: Mapping[str, str]
    fd: int
    took_us: int  # time that unpacking took, maybe long ago
    is_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerImages(KeptTrees):
    """Manages the unpacked container images of a host, of up to `limit_bytes` on disk."""

    helpers: HelperGroups = field(default_factory=HelperGroups, compare=False)

    def opened(self, name: str, place: HostMount) -> HeldContainerImage:
        """Return the image that is registered at a place; unpack it if that is not done yet.

        If another device worker is unpacking it, waits for that. Raises NotUnpacked.
        """
        digest = self._digest(place)
        held = self._held(digest, digest, lambda: self._unpack(digest, digest, place))
        try:
            self._note(name, digest)
        except BaseException:
            os.close(held.fd)
            raise
        return held

    def fetched(
        self, image: RegistryImage, program: str, *, is_plain_http: bool
    ) -> HeldContainerImage:
        """Return an image of a registry; fetch and unpack it if that is not done yet.

        `program` is skopeo. Raises NotUnpacked.
        """
        key = f"{_FROM_REGISTRY}{image.sha256}"

        def make() -> None:
            with self._draft() as making:
                order = {
                    "image": asdict(image),
                    "program": program,
                    "is_plain_http": is_plain_http,
                }
                try:
                    said = self._run("image_fetcher", order, making, FETCH_S)
                except NotUnpacked as error:
                    raise NotFromRegistry(str(error)) from error
                layout = HostMount(str((making / image_fetcher.LAYOUT).absolute()), ".")
                self._unpack(key, str(said["digest"]), layout)
            log.info("fetched container image %s", image.at(image.sha256))

        return self._held(key, image.sha256, make)

    def _held(self, key: str, digest: str, make: Callable[[], None]) -> HeldContainerImage:
        """Share the image that is kept as `key`; `make` makes it if it is not there."""
        made = list[str]()

        def make_with_room() -> None:
            make()
            self._make_room(key)
            made.append(key)

        if (held := self.shared(key, make_with_room, time.monotonic() + 2 * LONGEST_S)) is None:
            raise NotUnpacked("another task has been unpacking it for too long")
        fd, noted = held
        return HeldContainerImage(
            root=self.built(key) / "root",
            digest=digest,
            variables=noted["variables"],
            fd=fd,
            took_us=noted["took_us"],
            is_new=bool(made),
        )

    @property
    def noted_ns(self) -> tuple[int, int]:
        """Return a mark that differs after each change of what `shown` returns."""
        try:
            return self.changed_ns, (self.folder / "names").stat().st_mtime_ns
        except FileNotFoundError:
            return self.changed_ns, 0

    def shown(self) -> dict[str, JSON]:
        """Return digest, size in bytes and unpacking time in microseconds, by name."""
        found = {}
        for note in sorted((self.folder / "names").glob("*")):
            digest = note.read_text()
            if (about := self.about(digest)) is not None:
                sizes = {one: about[one] for one in ("size_bytes", "took_us")}
                found[note.name] = {"digest": digest, **sizes}
        return found

    # --- files ---

    def _note(self, name: str, digest: str) -> None:
        """Note the newest digest of a name."""
        note = self.folder / "names" / name
        make_private(note.parent)
        if not note.exists() or note.read_text() != digest:
            draft = self.work / f"note-{uuid.uuid4().hex[:12]}"
            draft.write_text(digest)
            draft.replace(note)

    # --- unpacking ---

    def _digest(self, place: HostMount) -> str:
        """Return the digest of the image at a place.

        Only the unpacker, in its sandbox, reads a tar file; the digest of each file is computed
        only once.
        """
        try:
            fd = host_mounts.opened(place)
        except OSError as error:
            raise NotUnpacked(f"it cannot be opened: {error.strerror}") from None
        try:
            state = os.fstat(fd)
            if stat.S_ISDIR(state.st_mode):
                with image_source.opened(fd) as found:
                    return found.digest
        except BadContainerImage as error:
            raise NotUnpacked(str(error)) from error
        finally:
            os.close(fd)
        key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        if (known := _digests.get(key)) is not None:
            return known
        with self._draft() as making:
            order = {"root": place.root, "below": place.below, "digest": ""}
            found_here = str(self._run("image_unpacker", order, making, DIGEST_S)["digest"])
        if len(_digests) >= _DIGESTS_KEPT:
            _digests.clear()
        _digests[key] = found_here
        return found_here

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        make_private(self.work)
        making = self.work / f"making-{uuid.uuid4().hex[:12]}"
        making.mkdir()
        try:
            yield making
        finally:
            self.remove(making)

    def _unpack(self, key: str, digest: str, place: HostMount) -> None:
        """Unpack the image, to be kept as `key`; this process holds its lock alone."""
        began_s = time.monotonic()
        with self._draft() as making:
            order = {"root": place.root, "below": place.below, "digest": digest}
            said = self._run("image_unpacker", order, making, UNPACK_S)
            made = making / "tree"
            size_bytes = make_read_only(made)
            took_us = int((time.monotonic() - began_s) * 1e6)
            about = {"size_bytes": size_bytes, "took_us": took_us}
            made.chmod(0o755)
            (made / ABOUT).write_text(json.dumps({**about, "variables": _fit(said["variables"])}))
            make_private(self.built(key).parent)
            made.rename(self.built(key))
            self.built(key).chmod(0o555)
        left = said["skipped"]
        told = f"; {left} devices, pipes or unreadable files left out" if left else ""
        log.info("unpacked container image %s in %.1f s%s", digest[:12], took_us / 1e6, told)

    def _run(self, program: str, order: JSON, making: Path, limit_s: float) -> JSON:
        """Run a program of this package in its draft folder; return what it says.

        Raises NotUnpacked.
        """
        order = {
            **order,
            "making": str(making.absolute()),
            "limit_bytes": self.limit_bytes,
            "limit_s": math.ceil(limit_s),
        }
        boot = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        boot += f"from workers.transfer.installs.{program} import main; main()"
        try:
            with self.helpers.of_helper() as groups:
                done = subprocess.run(
                    [sys.executable, "-B", "-c", boot, json.dumps({**order, "groups": groups})],
                    env={"LANG": "C.UTF-8", **_environment(program)},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    cwd="/",
                    timeout=limit_s + _SLACK_S,
                    check=False,
                )
        except subprocess.TimeoutExpired as error:
            raise NotUnpacked(f"it was not read within {limit_s:g} s") from error
        told = done.stderr.decode("utf-8", "replace").strip()[-_TOLD:]
        if done.returncode == REFUSED:
            raise NotUnpacked(told)
        if done.returncode:  # the program's message names paths of this host
            log.error("%s ended with status %d: %s", program, done.returncode, told)
            raise NotUnpacked(f"the {_CALLED[program]} ended with status {done.returncode}")
        said: JSON = json.loads(done.stdout)
        return said

    def _make_room(self, newest: str) -> None:
        """Remove the images that were used longest ago, until the other images are within the
        limit.
        """
        self.remove_left_drafts(2 * LONGEST_S)
        sizes = [about["size_bytes"] for one in self.by_use() if (about := self.about(one))]
        self.let_go_unused(sum(sizes) - self.limit_bytes, {newest})


def _environment(program: str) -> dict[str, str]:
    """Return what a program needs of our environment: the path of programs, and if it reaches the
    network, the proxy and the certificates of the host.
    """
    passed = ["PATH", *(_NETWORK if program == "image_fetcher" else ())]
    return {name: os.environ[name] for name in passed if name in os.environ}


def _fit(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, if a process can have so many; raises NotUnpacked otherwise."""
    fit = {
        name: value
        for name, value in variables.items()
        if _NAME.fullmatch(name) and is_storable(value)
    }
    size = sum(len(name) + len(value.encode()) for name, value in fit.items())
    if len(fit) > MAX_VARIABLES or size > MAX_VARIABLES_BYTES:
        told = f"{len(fit)} variables of {size} bytes; a command can have {MAX_VARIABLES}"
        raise NotUnpacked(f"it sets {told} of {MAX_VARIABLES_BYTES} bytes together")
    return fit
