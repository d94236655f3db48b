"""Lists the layers of a sandbox: what each keeps from a tenant's process, and what it means if it
is missing.

`workers.process.isolation.sandbox` sets them up. A device worker reports the layers that are active
on its host, and its mode for missing ones: `required` (it does not serve), `preferred` (it serves
with the active ones), `off` (it sets up none).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["required", "preferred", "off"]

#: The layers, in the order in which they are set up.
LAYERS = {
    "processes": "it sees and signals only its own processes, which all end with it",
    "ipc": "no shared memory or queues of other processes",
    "network": "no network except its own loopback",
    "files": "a read-only view of the interpreter, its code, and a folder of its own",
    "limits": "no core dumps, bounded numbers of files and processes",
    "user": "a separate user without rights outside the sandbox",
    "capabilities": "no capabilities",
    "privileges": "it can never gain rights",
    "syscalls": "system calls that computations do not need are blocked",
}
#: The layers that `required` needs; without `user`, because only root can switch users.
NEEDED = frozenset(LAYERS) - {"user"}

#: What a tenant's code can do on a host without the layer.
_WITHOUT = {
    "processes": "see and signal the processes of this machine",
    "ipc": "use the shared memory of others",
    "network": "reach the network, Postgres and Redis",
    "files": "read every file that the device worker can read: keys, other tenants' outputs",
    "limits": "use unlimited files and processes",
    "capabilities": "use the rights of the device worker",
    "privileges": "gain rights by programs that grant them",
    "syscalls": "make any system call",
}

NAMES_TOLD = 5
MENDS = (
    "allow user namespaces for this user (in a container: the seccomp profile "
    "deploy/seccomp.json, see docs/reference/operations.md), or set "
    "ROUNDHOUSE_SANDBOX=preferred, with which every tenant can read what the device worker can read"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Holds a device worker's report of its sandbox. `refuses` is why it does not serve, or ""."""

    mode: str
    standing: tuple[str, ...]
    refuses: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Sandbox:
        """Read the facts of a device.

        A value of the wrong type counts as not reported.
        """
        standing, mode = facts.get("sandbox"), facts.get("sandbox_mode")
        names = standing if isinstance(standing, list) else []
        return cls(
            mode=mode if isinstance(mode, str) else "unknown",
            standing=tuple(name for name in LAYERS if name in names),
            refuses=str(facts.get("refuses") or "")[:500],
        )

    @classmethod
    def told_as(cls, told: Mapping[str, Any]) -> Sandbox:
        """Read the `sandbox` of a device in the API."""
        return cls(mode=told["mode"], standing=tuple(told["layers"]), refuses=told["refuses"])

    @property
    def missing(self) -> list[str]:
        return missing(self.standing)

    @property
    def told(self) -> str:
        if self.refuses:
            return f"takes no work: {self.refuses}"
        if self.mode == "off":
            return "runs tenants' code without a sandbox (ROUNDHOUSE_SANDBOX=off)"
        if self.missing:
            without = ", ".join(self.missing)
            return f"runs tenants' code without the layers {without} ({self.mode})"
        return f"its sandbox is complete ({self.mode})"


def missing(standing: Collection[str]) -> list[str]:
    """Return the inactive layers among those that `required` needs."""
    return [name for name in LAYERS if name in NEEDED and name not in standing]


def refusal(lacking: Iterable[str]) -> str:
    return f"its sandbox is required, but its host does not support the layers {', '.join(lacking)}"


def summary(devices: Iterable[tuple[str, Sandbox]]) -> str:
    """Describe the devices in one sentence, grouped by equal reports."""
    told: dict[str, list[str]] = defaultdict(list)
    for name, sandbox in devices:
        told[sandbox.told].append(name)
    return "; ".join(f"{_named(sorted(names))}: {words}" for words, names in sorted(told.items()))


def warning(devices: Iterable[tuple[str, Sandbox]]) -> list[str]:
    """Return lines that warn of devices that serve without all layers; [] if there are none."""
    weak = {name: sandbox for name, sandbox in devices if sandbox.missing and not sandbox.refuses}
    if not weak:
        return []
    lacking = [name for name in LAYERS if any(name in each.missing for each in weak.values())]
    return [
        f"WARNING: {_named(sorted(weak))} without a complete sandbox. Run only trusted code:",
        "it can",
        *(f"  - {_WITHOUT[name]} (no layer {name!r})" for name in lacking),
        "ROUNDHOUSE_SANDBOX=required makes such a device take no work.",
    ]


def _named(names: list[str]) -> str:
    more = len(names) - NAMES_TOLD
    return ", ".join(names[:NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
