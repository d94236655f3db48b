"""Finds out which mounts this host can show, and reports each of them as `mount:NAME`, or as
`image:NAME` if it is a container image.

The island names all mounts with their paths. The host shows a path only below a root that its own
administrator allowed, and only behind the sandbox layer `files`. A look at a file system may hang
(NFS), so a thread does it, and at most one at a time.

The paths are written to a file. The device's next worker looks at them before its first report, so
a restart takes no mount away from tasks.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.core.model.protocol.messages import Launch
from app.core.model.protocol.wellformed import is_path
from app.core.model.provisions.mounts import FOLDER, IMAGE, digest, offer_of
from workers.device.heartbeat import Rhythm, now_us
from workers.process.isolation import host_mounts, sandbox
from workers.process.isolation.device_access import DeviceAccess
from workers.process.isolation.host_mounts import HostMount
from workers.process.isolation.sandbox import INPUTS
from workers.transfer.folder_cache import CONTENT, BuiltFolder
from workers.transfer.host_context import House
from workers.transfer.installs.container_images import HeldContainerImage

log = logging.getLogger(__name__)

AGAIN_US = 30_000_000  # interval of looks: a file system may come and go
PATIENCE_US = 5_000_000  # how long the first report waits for a look, which may hang
LAYER = "files"  # the sandbox layer without which no mount is shown

JSON = dict[str, Any]


class CannotMount(Exception):
    """Raised when a task cannot see its mounts on this host; the message is for its owner."""


class DeviceMounts:
    """Tracks what the device knows about mounts. Only the supervisor's thread uses it."""

    def __init__(self, house: House, receive: Callable[[Any], None], rhythm: Rhythm) -> None:
        self.house, self.rhythm = house, rhythm
        self._receive = receive
        self._known: dict[str, Mapping[str, str]] = {FOLDER: {}, IMAGE: {}}  # sort -> name -> path
        self._noted_ns = (0, 0)
        self._unpacked: JSON = {}  # report of unpacked container images
        self._due_us = 0
        self._looks = False
        self._troubles: dict[str, str] = {}
        self._is_awaited = False  # the first report waits for the next look
        self._patience_us: int | None = None  # when this wait ends
        self.shown: tuple[str, ...] = ()

    def start(self) -> None:
        """Read the paths that the device worker before has written down."""
        if self.house.image_registries and not self.house.skopeo:
            log.warning(
                "%s fetches no container images: skopeo is missing (Debian package skopeo)",
                self.house.device,
            )
        if self.house.mount_roots and self._file.exists():
            try:
                known = json.loads(self._file.read_text())
                if all(isinstance(path, str) for path in known.values()):
                    known = {FOLDER: known, IMAGE: {}}  # an earlier version wrote folders only
                for sort in self._known:
                    self._known[sort] = {n: p for n, p in known[sort].items() if is_path(p)}
                self._is_awaited = True
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("cannot read %s, which is deleted: %s", self._file, error)
                self._file.unlink()

    @property
    def _file(self) -> Path:
        return self.house.folder / "mounts.json"

    @property
    def is_judged(self) -> bool:
        """True if the first look at the known mounts has ended, or has taken too long to wait for
        it.
        """
        return not self._looks or self._patience_us is None or now_us() >= self._patience_us

    def facts(self) -> JSON:
        """Return facts for the island: a digest of the mounts that the device knows, and the
        container images that lie unpacked here.
        """
        if not self.house.mount_roots:
            return {}
        known = {"mounts": digest(self._known[FOLDER]), "images": digest(self._known[IMAGE])}
        images = self.house.images
        if (noted_ns := images.noted_ns) != self._noted_ns:
            self._noted_ns, self._unpacked = noted_ns, images.shown()
        return {**known, "unpacked": self._unpacked} if self._unpacked else known

    def offers(self, walls: Sequence[str]) -> list[str]:
        """Return an offer for each mount that is shown here, and for each registry from which this
        host fetches container images; `walls` are the sandbox layers here.
        """
        fetches = self.house.skopeo and LAYER in walls
        registries = [one.need for one in self.house.image_registries] if fetches else []
        return [*self.shown, *dict.fromkeys(registries)]

    def told(self, paths: Mapping[str, str] | None, sort: str) -> None:
        """Take in the paths of all mounts of a sort; None means that they have not changed."""
        if paths is not None and paths != self._known[sort]:
            self._known[sort], self._due_us = dict(paths), 0
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps(self._known))
            draft.replace(self._file)

    def _paths(self) -> dict[str, tuple[str, str]]:
        """Return path and sort of each mount, by offer."""
        return {
            offer_of(name, sort): (path, sort)
            for sort, known in self._known.items()
            for name, path in known.items()
        }

    def look(self, walls: list[str]) -> None:
        """Begin to look at all mounts, if it is time; `walls` are the sandbox layers here."""
        if self._looks or now_us() < self._due_us or LAYER not in walls or not self._paths():
            return
        self._looks, paths = True, self._paths()
        if self._is_awaited:
            self._is_awaited, self._patience_us = False, now_us() + PATIENCE_US
        thread = threading.Thread(target=self._look, args=(paths,), name="mounts", daemon=True)
        thread.start()

    def _look(self, paths: Mapping[str, tuple[str, str]]) -> None:
        try:
            troubles = {offer: self._trouble(*place) for offer, place in paths.items()}
        except Exception:
            log.exception("%s: cannot look at its mounts", self.house.device)
            troubles = dict.fromkeys(paths, "it cannot be looked at")
        self._receive(lambda: self._looked(paths, troubles))

    def _trouble(self, path: str, sort: str) -> str:
        place = host_mounts.place_of(path, self.house.mount_roots, may_be_file=sort == IMAGE)
        if place is None:
            return "it lies below no root that this host allows (ROUNDHOUSE_MOUNT_ROOTS)"
        return host_mounts.trouble(place, self.house.own_folders)

    def _looked(self, paths: Mapping[str, tuple[str, str]], troubles: dict[str, str]) -> None:
        self._looks, self._patience_us = False, None
        self._due_us = now_us() + AGAIN_US if paths == self._paths() else 0
        for offer, why in troubles.items():
            if why and self._troubles.get(offer) != why:
                log.warning("%s does not offer %s: %s", self.house.device, offer, why)
        self._troubles = troubles
        shown = tuple(sorted(offer for offer, why in troubles.items() if not why))
        if shown != self.shown:
            self.shown = shown
            self.rhythm.happened = True

    # --- at a launch ---

    def of_launch(
        self, launch: Launch, walls: list[str], access: DeviceAccess
    ) -> tuple[HostMount, ...]:
        """Return the folders that the task sees; raises CannotMount. Does not read the disk."""
        if launch.spec.mounts and LAYER not in walls:
            raise CannotMount(
                f"It has mounts, and this host shows none without the sandbox layer {LAYER!r}."
            )
        for target in launch.spec.mounts:
            if over := sandbox.overlaid(target, access.nodes, access.folders):
                raise CannotMount(f"Nothing can be shown at {target}: {over} is there.")
        return tuple(self._placed(launch, target) for target in sorted(launch.spec.mounts))

    def check_image(
        self, image: HeldContainerImage | None, mounts: Sequence[HostMount], walls: list[str]
    ) -> None:
        """Raise CannotMount if the task cannot have its container image, or one of its mounts in
        the image.
        """
        if image is None:
            return
        if LAYER not in walls:
            raise CannotMount(
                "It has a container image, and this host shows none without the sandbox layer "
                f"{LAYER!r}."
            )
        for mount in mounts:
            if why := sandbox.trouble_in_image(image.root, mount.target):
                raise CannotMount(f"Nothing can be shown at {mount.target}: {why}.")

    def of_folders(
        self, folders: Mapping[str, BuiltFolder], walls: list[str]
    ) -> tuple[HostMount, ...]:
        """Return the folders that the task takes as inputs; raises CannotMount."""
        if folders and LAYER not in walls:
            raise CannotMount(
                "It takes a folder as input, and this host shows none without the sandbox layer "
                f"{LAYER!r}."
            )
        return tuple(
            HostMount(str(one.entry), CONTENT, str(INPUTS / port)) for port, one in folders.items()
        )

    def _placed(self, launch: Launch, target: str) -> HostMount:
        name, path = launch.spec.mounts[target], launch.mounts.get(target)
        if path is None:
            raise CannotMount(
                f"Its tenant may not use the mount {name} any more, or it was removed."
            )
        place = host_mounts.place_of(path, self.house.mount_roots, target)
        if place is None:
            raise CannotMount(f"This host may not show the mount {name}.")
        return place
