"""Limits with control groups what the programs take that prepare a host for its tasks.

Such a helper builds packages or unpacks a container image.  It is no resident, so its memory does
not count for the device: the helpers of a device worker have a group beside that of the residents.
When a helper has ended, its group is removed, with every process that is left in it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.process.isolation import sandbox
from workers.process.isolation.cgroups import Bounds, ControlGroups

HELPER_BYTES = 8 * 2**30  # memory of one helper, with its temporary files
HELPERS = 4  # most at a time that have their whole memory


class HelperGroups:
    """Owns the groups of a device worker's helpers.  All threads may use it."""

    def __init__(self) -> None:
        self._groups: ControlGroups | None = None
        self._lock = threading.Lock()
        self._last = 0

    def open(self, device: str, run: Path) -> None:
        bounds = Bounds(
            device_memory_bytes=HELPERS * HELPER_BYTES,
            resident_memory_bytes=HELPER_BYTES,
            residents_max=HELPERS,
            threads=1,
            nodes=tuple(sandbox.device_nodes(())),
        )
        with self._lock:
            self._groups = ControlGroups.made(f"{device}-helpers", run, bounds)

    def close(self) -> None:
        with self._lock:
            if self._groups is not None:
                self._groups.close()
            self._groups = None

    @contextmanager
    def of_helper(self) -> Iterator[list[str]]:
        """Yield the paths of the groups that a new helper joins; [] if no limit works here."""
        with self._lock:
            self._last += 1
            groups, name = self._groups, f"helper-{self._last}"
            paths = groups.make(name) if groups is not None else []
        try:
            yield paths
        finally:
            with self._lock:
                if groups is not None and groups is self._groups:
                    groups.remove(name)
