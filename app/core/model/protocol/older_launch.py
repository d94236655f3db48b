"""Translates a Launch for and from processes of the version before `Launch.spec`.

During an upgrade an island and a device may differ by one version. In the older form, the fields of
the descriptor that a device needs are fields of the Launch itself. A device that takes the whole
descriptor has the fact "spec" (`core.model.protocol.messages.Alive`).
"""

from __future__ import annotations

from typing import Any

JSON = dict[str, Any]

_FLAT = (
    "run", "params", "outputs", "publish", "world_size", "checkpoint_every_s", "memory_bytes",
)  # fmt: skip


def flattened(body: JSON) -> JSON:
    """Return the older form of an encoded Launch."""
    rest = {name: value for name, value in body.items() if name != "spec"}
    spec: JSON = body["spec"]
    return {
        **rest,
        "run": spec["run"],
        "params": spec.get("params", {}),
        "outputs": spec.get("outputs", []),
        "publish": sorted(spec.get("publish", {})),
        "world_size": spec["world_size"],
        "checkpoint_every_s": spec["checkpoint"]["every_s"],
        "memory_bytes": spec["devices"].get("memory_bytes", 0),
    }


def is_flat(body: JSON) -> bool:
    return "run" in body and "spec" not in body


def lifted(body: JSON) -> JSON:
    """Return an encoded Launch of the older form in the present form; raises TypeError.

    The older form has all that a device needs of the descriptor.
    """
    rest = {name: value for name, value in body.items() if name not in _FLAT}
    publish = {output: f"block-{n}" for n, output in enumerate(body.get("publish", ()))}
    spec = {
        "name": "task",
        "publish": publish,
        "checkpoint": {"every_s": body.get("checkpoint_every_s")},
        "devices": {"memory_bytes": body.get("memory_bytes")},
        **{name: body.get(name) for name in ("run", "params", "outputs", "world_size")},
    }
    return {**rest, "spec": spec}
