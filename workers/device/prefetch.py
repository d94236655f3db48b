"""Prefetches code, inputs and images for tasks that are expected here, before their launch.

While a part of a graph runs here, the inputs of the next part are fetched as they are made
elsewhere.

While a task is being moved here, its image is fetched in rounds; each round writes only changed
chunks. When the task stops, its last image is fetched while it is still being written
(`checkpoint.follow`). The Launch then takes over the slab and fetches what is missing. Chunks of a
command's processes stay in the device worker's own memory until the Launch.

Prefetched data is verified when it arrives. The slab then belongs to this device worker alone,
until a resident starts with it. Prefetching is only an optimization: whatever is lost here is
fetched again at the launch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from app.core.model.protocol.messages import CheckpointRef, ExpectedTask, Launch
from app.core.model.provisions.folder import FOLDER
from app.storage.store import Damaged
from workers.device import store_io
from workers.device.store_io import Fetched, NotFetched
from workers.process import slab
from workers.transfer import checkpoint
from workers.transfer.checkpoint import FoundImage
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]

AGAIN_S = 2.0  # until the retry of a failed fetch
REMEMBERED = 10_000  # most prefetched inputs whose way is remembered
LOOK_S = 0.05  # interval of looks into the store for an image being written


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchedImage:
    """A prefetched image in `slab`; `fetched_us` is how long the fetch took."""

    slab: int
    found: FoundImage
    fetched_us: int

    @property
    def held_bytes(self) -> int:
        return self.found.layout.end + sum(map(len, self.found.beside.values()))


class Coming(threading.Thread):
    """Prefetches one task.  Only this thread touches the slab until the thread has ended."""

    def __init__(
        self, entry: ExpectedTask, house: House, came: dict[str, str], happened: Callable[[], None]
    ) -> None:
        """Start the thread. It records in `came`, by SHA-256, how each input came that it
        fetches.
        """
        super().__init__(name=f"ahead {entry.task}", daemon=True)
        self.entry, self.house, self.came, self.happened = entry, house, came, happened
        self.ahead: PrefetchedImage | None = None
        self._told = threading.Event()  # set if there is new work, or no more work
        self._over = self._unwanted = self._followed = False
        self.start()

    # --- from the supervisor's thread ---

    def go_on(self, entry: ExpectedTask) -> None:
        # the key is sealed anew each time
        if entry != replace(self.entry, image_key=entry.image_key):
            self.entry = entry
            self._told.set()

    def drop(self) -> None:
        """Give up: the task does not come here; free the data as soon as possible."""
        self._unwanted = self._over = True
        self._told.set()

    def taken(self) -> PrefetchedImage | None:
        """Hand the slab over, as the task is launched here.

        If a fetch is in progress, waits for its end.
        """
        self._over = True
        self._told.set()
        self.join()
        return self.ahead

    # --- this thread ---

    def run(self) -> None:
        while not self._over:
            try:
                self._work()
            except (NotFetched, Damaged, OSError) as error:
                log.warning("%s: not prefetched yet: %s", self.name, error)
                self._wait(AGAIN_S)
            except Exception:
                log.exception("%s: prefetch failed; the data is fetched at the launch", self.name)
                break
        if self._unwanted and self.ahead is not None:
            os.close(self.ahead.slab)

    def _work(self) -> None:
        """Do the next possible step, or wait until there is one."""
        self._told.clear()
        entry, image = self.entry, self.entry.image
        if image is None:
            self._get_ready(entry)
            self._wait(None)
        elif self._followed:
            self._wait(None)
        elif self.ahead is None or self.ahead.found.sha256 != image.sha256:
            self._fetch(entry, image)
        elif self.house.store.place.is_near:
            # a store on this machine is fast, and shows an image only when it is complete: nothing
            # to follow
            self._wait(None)
        else:
            self._follow(entry, image)

    def _wait(self, seconds: float | None) -> None:
        if not self._over:
            self._told.wait(seconds)

    def _get_ready(self, entry: ExpectedTask) -> None:
        """Fetch its code, its packages and its inputs to the disk of this host."""
        if entry.environment:
            store_io.held_environment(entry.environment, self.house).close()
        store_io.unpack(entry.bundle, self.house)
        for source in entry.inputs:
            if source["size_bytes"] <= self.house.cache.limit_bytes:
                fd, way = store_io.opened(source, self.house, {})
                try:
                    if source.get("format") == FOLDER:
                        os.close(store_io.built_folder(source, fd, self.house).lock)
                finally:
                    os.close(fd)
                if way != "here":
                    self.came[source["sha256"]] = way

    def _fetch(self, entry: ExpectedTask, image: CheckpointRef) -> None:
        self._get_ready(entry)

        def fetched(held: int, before: FoundImage | None) -> FoundImage:
            return store_io.fill(
                *(held, image),
                tenant=entry.tenant,
                store=self.house.store,
                before=before,
                ciphers=store_io.opened_image_key(entry, self.house),
                ahead_bytes=self.house.host_memory_bytes,
            )

        self._replace(fetched)

    def _follow(self, entry: ExpectedTask, image: CheckpointRef) -> None:
        """Wait for the image of the task's pause.

        Fetch it while the other device still writes it.
        """

        def look_again() -> bool:
            self._told.wait(LOOK_S)
            return not self._told.is_set()

        def followed(held: int, before: FoundImage | None) -> FoundImage | None:
            assert before is not None
            return checkpoint.follow(
                checkpoint.draft(entry.task, entry.epoch),
                into=held,
                tenant=entry.tenant,
                key=image.key,
                store=self.house.store,
                before=before,
                wait=look_again,
                ciphers=store_io.opened_image_key(entry, self.house),
                ahead_bytes=self.house.host_memory_bytes,
            )

        self._followed = self._replace(followed)

    def _replace(self, by: Callable[[int, FoundImage | None], FoundImage | None]) -> bool:
        """Read another image into the slab, over the present one; if that fails, there is no image
        any more.
        """
        began_s, before = time.monotonic(), self.ahead
        held = slab.made(self.house.host_memory_bytes) if before is None else before.slab
        try:
            came = by(held, None if before is None else before.found)
        except BaseException:
            self.ahead = None
            os.close(held)
            raise
        if came is None:
            return False
        took_us = int((time.monotonic() - began_s) * 1e6)
        self.ahead = PrefetchedImage(slab=held, found=came, fetched_us=took_us)
        self.happened()
        return True


def fetch(
    launch: Launch, house: House, came: dict[str, str], taken: Callable[[], PrefetchedImage | None]
) -> Fetched:
    """Fetch all that a launch names; of its image only what was not prefetched.

    `taken` hands over the prefetched image, if there is one. `came` says how each prefetched input
    came, by its SHA-256.
    """
    here = taken()
    if here is not None and not launch.images:
        os.close(here.slab)
        here = None
    if here is None:
        return store_io.fetch(launch, house, came)
    return store_io.fetch(launch, house, came, held=here.slab, before=here.found)


class Lookout:
    """Prefetches all tasks that are expected here.  Only the supervisor's thread uses it."""

    def __init__(self, house: House, happened: Callable[[], None]) -> None:
        """Set up; `happened` is called from other threads when an image has come."""
        self.house, self.happened = house, happened
        self.coming: dict[str, Coming] = {}
        self.came: dict[str, str] = {}  # inputs that no launch has taken yet: SHA-256 -> way

    @property
    def held_bytes(self) -> int:
        """The host memory of all prefetched images."""
        found = [coming.ahead for coming in self.coming.values()]
        return sum(ahead.held_bytes for ahead in found if ahead is not None)

    def expect(self, entries: Iterable[ExpectedTask], *, here: Iterable[str]) -> None:
        """Prefetch exactly these tasks; tasks that are already `here` need nothing."""
        launched = set(here)
        while len(self.came) > REMEMBERED:
            del self.came[next(iter(self.came))]
        wanted = {entry.task: entry for entry in entries if entry.task not in launched}
        for task in self.coming.keys() - wanted.keys():
            self.coming.pop(task).drop()
        for task, entry in wanted.items():
            if task in self.coming:
                self.coming[task].go_on(entry)
            else:
                self.coming[task] = Coming(entry, self.house, self.came, self.happened)

    def launched(self, task: str) -> Callable[[], PrefetchedImage | None]:
        """Return a function that hands over a task's prefetched image and may wait for it."""
        coming = self.coming.pop(task, None)
        return (lambda: None) if coming is None else coming.taken

    def view(self) -> list[JSON]:
        """Return the prefetched images in the form of `Alive.ahead`."""
        held = [(task, coming.ahead) for task, coming in self.coming.items()]
        return [
            {
                "task": task,
                "sha256": ahead.found.sha256,
                "bytes": ahead.found.fetched_bytes,
                "us": ahead.fetched_us,
            }
            for task, ahead in held
            if ahead is not None
        ]

    def close(self) -> None:
        for coming in self.coming.values():
            coming.drop()
        self.coming.clear()
