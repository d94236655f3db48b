"""What a task holds on an accelerator is what the driver counts, whatever the task says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.core.device.device_records import ProcessRecord, StayRecord
from app.core.model.protocol.messages import Failed, Paused
from workers.device.device_memory import CONTEXT_BYTES, DeviceAccount, Leftover
from workers.device.heartbeat import now_us
from workers.device.memory_tiers import Residency
from workers.device.processes.resident import Resident
from workers.hardware.memory_cap import cap_memory
from workers.process.host_allocations import HostAllocations
from workers.process.isolation.device_access import DeviceAccess
from workers.residents import progress

GB = 2**30
BUDGET = 40 * GB
OURS = os.getpid()


@pytest.fixture
def child() -> Iterator[int]:
    """A process that this one has started."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


def _resident(
    pid: int,
    *,
    tenant: str = "ten",
    level: str = "device",
    ranks: int = 1,
    milli: int = 1000,
    asked_bytes: int = 0,
    **more: Any,
) -> Resident:
    spec = SimpleNamespace(devices=SimpleNamespace(memory_bytes=asked_bytes), world_size=ranks)
    launch = SimpleNamespace(spec=spec, tenant=tenant)
    stay: Any = SimpleNamespace(state="paused", arrived_us=1, launch=launch, spec=spec)
    record = ProcessRecord(pid, f"t{pid}", StayRecord(f"t{pid}", 1, milli=milli), 0)
    given: list[Any] = [record, None, None, -1, {}, None, stay]
    return Resident(*given, pid=pid, level=level, **more)


def _residency(*residents: Resident, ended: list[Resident] | None = None) -> Residency:
    house: Any = SimpleNamespace(
        kind="sim", memory_bytes=BUDGET, host_memory_bytes=GB, residents_max=9
    )
    house.device, house.allocations = "h.0", HostAllocations()
    end = ([] if ended is None else ended).append
    return Residency(house, {r.id: r for r in residents}, end, lambda: 0)


def _measured(residency: Residency, counted: dict[int, int]) -> list[tuple[Resident, str]]:
    killed: list[tuple[Resident, str]] = []
    residency.measured(counted.items(), lambda r, reason: killed.append((r, reason)), 1)
    return killed


def test_resident_that_told_less_is_booked_with_what_the_driver_counted(child):
    """The processes that it has started count too."""
    resident = _resident(OURS, memory_bytes=1 * GB)
    residency = _residency(resident)
    assert _measured(residency, {OURS: 6 * GB, child: 2 * GB}) == []
    assert resident.memory_bytes == 8 * GB
    assert residency.free_bytes == BUDGET - 8 * GB
    assert residency.by_tenant() == {"ten": [8 * GB, 0]}
    # until the next count it may only tell more
    assert resident.bounded_memory(0, BUDGET, "sim", 1) == 8 * GB
    assert resident.bounded_memory(9 * GB, BUDGET, "sim", 1) == 9 * GB
    assert resident.bounded_memory(99 * GB, BUDGET, "sim", 1) == BUDGET
    assert _measured(residency, {OURS: 5 * GB}) == []
    assert resident.memory_bytes == 5 * GB


def test_resident_beyond_its_cap_is_ended_and_one_within_it_is_not():
    resident = _resident(OURS)
    residency = _residency(resident)
    assert _measured(residency, {OURS: BUDGET + CONTEXT_BYTES}) == []
    assert _measured(residency, {OURS: BUDGET + CONTEXT_BYTES + 1}) == [(resident, "device_memory")]


def test_fraction_beyond_its_cap_is_ended_and_its_neighbour_is_not(child):
    small = _resident(OURS, milli=250)
    neighbour = _resident(child, milli=500, asked_bytes=6 * GB)
    most = {OURS: BUDGET // 4 + CONTEXT_BYTES, child: 6 * GB + CONTEXT_BYTES}
    residency = _residency(small)
    assert _measured(residency, {OURS: most[OURS]}) == []
    assert _measured(residency, {OURS: most[OURS] + 1}) == [(small, "device_memory")]
    residency = _residency(neighbour)
    assert _measured(residency, {child: most[child]}) == []
    assert _measured(residency, {child: most[child] + 1}) == [(neighbour, "device_memory")]


def test_each_rank_of_a_resident_may_have_a_context(child):
    """More processes than ranks give it no more."""
    gang, single = _resident(OURS, ranks=2), _resident(OURS)
    held = {OURS: BUDGET, child: 2 * CONTEXT_BYTES}
    assert _measured(_residency(gang), held) == []
    assert _measured(_residency(gang), {**held, OURS: BUDGET + 1}) == [(gang, "device_memory")]
    assert _measured(_residency(single), held) == [(single, "device_memory")]


def test_resident_that_says_that_it_left_and_stays_is_ended_if_nothing_is_lost():
    ended: list[Resident] = []
    honest = _resident(OURS, level="host")
    assert _measured(_residency(honest), {OURS: CONTEXT_BYTES}) == []
    assert (honest.level, honest.memory_bytes) == ("host", CONTEXT_BYTES)
    small = _resident(OURS, level="host", memory_bytes=5 * GB)  # of its small tensors, as it told
    assert _measured(_residency(small), {OURS: 6 * GB}) == []
    assert small.level == "host"
    liar = _resident(OURS, level="host")
    residency = _residency(liar, ended=ended)
    _measured(residency, {OURS: 9 * GB})
    assert (liar.level, liar.may_leave, residency.free_bytes) == ("device", False, BUDGET - 9 * GB)
    assert ended == [liar]  # it never had the slot: it has no state to lose
    unsaved = _resident(OURS, level="host")
    unsaved.record.has_state = True
    _measured(_residency(unsaved, ended=ended), {OURS: 9 * GB})
    assert ended == [liar]


def test_memory_held_after_the_end_is_missing_from_the_device_and_charged(child):
    resident = _resident(OURS, tenant="red")
    residency = _residency(resident)
    _measured(residency, {OURS: GB, child: 2 * GB})
    residency.residents.clear()  # it has ended, and its child lives on
    for _ in range(2):
        _measured(residency, {child: 2 * GB})
        assert residency.account.leftovers == [Leftover(child, 2 * GB, "red")]
        assert residency.free_bytes == BUDGET - 2 * GB
        assert residency.by_tenant() == {"red": [2 * GB, 0]}
    _measured(residency, {})
    assert residency.free_bytes == BUDGET
    assert residency.by_tenant() == {}


def test_memory_of_a_stranger_is_missing_from_the_device_and_charged_to_nobody(child):
    account = DeviceAccount(BUDGET)
    account.measure([(child, 3 * GB)], [])
    assert (account.leftover_bytes, account.by_tenant()) == (3 * GB, {})


def test_paused_tasks_make_room_for_a_command_that_holds_the_device_as_a_guest(child):
    paused = _resident(OURS, memory_bytes=30 * GB)
    ended: list[Resident] = []
    residency = _residency(paused, ended=ended)
    allocations = residency.house.allocations
    allocations.serve("h.0", "sim", DeviceAccess(), lambda: None, lambda *asked: None)
    allocations.claim("h.1", {"h.0": 8 * GB})
    residency.look(1)
    assert (residency.free_bytes, ended) == (2 * GB, [])
    allocations.claim("h.1", {"h.0": 20 * GB})
    residency.end = lambda resident: residency.residents.pop(resident.id) and ended.append(resident)
    residency.look(2)
    assert ended == [paused]  # it never had the slot: it has no state to lose
    # what the driver counts of the command is a part of it
    _measured(residency, {child: 5 * GB})
    assert residency.free_bytes == BUDGET - 20 * GB


def test_processes_of_another_pid_namespace_are_compared_in_sum():
    unseen = 2**30  # no process has such a number
    resident = _resident(OURS, memory_bytes=5 * GB)
    residency = _residency(resident)
    _measured(residency, {unseen: 3 * GB, unseen + 1: GB})
    assert (resident.memory_bytes, residency.free_bytes) == (5 * GB, BUDGET - 5 * GB)
    _measured(residency, {unseen: 9 * GB})
    assert (resident.memory_bytes, residency.free_bytes) == (5 * GB, BUDGET - 9 * GB)
    _measured(residency, {})
    assert residency.free_bytes == BUDGET - 5 * GB


def test_count_from_before_a_leave_says_nothing_after_it(monkeypatch):
    monkeypatch.setattr(Resident, "measure", lambda resident: None)
    resident = _resident(OURS, level="leaving", turn=1, slab_bytes=9 * GB)
    residency = _residency(resident)
    _measured(residency, {OURS: 9 * GB})
    said = {"bytes": 9 * GB, "turn": 1, "memory_bytes": 0, "settled": True}
    residency.heard(resident, said)
    assert (resident.level, resident.memory_bytes) == ("host", 0)


# --- the resident's side --------------------------------------------------------------------------


def _work(*, is_host: bool, held_bytes: int) -> Any:
    accelerator = SimpleNamespace(is_host=is_host, held_bytes=lambda: held_bytes)
    images = SimpleNamespace(absence=SimpleNamespace(bytes=0))
    return SimpleNamespace(accelerator=accelerator, images=images, base_bytes=0, lazy_bytes=0)


def test_host_memory_of_a_task_on_an_accelerator_is_no_device_memory():
    assert progress.memory_bytes(_work(is_host=False, held_bytes=5)) == 5
    assert progress.memory_bytes(_work(is_host=True, held_bytes=0)) > 2**20  # of this process


def test_cap_is_set_where_the_backend_has_one_and_only_part_of_the_device_is_given():
    caps: list[Any] = []
    capped = SimpleNamespace(set_per_process_memory_fraction=lambda *cap: caps.append(cap))
    bare = SimpleNamespace()
    for module, fraction in ((None, 0.5), (bare, 0.5), (capped, 1.0), (capped, 0.5)):
        device: Any = SimpleNamespace(is_host=module is None, module=module, device="sim:0")
        cap_memory(device, fraction)
    assert caps == [(0.5, "sim:0")]


# --- on a device ----------------------------------------------------------------------------------


def test_task_beyond_the_memory_of_its_device_fails_with_the_reason(rigs):
    rig = rigs()
    supervisor = rig.supervisor
    for task in ("t1", "t2"):
        rig.launch(task, "jobs:Count")
        rig.steps(task, 2)
        rig.pause(task)
        rig.event(Paused, task)

    def count() -> None:
        by_task = {r.task: r.pid for r in supervisor.stays.residents.values()}
        cap_bytes = supervisor.residency.account.budget_bytes + CONTEXT_BYTES
        counted = [(by_task["t1"], cap_bytes + 1), (by_task["t2"], cap_bytes - 1)]
        supervisor.residency.measured(counted, supervisor.stays.kill, now_us())

    rig.launch("t1", "jobs:Count", epoch=2)
    rig.steps("t1", 4, 2)
    supervisor.receive(count)
    failed = rig.event(Failed, "t1", 2)
    assert failed.cause == "device_memory"
    assert "more memory on the device" in failed.message
    assert rig.view("t2").state == "paused"
