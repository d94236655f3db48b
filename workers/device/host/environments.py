"""Reports which environments lie on this host, and for which versions of Python it can build them.

It also has the environments built for which tasks wait (`workers.transfer.installs.builds_ahead`).
The island names their locks, and gives a task a device only on a host where its environment is
ready. Each report has the state of every lock that is wanted and not ready.

A thread searches for interpreters, as the search starts programs.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from workers.device.heartbeat import Rhythm
from workers.process import uv
from workers.process.uv import NoUv
from workers.transfer.host_context import House
from workers.transfer.installs import environments
from workers.transfer.installs.builds_ahead import BuildsAhead
from workers.transfer.installs.environments import PLATFORM_PYTHON

log = logging.getLogger(__name__)

JSON = dict[str, Any]


class DeviceEnvironments:
    """Owns the device's report of environments.  Only the supervisor's thread uses it."""

    def __init__(self, house: House, receive: Callable[[Any], None], rhythm: Rhythm) -> None:
        self.house, self.rhythm = house, rhythm
        self._receive = receive
        self._pythons: tuple[str, ...] = ()
        self._seen_ns = -1
        self._shown: dict[str, list[int]] = {}
        self._builds: BuildsAhead | None = None  # None if the host has no uv

    def start(self) -> None:
        """Offer environments of the platform's Python, and begin to look for others."""
        try:
            uv.program()
        except NoUv as error:
            log.warning("%s offers no environments: %s", self.house.device, error)
            return
        self._pythons = (PLATFORM_PYTHON,)
        self._builds = BuildsAhead(self.house.environments, self.house.store, self._happened)
        self._builds.start()
        threading.Thread(target=self._look, name="interpreters", daemon=True).start()

    def _look(self) -> None:
        try:
            found = tuple(sorted(environments.interpreters()))
        except (OSError, ValueError, KeyError, subprocess.SubprocessError, json.JSONDecodeError):
            log.exception("%s: cannot look for interpreters", self.house.device)
        else:
            self._receive(lambda: self._found(found))

    def _found(self, pythons: tuple[str, ...]) -> None:
        if pythons != self._pythons:
            self._pythons = pythons
            self.rhythm.happened = True

    def offers(self) -> list[str]:
        if not self._pythons:
            return []
        return [f"environment:{PLATFORM_PYTHON}", *(f"python:{one}" for one in self._pythons)]

    def told(self, locks: Sequence[str]) -> None:
        """Have exactly these environments built ahead, in this order."""
        if self._builds is not None and self._builds.want(locks):
            self._seen_ns = -1
            self.rhythm.happened = True  # the island sees that the builds are on their way

    def end(self) -> None:
        if self._builds is not None:
            self._builds.end()

    def facts(self) -> JSON:
        """Return size and build time of each environment, by its lock, and the state of those that
        are to be built.
        """
        wanted = () if self._builds is None else self._builds.wanted
        kept = self.house.environments
        if (changed_ns := kept.changed_ns) != self._seen_ns:
            self._seen_ns, self._shown = changed_ns, kept.shown(wanted)
        found: JSON = {"environments": self._shown} if self._shown else {}
        if self._builds is not None:
            open_ = (lock for lock in wanted if lock not in self._shown)
            found["builds"] = {lock: self._builds.state(lock) for lock in open_}
        return found

    def _happened(self) -> None:
        """Make the next report due now.  Called from the builds' thread."""
        self._receive(self._report)

    def _report(self) -> None:
        self.rhythm.happened = True
