"""Two tasks at once on one device, each with its fraction of it and its cap of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Saved, Started
from tests.workers.conftest import DeviceRig, alone
from workers.device.host import resource_watch

MB = 2**20
UNDISTURBED = {"steps": 100}
PARAMS = {**UNDISTURBED, "nap_s": 0.01}


def _both_step(rig: DeviceRig, *tasks: str) -> None:
    """Wait until each of the tasks has made steps since now, while all of them run."""
    for task in tasks:
        rig.steps(task, rig.view(task).step + 3)
    assert {rig.view(task).state for task in tasks} == {"running"}
    assert len(rig.supervisor.stays.holders) == len(tasks)


def _result(rig: DeviceRig, task: str) -> Any:
    """Let the job end, which its neighbour has not disturbed."""
    rig.let_end(task)
    return rig.event(Finished, task).result


def test_two_halves_run_at_once_and_end_with_the_bits_of_an_undisturbed_run(rig):
    for task in ("t1", "t2"):
        rig.launch(task, "jobs:Patient", params=PARAMS, fraction_milli=500)
    for task in ("t1", "t2"):
        rig.event(Started, task)
    _both_step(rig, "t1", "t2")
    expected = alone("jobs:Everything", UNDISTURBED)["result"]
    for task in ("t1", "t2"):
        assert _result(rig, task) == expected


def test_a_fraction_pauses_and_resumes_while_its_neighbour_goes_on(rig):
    rig.launch("t1", "jobs:Count", params={"nap_s": 0.002}, fraction_milli=500)
    rig.launch("t2", "jobs:Count", params={"nap_s": 0.002}, fraction_milli=300)
    for task in ("t1", "t2"):
        rig.event(Started, task)
    rig.pause("t1")
    step = rig.event(Paused, "t1").step
    rig.until(lambda: any(saved.step == step for saved in rig.all(Saved, "t1")))
    rig.steps("t2", rig.view("t2").step + 5)
    rig.launch("t1", "jobs:Count", 2, params={"nap_s": 0.002}, fraction_milli=500)
    started = rig.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("resident", step)


def test_a_whole_task_begins_once_all_fractions_have_left(rig):
    for task in ("t1", "t2"):
        rig.launch(task, "jobs:Count", params={"nap_s": 0.002}, fraction_milli=500)
        rig.event(Started, task)
    rig.launch("t3", "jobs:Count", params={"nap_s": 0.002})
    rig.pause("t1", successor="t3")
    rig.event(Paused, "t1")
    assert not rig.all(Started, "t3")
    rig.pause("t2", successor="t3")
    rig.event(Started, "t3")
    assert [holder.task for holder in rig.supervisor.stays.holders] == ["t3"]


def _held_us(rig: DeviceRig) -> dict[str, int]:
    """Return what each has held by one report: by two they would not be of the same moment."""
    return {view.task: view.held_us for view in rig.reports[-1].residents}


def test_held_time_counts_for_each_fraction_alone(rig):
    for task in ("t1", "t2"):
        rig.launch(task, "jobs:Count", params={"nap_s": 0.002}, fraction_milli=500)
        rig.event(Started, task)
    rig.steps("t1", rig.view("t1").step + 20)
    before = _held_us(rig)
    rig.steps("t2", rig.view("t2").step + 50)
    after = _held_us(rig)
    grown = [after[task] - before[task] for task in ("t1", "t2")]
    assert min(grown) > 0
    assert max(grown) < 3 * min(grown)  # in turns one of them would have held nothing meanwhile


def test_a_fraction_beyond_its_memory_ends_by_name_and_its_neighbour_keeps_its_bits(
    rig, monkeypatch
):
    monkeypatch.setattr(resource_watch, "CODE_BYTES", 400 * MB)
    rig.launch("t1", "jobs:Patient", params=PARAMS, fraction_milli=500)
    rig.event(Started, "t1")
    greedy = {"function": "greedy:hold_memory"}  # a busy device worker looks at it late
    params = {"megabytes": 1024}
    rig.launch("t2", greedy, params=params, memory_bytes=64 * MB, fraction_milli=10)
    failed = rig.event(Failed, "t2")
    assert "more memory than its part of the device (" in failed.message
    assert _result(rig, "t1") == alone("jobs:Everything", UNDISTURBED)["result"]


@pytest.mark.parametrize("where", ["heap", "memfd", "/dev/shm"])
@pytest.mark.parametrize("threads", [0, 300])
def test_a_fraction_cannot_hide_its_memory(rig, where, threads):
    hides = {"function": "greedy:hide_memory"}
    params = {"megabytes": 1024, "threads": threads, "where": where}
    rig.launch("t1", hides, params=params, memory_bytes=64 * MB, fraction_milli=10)
    assert "more memory than its part of the device (" in rig.event(Failed, "t1").message


@pytest.mark.parametrize("threads", [0, 300])
def test_a_fraction_cannot_hide_its_memory_where_no_control_group_counts(rig, threads):
    rig.supervisor.spawner.groups.standing = []
    hides = {"function": "greedy:hide_memory"}
    params = {"megabytes": 1024, "threads": threads, "where": "memfd"}
    rig.launch("t1", hides, params=params, memory_bytes=64 * MB, fraction_milli=10)
    told = rig.event(Failed, "t1").message
    assert ("cannot be counted" if threads else "its part of the device (") in told


# --- on a simulated accelerator -------------------------------------------------------------------


@pytest.mark.sim
def test_two_halves_run_at_once_on_an_accelerator_with_the_same_bits(
    accelerators: Callable[..., DeviceRig],
) -> None:
    rig = accelerators(256 * MB)
    for task in ("t1", "t2"):
        rig.launch(task, "jobs:Patient", params=PARAMS, fraction_milli=500)
    for task in ("t1", "t2"):
        rig.event(Started, task)
    _both_step(rig, "t1", "t2")
    expected = alone("jobs:Everything", UNDISTURBED, kind="sim")["result"]
    for task in ("t1", "t2"):
        assert _result(rig, task) == expected


@pytest.mark.sim
def test_a_fraction_that_allocates_past_its_cap_fails_and_its_neighbour_does_not(
    accelerators: Callable[..., DeviceRig],
) -> None:
    """The device itself has room for both."""
    rig = accelerators(256 * MB)
    rig.launch("t1", "jobs:Patient", params=PARAMS, fraction_milli=500)
    rig.event(Started, "t1")
    rig.launch("t2", "jobs:Count", params={"megabytes": 100}, fraction_milli=250)
    failed = rig.event(Failed, "t2")
    assert failed.cause == "device_memory"
    assert "OutOfMemoryError" in failed.message
    expected = alone("jobs:Everything", UNDISTURBED, kind="sim")["result"]
    assert _result(rig, "t1") == expected
