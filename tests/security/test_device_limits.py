"""A tenant's process takes all it can: the kernel stops it, its task fails with the reason, and a
neighbour's job on the same device goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from app.core.model.protocol.messages import Failed, Finished, Stopped
from tests.workers.conftest import DeviceRig
from workers.process.isolation import cgroups

pytestmark = pytest.mark.security

SMALL = {
    "memory_bytes": 2**28,
    "host_memory_bytes": 2**28,
    "overhead_bytes": 2**28,
    "scratch_bytes": 2**26,
}
_number = count(1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceRig]:
    """A device for all tests, with residents that may take 768 MiB each."""
    made = DeviceRig(tmp_path_factory.mktemp("small"), **SMALL)
    made.open()
    yield made
    made.close()


def _needs(rig: DeviceRig, *limits: str) -> None:
    for name in limits:
        if name not in rig.reports[-1].facts["limits"]:
            pytest.skip(f"no limit of {name} stands here: {rig.supervisor.unlimited[name]}")


def _goes_on_beside(rig: DeviceRig, attack: str) -> Failed:
    """Return how the attack ended; a neighbour must step before and after, in the same process."""
    number = next(_number)
    good, bad = f"good{number}", f"bad{number}"
    steps: dict[str, Any] = {"params": {"steps": 4000, "nap_s": 0.02}}
    rig.launch(good, "jobs:Everything", **steps)
    rig.steps(good, 3)
    rig.pause(good)
    rig.until(lambda: rig.view(good).state == "paused")
    rig.launch(bad, attack)
    failed: Failed = rig.event(Failed, bad)
    step = rig.view(good).step
    rig.launch(good, "jobs:Everything", 2, **steps)
    rig.steps(good, step + 3, 2)
    rig.cancel(good, 2)
    rig.event(Stopped, good, 2)
    return failed


@pytest.mark.parametrize("attack", ["greedy:eat_memory", "greedy:eat_memory_in_child"])
def test_task_that_exceeds_its_memory_is_ended_and_told_the_limit(small, attack):
    _needs(small, "memory")
    failed = _goes_on_beside(small, attack)
    bound = "It used more than 768.0 MiB of host memory (limit of this device)"
    assert failed.message.startswith(f"{bound} and was ended by the kernel.")


def test_fork_bomb_fails_and_is_told_the_limit(small):
    _needs(small, "processes")
    failed = _goes_on_beside(small, "greedy:fork_all")
    bound = f"It reached {cgroups.PROCESSES_MAX} processes and threads (limit of this device)."
    assert failed.message.startswith(bound)


@pytest.mark.parametrize("path", ["/scratch", "/tmp", "/dev/shm"])
def test_full_working_folder_has_no_more_space(small, path):
    _needs(small, *(["disk"] if path == "/scratch" else []))
    if "files" not in small.reports[-1].facts["sandbox"]:
        pytest.skip("this machine gives no mount namespaces")
    task = f"fill{next(_number)}"
    small.launch(task, "greedy:fill", params={"path": path})
    found = small.event(Finished, task).result
    most = small.house.scratch_bytes if path == "/scratch" else small.house.tmp_bytes
    assert found["told"] == "No space left on device"
    assert 0.8 * most <= found["bytes"] <= most


def test_task_without_disk_for_its_folder_fails_with_the_reason(small):
    _needs(small, "disk")
    template = small.supervisor.spawner.template
    os.truncate(template, 2**43)  # more than the host has, as if its disk were full
    try:
        small.launch("large", "jobs:Count", params={"steps": 3})
        failed = small.event(Failed, "large")
    finally:
        os.truncate(template, SMALL["scratch_bytes"])
    assert failed.message.startswith("A fault of this device, not of the task, ended its process")
    small.until(lambda: any("reserving disk" in line for line in small.printed("large")))


def test_control_groups_of_residents_are_removed_with_them(small):
    _needs(small, "memory")
    parents = [parent for _, parent in small.supervisor.spawner.groups.parents]
    task = f"short{next(_number)}"
    small.launch(task, "jobs:Count", params={"steps": 3})
    small.event(Finished, task)
    small.until(lambda: not small.supervisor.stays.residents)
    assert not [entry for parent in parents for entry in parent.iterdir() if entry.is_dir()]
