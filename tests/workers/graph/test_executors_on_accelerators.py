"""Graphs on several simulated accelerators: an executor for each, or several that share one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.accelerators import devices
from tests.workers.graph.test_executor_job import STATES, WIDE
from tests.workers.graph.test_remote_blocks import LONG, Executors
from tests.workers.resident_gangs import Residents

assert devices

pytestmark = pytest.mark.sim

JSON = dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(devices: list[Residents]) -> dict[str, JSON]:
    """What each graph gives with all executors on one device."""
    found = {}
    for name, graph in (("tensors", WIDE), ("states", STATES)):
        gang = Executors(devices, [1], graph).begin()
        found[name] = gang.until("finished")["result"]
        gang.end()
    return found


def test_graph_resumes_on_other_devices_and_changes_them_while_it_runs(
    devices: list[Residents],
) -> None:
    """Paused on two devices, resumed on one other, then spread over all three."""
    alone = Executors(devices, [1], LONG).begin()
    alone.let_end()
    undisturbed = alone.until("finished")["result"]
    alone.end()
    a, b, c = devices
    gang = Executors([a, b], [1, 1], LONG).begin()
    gang.until("progress", 1)
    gang.order("pause")
    step = gang.until("paused")["step"]
    saving = gang.until("saving")
    assert saving["at_step"] == step
    gang.end()
    image = {"step": step, "index_bytes": saving["index_bytes"]}
    again = Executors([c, a, b], [1], LONG, image=image, slab_fd=gang.slab).begin()
    again.until("progress", step + 1)
    again.change([1, 1, 1])
    assert again.until("resized")["seats"] == [1, 1, 1]
    again.let_end()
    assert again.until("finished")["result"] == undisturbed
    again.must_end()
    again.end()


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("graph", [WIDE, STATES], ids=["tensors", "states"])
def test_executors_on_several_devices_give_what_one_device_gives(
    devices: list[Residents], undisturbed: dict[str, JSON], graph: JSON, slots: int
) -> None:
    gang = Executors(devices, [1] * slots, graph).begin()
    assert gang.until("finished")["result"] == undisturbed["tensors" if graph is WIDE else "states"]
    gang.must_end()
    gang.end()
