"""Helpers for tests in which a tenant attacks its device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from app.core.model.protocol.messages import Finished
from tests.workers.conftest import DeviceRig, bundled
from workers.device.heartbeat import now_us

HOSTILE = Path(__file__).parent / "bundle"


def hostile_bundle(rig: DeviceRig) -> str:
    files = {path.name: path.read_text() for path in HOSTILE.glob("*.py")}
    return rig.store.put([bundled(files)])[0]


def attack(rig: DeviceRig, task: str, do: str, **more: Any) -> None:
    """Launch a job that makes this attack in its second step."""
    params = {"do": do, **more.pop("params", {})}
    bundle = hostile_bundle(rig)
    rig.launch(task, "attacks:Attack", bundle=bundle, tenant="bad", params=params, **more)


def serves(rig: DeviceRig, task: str, steps: int = 3) -> None:
    """Assert that another tenant's job is launched, runs and ends on this device."""
    bundle = hostile_bundle(rig)
    rig.launch(task, "attacks:Steady", bundle=bundle, params={"steps": steps})
    rig.event(Finished, task)


def longest_silence_s(rig: DeviceRig, since: int) -> float:
    """Return the longest time between two reports since number `since`, and until now."""
    told = [alive.sent_us for alive in rig.reports[max(0, since - 1) :]]
    told.append(now_us())
    return max(after - before for before, after in itertools.pairwise(told)) / 1e6
