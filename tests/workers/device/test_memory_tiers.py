"""State leaves a device's memory and comes back, bit by bit; who must go, and who may come."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from app.core.device.device_records import ProcessRecord, StayRecord
from app.core.model.protocol.messages import Finished, Paused, Saved, Started
from tests.thoroughness import every_second
from tests.workers.conftest import ROOT, alone
from tests.workers.journeys import ANIMALS, Animal, Station, evicted, points, undisturbed
from tests.workers.watching import WATCH, needs_watch
from workers.capture.capture import Surroundings, capture
from workers.device.memory_tiers import Residency
from workers.device.processes.resident import Resident
from workers.hardware.accelerator import Accelerator
from workers.hardware.storages import follow_lending
from workers.process import slab
from workers.process.host_allocations import HostAllocations
from workers.process.isolation.sandbox import ENVIRONMENT
from workers.process.slab import Slab
from workers.switching import context_switch
from workers.switching.offload import LEAVES_BYTES, Absence, CalledOff
from workers.switching.staging import Staging

CPU = Accelerator("cpu")
STEPS = 12
WIDE = 256  # WIDE x WIDE floats are large enough to leave
MB = 2**20


# --- a job's storages -----------------------------------------------------------------------------


class Place:
    """What a resident has: a slab, its staging, and what is away."""

    def __init__(self, limit: int = 64 * MB) -> None:
        self.slab = Slab(slab.made(limit))
        self.staging = Staging(self.slab, WATCH, CPU)
        self.absence = Absence(self.slab, CPU, self.staging.pinned)

    def leave(self, job: object) -> None:
        captured = capture(job, around=Surroundings(), accelerator=CPU)
        _, lying = self.staging.bring(captured)
        self.absence.leave(lying, lambda: None)

    def come_back(self) -> None:
        self.staging.lies(self.absence.come_back(lambda size: None))

    def copied(self, job: object) -> int:
        """Bytes that an image of it moved."""
        captured = capture(job, around=Surroundings(), accelerator=CPU)
        self.staging.begin(captured, lambda layout: None)
        self.staging.join()
        return self.staging.copied_bytes


@pytest.fixture(scope="module")
def station() -> Iterator[Station]:
    with Station() as station:
        yield station


@pytest.mark.parametrize("animal", every_second(ANIMALS, begin=1), ids=lambda each: each.name)
def test_job_that_left_the_device_computes_the_same_bits(station, animal: Animal):
    leaves = points(zlib.crc32(animal.name.encode()), STEPS, 5)
    expected = undisturbed(station, animal, STEPS)
    found = evicted(station, animal, STEPS, leaves)
    assert found["trace"] == expected["trace"], f"away after {leaves}"
    assert found["digest"] == expected["digest"], f"away after {leaves}"
    assert len(found["away_bytes"]) == 5
    assert min(found["away_bytes"]) > 0


class Tied:
    def __init__(self) -> None:
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDE, WIDE, bias=False), torch.nn.Linear(WIDE, WIDE, bias=False)
        )
        self.net[1].weight = self.net[0].weight
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.view = self.net[0].weight.detach()[3:5]
        self.small = torch.arange(10.0)
        self.array = numpy.arange(WIDE * WIDE, dtype=numpy.float32)
        self.over_array = torch.from_numpy(self.array)
        self.seen = torch.ones(WIDE * WIDE)
        self.seen_array = self.seen.numpy()
        self.shared = torch.ones(WIDE * WIDE).share_memory_()
        self.lent = torch.ones(WIDE * WIDE)

    def step(self) -> None:
        self.opt.zero_grad()
        self.net(torch.ones(2, WIDE)).square().mean().backward()
        self.opt.step()


def test_storages_that_leave_take_no_memory_and_viewed_ones_stay():
    follow_lending()
    job, place = Tied(), Place()
    job.step()
    lent = numpy.from_dlpack(job.lent)
    weight, before = job.net[0].weight, job.net[0].weight.detach().clone()
    address = job.seen.data_ptr()
    place.leave(job)
    assert place.absence.bytes == 4 * before.nbytes  # weight, gradient, two averages
    assert weight.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="storage"):
        weight[3:5].sum()
    assert job.seen.data_ptr() == address
    for kept in (job.seen, job.over_array, job.shared, job.lent, job.small):
        assert kept.untyped_storage().nbytes() == kept.nbytes
    place.come_back()
    assert torch.equal(weight, before)
    assert job.net[1].weight is weight
    assert job.view.data_ptr() == weight[3:5].data_ptr()
    assert job.opt.param_groups[0]["params"][0] is weight
    job.seen_array[7] = 5
    job.array[8] = 6
    assert (job.seen[7], job.over_array[8], lent[0]) == (5, 6, 1)
    job.step()
    assert not torch.equal(weight, before)


def in_use_bytes() -> int:
    """Of this process's own memory, without what the kernel may take back at any time."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return (found["Anonymous:"] - found["LazyFree:"]) * 1024


@pytest.mark.parametrize("environment", [{}, ENVIRONMENT], ids=["as glibc has it", "as residents"])
def test_released_memory_goes_back_to_the_kernel(environment):
    code = "from tests.workers.device.test_memory_tiers import leave_and_tell; leave_and_tell()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    size, fell, rose = map(int, done.stdout.split())
    assert 0.95 * size < fell < 1.05 * size
    assert 0.95 * size < rose < size + 11 * (2 * MB)  # pages of the heap are large


def leave_and_tell() -> None:
    """How many bytes left, by how much memory in use fell, and rose when they came back."""
    parts = [torch.ones(n * 300_000) for n in range(1, 12)]
    job, place = SimpleNamespace(parts=parts, between=[b"x" * 50_000] * 9), Place(128 * MB)
    before = in_use_bytes()
    place.leave(job)
    size, away = place.absence.bytes, in_use_bytes()
    place.come_back()
    assert all((part == 1).all() for part in parts)
    sys.stdout.write(f"{size} {before - away} {in_use_bytes() - away}")


def test_return_in_pieces_may_be_cancelled_and_reversed():
    job, place = SimpleNamespace(parts=[torch.full((WIDE, WIDE), n) for n in range(9)]), Place()
    place.leave(job)
    room = iter([True] * 4)

    def until_it_is_full(size: int) -> None:
        if not next(room, False):
            raise CalledOff

    place.staging.lies(place.absence.come_back(until_it_is_full))
    assert len(place.absence.away) == 5
    assert [part.untyped_storage().nbytes() > 0 for part in job.parts] == [True] * 4 + [False] * 5
    place.come_back()
    assert [part[1, 1].item() for part in job.parts] == list(range(9))


class Frozen:
    def __init__(self) -> None:
        self.base = torch.nn.Linear(1024, 1024).requires_grad_(False)
        self.head = torch.nn.Linear(1024, WIDE)
        self.opt = torch.optim.SGD(self.head.parameters(), lr=1e-3)

    def step(self) -> None:
        self.opt.zero_grad()
        self.head(self.base(torch.ones(2, 1024))).square().mean().backward()
        self.opt.step()


@needs_watch
def test_unchanged_storages_in_the_slab_are_not_moved_there_again():
    job, place = Frozen(), Place()
    for _ in range(3):
        job.step()
        place.copied(job)
    base, head = job.base.weight.nbytes, job.head.weight.nbytes
    job.step()
    place.leave(job)
    assert head <= place.staging.copied_bytes <= 2 * head + 2 * LEAVES_BYTES  # it, its gradient
    place.come_back()
    job.step()
    assert place.copied(job) < base
    place.leave(job)
    place.come_back()
    job.base.weight.data[5, 5] = 7
    assert place.copied(job) >= base
    place.leave(job)
    place.come_back()
    assert job.base.weight[5, 5] == 7


@needs_watch
def test_storages_just_restored_are_not_copied_back():
    job, place = Frozen(), Place()
    job.step()
    captured = capture(job, around=Surroundings(), accelerator=CPU)
    layout = place.staging.begin(captured, lambda layout: None)
    place.staging.join()
    fresh = Staging(place.slab, WATCH, CPU)
    again: Any = context_switch.restored(
        place.slab, layout.as_json(), around=Surroundings(), accelerator=CPU, then=fresh.lies
    )
    again.step()
    expected = [part.detach().clone() for part in again.head.parameters()]
    captured = capture(again, around=Surroundings(), accelerator=CPU)
    layout = fresh.begin(captured, lambda layout: None)
    fresh.join()
    assert fresh.copied_bytes < again.base.weight.nbytes
    third: Any = context_switch.restored(
        place.slab, layout.as_json(), around=Surroundings(), accelerator=CPU
    )
    assert torch.equal(third.base.weight, job.base.weight)
    assert all(map(torch.equal, third.head.parameters(), expected))


# --- who must go ----------------------------------------------------------------------------------


def _resident(task: str, paused_us: int, absent_us: int = 0) -> Any:
    return SimpleNamespace(task=task, paused_us=paused_us, absent_us=absent_us, kill_reason="")


def _house(**memory: int) -> Any:
    allocations = HostAllocations()
    return SimpleNamespace(
        device="h.0", kind="cpu", residents_max=9, allocations=allocations, **memory
    )


def _order(residents: list[Any], expected: list[str] | None = None) -> list[str]:
    house = _house(memory_bytes=0, host_memory_bytes=0)
    known = dict(enumerate(residents))
    residency = Residency(house, known, lambda resident: None, lambda: 0)
    residency.expected = expected or []
    return [r.task for r in residency.needed_last_first(residents)]


def test_task_paused_last_is_needed_last_among_those_that_take_turns():
    assert _order([_resident("a", 10), _resident("b", 20), _resident("c", 30)]) == ["c", "b", "a"]


def test_task_that_returns_sooner_stays():
    often, seldom = _resident("often", 30, absent_us=5), _resident("seldom", 10, absent_us=100)
    assert _order([often, seldom]) == ["seldom", "often"]


def test_prediction_of_the_island_wins_over_a_guess():
    residents = [_resident("a", 10), _resident("b", 20), _resident("c", 30)]
    assert _order(residents, ["c", "a"]) == ["b", "a", "c"]


def test_evicting_by_predicted_need_loads_less_than_evicting_the_oldest():
    """Four take turns where three fit: the best possible brings back one in three turns."""
    turns = [f"t{n % 4}" for n in range(400)]
    assert _loads(turns, lambda held, now: _order(list(held.values()))[0]) <= 400 / 3 + 5
    longest = _loads(turns, lambda held, now: min(held.values(), key=lambda r: r.paused_us).task)
    assert longest == 400


def _loads(turns: list[str], victim: Any) -> int:
    residents = {name: _resident(name, 0) for name in set(turns)}
    held, loads = dict[str, Any](), 0
    for now, name in enumerate(turns, start=1):
        mine = residents[name]
        if mine.paused_us:
            took = now - mine.paused_us
            mine.absent_us = (mine.absent_us + took) // 2 if mine.absent_us else took
        if name not in held:
            loads += 1
            if len(held) == 3:
                del held[victim(held, now)]
        held[name] = mine
        mine.paused_us = now
    return loads


# --- who may come ---------------------------------------------------------------------------------


def _living(task: str, state: str, **more: Any) -> Resident:
    spec = SimpleNamespace(devices=SimpleNamespace(memory_bytes=60 * MB))
    stay: Any = SimpleNamespace(state=state, arrived_us=1, spec=spec)
    wire: Any = SimpleNamespace(send=lambda message, fds: None)
    made = slab.made(64 * MB)
    record = ProcessRecord(1, task, StayRecord(task, 1), 0)
    bulk, room = None, None
    return Resident(record, wire, bulk, made, {}, room, stay, memory_bytes=20 * MB, **more)  # type: ignore[arg-type]


def test_returned_task_is_ready_only_once_it_may_grow_to_its_request(monkeypatch):
    """Of its 60 MB it used 40: with these back, the other 20 are still somebody else's."""
    monkeypatch.setattr(Resident, "measure", lambda resident: None)
    goes, comes = _living("goes", "paused"), _living("comes", "seating", level="host")
    goes.slab_bytes = comes.slab_bytes = comes.away_bytes = 20 * MB
    house = _house(memory_bytes=104 * MB, host_memory_bytes=MB**2)
    residency = Residency(house, {1: goes, 2: comes}, lambda resident: None, lambda: 0)

    def says(resident: Resident, away: int, **more: bool) -> None:
        said = {"bytes": away, "turn": resident.turn, "memory_bytes": 40 * MB - away}
        residency.heard(resident, {**said, **more})
        residency.look(0)
        assert residency.free_bytes >= 0

    residency.look(0)
    assert (goes.level, comes.level, comes.granted_bytes) == ("leaving", "coming", 24 * MB)
    says(goes, 15 * MB)
    says(comes, 0, settled=True)
    assert (comes.level, comes.lacking_bytes) == ("coming", 20 * MB)
    assert (residency.free_bytes, comes.granted_bytes) == (19 * MB, 0)
    says(goes, 20 * MB, settled=True)
    assert (comes.level, comes.granted_bytes) == ("coming", 20 * MB)
    says(comes, 0, settled=True)
    assert (goes.level, comes.level) == ("host", "device")


def test_task_that_took_all_memory_it_may_use_is_ready(monkeypatch):
    """It was granted less, but its allocator took more: nothing is left to be granted."""
    monkeypatch.setattr(Resident, "measure", lambda resident: None)
    comes = _living("comes", "seating", level="coming", granted_bytes=35 * MB, turn=1)
    comes.slab_bytes = comes.away_bytes = 35 * MB
    house = _house(memory_bytes=64 * MB, host_memory_bytes=MB**2)
    residency = Residency(house, {1: comes}, lambda resident: None, lambda: 0)
    said = {"bytes": 0, "turn": 1, "memory_bytes": 60 * MB, "settled": True}
    residency.heard(comes, said)
    assert comes.level == "device"
    assert residency.look(0)


@pytest.mark.parametrize(("free_mb", "leaves"), [(5, True), (4, False)])
def test_paused_task_leaves_if_host_memory_has_room_for_what_it_lacks(free_mb, leaves):
    """15 of its 20 MB lie in host memory already."""
    goes = _living("goes", "running", slab_bytes=15 * MB)
    house = _house(memory_bytes=64 * MB, host_memory_bytes=(15 + free_mb) * MB)
    residency = Residency(house, {1: goes}, lambda resident: None, lambda: 0)
    residency.lacks = "bytes"
    assert residency.with_pause(goes, 0).get("leave", False) is leaves


# --- on a device ----------------------------------------------------------------------------------


def _start(rig: Any, task: str, epoch: int = 1, **more: Any) -> None:
    params = {"megabytes": 40, "nap_s": 0.002, **more.pop("params", {})}
    rig.launch(task, "jobs:Count", epoch, params=params, **{"memory_bytes": 60 * MB, **more})


def _turn(rig: Any, task: str, epoch: int, steps: int = 2, **more: Any) -> Any:
    """One turn on the seat; its `Started`."""
    _start(rig, task, epoch, **more)
    started = rig.event(Started, task, epoch)
    rig.steps(task, started.step + steps, epoch)
    rig.pause(task, epoch)
    rig.event(Paused, task, epoch)
    return started


def test_more_tasks_take_turns_than_fit_and_none_of_them_ends(rigs):
    rig = rigs(memory_bytes=130 * MB, host_memory_bytes=400 * MB)
    for epoch, task in itertools.product((1, 2, 3), ("t1", "t2", "t3", "t4")):
        started = _turn(rig, task, epoch)
        assert started.resumed == ("fresh" if epoch == 1 else "resident")
    levels = [rig.view(f"t{n}", 3).level for n in (1, 2, 3, 4)]
    assert set(levels) == {"device", "host"}
    for report in rig.reports:
        held = [(v.task, v.state, v.level, v.on_device_bytes) for v in report.residents]
        assert sum(part[-1] for part in held) <= 130 * MB, held


def test_images_that_host_memory_cannot_hold_go_to_the_store(rigs):
    rig = rigs(memory_bytes=130 * MB, host_memory_bytes=100 * MB)
    for task in ("t1", "t2", "t3", "t4"):
        _turn(rig, task, 1)
        rig.event(Saved, task)
    rig.until(lambda: sum(v.host_bytes for v in rig.reports[-1].residents) <= 100 * MB)
    gone = [task for task in ("t1", "t2", "t3", "t4") if rig.view(task) is None]
    assert gone
    image = rig.image(rig.all(Saved, gone[0])[-1])
    assert _turn(rig, gone[0], 2, images=[image]).resumed == "image"


def test_next_task_returns_to_the_device_while_the_one_before_runs(rigs):
    rig = rigs(memory_bytes=160 * MB, host_memory_bytes=400 * MB)
    for task in ("t1", "t2", "t3"):
        _turn(rig, task, 1)
    away = next(task for task in ("t1", "t2") if rig.view(task).level == "host")
    _start(rig, "t3", 2)
    rig.event(Started, "t3", 2)
    _start(rig, away, 2)
    rig.until(lambda: rig.view(away, 2) and rig.view(away, 2).level == "device")
    assert rig.view("t3", 2).state == "running"


def test_jobs_that_leave_again_and_again_end_with_the_same_bits(rigs):
    steps = {"steps": 30, "nap_s": 0.005}
    expected = alone("jobs:Everything", steps)["result"]
    rig = rigs(memory_bytes=120 * MB, host_memory_bytes=400 * MB)
    dice, epochs = random.Random(4), {"e1": 0, "e2": 0, "c1": 0, "c2": 0}
    line = ["e2", "c1", "e1", "c2"]  # at first; for c1 and c2 together there is no room
    for _ in range(14):
        task = line.pop() if line else dice.choice(sorted(epochs))
        epochs[task] += 1
        if task[0] == "c":
            _start(rig, task, epochs[task], params={"megabytes": dice.choice((50, 70))})
        else:
            rig.launch(task, "jobs:Patient", epochs[task], params=steps)
        rig.event(Started, task, epochs[task])
        rig.pause(task, epochs[task])
        rig.event(Paused, task, epochs[task])
    for task in ("e1", "e2"):
        epochs[task] += 1
        rig.launch(task, "jobs:Patient", epochs[task], params=steps)
        rig.event(Started, task, epochs[task])
        rig.let_end(task, epochs[task])
        assert rig.event(Finished, task, epochs[task]).result == expected
    levels = {view.level for report in rig.reports for view in report.residents}
    assert {"device", "host"} <= levels
