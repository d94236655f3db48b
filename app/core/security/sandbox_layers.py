"""The layers of a sandbox: what each withholds from a tenant's process, and what its lack means.

`workers.process.sandbox` sets them up.  A device worker reports the layers that are active on its
host, and its mode for missing ones: `required` (it does not serve), `preferred` (it serves with the
active ones), `off` (it sets up none).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["required", "preferred", "off"]

#: The layers, in the order in which they are set up.
LAYERS = {
    "processes": "it sees and signals no process but its own, and all of them end with it",
    "ipc": "no shared memory or queues of other processes",
    "network": "no network, only its own loopback",
    "files": "a read-only view of the interpreter, its code, and a folder of its own",
    "limits": "no core dumps, bounded numbers of files and processes",
    "user": "a user of its own, with no rights anywhere else",
    "capabilities": "no capabilities",
    "privileges": "it can never gain rights",
    "syscalls": "system calls that a computation does not need are refused",
}
#: The layers that `required` needs; without `user`, because only root can switch users.
NEEDED = frozenset(LAYERS) - {"user"}

#: What a tenant's code can do on a host without the layer.
_WITHOUT = {
    "processes": "see and signal the processes of this machine",
    "ipc": "use the shared memory of others",
    "network": "reach the network, Postgres and Redis",
    "files": "read every file that the device worker can read: keys, other tenants' outputs",
    "limits": "open files and start processes without a bound",
    "capabilities": "use the rights of the device worker",
    "privileges": "gain rights by programs that grant them",
    "syscalls": "make any system call",
}

NAMES_TOLD = 5
MENDS = (
    "let this user make user namespaces (in a container: the seccomp profile"
    " deploy/seccomp.json, see docs/operations.md), or set ROUNDHOUSE_SANDBOX=preferred, where"
    " every tenant may read what the device worker can"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A device worker's report of its sandbox.  `refuses` is why it does not serve, or empty."""

    mode: str
    standing: tuple[str, ...]
    refuses: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Sandbox:
        """Read the facts of a device; values of another form count as not reported."""
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
            return f"refuses to serve: {self.refuses}"
        if self.mode == "off":
            return "runs tenants' code without a sandbox (ROUNDHOUSE_SANDBOX=off)"
        if self.missing:
            without = ", ".join(self.missing)
            return f"runs tenants' code without the layers {without} ({self.mode})"
        return f"its sandbox stands ({self.mode})"


def missing(standing: Collection[str]) -> list[str]:
    """Return the layers that `required` needs and that are not active."""
    return [name for name in LAYERS if name in NEEDED and name not in standing]


def refusal(lacking: Iterable[str]) -> str:
    return f"its sandbox is required, and the layers {', '.join(lacking)} do not stand on its host"


def summary(devices: Iterable[tuple[str, Sandbox]]) -> str:
    """Describe the devices in one sentence, grouped by equal reports."""
    told: dict[str, list[str]] = defaultdict(list)
    for name, sandbox in devices:
        told[sandbox.told].append(name)
    return "; ".join(f"{_named(sorted(names))}: {words}" for words, names in sorted(told.items()))


def warning(devices: Iterable[tuple[str, Sandbox]]) -> list[str]:
    """Return lines that warn of devices that serve without all layers; empty if there are none."""
    weak = {name: sandbox for name, sandbox in devices if sandbox.missing and not sandbox.refuses}
    if not weak:
        return []
    lacking = [name for name in LAYERS if any(name in each.missing for each in weak.values())]
    return [
        f"WARNING: {_named(sorted(weak))} without a whole sandbox. Run only code that you trust:",
        "it can",
        *(f"  - {_WITHOUT[name]} (no layer {name!r})" for name in lacking),
        "ROUNDHOUSE_SANDBOX=required makes a device refuse to serve like this.",
    ]


def _named(names: list[str]) -> str:
    more = len(names) - NAMES_TOLD
    return ", ".join(names[:NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
