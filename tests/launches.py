"""Descriptors and Launch orders for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.core.model.descriptor import TaskDescriptor, from_json
from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.protocol.messages import CheckpointRef, Launch

IN_THE_DESCRIPTOR = (
    "run", "params", "outputs", "publish", "world_size", "checkpoint_every_s", "best",
    "memory_bytes",
)  # fmt: skip
# a Launch has `secrets` of its own, beside those of the descriptor
LATER = (
    "env", "notice", "environment", "resources", "secret_names", "session", "from_checkpoint",
    "isolation", "artifacts", "retry", "collectives",
)  # fmt: skip


def spec_of(run: dict[str, Any], **more: Any) -> TaskDescriptor:
    """Return the descriptor of a task; `more` has parts of it: IN_THE_DESCRIPTOR and LATER."""
    later = {name: more.pop(name) for name in LATER if name in more}
    later |= {"secrets": names} if (names := later.pop("secret_names", None)) else {}
    published = {output: f"block-{n}" for n, output in enumerate(more.get("publish", ()))}
    return from_json(
        {
            "name": "task",
            "run": run,
            "publish": published,
            "checkpoint": {"every_s": more.get("checkpoint_every_s"), "best": more.get("best")},
            "devices": {"memory_bytes": more.get("memory_bytes")},
            **{name: more.get(name) for name in ("params", "outputs", "world_size")},
            **later,
        }
    )


def launch_of(task: str, epoch: int = 1, **more: Any) -> Launch:
    """Return a Launch; `more` has fields of it and parts of its descriptor.

    With `fraction_milli` the task takes so many thousandths of its device.
    """
    milli = more.pop("fraction_milli", WHOLE_MILLI)
    names = (*IN_THE_DESCRIPTOR, *LATER)
    within = {name: more.pop(name) for name in names if name in more}
    usual: dict[str, Any] = {
        "seq": 1, "tenant": "ten", "bundle": "", "inputs": {}, "preset": {}, "images": [],
        "budget_us": 1,
    }  # fmt: skip
    spec = spec_of(**{"run": {"job": "m:J"}, **within})
    choice = replace(spec.devices.choice, fraction_milli=milli)
    spec = replace(spec, devices=replace(spec.devices, choice=choice))
    return Launch(**{**usual, "task": task, "epoch": epoch, "spec": spec, **more})


def image_of(sha256: str, step: int, key: str = "") -> CheckpointRef:
    return CheckpointRef(sha256=sha256, step=step, key=key)
