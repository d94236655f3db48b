"""A device worker of an accelerator, with real processes behind the sandbox.

The accelerator is the simulated one.  Its budget is common to all processes that use it, and its
streams run late.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.core.model.protocol.messages import CheckpointRef, Failed, Finished, Paused, Saved, Started
from tests.workers.conftest import DeviceRig, alone

pytestmark = pytest.mark.sim

MB = 2**20


def test_job_runs_to_its_end_on_the_device(accelerators: Callable[..., DeviceRig]) -> None:
    rig = accelerators(256 * MB)
    rig.launch("t1", "jobs:Everything", params={"steps": 5})
    found = rig.event(Finished, "t1").result
    assert found == alone("jobs:Everything", {"steps": 5}, kind="sim")["result"]


def test_job_disturbed_at_random_ends_with_the_same_bits(
    accelerators: Callable[..., DeviceRig],
) -> None:
    rig, dice = accelerators(256 * MB), random.Random(5)
    params = {"steps": 60, "nap_s": 0.002}
    images: list[CheckpointRef] = []
    resumed = []
    for epoch in range(1, 7):
        rig.launch(
            *("t1", "jobs:Patient", epoch), params=params, images=images, checkpoint_every_s=0.05
        )
        resumed.append(rig.event(Started, "t1", epoch).resumed)
        if epoch == 6:
            break
        time.sleep(dice.uniform(0, 0.03))
        images = rig.paused_and_saved("t1", epoch)
        if epoch % 2:
            rig.drop.append(["t1", epoch])
            rig.until(lambda: not rig.supervisor.stays.residents)
    expected = alone("jobs:Everything", params, kind="sim")["result"]
    rig.let_end("t1", 6)
    assert rig.event(Finished, "t1", 6).result == expected, resumed
    assert set(resumed) == {"fresh", "resident", "image"}


def test_more_tasks_take_turns_than_fit_on_the_device(
    accelerators: Callable[..., DeviceRig],
) -> None:
    """The device itself would raise OutOfMemoryError if two tasks' states did not leave."""
    rig = accelerators(130 * MB, host_memory_bytes=400 * MB)
    for epoch, task in itertools.product((1, 2), ("t1", "t2", "t3")):
        params = {"megabytes": 40, "nap_s": 0.002}
        rig.launch(task, "jobs:Count", epoch, params=params, memory_bytes=60 * MB)
        started = rig.event(Started, task, epoch)
        assert started.resumed == ("fresh" if epoch == 1 else "resident")
        rig.steps(task, started.step + 2, epoch)
        rig.pause(task, epoch)
        rig.event(Paused, task, epoch)
    assert {rig.view(task, 2).level for task in ("t1", "t2", "t3")} == {"device", "host"}


def test_job_larger_than_the_device_fails_with_torchs_words(
    accelerators: Callable[..., DeviceRig],
) -> None:
    rig = accelerators(64 * MB)
    rig.launch("t1", "jobs:Count", params={"megabytes": 100})
    failed = rig.event(Failed, "t1")
    assert failed.cause == "device_memory"
    assert "OutOfMemoryError: sim out of memory" in failed.message


def test_ranks_whose_states_do_not_fit_together_share_the_device(
    accelerators: Callable[..., DeviceRig],
) -> None:
    """While they are paused, another job finds the device free; their image is made meanwhile."""
    rig = accelerators(208 * MB, host_memory_bytes=600 * MB)
    given: dict[str, Any] = {"params": {"steps": 6, "pace": 0.05}, "world_size": 3}
    rig.launch("t1", "ranks:Wide", **given)
    expected = rig.event(Finished, "t1").result
    given["params"]["waits"] = True
    rig.launch("t2", "ranks:Wide", **given)
    rig.steps("t2", 2)
    rig.pause("t2")
    step = rig.event(Paused, "t2").step
    assert step > 0
    rig.launch("other", "jobs:Count", params={"megabytes": 120, "steps": 3})
    saved = rig.until(lambda: [one for one in rig.all(Saved, "t2") if one.step == step])
    assert rig.event(Finished, "other").result == {"done": 3}
    rig.drop.append(["t2", 1])
    rig.until(lambda: not rig.supervisor.stays.residents)
    rig.launch("t2", "ranks:Wide", 2, images=[rig.image(saved[0])], **given)
    assert rig.event(Started, "t2", 2).resumed == "image"
    rig.let_end("t2", 2)
    assert rig.event(Finished, "t2", 2).result == expected
