"""A job on several accelerators of one host: one process tree, in one sandbox that shows them all.

When its devices change, it goes on in another sandbox, and no step goes to the store.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import (
    Failed,
    Finished,
    Paused,
    Resize,
    Resized,
    Saved,
    Started,
    Stopped,
)
from tests.thoroughness import rest_long
from tests.workers.accelerators import host
from tests.workers.conftest import PATIENCE_S, DeviceRig
from workers.device.stays.resident_messages import ResidentMessages
from workers.process.untrusted import Nonsense

assert host

pytestmark = pytest.mark.sim

RANKS, STEPS = 3, 40
GUESTS = ("h.1", "h.2")


def train(
    rig: DeviceRig,
    task: str,
    epoch: int = 1,
    *,
    guests: Sequence[str] = (),
    waits: bool = True,
    pace: float = 0.02,
    **more: Any,
) -> None:
    params = {"steps": STEPS, "pace": pace, "waits": waits}
    seats = [1 + len(guests)]
    more = {"world_size": RANKS, "params": params, **more}
    rig.launch(task, "ranks:Looks", epoch, guests=[*guests], seats=seats, **more)


def resize(rig: DeviceRig, task: str, guests: Sequence[str], epoch: int = 1) -> Resized:
    before = len(rig.all(Resized, task, epoch))
    rig.resize(task, 1 + len(guests), epoch, guests)
    rig.until(lambda: len(rig.all(Resized, task, epoch)) > before)
    return rig.all(Resized, task, epoch)[-1]


def result(rig: DeviceRig, task: str, epoch: int = 1) -> dict[str, Any]:
    rig.let_end(task, epoch)
    return rig.event(Finished, task, epoch).result


def seen(rig: DeviceRig, task: str, epoch: int = 1) -> list[str]:
    """Return what the ranks said of their devices, in the order of the ranks of each sandbox."""
    said = [line for line in rig.printed(task, epoch) if " sees " in line]
    return [line for at in range(0, len(said), RANKS) for line in sorted(said[at : at + RANKS])]


@pytest.fixture(scope="module")
def undisturbed(host: Callable[[int], DeviceRig]) -> dict[str, Any]:
    """What the job gives on one device."""
    train(host(0), "alone", waits=False, pace=0.0)
    return host(0).event(Finished, "alone").result


def test_each_rank_sees_its_own_device_and_a_job_goes_on_on_others(host, undisturbed):
    """It grows onto three devices and returns them one by one."""
    rig, step = host(0), 0
    train(rig, "t1")
    rig.steps("t1", 2)
    for guests in (GUESTS, GUESTS[:1], ()):
        resized = resize(rig, "t1", guests)
        assert (resized.seats, resized.step > step) == ([1 + len(guests)], True)
        step = resized.step
        rig.steps("t1", step + 2)
    assert result(rig, "t1") == undisturbed
    assert seen(rig, "t1") == [
        *(f"rank {rank} sees 1: 0 of 0" for rank in range(RANKS)),
        *(f"rank {rank} sees 1: {rank} of 0 1 2" for rank in range(RANKS)),
        *(f"rank {rank} sees 1: {device} of 0 1" for rank, device in enumerate("001")),
        *(f"rank {rank} sees 1: 0 of 0" for rank in range(RANKS)),
    ]
    assert len(rig.all(Started, "t1")) == 1
    assert not rig.all(Paused, "t1") + rig.all(Saved, "t1")


@pytest.mark.parametrize("seed", rest_long(range(4)))
def test_orders_during_a_change_are_obeyed(host, undisturbed, seed):
    """A pause may come before the ranks stop, while they stage, or while the next ones begin."""
    rig, chance = host(0), random.Random(seed)
    task = f"paused{seed}"
    train(rig, task)
    for epoch in (1, 2, 3):
        step = rig.event(Started, task, epoch).step
        rig.steps(task, step + 2, epoch)
        rig.resize(task, 3, epoch, GUESTS)
        reach(rig, task, epoch, chance.choice(["at once", "told", "heard", "left", "begun"]))
        rig.save(task, epoch)
        rig.pause(task, epoch)
        paused = rig.event(Paused, task, epoch)
        assert paused.step >= step + 2
        guests, images = ["h.4"] if epoch == 2 else [], saved(rig, task, epoch)
        train(rig, task, epoch + 1, guests=guests, images=images)
        assert rig.event(Started, task, epoch + 1).step == paused.step
    assert result(rig, task, 4) == undisturbed


class Drivers:
    """The power limits in the drivers of the first devices of the host."""

    def __init__(self, host: Callable[[int], DeviceRig]) -> None:
        self.rigs = [host(number) for number in range(4)]

    def _file(self, number: int) -> Path:
        return self.rigs[0].house.run.parent / "driver" / f"h.{number}.settings.json"

    @property
    def watts(self) -> list[int]:
        files = (self._file(number) for number in range(4))
        return [json.loads(file.read_text())["power_limit_w"]["value"] for file in files]

    def refuse(self, number: int) -> None:
        said = {"power_limit_w": {"value": 300, "refused": "only root may set it"}}
        self._file(number).write_text(json.dumps(said))

    def until(self, *watts: int) -> None:
        self.rigs[0].until(lambda: self.watts == [*watts])


LOW = {"power_limit_w": 200}


def test_each_device_of_a_task_is_set_as_its_preset_says(host, undisturbed):
    rig, drivers = host(0), Drivers(host)
    train(rig, "set", guests=["h.1"], preset=LOW)
    assert rig.event(Started, "set").preset["power_limit_w"] == 200
    assert drivers.watts == [200, 200, 300, 300]
    rig.steps("set", 2)
    resize(rig, "set", ["h.2"])
    drivers.until(200, 300, 200, 300)
    rig.pause("set")
    rig.event(Paused, "set")
    drivers.until(300, 300, 300, 300)
    train(rig, "set", 2, guests=["h.1"], preset=LOW)
    rig.event(Started, "set", 2)
    assert drivers.watts == [200, 200, 300, 300]
    assert result(rig, "set", 2) == undisturbed
    drivers.until(300, 300, 300, 300)


def test_device_that_does_not_take_the_preset_is_named_and_not_used(host, undisturbed):
    rig, drivers = host(0), Drivers(host)
    drivers.refuse(3)
    train(rig, "refused", guests=["h.3"], preset=LOW)
    failed = rig.event(Failed, "refused")
    assert failed.cause == "device_preset"
    assert failed.message.endswith("h.3: power_limit_w: only root may set it")
    drivers.until(300, 300, 300, 300)
    train(rig, "kept", preset=LOW)
    rig.steps("kept", 2)
    assert resize(rig, "kept", ["h.3"]).seats == [1], "it keeps what it has"
    assert result(rig, "kept") == undisturbed


def reach(rig: DeviceRig, task: str, epoch: int, moment: str) -> None:
    """Wait until the change of the task's devices has come so far."""
    resident = next(r for r in rig.supervisor.stays.residents.values() if r.task == task)
    first = resident.wire
    come = {
        "at once": lambda: True,
        "told": lambda: resident.repeated is not None or resident.wire is not first,
        "heard": lambda: has_left(rig, resident.id) or resident.wire is not first,
        "left": lambda: resident.wire is not first,
        "begun": lambda: resident.wire is not first and resident.has_entered,
    }[moment]
    end_s = time.monotonic() + PATIENCE_S
    while not (come() or rig.all(Resized, task, epoch)):
        assert time.monotonic() < end_s, moment
        time.sleep(0.001)


def has_left(rig: DeviceRig, resident: int) -> bool:
    """Say whether the process has said that it leaves, and has not been replaced yet."""
    change = rig.supervisor.change.next.get(resident)
    return change is not None and change.image is not None


def saved(rig: DeviceRig, task: str, epoch: int) -> list[Any]:
    """Wait until the image of the pause is durable; it is what a launch elsewhere begins from."""
    step = rig.event(Paused, task, epoch).step

    def there() -> list[Any]:
        return [one for one in rig.all(Saved, task, epoch) if one.step == step]

    return [rig.image(rig.until(there)[0])]


def test_job_is_cancelled_while_its_devices_change(host):
    rig = host(0)
    train(rig, "cancelled")
    rig.steps("cancelled", 2)
    rig.resize("cancelled", 2, 1, GUESTS[:1])
    rig.cancel("cancelled")
    rig.event(Stopped, "cancelled")


def test_job_whose_next_devices_are_not_served_goes_on_where_it_is(host, undisturbed):
    rig = host(0)
    train(rig, "stays", guests=GUESTS[:1])
    rig.steps("stays", 2)
    assert resize(rig, "stays", ["h.1", "h.99"]).seats == [2]
    assert result(rig, "stays") == undisturbed


def test_launch_on_other_devices_waits_for_the_image_of_the_paused_job(host, undisturbed):
    """The process that is paused cannot go on there, and it alone has the last steps."""
    rig = host(0)
    train(rig, "moved", guests=GUESTS[:1])
    rig.steps("moved", 3)
    rig.pause("moved")
    paused = rig.event(Paused, "moved")
    train(rig, "moved", 2, guests=["h.3"])
    assert rig.event(Started, "moved", 2).step == paused.step
    assert result(rig, "moved", 2) == undisturbed
    assert seen(rig, "moved", 2)[-1] == "rank 2 sees 1: 3 of 0 3"


def test_memory_of_a_job_is_claimed_on_each_of_its_devices(host):
    rig, allocations = host(0), host(0).house.allocations
    train(rig, "claims", guests=GUESTS, memory_bytes=5 * 2**20)
    rig.steps("claims", 2)
    held = [allocations.claimed_bytes(f"h.{n}") for n in range(4)]
    assert held[0] == held[3] == 0
    assert held[1] == held[2] >= 5 * 2**20
    rig.cancel("claims")
    rig.event(Stopped, "claims")
    rig.until(lambda: not any(allocations.claimed_bytes(f"h.{n}") for n in range(4)))


def test_process_that_says_it_was_resized_without_leaving_is_ended(host):
    """It would keep a device that the island then gives to another task."""
    rig = host(0)
    train(rig, "keeps", guests=GUESTS[:1])
    rig.steps("keeps", 2)
    messages = ResidentMessages(
        *(rig.house, rig.supervisor.stays, rig.supervisor.hosts),
        *(rig.supervisor.residency, rig.supervisor.rhythm, lambda: rig.supervisor.spawner.groups),
    )
    residents = rig.supervisor.stays.residents.values()
    resident = next(each for each in residents if each.task == "keeps")
    resident.record.stay.wanted = Resize(task="keeps", epoch=1, seq=2, seats=[1])
    with pytest.raises(Nonsense, match="did not leave its devices"):
        messages.resized(resident, {"seats": [1], "step": 3})
    resident.record.stay.wanted = None
    rig.cancel("keeps")
    rig.event(Stopped, "keeps")
