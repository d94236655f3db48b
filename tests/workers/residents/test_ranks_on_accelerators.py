"""Gangs on simulated accelerators of several hosts, which have one device each.

Ranks that share a device leave it between their turns.  Several devices of one host are in
`test_sandbox_change`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.thoroughness import in_rotation, rest_long
from tests.workers.accelerators import devices
from tests.workers.resident_gangs import Gang, Residents, next_said
from workers.process import slab

assert devices

pytestmark = pytest.mark.sim

JSON = dict[str, Any]

RANKS, STEPS = 3, 60
LIMIT_BYTES = 64 * 2**20


def _gang(devices: list[Residents], slots: int, entry: str = "ranks:Train", **more: Any) -> Gang:
    """A gang with a slot on each of so many devices."""
    return Gang(devices, [1] * slots, entry=entry, ranks=RANKS, steps=STEPS, **more)


@pytest.fixture(scope="module")
def undisturbed(devices: list[Residents]) -> dict[str, JSON]:
    """What each job gives with a device for each rank."""
    found = {}
    for entry in ("ranks:Train", "ranks:Sharded"):
        gang = _gang(devices, RANKS, entry).begin()
        found[entry] = gang.finished()
        gang.must_end()
        gang.end()
    return found


@pytest.mark.parametrize(("entry", "slots"), in_rotation(["ranks:Train", "ranks:Sharded"], [1, 2]))
def test_gang_on_fewer_devices_gives_the_bits_of_a_device_per_rank(
    devices: list[Residents], undisturbed: dict[str, JSON], entry: str, slots: int
) -> None:
    gang = _gang(devices, slots, entry).begin()
    assert gang.finished() == undisturbed[entry]
    gang.end()


@pytest.mark.parametrize("slots", [1, 2])
def test_ranks_of_a_function_combine_what_lies_on_their_devices(
    devices: list[Residents], slots: int
) -> None:
    gang = _gang(devices, slots, "ranks:summed").begin()
    assert gang.finished() == {"total": 328350.0}
    gang.end()


@pytest.mark.parametrize("entry", rest_long(["ranks:Sharded", "ranks:Train"]))
def test_devices_of_a_gang_change_while_it_runs(
    devices: list[Residents], undisturbed: dict[str, JSON], entry: str
) -> None:
    """It gives devices back until its ranks take turns on one, and gets them again."""
    gang, step = _gang(devices, 3, entry, pace=0.05).begin(), 0
    for slots in (1, 2, 1, 3):
        gang.until("progress", step + 1)
        gang.change([1] * slots)
        resized = gang.until("resized")
        assert resized["seats"] == [1] * slots
        assert resized["step"] > step
        step = resized["step"]
    assert gang.finished() == undisturbed[entry]
    gang.must_end()
    gang.end()


@pytest.mark.parametrize("entry", rest_long(["ranks:Train", "ranks:Sharded"]))
def test_gang_is_paused_and_moved_to_other_devices(
    devices: list[Residents], undisturbed: dict[str, JSON], entry: str
) -> None:
    """From three devices to one, to two others, and back in another order."""
    image: JSON | None = None
    kept = slab.made(LIMIT_BYTES)
    a, b, c = devices
    for on in ([a, b, c], [b], [c, a], [c, b, a]):
        gang = _gang(on, len(on), entry, image=image, slab_fd=kept, pace=0.05).begin()
        gang.until("progress", (image or {"step": 0})["step"] + 1)
        image = gang.paused_image()
        gang.end()
    gang = _gang([a], 1, entry, image=image, slab_fd=kept).begin()
    assert gang.finished() == undisturbed[entry]
    gang.end()


@pytest.mark.parametrize("slots", [1, 2])
def test_gang_is_saved_and_paused_in_place(
    devices: list[Residents], undisturbed: dict[str, JSON], slots: int
) -> None:
    """An image is made of what the ranks have on the host: none comes back to the device for it."""
    gang, step = _gang(devices, slots, pace=0.05).begin(), 0
    for order in ("save", "pause", "save", "pause"):
        gang.until("progress", step + 1)
        gang.order(order)
        if order == "save":
            step = gang.until("saving")["at_step"]
            continue
        step = gang.until("paused")["step"]
        if slots > 1:
            assert next_said(gang.wires[1])["is"] == "paused"
        gang.order("go", seats=gang.hosts, linked=False)
    assert gang.finished() == undisturbed["ranks:Train"]
    gang.end()
