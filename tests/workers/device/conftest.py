"""Gives tests a device whose index of packages is a folder of wheels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.core.model.provisions.package_lock import PackageLock
from app.core.model.provisions.requirements import PinnedPackage
from tests.wheels import add_wheel
from tests.workers.conftest import DeviceRig
from workers.control.package_locker import installed
from workers.transfer.installs.environments import PLATFORM_PYTHON

TOWERS = "ONE = 1\nclass Tower:\n    def __init__(self):\n        self.height = 0\n"
SCRIPTS = {"towers-1.0.data/scripts/build-tower": "#!python\nimport towers\nprint(towers.ONE)\n"}


class PackagedRig:
    """A device whose index is a folder of wheels, and a lock over the platform's packages."""

    def __init__(self, rig: DeviceRig, wheels: Path) -> None:
        self.rig, self.wheels = rig, wheels
        digest = add_wheel(wheels, "towers", files={"towers.py": TOWERS, **SCRIPTS})
        self.pin = PinnedPackage(name="towers", version="1.0", hashes=(f"sha256:{digest}",))

    def environment(self, **lock: Any) -> dict[str, Any]:
        """The environment of a task, whose lock is in the store."""
        usual = {"python": PLATFORM_PYTHON, "packages": (self.pin,), "over": installed()}
        made = PackageLock(**{**usual, **lock})
        sha256, _ = self.rig.store.put([made.text.encode()])
        return {"python": PLATFORM_PYTHON, "lock": sha256, "own_python": False}


@pytest.fixture
def packaged(rigs: Callable[..., DeviceRig], tmp_path: Path) -> PackagedRig:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    options = ("--no-index", "--find-links", str(wheels))
    return PackagedRig(rigs(package_options=options, wheels=wheels), wheels)
