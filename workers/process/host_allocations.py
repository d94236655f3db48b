"""Keeps what the supervisors of one host must know of each other's devices: their allocations.

A task may hold several devices of its host.  The supervisor of its home device runs its processes,
in a sandbox that shows all of them.  It takes from here how processes use the other devices, and
claims the memory that its task holds there.  The supervisors of these devices count the claims as
used, and have paused tasks make room.  It also has the other devices set as the preset of its task
says (`workers.device.host.device_presets`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workers.process.isolation.device_access import DeviceAccess, NoSuchDevice

JSON = dict[str, Any]
#: Sets a device for a task of the home device that is named, and tells once, in any thread, whether
#: that has failed.  None instead of settings: the task is no longer there.
SetPreset = Callable[[str, JSON | None, Callable[[Exception | None], None]], None]


@dataclass(slots=True)
class _Served:
    """Describes a device that is served now; any thread may call its functions."""

    kind: str
    access: DeviceAccess
    wake: Callable[[], None]  # lets the supervisor look at once
    set_preset: SetPreset
    has_room: bool = True  # False until its supervisor has made room for all claims
    claims: dict[str, int] = field(default_factory=dict)  # bytes, by home device


class HostAllocations:
    """Holds the devices that this process serves.  Each method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, _Served] = {}

    def serve(
        self,
        device: str,
        kind: str,
        access: DeviceAccess,
        wake: Callable[[], None],
        set_preset: SetPreset,
    ) -> None:
        with self._lock:
            before = self._served.get(device)
            claims = {} if before is None else before.claims
            self._served[device] = _Served(kind, access, wake, set_preset, claims=claims)

    def leave(self, device: str) -> None:
        """Serve the device no more; its tasks hold nothing on other devices, and want nothing set
        there.
        """
        self.claim(device, {})
        with self._lock:
            self._served.pop(device, None)
            others = [*self._served.values()]
        for one in others:
            one.set_preset(device, None, lambda error: None)

    def access(self, home: str, guests: Sequence[str]) -> DeviceAccess:
        """Return the access to a device and to further ones of its kind, in this order.

        A process sees them as devices 0, 1, ... Raises NoSuchDevice.
        """
        with self._lock:
            own, *others = (self._find(device) for device in (home, *guests))
        if wrong := [id for id, one in zip(guests, others, strict=True) if one.kind != own.kind]:
            raise NoSuchDevice(f"{wrong[0]} is not of kind {own.kind}")
        if not others:
            return own.access
        accesses = [one.access for one in (own, *others)]
        visible = {f"{own.kind.upper()}_VISIBLE_DEVICES": ",".join(one.id for one in accesses)}
        return replace(
            own.access,
            variables={**own.access.variables, **visible},
            nodes=tuple(dict.fromkeys(node for one in accesses for node in one.nodes)),
            folders=tuple(dict.fromkeys(shown for one in accesses for shown in one.folders)),
        )

    def _find(self, device: str) -> _Served:
        if (found := self._served.get(device)) is None:
            raise NoSuchDevice(f"the worker of this host does not serve {device}")
        return found

    def claim(self, home: str, claims: Mapping[str, int]) -> None:
        """Replace all that the tasks of `home` hold on other devices, in bytes by device."""
        with self._lock:
            changed = [
                one
                for id, one in self._served.items()
                if one.claims.get(home, 0) != claims.get(id, 0)
            ]
            for id, one in self._served.items():
                one.claims.pop(home, None)
                if id in claims:
                    one.claims[home] = claims[id]
            for one in changed:
                one.has_room = False
        for one in changed:
            one.wake()

    def claimed_bytes(self, device: str) -> int:
        """Return what tasks with other home devices hold on this device."""
        with self._lock:
            found = self._served.get(device)
            return 0 if found is None else sum(found.claims.values())

    def set_preset(
        self,
        device: str,
        home: str,
        wanted: JSON | None,
        then: Callable[[Exception | None], None],
    ) -> None:
        """Have a device set for a task of another home device (`SetPreset`).

        Raises NoSuchDevice.
        """
        with self._lock:
            found = self._find(device)
        found.set_preset(home, wanted, then)

    def note_room(self, device: str, *, has_room: bool) -> None:
        """Note whether the device has room for all that is claimed there."""
        with self._lock:
            found = self._served.get(device)
            if found is None or found.has_room == has_room:
                return
            found.has_room = has_room
            homes = [self._served[id] for id in found.claims if id in self._served]
        for home in homes if has_room else ():
            home.wake()

    def have_room(self, devices: Sequence[str]) -> bool:
        """True if all these devices have room for what is claimed there."""
        with self._lock:
            return all(self._served[id].has_room for id in devices if id in self._served)
