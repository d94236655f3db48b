"""Helpers for tests in which a tenant attacks its device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from app.core.model.messages import Finished
from tests.workers.conftest import Ground, bundled
from workers.device.heartbeat import now_us

HOSTILE = Path(__file__).parent / "bundle"


def hostile_bundle(ground: Ground) -> str:
    files = {path.name: path.read_text() for path in HOSTILE.glob("*.py")}
    return ground.store.put([bundled(files)])[0]


def attack(ground: Ground, task: str, do: str, **more: Any) -> None:
    """Launch a job that makes this attack in its second step."""
    params = {"do": do, **more.pop("params", {})}
    bundle = hostile_bundle(ground)
    ground.launch(task, "attacks:Attack", bundle=bundle, tenant="bad", params=params, **more)


def serves(ground: Ground, task: str, steps: int = 3, **wait: Any) -> None:
    """Assert that another tenant's job is launched, runs and ends on this device."""
    bundle = hostile_bundle(ground)
    ground.launch(task, "attacks:Steady", bundle=bundle, params={"steps": steps})
    ground.event(Finished, task, **wait)


def longest_silence_s(ground: Ground, since: int) -> float:
    """Return the longest time between two reports since number `since`, and until now."""
    told = [alive.sent_us for alive in ground.reports[max(0, since - 1) :]]
    told.append(now_us())
    return max(after - before for before, after in itertools.pairwise(told)) / 1e6
