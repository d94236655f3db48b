"""Tasks that ended well while the store refuses their outputs: they wait, and run no step twice."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from app.core.model.graphs import task_graph
from app.core.model.protocol.messages import Finished, Paused, Stopped
from app.storage.s3_backend import BucketAway
from app.storage.store import Store
from tests.workers.conftest import DeviceRig
from tests.workers.graph.test_executor_job import WIDE

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def function(rig: DeviceRig, epoch: int = 1, task: str = "t1") -> None:
    rig.launch(task, "jobs:tokenize", epoch, params={"text": "abc"}, outputs=["tokens"])


def job(rig: DeviceRig, epoch: int = 1, task: str = "t1", **more: Any) -> None:
    more = {"params": {"steps": 4}, "outputs": ["digest"], **more}
    rig.launch(task, "jobs:Everything", epoch, **more)


def gang(rig: DeviceRig, epoch: int = 1, task: str = "t1") -> None:
    more = {"world_size": 2, "params": {"steps": 4}, "outputs": ["seen"]}
    rig.launch(task, "ranks:Train", epoch, **more)


def function_of_ranks(rig: DeviceRig, epoch: int = 1, task: str = "t1") -> None:
    rig.launch(task, "ranks:summed", epoch, world_size=3, outputs=["total"])


def graph(rig: DeviceRig, epoch: int = 1, task: str = "t1", **more: Any) -> None:
    sha256, _ = Store.at(rig.house.run.parent / "store").put([task_graph.canonical(WIDE)])
    rig.launch(task, {"graph": f"sha256:{sha256}"}, epoch, outputs=["y", "z"], **more)


def executors(rig: DeviceRig, epoch: int = 1, task: str = "t1") -> None:
    graph(rig, epoch, task, world_size=3)


ALL = [function, job, gang, function_of_ranks, graph, executors]
REFUSALS = [
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    OSError(errno.EROFS, os.strerror(errno.EROFS)),
    *(BucketAway(f"a call failed: {status}") for status in (403, 503, 507)),
]


def values(rig: DeviceRig, finished: Finished) -> dict[str, bytes]:
    """The bytes of the tensors of each output."""
    found = {}
    for name, kept in finished.outputs.items():
        with rig.store.open(kept["sha256"]) as file:
            found[name] = file.read()[kept["head_bytes"] :]
    return found


@pytest.mark.parametrize(
    ("launch", "error"),
    [*((launch, FULL) for launch in ALL), *((function, error) for error in REFUSALS)],
)
def test_ended_task_waits_without_the_slot_until_the_store_takes_its_outputs(
    rig: DeviceRig, refuse: Any, launch: Callable[..., None], error: Exception
) -> None:
    launch(rig, task="undisturbed")
    expected = rig.event(Finished, "undisturbed")
    refuse(error)
    launch(rig)
    paused = rig.event(Paused, "t1")
    assert paused.unstored
    assert rig.view("t1").unstored == paused.unstored
    rig.launch("t2", ["true"])  # the device is free
    rig.event(Finished, "t2")
    launch(rig, 2)
    assert rig.event(Paused, "t1", 2).wait_us == 2 * paused.wait_us
    refuse(None)
    launch(rig, 3)
    finished = rig.event(Finished, "t1", 3)
    assert finished.result == expected.result
    assert values(rig, finished) == values(rig, expected)
    assert (finished.step, paused.step) == (expected.step,) * 2
    rig.until(lambda: rig.view("t1", 3) is None)
    assert rig.printed("t1") == rig.printed("undisturbed")
    assert rig.printed("t1", 2) + rig.printed("t1", 3) == []  # no step ran again


@pytest.mark.parametrize("launch", [job, graph])
def test_ended_task_that_moves_runs_no_further_step(
    rig: DeviceRig, refuse: Any, launch: Callable[..., None]
) -> None:
    refuse(FULL)
    launch(rig)
    paused = rig.event(Paused, "t1")
    refuse(None)
    rig.save("t1")
    image = rig.until(lambda: rig.supervisor.storing.kept.get("t1"))[1]
    rig.drop = [["t1", 1]]
    rig.until(lambda: not rig.supervisor.stays.residents)
    rig.drop = []
    launch(rig, 2, images=[image])
    finished = rig.event(Finished, "t1", 2)
    assert finished.step == paused.step
    assert rig.printed("t1", 2) == []


@pytest.mark.parametrize("launch", ALL)
def test_ended_task_that_waits_for_the_store_can_be_cancelled(
    rig: DeviceRig, refuse: Any, launch: Callable[..., None]
) -> None:
    refuse(FULL)
    launch(rig)
    rig.event(Paused, "t1")
    rig.cancel("t1")
    rig.event(Stopped, "t1")
