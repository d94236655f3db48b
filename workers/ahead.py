"""What is fetched of tasks before they are launched here: code, inputs, and images in host memory.

While a leg of a graph runs here, what the next one takes is fetched as it is made elsewhere.

While a task is being moved here its image is fetched round by round; each round lays only what
changed over what is there.  When it stops, its last image is fetched while it is still being
written (`checkpoint.follow`).  The Launch then takes the memory over, and fetches what it lacks.

What lies ahead was verified when it came, and nobody else has the memory until a resident is born
with it.  It is only ever a start: whatever is lost here is fetched again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from app.core.messages import Launch
from app.store import Damaged
from workers import checkpoint, slab, transfer
from workers.checkpoint import Found
from workers.house import House
from workers.transfer import Fetched, NotFetched

log = logging.getLogger(__name__)

JSON = dict[str, Any]

AGAIN_S = 2.0  # after a fetch that failed
REMEMBERED = 10_000  # inputs that were fetched
LOOK_S = 0.05  # so often a store is asked for what is being written


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """An image that lies in `slab`; `fetched_us` is how long it took to come."""

    slab: int
    found: Found
    fetched_us: int


class Coming(threading.Thread):
    """One task on its way here.  Nobody but this thread touches the memory until it has ended."""

    def __init__(
        self, entry: JSON, house: House, came: dict[str, str], happened: Callable[[], None]
    ) -> None:
        """Into `came` is written by which way inputs came, by SHA-256."""
        super().__init__(name=f"ahead {entry['task']}", daemon=True)
        self.entry, self.house, self.came, self.happened = entry, house, came, happened
        self.ahead: Ahead | None = None
        self._told = threading.Event()  # there is something else to do, or nothing more
        self._over = self._unwanted = self._followed = False
        self.start()

    # --- from the supervisor's thread ---

    def go_on(self, entry: JSON) -> None:
        if entry != self.entry:
            self.entry = entry
            self._told.set()

    def drop(self) -> None:
        """It does not come; what is here is given up as soon as it can be."""
        self._unwanted = self._over = True
        self._told.set()

    def taken(self) -> Ahead | None:
        """It is launched here: the memory is the caller's, who waits for what is under way."""
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
                log.warning("%s: not fetched yet: %s", self.name, error)
                self._wait(AGAIN_S)
            except Exception:
                log.exception("%s: failed; it is fetched when it is launched", self.name)
                break
        if self._unwanted and self.ahead is not None:
            os.close(self.ahead.slab)

    def _work(self) -> None:
        """One thing that can be done now; or wait until there is one."""
        self._told.clear()
        entry, image = self.entry, self.entry["image"]
        if image is None:
            self._get_ready(entry)
            self._wait(None)
        elif self._followed:
            self._wait(None)
        elif self.ahead is None or self.ahead.found.sha256 != image["sha256"]:
            self._fetch(entry)
        elif self.house.store.place.is_near:
            self._wait(None)  # there it takes no time, and is seen only when all of it is there
        else:
            self._follow(entry)

    def _wait(self, seconds: float | None) -> None:
        if not self._over:
            self._told.wait(seconds)

    def _get_ready(self, entry: JSON) -> None:
        """Its code and its inputs, on the disk of this host."""
        transfer.unpack(entry["bundle"], self.house)
        for source in entry["inputs"]:
            if source["size_bytes"] <= self.house.cache.limit_bytes:
                fd, way = transfer.opened(source, self.house, {})
                os.close(fd)
                if way != "here":
                    self.came[source["sha256"]] = way

    def _fetch(self, entry: JSON) -> None:
        self._get_ready(entry)
        image = entry["image"]

        def fetched(held: int, before: Found | None) -> Found:
            return transfer.fill(
                held, image, tenant=entry["tenant"], store=self.house.store, before=before
            )

        self._replace(fetched)

    def _follow(self, entry: JSON) -> None:
        """Wait for the image of the pause, and fetch it while it is being written."""

        def look_again() -> bool:
            self._told.wait(LOOK_S)
            return not self._told.is_set()

        def followed(held: int, before: Found | None) -> Found | None:
            assert before is not None
            return checkpoint.follow(
                checkpoint.draft(entry["task"], entry["epoch"]),
                into=held,
                tenant=entry["tenant"],
                key=entry["image"]["key"],
                store=self.house.store,
                before=before,
                wait=look_again,
            )

        self._followed = self._replace(followed)

    def _replace(self, by: Callable[[int, Found | None], Found | None]) -> bool:
        """Lay another image over the one that is here; if that fails nothing is here any more."""
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
        self.ahead = Ahead(slab=held, found=came, fetched_us=took_us)
        self.happened()
        return True


def fetch(
    launch: Launch, house: House, came: dict[str, str], taken: Callable[[], Ahead | None]
) -> Fetched:
    """All that a launch names; of its image only what does not lie here already."""
    here = taken()
    if here is not None and not launch.images:
        os.close(here.slab)
        here = None
    if here is None:
        return transfer.fetch(launch, house, came)
    return transfer.fetch(launch, house, came, held=here.slab, before=here.found)


class Lookout:
    """All tasks that are expected here; used by the supervisor's thread alone."""

    def __init__(self, house: House, happened: Callable[[], None]) -> None:
        """`happened` is called from other threads, when an image has come."""
        self.house, self.happened = house, happened
        self.coming: dict[str, Coming] = {}
        self.came: dict[str, str] = {}  # inputs that no launch has taken yet: SHA-256 -> way

    @property
    def held_bytes(self) -> int:
        """The host memory that it takes."""
        found = [coming.ahead for coming in self.coming.values()]
        return sum(ahead.found.layout.end for ahead in found if ahead is not None)

    def expect(self, entries: Iterable[JSON], *, here: Iterable[str]) -> None:
        """These and no others; those who are `here` are launched already, and need nothing."""
        launched = set(here)
        while len(self.came) > REMEMBERED:
            del self.came[next(iter(self.came))]
        wanted = {entry["task"]: entry for entry in entries if entry["task"] not in launched}
        for task in self.coming.keys() - wanted.keys():
            self.coming.pop(task).drop()
        for task, entry in wanted.items():
            if task in self.coming:
                self.coming[task].go_on(entry)
            else:
                self.coming[task] = Coming(entry, self.house, self.came, self.happened)

    def launched(self, task: str) -> Callable[[], Ahead | None]:
        """Gives up what lies ahead of a task, to a thread that may wait for it."""
        coming = self.coming.pop(task, None)
        return (lambda: None) if coming is None else coming.taken

    def view(self) -> list[JSON]:
        """What is here, as `Alive.ahead` says it."""
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
