"""Ranks on simulated accelerators: a device for each rank, or turns on fewer, with the same bits.

The devices' memory is not the host's, their work runs late, and each process sees one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim import orders
from tests.thoroughness import in_rotation
from tests.workers.gangs import JSON, Gangs, bits

pytestmark = pytest.mark.sim

RANKS, STEPS = 3, 6
BYTES = 208 * 2**20  # of each device: the states of three ranks of `Wide` are larger

Ways = dict[str, Any]


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """A host of three devices, whose memory is common to all processes that use them."""
    home = str(tmp_path_factory.mktemp("devices"))
    host = Gangs(
        SIM_DEVICES=str(RANKS), SIM_HOME=home, SIM_MEMORY_BYTES=str(BYTES), **orders.ENVIRON
    )
    yield host
    host.close()


def _right(gangs: Gangs, job: str, way: Ways) -> list[JSON]:
    return gangs.right(f"devices:{job}", ranks=RANKS, kind="sim", **{"steps": STEPS, **way})


@pytest.fixture(scope="module")
def undisturbed(gangs: Gangs) -> dict[str, list[JSON]]:
    """By job: the run with a device for each rank."""
    jobs = ("Mlp", "Conv", "Accumulating", "Sharded")
    return {job: _right(gangs, job, {"seats": RANKS}) for job in jobs}


@pytest.mark.parametrize(
    ("job", "way"),
    in_rotation(
        ["Mlp", "Conv", "Accumulating", "Sharded"],
        [{"seats": 1}, {"seats": 1, "swap": True}, {"seats": 2, "swap": True}],
    ),
)
def test_turns_on_fewer_devices_give_the_bits_of_a_device_per_rank(
    gangs: Gangs, undisturbed: dict[str, list[JSON]], job: str, way: Ways
) -> None:
    found = _right(gangs, job, way)
    assert bits(found) == bits(undisturbed[job])
    assert all((story["out_bytes"] > 0) == way.get("swap", False) for story in found[:2])


@pytest.mark.parametrize("slots", [[1, 1, 1], [1, 1]], ids=str)
def test_devices_that_are_joined_as_hosts_give_the_same_bits(
    gangs: Gangs, undisturbed: dict[str, list[JSON]], slots: list[int]
) -> None:
    """Hosts with one device each: the ranks of the others are remote ranks."""
    found = _right(gangs, "Mlp", {"hosts": slots, "swap": True})
    assert bits(found) == bits(undisturbed["Mlp"])


def test_ranks_whose_states_do_not_fit_together_take_turns_on_the_device(gangs: Gangs) -> None:
    whole = _right(gangs, "Wide", {"seats": RANKS, "steps": 3})
    turns = _right(gangs, "Wide", {"seats": 1, "swap": True, "steps": 3})
    assert bits(turns) == bits(whole)
    assert min(story["largest_bytes"] for story in turns) >= 48 * 2**20  # without DDP's bucket
    crowded = gangs.errors("devices:Wide", ranks=RANKS, steps=STEPS, kind="sim", seats=1)
    assert any("OutOfMemoryError: sim out of memory" in error for error in crowded)


def test_collectives_by_hand_take_tensors_of_the_device(gangs: Gangs) -> None:
    found = [_right(gangs, "numbers_by_hand", {"seats": seats}) for seats in (RANKS, 1)]
    assert bits(found[0]) == bits(found[1])
    total, rows, part, word = found[0][2]["losses"][0]
    assert total == [3.0, 6.0, 9.0, 12.0, 15.0]
    assert rows[1] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert (part, word) == ([12.0, 15.0], ["rank 1"])


def test_optimizer_of_tensors_on_a_device_is_not_squashed_and_says_so(
    undisturbed: dict[str, list[JSON]],
) -> None:
    [event] = undisturbed["Mlp"][0]["events"]
    assert event["kind"] == "not squashed"
    assert event["what"] == (
        "its tensors lie on sim:0, and ranks can share memory of the host only"
    )


def test_optimizer_that_draws_on_the_device_is_not_squashed(gangs: Gangs) -> None:
    """Its tensors lie on the host, but each rank must draw: one rank's step is not the others'."""
    found = _right(gangs, "DrawsOnTheDevice", {"seats": 1})
    [event] = found[0]["events"]
    assert event["what"] == "its step draws random numbers or calls collectives"


def test_ranks_on_a_device_cannot_change_it_within_their_process(gangs: Gangs) -> None:
    told = gangs.errors("devices:Mlp", ranks=RANKS, steps=STEPS, kind="sim", seats=1, resize={3: 2})
    assert "a rank cannot change its device" in told[0]
